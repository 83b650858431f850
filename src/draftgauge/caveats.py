"""Caveats: what a reader must know to read a number rightly, as data with stable names.

Every caveat has a slug, a severity and a sentence with the numbers in it. Which of them hold is decided from
plain facts; nothing here computes or measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "warning"]

#: From this share on, references that are no near-ties either say that the text is not the target's own.
_FAR_SHARE = 0.01
#: How many tensors a caveat names.
_NAMED = 8


@dataclass(frozen=True)
class Caveat:
    """One caveat, as in `Caveat("few-prompts", "warning", "3 prompts: ...")`."""

    slug: str
    severity: Severity
    text: str

    def as_dict(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What the caveats are decided from.

    Of `tokens` reference tokens, `agreed` are the target's first choice and `near_ties` nearly so; blocks
    were drafted for `drafted_tokens`, of which `unreachable_tokens` are not in the drafter's vocabulary.
    """

    prompts_asked: int
    prompts_recorded: int
    prompts_evaluated: int
    block_size: int
    trained_block_size: int | None
    unused: Mapping[str, str]
    opaque_classes: Sequence[str]
    checksums_absent: int
    dtype: str
    recorded_dtype: str
    tokens: int
    agreed: int
    near_ties: int
    max_blocks: int | None
    anchors: str
    drafted_tokens: int
    unreachable_tokens: int
    stored_in: str


def caveats(facts: Facts) -> list[Caveat]:
    """The caveats that hold, warnings first."""
    found = [*_prompts(facts), *_wiring(facts), *_references(facts), *_file(facts)]
    return sorted(found, key=lambda caveat: caveat.severity != "warning")


def as_json(found: Sequence[Caveat]) -> list[dict[str, Any]]:
    """The caveats as they stand in summary.json."""
    return [caveat.as_dict() for caveat in found]


def _prompts(f: Facts) -> Iterator[Caveat]:
    if f.prompts_evaluated < f.prompts_asked:
        yield Caveat(
            "prompts-incomplete",
            "warning",
            f"{f.prompts_evaluated} of {f.prompts_asked} prompts were evaluated; the recording holds "
            f"{f.prompts_recorded}.",
        )
    if f.prompts_evaluated < 5:
        yield Caveat(
            "few-prompts",
            "warning",
            f"{f.prompts_evaluated} prompt(s): the prompt is the unit, and below 5 no interval is honest.",
        )
    elif f.prompts_evaluated < 20:
        yield Caveat(
            "rough-interval", "note", f"{f.prompts_evaluated} prompts: the intervals are rough below 20."
        )
    if f.max_blocks is not None:
        yield Caveat(
            "anchors-limited",
            "warning",
            f"Only the first {f.max_blocks} anchors of each completion were evaluated.",
        )
    if f.anchors == "walk":
        yield Caveat(
            "walk-anchors",
            "note",
            "Blocks were drafted only where the policies' walks go: all-anchor means and depth curves are absent.",
        )


def _wiring(f: Facts) -> Iterator[Caveat]:
    if f.trained_block_size is not None and f.trained_block_size != f.block_size:
        yield Caveat(
            "block-size-differs",
            "warning",
            f"Block size {f.block_size} was used, {f.trained_block_size} was trained: "
            + (
                "a block cut short is not the prefix of the full block."
                if f.block_size < f.trained_block_size
                else "the rows beyond the trained block were never trained."
            ),
        )
    if f.unreachable_tokens:
        yield Caveat(
            "vocabulary-misses",
            "warning",
            f"{f.unreachable_tokens} of {f.drafted_tokens} reference tokens that blocks were drafted for are "
            "outside the drafter's own vocabulary and can never be accepted.",
        )
    if f.unused:
        named = [f"{name} ({reason})" for name, reason in list(f.unused.items())[:_NAMED]]
        rest = len(f.unused) - len(named)
        yield Caveat(
            "tensors-unused",
            "note",
            f"{len(f.unused)} tensor(s) of the file are not used: {'; '.join(named)}"
            + (f"; and {rest} more, which run.json lists." if rest else "."),
        )


def _references(f: Facts) -> Iterator[Caveat]:
    others = f.tokens - f.agreed
    if others:
        far = others - f.near_ties
        yield Caveat(
            "reference-agreement",
            "warning" if far > f.tokens * _FAR_SHARE else "note",
            f"{others} of {f.tokens} reference tokens are not the target's own first choice in the recorded "
            f"pass; {f.near_ties} of them are near-ties.",
        )
    if f.dtype != f.recorded_dtype:
        yield Caveat(
            "dtype-differs",
            "note",
            f"Features were recorded in {f.recorded_dtype}, computed with in {f.dtype}.",
        )


def _file(f: Facts) -> Iterator[Caveat]:
    if f.opaque_classes:
        yield Caveat(
            "opaque-values",
            "note",
            f"The file holds values of classes that are never loaded: {', '.join(f.opaque_classes)}.",
        )
    if f.checksums_absent:
        yield Caveat(
            "no-checksums",
            "note",
            f"{f.checksums_absent} record(s) of the weights carry no checksum ({f.stored_in}): damage inside "
            "them would not be noticed.",
        )
