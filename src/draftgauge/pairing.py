"""Brings a checkpoint's weights and a recording together: whether they fit, and the network.

Knows nothing of replaying or counting.
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from draftgauge.checkpoint import Checkpoint, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.drafters import DFlash, load_drafter
from draftgauge.errors import WiringError
from draftgauge.features import as_torch
from draftgauge.fit import require_fit
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, Recording, open_recording
from draftgauge.stated import Stated, used_wiring, wiring_of
from draftgauge.wiring import Wiring, tensor_shapes

DTYPES = ("float32", "bfloat16")
#: In place of a dtype: whichever `fastest_dtype` finds.
AUTO = "auto"
#: Blocks whose rows are multiplied together when a machine's rates are measured.
_BLOCKS = 8


@dataclass(frozen=True)
class Pair:
    """A checkpoint and the recording that it is measured on, opened and found to fit.

    `trained` is the wiring that the checkpoint was trained with, `wiring` the one to measure with: they differ
    in the block size where the user asks for another.
    """

    checkpoint: Checkpoint
    trained: Wiring
    wiring: Wiring
    recording: Recording
    items: tuple[Item, ...]


def open_pair(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    *,
    stated: Stated,
    state_dict: str | None = None,
    num_prompts: int | None = None,
    prompts: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Pair:
    """The checkpoint and the recording, with the items to measure on.

    Args:
        checkpoint_path: A drafter directory, a trainer's step directory, a `.pt` or a `.safetensors` file, or the
            address of one.
        recording_path: A recording's folder.
        stated: What the user states about the wiring.
        state_dict: Which weights in a `.pt` that holds several.
        num_prompts: Only the first so many of the recorded prompts.
        prompts: Only the prompts of these ids, in the recording's order.
        progress: Shows the download of a checkpoint that lies elsewhere.

    Raises:
        CheckpointError: The file is damaged or holds no drafter.
        WiringError: The wiring is not known completely, or impossible.
        RecordingError: The recording is damaged, lacks one of `prompts`, or was made of another target.
    """
    checkpoint = open_checkpoint(checkpoint_path, state_dict=state_dict, progress=progress)
    trained = wiring_of(checkpoint, stated)
    wiring = used_wiring(trained, stated)
    recording = open_recording(recording_path)
    asked = None if prompts is None else {recording.item(name).id for name in prompts}
    items = tuple(item for item in recording.items if asked is None or item.id in asked)[:num_prompts]
    require_fit(wiring, recording)
    return Pair(checkpoint, trained, wiring, recording, items)


def open_drafter(checkpoint: Checkpoint, wiring: Wiring, *, recording: Recording, dtype: str) -> DFlash:
    """The network with the checkpoint's weights and the recorded target's ends.

    Raises:
        WiringError: The dtype is unknown, or the wiring does not fit the target's embedding and head.
        RecordingError: The target's embedding or head is not at hand, or changed.
    """
    if dtype not in DTYPES:
        raise WiringError(f"dtype {dtype!r} is not computed with; expected --dtype {' or '.join(DTYPES)}")
    recording.verify_ends()
    stored = recording.end("embedding"), recording.end("head")
    embedding = as_torch(stored[0])
    return load_drafter(
        wiring,
        checkpoint.tensors,
        embedding=embedding,
        head=embedding if stored[0] == stored[1] else as_torch(stored[1]),
        dtype=getattr(torch, dtype),
    )


def fastest_dtype(checkpoint: Checkpoint, wiring: Wiring) -> tuple[str, dict[str, float]]:
    """The dtype to compute in on this machine, and what the choice rests on: GFLOP/s of each, measured now.

    That is bfloat16 where the weights are stored in it and a product of this drafter's largest matrix is faster
    in it, as on processors that have such products. Else float32, without a measurement if they are not stored so.

    Example of the result: `("bfloat16", {"float32": 141.2, "bfloat16": 562.8})`.
    """
    if max(checkpoint.dtypes, key=lambda name: checkpoint.dtypes[name]) != "BF16":
        return "float32", {}
    rows, inner = _BLOCKS * wiring.block_size, wiring.intermediate_size
    rates = {}
    for name in DTYPES:
        matrix = torch.ones(inner, wiring.hidden_size, dtype=getattr(torch, name))
        states = torch.ones(rows, wiring.hidden_size, dtype=matrix.dtype)
        took = min(timeit.repeat(functools.partial(F.linear, states, matrix), number=1, repeat=4))
        rates[name] = 2e-9 * rows * matrix.numel() / took
    return max(rates, key=lambda name: rates[name]), rates


def require_sound(checkpoint: Checkpoint, wiring: Wiring, *, progress: Progress) -> int:
    """Makes sure that the weights are whole and what the wiring reads; how many records carry no checksum.

    Raises:
        CheckpointError: They are not.
    """
    require_tensors(checkpoint, tensor_shapes(wiring))
    names = checkpoint.tensors
    require_finite(checkpoint, progress(names, label="check weights", total=len(names), unit="tensor"))
    return verify(checkpoint).absent
