"""What a speculating engine counted: rounds, drafted and accepted tokens, per request and in all.

Reads the objects in which vLLM and SGLang put these counts into their answers. What a form does not say is None,
never 0. Knows nothing of servers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: How each source's own acceptance length is meant to be computed; measurement.md has the table.
CONVENTIONS = ("pooled", "sglang_request", "ddtree")


@dataclass(frozen=True)
class RequestCounts:
    """The counts of one request.

    `histogram[n]` is the number of rounds that accepted n drafted tokens, and `accepted_in_order` how many each
    round accepted, in turn; the bonus token is in neither. `completion_tokens` counts all that came back, with
    the first token, which the target's prefill gives.

    Example:
        `RequestCounts("81", rounds=3, accepted_tokens=4, completion_tokens=8, histogram=(1, 0, 2))`
    """

    id: str | None = None
    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    completion_tokens: int | None = None
    histogram: tuple[int, ...] | None = None
    accepted_in_order: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Served:
    """What an engine counted in all, the requests where it tells them apart, and what may be wrong with it.

    `accepted_per_depth[d-1]` is the number of rounds that accepted the drafted token at depth d. `convention` names
    how the engine makes its own acceptance length of these counts, and `source` where they were read.

    Example:
        `Served("pooled", "vLLM counters", rounds=40, accepted_tokens=126, completion_tokens=170)`
    """

    convention: str
    source: str
    requests: int | None = None
    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    completion_tokens: int | None = None
    accepted_per_depth: tuple[int, ...] | None = None
    histogram: tuple[int, ...] | None = None
    rows: tuple[RequestCounts, ...] = ()
    doubts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def summed(
    rows: Sequence[RequestCounts], *, convention: str, source: str, doubts: Sequence[str] = ()
) -> Served:
    """The counts of all requests; one that a single request lacks is None in all."""
    histogram = _added(row.histogram for row in rows)
    return Served(
        convention,
        source,
        requests=len(rows),
        rounds=_total(row.rounds for row in rows),
        drafted_tokens=_total(row.drafted_tokens for row in rows),
        accepted_tokens=_total(row.accepted_tokens for row in rows),
        completion_tokens=_total(row.completion_tokens for row in rows),
        accepted_per_depth=None if histogram is None else per_depth(histogram),
        histogram=histogram,
        rows=tuple(rows),
        doubts=tuple(doubts),
    )


def per_depth(histogram: Sequence[int]) -> tuple[int, ...]:
    """How many rounds accepted the drafted token at each depth, of a histogram of accepted tokens.

    Example:
        `per_depth([5, 3, 2])` is `(5, 2)`: of ten rounds five accepted one token or more, two the second.
    """
    return tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))


def histogram_of(accepted: Iterable[int]) -> tuple[int, ...]:
    """How many rounds accepted 0, 1, 2, ... tokens.

    Example:
        `histogram_of([2, 0, 2])` is `(1, 0, 2)`.
    """
    lengths = list(accepted)
    return tuple(lengths.count(n) for n in range(max(lengths, default=-1) + 1))


def of_rounds(
    accepted: Sequence[int], *, name: str | None = None, completion_tokens: int | None = None
) -> RequestCounts:
    """The counts of a request that is told round by round, the bonus left out."""
    return RequestCounts(
        id=name,
        rounds=len(accepted),
        accepted_tokens=sum(accepted),
        completion_tokens=completion_tokens,
        histogram=histogram_of(accepted),
        accepted_in_order=tuple(accepted),
    )


def of_sglang(meta: Mapping[str, Any], *, name: str | None = None) -> RequestCounts:
    """The counts in the `meta_info` of an SGLang answer.

    Newer versions say `spec_num_correct_drafts` and `spec_correct_drafts_histogram`, older ones
    `spec_accept_token_num` and `spec_accept_histogram`; the oldest only `spec_verify_ct`.
    """
    histogram = _counts(_first(meta, "spec_correct_drafts_histogram", "spec_accept_histogram")) or None
    accepted = _count(
        _first(meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    )
    if accepted is None and histogram is not None:
        accepted = sum(n * rounds for n, rounds in enumerate(histogram))
    return RequestCounts(
        id=name,
        rounds=_count(meta.get("spec_verify_ct")),
        drafted_tokens=_count(
            _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
        ),
        accepted_tokens=accepted,
        completion_tokens=_count(meta.get("completion_tokens")),
        histogram=histogram,
    )


def of_vllm(
    said: Mapping[str, Any], *, name: str | None = None, completion_tokens: int | None = None
) -> RequestCounts:
    """The counts in `metrics.speculative_decoding` of a vLLM answer.

    vLLM adds that object where it is started with `--per-request-spec-decode-metrics summary` (or `detailed`, which
    lists the rounds in `per_step_accepted`).
    """
    return RequestCounts(
        id=name,
        rounds=_count(said.get("num_spec_steps")),
        drafted_tokens=_count(said.get("num_draft_tokens")),
        accepted_tokens=_count(said.get("num_accepted_draft_tokens")),
        completion_tokens=completion_tokens,
        histogram=_counts(said.get("acceptance_histogram")) or None,
        accepted_in_order=_counts(said.get("per_step_accepted")),
    )


def _first(said: Mapping[str, Any], *names: str) -> Any:
    return next((said[name] for name in names if said.get(name) is not None), None)


def _count(value: Any) -> int | None:
    """A count; None for what is not one, true and false among it."""
    return value if type(value) is int and value >= 0 else None


def _counts(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(_count(item) is None for item in value):
        return None
    return tuple(value)


def _every(values: Iterable[Any], add: Callable[[list[Any]], Any]) -> Any:
    """What `add` makes of the values; None where one of them, or all, are missing."""
    found = list(values)
    return None if not found or None in found else add(found)


def _total(values: Iterable[int | None]) -> int | None:
    total: int | None = _every(values, sum)
    return total


def _added(values: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    def add(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        width = max(map(len, rows))
        return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(width))

    total: tuple[int, ...] | None = _every(values, add)
    return total
