"""vLLM's Prometheus counters of speculation, read from the text of `/metrics`.

Knows nothing of requests: `served` takes them before and after.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from draftgauge.errors import EngineError

#: What is read, without the ending `_total` that some versions add.
NAMES: Mapping[str, str] = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "generated_tokens": "vllm:generation_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """Counts since the server started, over all its engines and models; None for one that it does not show.

    Example:
        `Counters(rounds=40, drafted_tokens=280, accepted_tokens=126, accepted_per_depth=(35, 22))`
    """

    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    generated_tokens: int | None = None
    accepted_per_depth: tuple[int, ...] | None = field(default=None)

    def since(self, before: Counters) -> Counters:
        """What was counted after `before` was read.

        Raises:
            EngineError: A counter went back, as after a restart.
        """
        return Counters(
            rounds=_moved("rounds", before.rounds, self.rounds),
            drafted_tokens=_moved("drafted_tokens", before.drafted_tokens, self.drafted_tokens),
            accepted_tokens=_moved("accepted_tokens", before.accepted_tokens, self.accepted_tokens),
            generated_tokens=_moved("generated_tokens", before.generated_tokens, self.generated_tokens),
            accepted_per_depth=_depths(before.accepted_per_depth, self.accepted_per_depth),
        )


def read_counters(text: str) -> Counters:
    """The counters in a text of Prometheus' form; those of several engines and models are added."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _samples(text):
        if name == PER_POSITION and (found := _POSITION.search(labels)):
            positions[int(found[1])] = positions.get(int(found[1]), 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    depths = tuple(positions.get(depth, 0) for depth in range(max(positions, default=-1) + 1))
    counts = {field: totals.get(name) for field, name in NAMES.items()}
    return Counters(accepted_per_depth=depths or None, **counts)


def _samples(text: str) -> Iterator[tuple[str, str, int]]:
    """Name without `_total`, labels and value of every sample that is read here."""
    wanted = {*NAMES.values(), PER_POSITION}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found and found[1].removesuffix("_total") in wanted:
            yield found[1].removesuffix("_total"), found[2] or "", round(float(found[3]))


def _moved(name: str, before: int | None, after: int | None) -> int | None:
    if before is None or after is None:
        return after  # a counter appears with its first count
    if after < before:
        raise EngineError(
            f"the server's counter of {name} went from {before} to {after}: it was restarted; ask again"
        )
    return after - before


def _depths(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if before is None or after is None:
        return after
    pairs = itertools.zip_longest(before, after, fillvalue=0)
    moved = (_moved("accepted tokens per position", was, now) for was, now in pairs)
    return tuple(count or 0 for count in moved)
