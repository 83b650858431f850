"""Brings a checkpoint's weights and a recording together: whether they fit, and the network.

Knows nothing of replaying or counting.
"""

from __future__ import annotations

import torch

from draftgauge.checkpoint import Checkpoint
from draftgauge.drafters import Drafter, load_drafter
from draftgauge.errors import RecordingError, WiringError
from draftgauge.features import as_torch
from draftgauge.recording import ENDS, Recording
from draftgauge.wiring import Wiring

DTYPES = ("float32", "bfloat16")


def open_drafter(checkpoint: Checkpoint, wiring: Wiring, *, recording: Recording, dtype: str) -> Drafter:
    """The network with the checkpoint's weights and the recorded target's ends.

    Raises:
        WiringError: The dtype is unknown, or the wiring does not fit the target's embedding and head.
        RecordingError: The target's embedding or head is not at hand, or changed.
    """
    if dtype not in DTYPES:
        raise WiringError(f"dtype {dtype!r} is not computed with; expected --dtype {' or '.join(DTYPES)}")
    for name in ENDS:
        recording.verify_end(name)
    return load_drafter(
        wiring,
        checkpoint.tensors,
        embedding=as_torch(recording.end("embedding")),
        head=as_torch(recording.end("head")),
        dtype=getattr(torch, dtype),
    )


def require_fit(wiring: Wiring, recording: Recording) -> None:
    """Makes sure that the drafter was made for the target that was recorded.

    Raises:
        RecordingError: Another target's size or number of layers, or a tap that was not recorded.
    """
    if wiring.hidden_size != recording.target.hidden_size:
        raise RecordingError(
            f"the drafter's hidden size is {wiring.hidden_size}, the recorded target's "
            f"({recording.target.architecture}) {recording.target.hidden_size}; record the target that the "
            "drafter was trained for, with `draftgauge record --checkpoint`"
        )
    if wiring.num_target_layers not in (None, recording.target.num_layers):
        raise RecordingError(
            f"the drafter was trained for a target of {wiring.num_target_layers} layers, the recorded one "
            f"({recording.target.architecture}) has {recording.target.num_layers}; record the target that the "
            "drafter was trained for, with `draftgauge record --checkpoint`"
        )
    recording.tap_rows(wiring.taps)
