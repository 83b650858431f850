"""Opens any drafter file safely: which tensors it holds, under which names, and what else it says.

Reads the descriptions and leaves the bytes where they are: a 15 GB training checkpoint opens in a moment,
its optimizer is never read. Nothing is guessed: two possible files or two sets of weights are refused with
the names to choose from. This module knows nothing of wirings, of networks or of torch.
"""

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftgauge.distcp import verify_distributed
from draftgauge.errors import CheckpointError, FamilyError
from draftgauge.keys import canonical_name, foreign_family, unused_reason
from draftgauge.progress import Progress, silent
from draftgauge.tensorfile import ByteProgress, Fingerprint, StoredTensor
from draftgauge.torchfile import ChecksumCount, read_torch_file, verify_checksums
from draftgauge.urls import Localised, localise
from draftgauge.weights import Weights, read_weights


@dataclass(frozen=True)
class KeyUse:
    """What became of one stored name: `loaded`, `renamed` (to `canonical`), or `unused` for a reason."""

    stored: str
    canonical: str | None
    status: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's file or directory, opened: its tensors by canonical name and everything around them.

    `kind` is `hf-directory`, `safetensors`, `trainer-pt` or `distributed`; `state_dict` is the dotted path of the
    weights within one of the last two, empty if they are the whole of it. `config` and `step` are None where
    nothing states them, and their `_source` then says why. `extras` describes, in a line each, what was not read.
    `bytes_model` counts the tensors of `tensors`, `bytes_file` the files that hold them; `origin` is the address
    that it was fetched from, if it was.
    """

    path: Path
    kind: str
    state_dict: str
    tensors: dict[str, StoredTensor]
    key_map: tuple[KeyUse, ...]
    config: dict[str, object] | None
    config_source: str
    step: int | None
    step_source: str
    extras: dict[str, str]
    opaque_classes: tuple[str, ...]
    bytes_model: int
    bytes_file: int
    dtypes: dict[str, int]
    files: tuple[Path, ...]
    fingerprints: dict[Path, Fingerprint]
    origin: Localised


def open_checkpoint(
    path: str | Path, *, state_dict: str | None = None, progress: Progress = silent
) -> Checkpoint:
    """Open a drafter: a Hugging Face directory, a trainer's directory, `.pt` or distributed save, or safetensors.

    `path` may be an address (`hf://owner/repo@revision`, `https://...`, `s3://...`), which is fetched first;
    `progress` shows that. `state_dict` chooses among several sets of weights in a `.pt`, by dotted path.

    Example:
        `open_checkpoint("runs/step_4000").tensors["fc.weight"]` is
        `StoredTensor("model_state_dict.fc.weight", "BF16", (2048, 10240), ...)`.

    Raises:
        CheckpointError: missing, ambiguous, damaged, truncated or still being written.
        FamilyError: the tensors are those of another kind of drafter.
        ConnectionLostError: an address that does not answer.
    """
    origin = localise(path, progress=progress)
    weights = read_weights(origin.path, state_dict=state_dict)
    tensors, key_map = _named(weights)
    for file, fingerprint in weights.fingerprints.items():
        fingerprint.require_unchanged(file)
    return Checkpoint(
        path=weights.path,
        kind=weights.kind,
        state_dict=weights.state_dict,
        tensors=tensors,
        key_map=key_map,
        config=weights.config,
        config_source=weights.config_source,
        step=weights.step,
        step_source=weights.step_source,
        extras=weights.extras,
        opaque_classes=weights.opaque_classes,
        bytes_model=sum(tensor.nbytes for tensor in tensors.values()),
        bytes_file=sum(weights.fingerprints[file].size for file in weights.tensor_files),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors.values())),
        files=tuple(weights.fingerprints),
        fingerprints=weights.fingerprints,
        origin=origin,
    )


def require_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the checkpoint has every expected tensor in its shape; -1 stands for any size.

    Raises:
        CheckpointError: lists every missing tensor with the nearest stored name, and every other shape; or a
            tensor is of a type that is not computed with.
    """
    stored_names = [use.stored for use in checkpoint.key_map]
    problems = []
    for name, shape in expected.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            near = difflib.get_close_matches(name, stored_names, n=1)
            problems.append(
                f"  {name} is missing" + (f"; the nearest stored name is {near[0]}" if near else "")
            )
        elif not _fits(tensor.shape, shape):
            problems.append(f"  {name} has shape {list(tensor.shape)}; expected {list(shape)}")
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} lacks tensors that its wiring needs:\n" + "\n".join(problems) + "\n"
            "Compare the wiring (--wiring) with the config that the drafter was trained with"
        )
    for name in expected:
        tensor, types = checkpoint.tensors[name], _INTEGERS if name == "d2t" else tuple(_EXPONENT_BITS)
        if tensor.dtype not in types:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has type {tensor.dtype}; expected one of {', '.join(types)}. "
                "Save the unquantised weights, and d2t as whole numbers"
            )


