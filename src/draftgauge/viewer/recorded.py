"""What a recording's own manifest says of its health: in the words of the caveats that its runs will carry.

Reads no tensor. Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftgauge.caveats import Facts, caveats
from draftgauge.recording import BEFORE_NORM, ENDS_FILE, Recording
from draftgauge.report.text import number

#: How many prompts a note names.
_NAMED = 6


@dataclass(frozen=True)
class Note:
    """One thing that is known of a recording; `severity` is `passed`, `note` or `warning`."""

    severity: str
    text: str


def health_notes(recording: Recording) -> list[Note]:
    """Everything that recording.json says of its health, warnings first."""
    notes = [*_incomplete(recording), *_references(recording), *_origin(recording)]
    order = ("warning", "note", "passed")
    return sorted(notes, key=lambda note: order.index(note.severity))


def is_portable(recording: Recording) -> bool:
    """Whether the target's two ends lie in the recording itself."""
    return all(place["file"] == ENDS_FILE for place in recording.target.ends.values())


def _incomplete(recording: Recording) -> Iterator[Note]:
    asked = int(recording.produced.get("prompts_asked") or 0)
    if recording.failed:
        named = ", ".join(list(recording.failed)[:_NAMED])
        more = ", ..." if len(recording.failed) > _NAMED else ""
        yield Note("warning", f"{len(recording.failed)} prompt(s) could not be recorded: {named}{more}.")
    elif asked > len(recording.items):
        yield Note("warning", f"{len(recording.items)} of {asked} prompts were recorded.")
    else:
        yield Note("passed", f"Every prompt was recorded: {len(recording.items)}.")


def _references(recording: Recording) -> Iterator[Note]:
    items = recording.items
    known = all(item.has_final for item in items)
    facts = Facts(
        prompts_asked=len(items),
        prompts_recorded=len(items),
        prompts_evaluated=len(items),
        block_size=1,
        trained_block_size=None,
        unused={},
        opaque_classes=(),
        checksums_absent=0,
        dtype=recording.plan.dtype,
        recorded_dtype=recording.plan.dtype,
        tokens=sum(item.completion_len for item in items),
        agreed=sum(item.agreed or 0 for item in items) if known else None,
        near_ties=sum(item.near_ties or 0 for item in items) if known else None,
        max_blocks=None,
        anchors="all",
        drafted_tokens=0,
        unreachable_tokens=0,
        stored_in="",
        template=recording.plan.template,
        template_switches=recording.produced.get("template_switches") or (),
    )
    found = caveats(facts)
    yield from (Note(caveat.severity, caveat.text) for caveat in found)
    if known and not any(caveat.slug == "reference-agreement" for caveat in found):
        yield Note("passed", "Every reference token is the target's own first choice in the recorded pass.")
    gap = max((item.worst_gap or 0.0 for item in items), default=0.0)
    if known and gap:
        yield Note("note", f"The largest logit gap of a token that is not the first choice is {number(gap)}.")


def _origin(recording: Recording) -> Iterator[Note]:
    if recording.plan.source:
        yield Note("note", "It was made from files, or from a recording, that came from elsewhere.")
    if recording.plan.last_layer != BEFORE_NORM:
        yield Note("note", f"The last layer's state was kept {recording.plan.last_layer}.")
    if not is_portable(recording):
        yield Note("note", f"It needs the target's own files beside it: {recording.target.path}.")
