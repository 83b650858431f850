"""Joins a recorded item's taps into the features that a drafter's wiring reads.

Knows that a last layer may be tapped before or after the target's final norm. Knows nothing of networks.

Letters: A anchors, T positions, F features per position (taps x H), H hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftgauge.errors import RecordingError
from draftgauge.recording import AFTER_NORM, Item, Recording
from draftgauge.tensorfile import StoredTensor
from draftgauge.wiring import Wiring

_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class Recorded:
    """What replay needs of one item: `tokens` [T], the prompt's length, `features` [T, F] (taps joined)."""

    tokens: Int[Tensor, " T"]
    prompt_len: int
    features: Float[Tensor, "T F"]

    @property
    def anchors(self) -> Int[Tensor, " A"]:
        """All anchors: P to T-2."""
        return torch.arange(self.prompt_len, len(self.tokens) - 1)


def as_torch(stored: StoredTensor) -> Tensor:
    """The mapped bytes as a tensor, without a copy; it must not be written to.

    Raises:
        RecordingError: Nothing here computes with the stored element type.
    """
    if stored.dtype not in _DTYPES:
        raise RecordingError(
            f"{stored.path}: {stored.name} is stored as {stored.dtype}, nothing computes with it; expected one of "
            f"{', '.join(_DTYPES)}. Save it in one of them"
        )
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(np.asarray(stored.mapped()))
    return flat.view(_DTYPES[stored.dtype]).view(stored.shape)


def as_stored(tensor: Tensor) -> np.ndarray | tuple[str, np.ndarray]:
    """A tensor as `write_safetensors` takes it; bfloat16 has no numpy type and goes as its bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def read_item(
    recording: Recording, item: Item, *, wiring: Wiring, dtype: torch.dtype, max_blocks: int | None = None
) -> Recorded:
    """The item as the drafter sees it.

    Args:
        recording: The recording.
        item: One of its items.
        wiring: Which taps, in which order, and whether a last layer is read after the final norm.
        dtype: The dtype that the drafter computes in.
        max_blocks: Keep only the first so many anchors, 1 or more: the reference is cut after them.

    Raises:
        RecordingError: The item does not hold a tap that the drafter reads, or holds it only after the final norm
            where the drafter reads it before; it is damaged, or not finite.
    """
    recording.require_recorded(wiring.taps, item=item)
    tensors = recording.tensors(item)
    length = item.length_within(max_blocks)
    last = recording.target.num_layers - 1
    after_norm = recording.plan.last_layer == AFTER_NORM
    if last in wiring.taps and after_norm and not wiring.tap_after_final_norm:
        raise RecordingError(
            f"{recording.path} holds the last layer, {last}, after the final norm, and the drafter reads it before: "
            "what the norm did cannot be undone. Record the target, or state tap_after_final_norm = true if the "
            "drafter was trained on that"
        )
    parts = []
    for tap in wiring.taps:
        part = as_torch(tensors.outputs[tap])[:length]
        if tap == last and wiring.tap_after_final_norm and not after_norm:
            part = normed(part, as_torch(recording.end("norm")), eps=recording.target.norm_eps)
        parts.append(part.to(dtype))
    features = torch.cat(parts, dim=1)
    if not bool(features.isfinite().all()):
        raise RecordingError(
            f"the taps of {item.id} in {recording.path} hold NaN or infinite values; record again, with --dtype "
            "float32 if the target overflowed"
        )
    return Recorded(
        tokens=as_torch(tensors.tokens)[:length].long(),
        prompt_len=item.prompt_len,
        features=features,
    )


def normed(x: Float[Tensor, "T H"], weight: Float[Tensor, " H"], *, eps: float) -> Float[Tensor, "T H"]:
    """What the target's final norm makes of its last layer, rounded where the target rounds."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)