def require_finite(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Raise if a float tensor has a NaN or an infinity, or a matrix is zero throughout (never trained).

    Raises:
        CheckpointError: names each such tensor, with its count of non-finite values.
    """
    problems = []
    for name in checkpoint.tensors if names is None else names:
        tensor = checkpoint.tensors[name]
        if tensor.dtype not in _EXPONENT_BITS:
            continue
        non_finite, any_nonzero = _scan(tensor)
        if non_finite:
            problems.append(f"  {name}: {non_finite} of {tensor.numel} values are NaN or infinite")
        elif not any_nonzero and len(tensor.shape) > 1 and tensor.numel:
            problems.append(f"  {name}: all {tensor.numel} values are zero, as before any training")
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} holds weights that cannot be a trained drafter's:\n"
            + "\n".join(problems)
            + "\n"
            "Use an earlier checkpoint, or look at the run that wrote this one"
        )


def verify(checkpoint: Checkpoint, *, progress: ByteProgress | None = None) -> ChecksumCount:
    """Raise unless the files are those that were opened and the weights' bytes agree with their checksums.

    The count says how many records of the weights were compared, and how many carry no checksum: all
    files of a safetensors checkpoint, whose format has none.

    Raises:
        CheckpointError: a file changed since it was opened, or its bytes are damaged.
    """
    _require_unchanged(checkpoint)
    if checkpoint.kind == "trainer-pt":
        (file,) = {tensor.path for tensor in checkpoint.tensors.values()}
        names = [tensor.name for tensor in checkpoint.tensors.values()]
        count = verify_checksums(read_torch_file(file), names, progress=progress)
    elif checkpoint.kind == "distributed":
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        count = verify_distributed(folder, checkpoint.tensors.values(), progress=progress)
    else:
        count = ChecksumCount(checked=0, absent=len({t.path for t in checkpoint.tensors.values()}))
    _require_unchanged(checkpoint)
    return count


def digest(checkpoint: Checkpoint) -> str:
    """The identity of the weights: SHA-256 over the canonical tensors, the same in every container.

    Covers name, type, shape and bytes of each tensor, in the order of the names. 64 hexadecimal digits.

    Raises:
        CheckpointError: a tensor's bytes cannot be read, or a file changed since it was opened.
    """
    sha = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        sha.update(json.dumps([name, tensor.dtype, tensor.shape]).encode() + b"\n")
        for block in tensor.blocks():
            sha.update(block)
    _require_unchanged(checkpoint)
    return sha.hexdigest()


def _named(weights: Weights) -> tuple[dict[str, StoredTensor], tuple[KeyUse, ...]]:
    """The tensors under their canonical names, and what became of every stored name."""
    foreign = foreign_family(weights.tensors)
    if foreign is not None:
        family, stored = foreign
        raise FamilyError(
            f"{weights.path} holds {stored}, which makes it {family.name}; only plain DFlash drafters are "
            f"computed, and an approximation would measure something else. {family.help}"
        )
    tensors: dict[str, StoredTensor] = {}
    uses: list[KeyUse] = []
    taken: dict[str, str] = {}
    for stored, value in weights.tensors.items():
        canonical = canonical_name(stored)
        reason = unused_reason(canonical)
        if reason is not None:
            uses.append(KeyUse(stored, None, "unused", reason))
            continue
        if not isinstance(value, StoredTensor):
            raise CheckpointError(
                f"{weights.path}: {stored} is a {value}, not a plain tensor. "
                "Save full tensors (full_state_dict=True, or DTensor.full_tensor())"
            )
        if canonical in tensors:
            raise CheckpointError(
                f"{weights.path}: {taken[canonical]} and {stored} are both {canonical}. "
                "Save the drafter's weights alone, without those of another model"
            )
        tensors[canonical], taken[canonical] = value, stored
        if stored == canonical:
            uses.append(KeyUse(stored, canonical, "loaded", ""))
        else:
            uses.append(KeyUse(stored, canonical, "renamed", "another spelling"))
    if "t2d" in map(canonical_name, weights.tensors) and "d2t" not in tensors:
        raise CheckpointError(
            f"{weights.path} holds t2d but not d2t, the map of its pruned vocabulary. "
            "Save d2t with the weights"
        )
    return tensors, tuple(uses)


def _require_unchanged(checkpoint: Checkpoint) -> None:
    for file, fingerprint in checkpoint.fingerprints.items():
        fingerprint.require_unchanged(file)


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(e in (-1, n) for n, e in zip(shape, expected, strict=True))


# The bits of the exponent: all of them set means NaN or infinity. All but the sign: zero means zero.
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
_INTEGERS = ("I64", "I32")


def _scan(tensor: StoredTensor) -> tuple[int, bool]:
    """(how many values are not finite, whether any is other than zero), without converting a value."""
    exponent = _EXPONENT_BITS[tensor.dtype]
    item_bytes = tensor.nbytes // tensor.numel if tensor.numel else 1
    magnitude = (1 << (8 * item_bytes - 1)) - 1
    non_finite, any_nonzero = 0, False
    for block in tensor.blocks():
        bits = np.frombuffer(block, f"<u{item_bytes}")
        non_finite += int(np.count_nonzero((bits & exponent) == exponent))
        any_nonzero = any_nonzero or bool((bits & magnitude).any())
    return non_finite, any_nonzero
