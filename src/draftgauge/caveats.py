"""Caveats: what a reader must know to read a number rightly, as data with stable names.

Every caveat has a slug, a severity and a sentence with the numbers in it. Which of them hold is decided from
plain facts; nothing here computes or measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["note", "warning"]

#: From this share on, references that are no near-ties either say that the text is not the target's own.
_FAR_SHARE = 0.01
#: From this spread on, it matters whose convention a number follows.
_CONVENTION_SPREAD = 0.02
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
    `overridden` maps wiring fields to what the file says and what the user states instead; `block_size_effect` is
    the streak with the block size used, with the trained one, the anchors, and the depth compared. `conventions`
    are the chain's values on these rounds. `degenerate` maps looping prompts to their repetition share, `outliers`
    those that stand apart to their tau; `tau_without` leaves both out. `lost` maps prompts that were lost with the
    worker that measured them to why.
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
    agreed: int | None
    near_ties: int | None
    max_blocks: int | None
    anchors: str
    drafted_tokens: int
    unreachable_tokens: int
    stored_in: str
    mutable_url: str = ""
    revision: str = ""
    template: str = ""
    template_switches: Sequence[str] = ()
    overridden: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    block_size_effect: tuple[float, float, int, int] | None = None
    step: int | None = None
    trainer_step: int | None = None
    target_change: str | None = None
    conventions: Mapping[str, float] = field(default_factory=dict)
    degenerate: Mapping[str, float] = field(default_factory=dict)
    outliers: Mapping[str, float] = field(default_factory=dict)
    tau: float | None = None
    tau_without: float | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    failed_controls: Sequence[str] = ()
    undecided_controls: Sequence[str] = ()


def caveats(facts: Facts) -> list[Caveat]:
    """The caveats that hold, warnings first."""
    found = [
        *_trust(facts),
        *_prompts(facts),
        *_wiring(facts),
        *_references(facts),
        *_numbers(facts),
        *_file(facts),
    ]
    return sorted(found, key=lambda caveat: caveat.severity != "warning")


def as_json(found: Sequence[Caveat]) -> list[dict[str, Any]]:
    """The caveats as they stand in summary.json."""
    return [caveat.as_dict() for caveat in found]


def _trust(f: Facts) -> Iterator[Caveat]:
    if f.failed_controls:
        yield Caveat(
            "not-trusted",
            "warning",
            f"{len(f.failed_controls)} control(s) failed: {', '.join(f.failed_controls)}. Do not use these numbers "
            "before that is explained.",
        )
    if f.undecided_controls:
        yield Caveat(
            "controls-undecided",
            "note",
            f"These data were too few for {len(f.undecided_controls)} control(s): "
            f"{', '.join(f.undecided_controls)}; `draftgauge check` drafts at more anchors.",
        )


def _prompts(f: Facts) -> Iterator[Caveat]:
    if f.prompts_evaluated < f.prompts_asked:
        yield Caveat(
            "prompts-incomplete",
            "warning",
            f"{f.prompts_evaluated} of {f.prompts_asked} prompts were evaluated; the recording holds "
            f"{f.prompts_recorded}.",
        )
    if f.lost:
        named = ", ".join(list(f.lost)[:_NAMED]) + (", ..." if len(f.lost) > _NAMED else "")
        yield Caveat(
            "prompts-lost",
            "warning",
            f"{len(f.lost)} prompt(s) were lost with their workers, twice: {named} "
            f"({next(iter(f.lost.values()))}). The same command measures them again.",
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
            )
            + _effect(f.block_size_effect),
        )
    if f.overridden:
        said = [
            f"{name} is {_plain(theirs)} in the file and was stated as {_plain(ours)}"
            for name, (theirs, ours) in f.overridden.items()
        ]
        yield Caveat(
            "wiring-overridden",
            "warning",
            f"The wiring that was stated contradicts the checkpoint's own word: {'; '.join(said)}.",
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


def _plain(value: Any) -> str:
    return f"({'; '.join(map(str, value))})" if isinstance(value, list | tuple) else str(value)


def _effect(effect: tuple[float, float, int, int] | None) -> str:
    if effect is None:
        return ""
    used, trained, anchors, depth = effect
    return (
        f" On {anchors} anchors the streak within depth {depth} is {used:.3f}, with the trained block size "
        f"{trained:.3f}."
    )


def _references(f: Facts) -> Iterator[Caveat]:
    if f.agreed is None or f.near_ties is None:
        yield Caveat(
            "references-unverified",
            "warning",
            "Whether the references are the target's own text is not known: the features came without its final "
            "state. If they are not, online decoding commits another text, and accepts otherwise.",
        )
    elif others := f.tokens - f.agreed:
        far = others - f.near_ties
        yield Caveat(
            "reference-agreement",
            "warning" if far > f.tokens * _FAR_SHARE else "note",
            f"{others} of {f.tokens} reference tokens are not the target's own first choice in the recorded "
            f"pass; {f.near_ties} of them are near-ties.",
        )
    if f.degenerate:
        loops = ", ".join(f"{name} ({share:.0%})" for name, share in f.degenerate.items())
        yield Caveat(
            "degenerate-references",
            "warning",
            f"{len(f.degenerate)} completion(s) loop, with the share of their tokens in loops: {loops}. A loop is "
            "easy to draft." + _without(f),
        )
    if f.target_change is not None:
        yield Caveat(
            "target-changed", "warning", f"The target at hand may not be the one recorded: {f.target_change}."
        )
    yield from _template(f)
    if f.dtype != f.recorded_dtype:
        yield Caveat(
            "dtype-differs",
            "note",
            f"Features were recorded in {f.recorded_dtype}, computed with in {f.dtype}.",
        )


def _template(f: Facts) -> Iterator[Caveat]:
    if f.template == "raw":
        yield Caveat(
            "template",
            "note",
            "The prompts went to the target as they are, without a chat template: a server that applies one sees "
            "other text, and other acceptance.",
        )
    elif f.template == "chat" and f.template_switches:
        yield Caveat(
            "template",
            "note",
            f"The chat template has a switch that was not stated ({', '.join(f.template_switches)}); its default was "
            "used. Acceptance with thinking and without differs: record with --template chat-thinking or "
            "chat-no-thinking.",
        )


def _numbers(f: Facts) -> Iterator[Caveat]:
    if f.outliers:
        named = ", ".join(f"{name} ({tau:.2f})" for name, tau in f.outliers.items())
        yield Caveat(
            "outlier-prompts",
            "note",
            f"{len(f.outliers)} prompt(s) stand far from the others: {named}. With such prompts the intervals cover "
            "less than their 95 % (86 to 91 % in simulation, where one in ten of 20 prompts is such)."
            + _without(f),
        )
    values = {name: value for name, value in f.conventions.items() if value}
    if values and max(values.values()) > (1 + _CONVENTION_SPREAD) * min(values.values()):
        low, high = min(values, key=lambda n: values[n]), max(values, key=lambda n: values[n])
        yield Caveat(
            "conventions",
            "note",
            f"These very rounds of the chain count as {values[low]:.3f} ({low}) to {values[high]:.3f} ({high}): "
            "compare only numbers of one convention.",
        )


def _without(f: Facts) -> str:
    if f.tau is None or f.tau_without is None:
        return ""
    apart = len({*f.degenerate, *f.outliers})
    return f" Tau of the chain is {f.tau:.3f} by response, {f.tau_without:.3f} without the {apart} prompt(s) named."


def _file(f: Facts) -> Iterator[Caveat]:
    if f.step is not None and f.trainer_step is not None and f.trainer_step > f.step:
        yield Caveat(
            "step-behind",
            "note",
            f"The checkpoint is of step {f.step}; training is at step {f.trainer_step}.",
        )
    if f.opaque_classes:
        yield Caveat(
            "opaque-values",
            "note",
            f"The file holds values of classes that are never loaded: {', '.join(f.opaque_classes)}.",
        )
    if f.mutable_url:
        yield Caveat(
            "mutable-revision",
            "note",
            f"{f.mutable_url} may point to other weights tomorrow; measured was {f.revision}.",
        )
    if f.checksums_absent:
        yield Caveat(
            "no-checksums",
            "note",
            f"{f.checksums_absent} record(s) of the weights carry no checksum ({f.stored_in}): damage inside "
            "them would not be noticed.",
        )
