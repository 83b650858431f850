"""What a drafter file holds, before anything is computed with it: wiring, key map, sizes, problems.

Reads, never runs and never imports torch. The result is plain values for `report` and `--json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftgauge.checkpoint import Checkpoint, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.errors import CheckpointError, WiringError
from draftgauge.progress import Progress, silent
from draftgauge.stated import Stated, unused_tensors, used_wiring, wiring_of
from draftgauge.wiring import FIELDS, Wiring, tensor_shapes


def inspect_checkpoint(
    path: str | Path,
    stated: Stated = Stated(),  # noqa: B008
    *,
    state_dict: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Opens a checkpoint, verifies its bytes, and says how its weights would be wired.

    A wiring that is not known completely is not an error here: the result says what is missing.

    Raises:
        CheckpointError: The file is damaged, truncated, or still being written.
        FamilyError: The tensors are those of another kind of drafter.
    """
    checkpoint = open_checkpoint(path, state_dict=state_dict, progress=progress)
    checksums = verify(checkpoint)
    wiring, wiring_problem = _wiring(checkpoint, stated)
    return {
        "file": {
            "path": str(checkpoint.path),
            "url": checkpoint.origin.url,
            "revision": checkpoint.origin.revision,
            "kind": checkpoint.kind,
            "bytes_file": checkpoint.bytes_file,
            "bytes_model": checkpoint.bytes_model,
            "parameters": sum(tensor.numel for tensor in checkpoint.tensors.values()),
            "dtypes": checkpoint.dtypes,
            "state_dict": checkpoint.state_dict,
            "step": checkpoint.step,
            "step_source": checkpoint.step_source,
            "checksums": asdict(checksums),
        },
        "wiring": None if wiring is None else _fields(wiring),
        "wiring_problem": wiring_problem,
        "problems": _problems(checkpoint, wiring, progress=progress),
        "key_map": _key_map(checkpoint, wiring),
        "tensors": {n: {"dtype": t.dtype, "shape": list(t.shape)} for n, t in checkpoint.tensors.items()},
        "extras": checkpoint.extras,
        "opaque_classes": list(checkpoint.opaque_classes),
    }


def _wiring(checkpoint: Checkpoint, stated: Stated) -> tuple[Wiring | None, str | None]:
    try:
        return used_wiring(wiring_of(checkpoint, stated), stated), None
    except WiringError as exc:
        return None, str(exc)


def _fields(wiring: Wiring) -> dict[str, Mapping[str, Any]]:
    """Every field with its value and where it came from; attention layers in words."""
    values = {name: getattr(wiring, name) for name in FIELDS}
    values["attention"] = [str(layer) for layer in wiring.attention]
    values["rope_scaling"] = None if wiring.rope_scaling is None else str(wiring.rope_scaling)
    return {name: {"value": value, "source": wiring.provenance[name]} for name, value in values.items()}


def _problems(checkpoint: Checkpoint, wiring: Wiring | None, *, progress: Progress) -> list[str]:
    """Why `eval` would refuse this checkpoint, besides a wiring that is not known."""
    found = []
    names = checkpoint.tensors
    try:
        require_finite(checkpoint, progress(names, label="check weights", total=len(names), unit="tensor"))
    except CheckpointError as exc:
        found.append(str(exc))
    try:
        require_tensors(checkpoint, {} if wiring is None else tensor_shapes(wiring))
    except CheckpointError as exc:
        found.append(str(exc))
    return found


def _key_map(checkpoint: Checkpoint, wiring: Wiring | None) -> list[dict[str, Any]]:
    """What became of every stored name, and then the names that the wiring reads and nothing is stored for."""
    uses = [asdict(use) for use in checkpoint.key_map]
    if wiring is None:
        return uses
    unused = unused_tensors(checkpoint, wiring)
    for use in uses:
        if use["stored"] in unused:
            use |= {"status": "unused", "reason": unused[use["stored"]]}
    missing = [name for name in tensor_shapes(wiring) if name not in checkpoint.tensors]
    return uses + [
        {"stored": None, "canonical": name, "status": "missing", "reason": "the wiring reads it"}
        for name in missing
    ]
