"""Runs pieces of work in processes of this machine or on a Ray cluster, and survives the loss of any of them.

A piece that a killed worker, a lost node or a silent one took with it is run again; one that fails twice is given
up and named, and the others go on. An error of ours (`DraftgaugeError`) is no such failure: the same input fails
everywhere, so it is raised at once. Pieces are small values that name files; results are bytes. Knows nothing of
what a piece is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pebble import ProcessPool

from draftgauge.errors import DraftgaugeError, InputError, first_line

Piece = TypeVar("Piece")

#: A piece may take so many times as long as the slowest so far.
_PATIENCE = 10.0
#: How often a piece is tried.
_ATTEMPTS = 2
#: Pieces that are handed out for each worker: one that it works on, and one that waits.
_AHEAD = 2
#: How long to wait for a result before looking whether one is overdue, in seconds.
_LOOK_S = 2.0
RAY = "ray"


@dataclass(frozen=True)
class Lost:
    """A piece that was given up, with what its last try said."""

    reason: str


@dataclass(frozen=True)
class Workers:
    """Where pieces are run: in `count` processes of this machine, or on Ray.

    Raises:
        InputError: The count is below 1.
    """

    count: int = 1
    ray: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"{self.count} workers cannot work; give a number from 1 on, or {RAY}")

    @classmethod
    def parse(cls, text: str) -> Workers:
        """`4` or `ray`.

        Raises:
            InputError: Neither, or Ray is not installed.
        """
        if text == RAY:
            if importlib.util.find_spec("ray") is None:
                raise InputError("--workers ray needs Ray: pip install 'draftgauge[ray]'")
            return cls(ray=True)
        if not text.isdecimal():
            raise InputError(f"--workers {text!r} is not known; expected a number from 1 on, or {RAY}")
        return cls(int(text))

    @property
    def here(self) -> bool:
        """Whether this process does the work itself."""
        return self.count == 1 and not self.ray

    @property
    def threads(self) -> int:
        """Threads of the matrix library for each worker, so that together they use each core once."""
        return 1 if self.ray else max(1, len(os.sched_getaffinity(0)) // self.count)


def run_pieces(
    work: Callable[[Piece], bytes],
    pieces: Sequence[Piece],
    *,
    workers: Workers,
    least_patience_s: float = 120.0,
) -> Iterator[tuple[int, bytes | Lost]]:
    """What `work` makes of every piece, by its place in `pieces`, as they are done.

    Args:
        work: A function that other processes can import, or a `functools.partial` of one.
        pieces: Small values.
        workers: Where.
        least_patience_s: No piece is given up as overdue before so many seconds; then it is when it has taken ten
            times as long as the slowest that is done.

    Raises:
        DraftgaugeError: The work itself raised it.
    """
    if not pieces:
        return
    crew: _Crew = _RayCluster() if workers.ray else _Processes(min(workers.count, len(pieces)))
    try:
        yield from _rounds(crew, work, pieces, least_patience_s=least_patience_s)
    finally:
        crew.stop()


def _rounds(
    crew: _Crew, work: Callable[[Piece], bytes], pieces: Sequence[Piece], *, least_patience_s: float
) -> Iterator[tuple[int, bytes | Lost]]:
    """Hands out, collects, and hands out again what was lost."""
    waiting = collections.deque((place, 1) for place in range(len(pieces)))
    out: dict[Any, tuple[int, int, float]] = {}
    slowest: float | None = None
    while waiting or out:
        while waiting and len(out) < _AHEAD * crew.size():
            place, attempt = waiting.popleft()
            out[crew.submit(work, pieces[place])] = place, attempt, time.monotonic()
        results = dict(crew.settled(list(out)))
        now = time.monotonic()
        if slowest is not None:
            patience = max(_PATIENCE * slowest, least_patience_s)
            overdue = [ticket for ticket, (_, _, since) in out.items() if now - since > patience]
            for ticket in overdue:
                if ticket not in results:
                    crew.drop(ticket)
                    results[ticket] = Lost(f"it did not answer within {patience:.0f} s")
        for ticket, result in results.items():
            place, attempt, since = out.pop(ticket)
            if isinstance(result, bytes):
                slowest = max(slowest or 0.0, now - since)
                yield place, result
            elif attempt < _ATTEMPTS:
                waiting.append((place, attempt + 1))
            else:
                yield place, result


class _Crew(Protocol):
    """Some workers: takes pieces for tickets, and gives what became of tickets."""

    def size(self) -> int:
        """How many pieces are worked on at a time, now."""

    def submit(self, work: Callable[[Any], bytes], piece: Any) -> Any:
        """Hands out a piece; returns a ticket."""

    def settled(self, tickets: Sequence[Any]) -> Iterator[tuple[Any, bytes | Lost]]:
        """Waits a while; the tickets that are settled, each with its result."""

    def drop(self, ticket: Any) -> None:
        """Gives a piece up, and whoever works on it."""

    def stop(self) -> None:
        """Ends all work at once."""


class _Processes:
    """Processes of this machine, which start with nothing of this one's memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ProcessPool(max_workers=count, context=multiprocessing.get_context("spawn"))

    def size(self) -> int:
        return self._count

    def submit(self, work: Callable[[Any], bytes], piece: Any) -> Any:
        return self._pool.schedule(_call, args=[work, piece])

    def settled(self, tickets: Sequence[Any]) -> Iterator[tuple[Any, bytes | Lost]]:
        finished, _ = concurrent.futures.wait(
            tickets, timeout=_LOOK_S, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for ticket in finished:
            yield ticket, _outcome(ticket.result)

    def drop(self, ticket: Any) -> None:
        ticket.cancel()  # ends the process that works on it; the pool starts another

    def stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


class _RayCluster:
    """The cluster at `RAY_ADDRESS`, or one of this machine alone that ends with this process."""

    def __init__(self) -> None:
        # Without these a node that falls silent is noticed after minutes.
        os.environ.setdefault("RAY_grpc_client_keepalive_time_ms", "10000")
        os.environ.setdefault("RAY_grpc_client_keepalive_timeout_ms", "10000")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            ray.init(log_to_driver=False, logging_level="error")
        self._resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        gpus = 1 if self._resource == "GPU" else 0
        # Ray's own retries would repeat a failing piece in silence; ours are counted.
        self._run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_call)

    def size(self) -> int:
        return max(1, int(self._ray.cluster_resources().get(self._resource, 1)))

    def submit(self, work: Callable[[Any], bytes], piece: Any) -> Any:
        return self._run.remote(work, piece)

    def settled(self, tickets: Sequence[Any]) -> Iterator[tuple[Any, bytes | Lost]]:
        finished, _ = self._ray.wait(list(tickets), num_returns=1, timeout=_LOOK_S)
        for ticket in finished:
            yield ticket, _outcome(functools.partial(self._ray.get, ticket))

    def drop(self, ticket: Any) -> None:
        self._ray.cancel(ticket, force=True)

    def stop(self) -> None:
        if self._ours:
            self._ray.shutdown()


def _call(work: Callable[[Any], bytes], piece: Any) -> bytes | Lost | DraftgaugeError:
    """Where the piece is run: errors come back as values, and not as what an engine makes of them."""
    try:
        return work(piece)
    except DraftgaugeError as exc:
        return exc
    except Exception as exc:
        return _lost(exc)


def _outcome(result: Callable[[], bytes | Lost | DraftgaugeError]) -> bytes | Lost:
    """What a worker gave, or what the engine says of its loss.

    Raises:
        DraftgaugeError: The work raised it.
    """
    try:
        found = result()
    except Exception as exc:
        return _lost(exc)
    if isinstance(found, DraftgaugeError):
        raise found
    return found


def _lost(error: Exception) -> Lost:
    return Lost(f"{type(error).__name__}: {first_line(error)}")
