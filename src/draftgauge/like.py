"""Measures again what an earlier run measured: its recording and its options, for another checkpoint.

Knows nothing of the new checkpoint: what the user states about that stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from draftgauge.acceptance import Policy
from draftgauge.errors import RecordingError, RunError
from draftgauge.evaluate import Options
from draftgauge.recording import Recording, open_recording, reference_digest
from draftgauge.runs import Run

#: How many differing prompts a message names.
_NAMED = 8


def options_like(run: Run, options: Options, *, recording: Path | None = None) -> tuple[Path, Options]:
    """The recording and the options with which an earlier run measured.

    Args:
        run: The earlier run.
        options: What they say about the checkpoint is kept; all else becomes the run's.
        recording: Where the recording is now, or another one of the same references, as for a drafter with other
            taps; where the run says if None.

    Raises:
        RunError: There is no such recording, or its references are not those of the run.
    """
    plan, path = run.plan, recording or Path(run.manifest["recording"]["path"])
    try:
        found = open_recording(path)
    except RecordingError as exc:
        raise RunError(
            f"--like {run.path}: its recording {plan.recording_digest[:16]} is not at {path} ({exc}); say where it "
            "is now with --recording"
        ) from exc
    if found.digest != plan.recording_digest:
        _require_same_references(run, found)
    return path, replace(
        options,
        stated=replace(options.stated, block_size=plan.wiring["block_size"]),
        policies=tuple(Policy.parse(slug) for slug in plan.policies),
        anchors=plan.anchors,
        prompts=plan.prompts,
        num_prompts=None,
        max_blocks=plan.max_blocks,
        dtype=plan.dtype,
    )


def _require_same_references(run: Run, recording: Recording) -> None:
    """Makes sure that another recording holds, token for token, the references that the run measured on."""
    items, plan = {item.id: item for item in recording.items}, run.plan
    others = ["the target"] if recording.plan.target_digest != plan.target_digest else []
    for name in plan.prompts:
        said = run.summary["prompts"][name].get("reference_sha256")
        if name not in items:
            others.append(f"{name} (not recorded)")
        elif said is None:
            others.append(f"{name} (the run does not say its text)")
        elif said != reference_digest(recording, items[name]):
            others.append(f"{name} (another text)")
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise RunError(
            f"--like {run.path}: the recording at {recording.path} has digest {recording.digest[:16]}, measured was "
            f"{plan.recording_digest[:16]}, and they differ in {', '.join(others[:_NAMED])}{more}; say where the one "
            "measured is with --recording, or record once and evaluate both checkpoints on that"
        )
