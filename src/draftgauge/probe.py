"""The trainer's probe: what a trainer saw and computed at a few anchors, written beside its checkpoint.

    step_N/probe.safetensors
        tokens        int   [T]              the sequence
        features      float [S, F]           what `fc` was given at positions 0 to S-1
        anchors       int   [A]              positions in `tokens`, at most S
        top_ids       int   [A, D, K]        the trainer's first choices, best first, as ids of the target
        top_log_probs float [A, D, K]        their log-probabilities
        vocabulary    int   [V]              optional: the only tokens that these are normalised over
        context       float [S, H]           optional: the fused features after `hidden_norm`
        rows          float [L+1, A, B, H]   optional: the block's rows before the draft layers and after each
        final         float [A, D, H]        optional: the rows that predict, after the output norm
        metadata      version, dtype (what the trainer computed in) and step, all of them text

Training and evaluation must compute the same function; with this, anybody can see whether they do. docs/probe.md
has a snippet for other trainers. Knows nothing of torch, of networks or of wirings.

Letters: as in the table; K choices, D depth, B block rows, L draft layers, H hidden size, F = taps x H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from draftgauge.errors import CheckpointError
from draftgauge.store import publish_file
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors

PROBE_FILE = "probe.safetensors"
#: 1: the first.
VERSION = "1"
#: What a trainer may say that it computed in; autocast counts as what it casts to.
DTYPES = ("float32", "tfloat32", "float16", "bfloat16")
_REQUIRED = ("tokens", "features", "anchors", "top_ids", "top_log_probs")
_LETTERS: Mapping[str, str] = {
    "tokens": "T",
    "features": "S F",
    "anchors": "A",
    "top_ids": "A D K",
    "top_log_probs": "A D K",
    "vocabulary": "V",
    "context": "S H",
    "rows": "L+1 A B H",
    "final": "A D H",
}
_WHOLE = ("tokens", "anchors", "top_ids", "vocabulary")
_KINDS: Mapping[bool, Mapping[str, str]] = {
    True: {"I32": "<i4", "I64": "<i8"},
    False: {"F32": "<f4", "BF16": "<u2", "F16": "<f2"},
}
#: A log-probability may be above 0 by what rounding does.
_ROUNDING = 1e-2


@dataclass(frozen=True)
class Probe:
    """A probe, its tensors mapped by name.

    `dtype` is what the trainer computed in, empty where it does not say; so is `step` None.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    dtype: str
    step: int | None

    @property
    def depth(self) -> int:
        """D, the depths at which the trainer's choices are known."""
        return self.tensors["top_ids"].shape[1]


def find_probe(checkpoint: Path) -> Path | None:
    """The probe that lies in a checkpoint's folder or beside its file; None where there is none."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    path = folder / PROBE_FILE
    return path if path.is_file() else None


def read_probe(path: Path) -> Probe:
    """The probe in a file, once its parts are known to fit together.

    Raises:
        CheckpointError: It is damaged, lacks a tensor, holds values that a probe cannot, or two of its tensors
            contradict each other; the message names both.
    """
    tensors, metadata = read_safetensors(path)
    probe = {name: tensors[name] for name in _LETTERS if name in tensors}
    missing = [name for name in _REQUIRED if name not in probe]
    if missing:
        raise _refused(path, f"it lacks {', '.join(missing)}")
    version, dtype, step = (metadata.get(name, "") for name in ("version", "dtype", "step"))
    if version not in ("", VERSION):
        raise _refused(path, f"its version is {version}; this draftgauge reads {VERSION}")
    if dtype not in ("", *DTYPES):
        raise _refused(path, f"its dtype is {dtype!r}; expected {', '.join(DTYPES)}")
    if not (step.isdecimal() or step == ""):
        raise _refused(path, f"its step is {step!r}; expected a whole number")
    # The later checks stand on what the earlier ones have made sure of.
    for problems in (_wrong_kinds, _wrong_sizes, _wrong_values):
        found = list(problems(probe))
        if found:
            raise _refused(path, "; ".join(found))
    return Probe(path, probe, dtype, int(step) if step else None)


def write_probe(
    path: Path,
    tensors: Mapping[str, Shaped[np.ndarray, ...] | tuple[str, Shaped[np.ndarray, ...]]],
    *,
    dtype: str,
    step: int | None = None,
) -> None:
    """Writes a probe, whole or not at all; values as `tensorfile.write_safetensors` takes them.

    Raises:
        StoreError: The file exists already, or cannot be written.
        CheckpointError: The tensors are not those of a probe.
    """
    metadata = {"version": VERSION, "dtype": dtype} | ({} if step is None else {"step": str(step)})
    with publish_file(path) as partial:
        write_safetensors(partial, tensors, metadata=metadata)
        read_probe(partial)


def _wrong_kinds(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Tensors that are whole numbers where floats belong, or the reverse, or of another number of dimensions."""
    for name, stored in tensors.items():
        letters, kinds = _LETTERS[name], _KINDS[name in _WHOLE]
        if stored.dtype not in kinds:
            yield f"{name} is stored as {stored.dtype}; expected {' or '.join(kinds)}"
        if len(stored.shape) != len(letters.split()) or 0 in stored.shape:
            yield f"{name} is {list(stored.shape)}; expected [{letters.replace(' ', ', ')}]"


def _wrong_sizes(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Pairs of tensors that disagree on the size which one letter stands for."""
    known: dict[str, tuple[int, str]] = {}
    for name, stored in tensors.items():
        for letter, size in zip(_LETTERS[name].split(), stored.shape, strict=True):
            expected, other = known.setdefault(letter, (size, name))
            if size != expected:
                theirs = list(tensors[other].shape)
                yield f"{name} is {list(stored.shape)}, {other} {theirs}: {letter} is {size} and {expected}"


def _wrong_values(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Values that a probe cannot hold."""
    for name, stored in tensors.items():
        if name not in _WHOLE and not np.isfinite(stored.to_float32()).all():
            yield f"{name} holds values that are not finite"
    anchors, ids = _whole(tensors["anchors"]), _whole(tensors["top_ids"])
    length, positions = tensors["tokens"].shape[0], tensors["features"].shape[0]
    if not 0 <= anchors.min() <= anchors.max() < length:
        yield f"anchors are {anchors.tolist()}, tokens has {length} positions"
    if anchors.max() > positions:
        yield f"features ends at position {positions - 1}, before the anchor {anchors.max()}"
    if min(ids.min(), _whole(tensors["tokens"]).min()) < 0:
        yield "tokens or top_ids holds negative ids"
    if (np.diff(np.sort(ids, axis=-1)) == 0).any():
        yield "top_ids names a token twice at one depth"
    scores = tensors["top_log_probs"].to_float32()
    if scores.max() > _ROUNDING:
        yield f"top_log_probs holds {scores.max():.3g}; a log-probability is at most 0"
    if (np.diff(scores) > 0).any():
        yield "top_log_probs rises along its last dimension; expected the best choice first"
    if "vocabulary" in tensors and not np.isin(ids, _whole(tensors["vocabulary"])).all():
        yield "top_ids holds tokens that vocabulary lacks"


def _whole(stored: StoredTensor) -> Int[np.ndarray, ...]:
    """A tensor of whole numbers."""
    values: np.ndarray = np.asarray(stored.mapped()).view(_KINDS[True][stored.dtype])
    return values.reshape(stored.shape)


def _refused(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no probe: {problem}. docs/probe.md says what one holds; write it again or remove it"
    )
