"""Checks that a measurement can be trusted: the controls of a checkpoint and the recording it is measured on.

The cheap ones stand in every run; `check_checkpoint` runs them all. What each control expects stands where it is
made: `health` looks at the recording, `controls` and `soundness` at the drafter, `probing` at what the trainer
computed, and
`witness` asks the target itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftgauge.checkpoint import Checkpoint
from draftgauge.controls import context_controls, drafter_controls
from draftgauge.drafters import DFlash, Drafter, rewired
from draftgauge.errors import RecordingError
from draftgauge.features import Recorded, read_item
from draftgauge.health import recording_controls
from draftgauge.pairing import Pair, open_drafter, open_pair, require_sound
from draftgauge.probe import Probe, find_probe, read_probe
from draftgauge.probing import probe_controls
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, verify_items
from draftgauge.soundness import soundness_controls
from draftgauge.stated import Stated
from draftgauge.trials import choose_anchors, streaks_of
from draftgauge.trust import Control, outcome, worst_first
from draftgauge.witness import target_controls

#: In a run, a control drafts one block for so many that are measured, within these bounds.
_BLOCKS_PER_CONTROL_BLOCK = 20
_FEWEST_BLOCKS, _MOST_BLOCKS = 16, 128
#: What another block size does takes more of them to see; twice the fewest.
_BLOCKS_PER_EFFECT_BLOCK = 4
#: In a check of its own, so many.
_CHECK_BLOCKS = 256


def check_checkpoint(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    *,
    stated: Stated = Stated(),  # noqa: B008
    state_dict: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Runs every control on a checkpoint and a recording.

    Example of the result: `{"trusted": False, "failed": ["context-moved-earlier"], "controls": [{"slug":
    "context-moved-earlier", "verdict": "failed", ...}, ...], ...}`, the controls worst first.

    Raises:
        CheckpointError: The file is damaged, incomplete, or lacks tensors.
        WiringError: The wiring is not known completely, or impossible.
        RecordingError: The recording is damaged or does not hold what the drafter reads.
    """
    started = time.time()
    pair = open_pair(checkpoint_path, recording_path, stated=stated, state_dict=state_dict, progress=progress)
    require_sound(pair.checkpoint, pair.wiring, progress=progress)
    items = list(verify_items(pair.recording, pair.items))
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=dtype)

    def reopen(other: str) -> DFlash:
        return open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=other)

    probe, unprobed = _probe(pair.checkpoint)
    trained = _as_trained(pair, drafter)
    found = recording_controls(pair.recording, items=items, taps=pair.wiring.taps)
    if any(control.slug == "features-finite" and control.verdict == "failed" for control in found):
        return _outcome(
            pair, found, dtype=dtype, started=started
        )  # nothing can be drafted from such features
    controls = [
        *found,
        *drafter_controls(drafter, pair.recording, items=items, count=_CHECK_BLOCKS, seed=seed),
        *context_controls(drafter, pair.recording, items=items, count=_CHECK_BLOCKS, seed=seed),
        *soundness_controls(drafter, pair.recording, items=items, reopen=reopen),
        *(unprobed if probe is None else probe_controls(trained, probe, step=pair.checkpoint.step)),
        *target_controls(pair.recording, items=items, probe=probe, progress=progress),
    ]
    return _outcome(pair, controls, dtype=dtype, started=started)


def _outcome(pair: Pair, controls: Sequence[Control], *, dtype: str, started: float) -> dict[str, Any]:
    return {
        "checkpoint": str(pair.checkpoint.path),
        "recording": str(pair.recording.path),
        "step": pair.checkpoint.step,
        "dtype": dtype,
        "seconds": time.time() - started,
        **outcome(worst_first(controls)),
    }


def quick_controls(pair: Pair, drafter: Drafter, *, blocks: int) -> list[Control]:
    """The controls that cost little beside a measurement of so many blocks."""
    count = min(max(blocks // _BLOCKS_PER_CONTROL_BLOCK, _FEWEST_BLOCKS), _MOST_BLOCKS)
    return [
        *recording_controls(pair.recording, items=pair.items, taps=pair.wiring.taps),
        *drafter_controls(drafter, pair.recording, items=pair.items, count=count),
    ]


def block_size_effect(pair: Pair, drafter: DFlash, *, blocks: int) -> tuple[float, float, int, int] | None:
    """What the block size does where another was trained; None where it is the same, or nothing can tell.

    Drafts with both sizes at up to a quarter as many anchors as there are `blocks` in the measurement.

    Example:
        `(1.32, 1.41, 128, 7)`: the streak is 1.32 with the size used and 1.41 with the trained one, on 128
        anchors, counted to depth 7, which both reach.
    """
    if pair.trained.block_size == pair.wiring.block_size:
        return None
    depths = pair.trained.depth, pair.wiring.depth
    compute = drafter.ends.embedding.dtype
    count = min(max(blocks // _BLOCKS_PER_EFFECT_BLOCK, 2 * _FEWEST_BLOCKS), _MOST_BLOCKS)
    try:
        trial = choose_anchors(pair.items, room=max(depths), count=count)
    except RecordingError:  # no completion is long enough for the larger block
        return None
    trained = _as_trained(pair, drafter)

    def read(item: Item) -> Recorded:
        return read_item(pair.recording, item, wiring=pair.wiring, dtype=compute)

    used, full = (streaks_of(d, trial, read=read).clip(max=min(depths)).mean() for d in (drafter, trained))
    return float(used), float(full), len(trial), min(depths)


def _as_trained(pair: Pair, drafter: DFlash) -> DFlash:
    """The drafter as it was trained, which has another block size where the user asks for one."""
    return drafter if pair.trained == pair.wiring else rewired(drafter, pair.trained)


def _probe(checkpoint: Checkpoint) -> tuple[Probe | None, list[Control]]:
    """The trainer's probe, or a control that says why there is nothing to compare with."""
    path = find_probe(checkpoint.path)
    if path is not None:
        return read_probe(path), []
    expectation = "training and evaluation compute the same function"
    missing = f"no probe.safetensors lies beside {checkpoint.path.name}: the trainer wrote none"
    return None, [
        Control("probe", expectation, missing, "skipped", advice="docs/probe.md says how to write one")
    ]
