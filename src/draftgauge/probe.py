"""The trainer's probe: what a trainer saw and computed at a few anchors, written beside its checkpoint.

    step_N/probe.safetensors
        tokens        int32 [T]          the sequence
        features      float [S, F]       what `fc` was given at positions 0 to S-1, S >= the last anchor
        anchors       int32 [A]          ascending positions in `tokens`
        top_ids       int32 [A, D, K]    the trainer's first choices, best first, as ids of the target
        top_log_probs float [A, D, K]    their log-probabilities
        rows          float [L+1, A, B, H]   optional: the block's rows before the draft layers and after each
        context       float [S, H]       optional: the fused features after `hidden_norm`

Training and evaluation must compute the same function; with this, anybody can see whether they do. docs/probe.md
has a snippet for other trainers. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftgauge.errors import CheckpointError
from draftgauge.store import publish_file
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors

PROBE_FILE = "probe.safetensors"
FORMAT_VERSION = "1"
_REQUIRED = ("tokens", "features", "anchors", "top_ids", "top_log_probs")
_DIMENSIONS: Mapping[str, int] = {
    "tokens": 1,
    "features": 2,
    "anchors": 1,
    "top_ids": 3,
    "top_log_probs": 3,
    "rows": 4,
    "context": 2,
}


@dataclass(frozen=True)
class Probe:
    """A probe, its tensors mapped by name; `dtype` is the one that the trainer computed in, as it says."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    dtype: str

    @property
    def depth(self) -> int:
        """D, the depths at which the trainer's choices are known."""
        return self.tensors["top_ids"].shape[1]


def find_probe(checkpoint: Path) -> Path | None:
    """The probe that lies in a checkpoint's folder; None where there is none."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    path = folder / PROBE_FILE
    return path if path.is_file() else None


def read_probe(path: Path) -> Probe:
    """The probe in a file, once its parts are known to fit together.

    Raises:
        CheckpointError: It is damaged, lacks a tensor, or two of its tensors contradict each other.
    """
    tensors, metadata = read_safetensors(path)
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; docs/probe.md says what a probe holds")
    flat = [n for n, dims in _DIMENSIONS.items() if n in tensors and len(tensors[n].shape) != dims]
    if flat:
        wrong = ", ".join(
            f"{n} is {list(tensors[n].shape)}, expected {_DIMENSIONS[n]} dimensions" for n in flat
        )
        raise CheckpointError(f"{path}: {wrong}; write the probe again")
    problems = _contradictions({name: tensor.shape for name, tensor in tensors.items()})
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}; write the probe again")
    return Probe(
        path, {name: tensors[name] for name in _DIMENSIONS if name in tensors}, metadata.get("dtype", "")
    )


def write_probe(
    path: Path, tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]], *, dtype: str
) -> None:
    """Writes a probe; values as `tensorfile.write_safetensors` takes them.

    Raises:
        StoreError: The file exists already, or cannot be written.
        CheckpointError: The tensors are not those of a probe.
    """
    with publish_file(path) as partial:
        write_safetensors(partial, tensors, metadata={"version": FORMAT_VERSION, "dtype": dtype})
        read_probe(partial)


def _contradictions(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Pairs of tensors whose sizes do not fit."""
    anchors = shapes["anchors"][0]
    checks = [
        (shapes["top_ids"][0] != anchors, f"top_ids has {shapes['top_ids'][0]} anchors, anchors {anchors}"),
        (
            shapes["top_log_probs"] != shapes["top_ids"],
            f"top_log_probs is {list(shapes['top_log_probs'])}, top_ids {list(shapes['top_ids'])}",
        ),
        (not anchors, "anchors is empty"),
        (not shapes["top_ids"][1] or not shapes["top_ids"][2], "top_ids is empty"),
    ]
    if "rows" in shapes:
        checks.append(
            (shapes["rows"][1] != anchors, f"rows has {shapes['rows'][1]} anchors, anchors {anchors}")
        )
    if "context" in shapes:
        checks.append(
            (
                shapes["context"][0] != shapes["features"][0],
                f"context has {shapes['context'][0]} positions, features {shapes['features'][0]}",
            )
        )
    return [message for wrong, message in checks if wrong]
