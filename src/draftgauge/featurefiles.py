"""Features that other projects stored: which form a file has, and where its tokens and states lie in it.

Reads descriptions and leaves the bytes where they are. Layers are not known here: no form but DeepSpec's says them.
Knows nothing of targets, drafters or torch.

Letters: T positions, H hidden size, K states side by side at one position.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from draftgauge.errors import BeingWrittenError, CheckpointError, RecordingError
from draftgauge.tensorfile import Fingerprint, StoredTensor, read_safetensors
from draftgauge.torchfile import read_torch_file

#: What one entry of DeepSpec's index says: sample, shard, length, and where the five arrays begin in the shard.
_DEEPSPEC_ENTRY = struct.Struct("<QIIQQQQQ")
_DEEPSPEC_INDEX, _DEEPSPEC_MANIFEST = "samples.idx", "manifest.json"
_TORCH = (".pt", ".pth", ".ckpt", ".ckpt.gz")
_SUFFIXES = (*_TORCH, ".safetensors")
_TOKEN_NAMES = ("input_ids", "token_ids", "tokens")
_FLOATS = ("F32", "BF16", "F16")
_NUMPY = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "u1"}
_NUMPY |= {"I8": "i1", "I16": "<i2", "F64": "<f8"}


@dataclass(frozen=True)
class Form:
    """One project's way to store features: which tensor holds the taps, and which the last layer's state.

    `last_with_taps` says that the last layer's state is the last of the states in `taps`.
    """

    name: str
    description: str
    taps: str | None
    last: str | None = None
    last_with_taps: bool = False


#: Every form that is read, by its name, with the names of its tensors.
FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("specforge", "SpecForge: .ckpt, .ckpt.gz", "hidden_states", "target_last_hidden_states"),
        Form("vllm", "vLLM's connector, speculators: hs_*.safetensors", "hidden_states", last_with_taps=True),
        Form(
            "deepspec",
            "DeepSpec: manifest.json, samples.idx, shards",
            "target_hidden_states",
            "target_last_hidden_states",
        ),
        Form("modelopt", "Model-Optimizer: .pt", "aux_hidden_states", "hidden_states"),
        Form("loose", "any .pt or .safetensors of named tensors", None),
    )
}


@dataclass(frozen=True)
class Features:
    """One sequence's features where they lie: `tokens` [T] and a `loss_mask` [T] where the file holds them.

    `states` are the stored tensors by name, each [T, K*H], [1, T, K*H] or [T, K, H]; `layers` are the ids of the
    taps where the form says them, counted from 0.
    """

    name: str
    form: Form
    path: Path
    tokens: StoredTensor | None
    loss_mask: StoredTensor | None
    states: Mapping[str, StoredTensor]
    fingerprints: Mapping[Path, Fingerprint]
    layers: tuple[int, ...] | None = None

    def width(self, name: str) -> int:
        """How many values a tensor of states holds at one position."""
        shape = self.states[name].shape
        return shape[-1] if len(shape) < 3 or shape[0] == 1 else shape[-2] * shape[-1]

    def turned(self, name: str) -> str:
        """What to say of a tensor whose last dimension, not its first, counts the tokens; empty for others."""
        shape, count = self.states[name].shape, 0 if self.tokens is None else self.tokens.numel
        return " It looks transposed." if shape[-1] == count != shape[-2] else ""

    def require_unchanged(self) -> None:
        """Makes sure that nobody wrote to the files since they were opened.

        Raises:
            CheckpointError: Somebody did.
        """
        for path, seen in self.fingerprints.items():
            seen.require_unchanged(path)


def feature_sources(folder: Path) -> list[Path]:
    """What may hold features in a folder, by name: each file that is to be opened, or a DeepSpec cache's folder.

    A file alone is its own source.
    """
    if not folder.is_dir():
        return [folder]
    if (folder / _DEEPSPEC_MANIFEST).is_file() and (folder / _DEEPSPEC_INDEX).is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and path.is_file())


def source_name(path: Path, *, root: Path) -> str:
    """What the sequence in a file is called: its name without the suffix, below `root`.

    Example:
        `source_name(Path("f/rows_0/data_12.ckpt.gz"), root=Path("f"))` is `"rows_0/data_12"`.
    """
    below = path.relative_to(root) if path.is_relative_to(root) and path != root else Path(path.name)
    name = below.as_posix().removesuffix(".gz")
    return name.removesuffix(Path(name).suffix)


@contextmanager
def open_features(path: Path, *, root: Path, room: Path) -> Iterator[list[Features]]:
    """The sequences that a source holds, for as long as the context is open.

    Args:
        path: One of `feature_sources`.
        root: The folder that was given: names are told below it.
        room: A folder in which a compressed file may be unpacked meanwhile.

    Raises:
        RecordingError: It is no form that is read.
        CheckpointError: It is damaged or truncated.
        BeingWrittenError: Its writer holds its lock.
    """
    if path.is_dir():
        yield _deepspec(path)
        return
    _require_unlocked(path)
    name = source_name(path, root=root)
    if path.suffix == ".gz":
        with _unpacked(path, room) as plain:
            yield [_torch(plain, name=name, given=path)]
    elif path.suffix == ".safetensors":
        yield [_safetensors(path, name=name)]
    else:
        yield [_torch(path, name=name, given=path)]


def ids_of(stored: StoredTensor) -> list[int]:
    """The whole numbers of a stored tensor of any integer type, in order.

    Raises:
        RecordingError: It holds no whole numbers.
    """
    if stored.dtype not in ("I64", "I32", "I16", "I8", "U8", "BOOL"):
        raise RecordingError(f"{stored.name} in {stored.path} is {stored.dtype}; expected whole numbers")
    return [int(value) for value in stored.mapped().view(_NUMPY[stored.dtype])]


def states_of(
    features: Features, name: str, *, part: int, length: int, hidden_size: int
) -> Shaped[np.ndarray, "T H"]:
    """One state at every position, a view into the mapped file; bfloat16 as its bits.

    Args:
        features: The sequence.
        name: The tensor.
        part: Which of the states side by side, counted from 0.
        length: T, the number of tokens.
        hidden_size: H.

    Raises:
        RecordingError: The tensor has another number of rows than there are tokens, or another width.
    """
    stored = features.states[name]
    rows = stored.numel // max(1, features.width(name))
    if rows != length:
        raise RecordingError(
            f"{features.path}: {name} is {list(stored.shape)}, {rows} rows for {length} tokens."
            f"{features.turned(name)} Expected one row for each token: a server's prefix cache shortens what it "
            "returns (switch it off), or the tokens are another sequence's"
        )
    if features.width(name) % hidden_size:
        raise RecordingError(
            f"{features.path}: {name} holds {features.width(name)} values at a position, which are no whole states "
            f"of the target's {hidden_size}; give the target that they were taken from"
        )
    values = stored.mapped().view(_NUMPY[stored.dtype]).reshape(length, -1, hidden_size)
    return np.asarray(values[:, part])


def _require_unlocked(path: Path) -> None:
    """A writer that takes its time holds `<path>.lock`; a lock file that nobody holds means nothing."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        handle = lock.open("rb")
    except OSError:
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            raise BeingWrittenError(
                f"{path} is still being written: {lock.name} is held; import again later"
            ) from exc


@contextmanager
def _unpacked(path: Path, room: Path) -> Iterator[Path]:
    plain = room / f"unpacked-{path.name.removesuffix('.gz')}"
    try:
        try:
            with gzip.open(path, "rb") as packed, plain.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 22)
        except (EOFError, gzip.BadGzipFile, OSError) as exc:
            raise CheckpointError(f"{path} cannot be unpacked: {exc}. Copy the file again") from exc
        yield plain
    finally:
        plain.unlink(missing_ok=True)


def _safetensors(path: Path, *, name: str) -> Features:
    tensors, metadata = read_safetensors(path)
    states = {key: t for key, t in tensors.items() if t.dtype in _FLOATS and len(t.shape) > 1}
    stack = states.get("hidden_states")
    is_vllm = stack is not None and len(stack.shape) == 3 and stack.shape[0] > 1 and "token_ids" in tensors
    form = FORMS["vllm" if is_vllm else "loose"]
    return _found(path, form, metadata.get("id", name), tensors, states=states, given=path)


def _torch(path: Path, *, name: str, given: Path) -> Features:
    value = read_torch_file(path).value
    tensors = (
        {k: t for k, t in value.items() if isinstance(t, StoredTensor)} if isinstance(value, dict) else {}
    )
    states = {key: t for key, t in tensors.items() if t.dtype in _FLOATS and len(t.shape) > 1}
    if {"aux_hidden_states", "hidden_states"} <= states.keys():
        form = FORMS["modelopt"]
    elif {"hidden_states", "loss_mask", "input_ids"} <= tensors.keys():
        form = FORMS["specforge"]
    else:
        form = FORMS["loose"]
    return _found(path, form, name, tensors, states=states, given=given)


def _found(
    path: Path,
    form: Form,
    name: str,
    tensors: Mapping[str, StoredTensor],
    *,
    states: Mapping[str, StoredTensor],
    given: Path,
) -> Features:
    if not states:
        raise RecordingError(
            f"{given} holds no hidden states, which are named tensors of {', '.join(_FLOATS)} with a row for each "
            f"token; it holds {', '.join(tensors) or 'no named tensor'}"
        )
    odd = [f"{key} {list(t.shape)}" for key, t in states.items() if len(t.shape) > 3]
    unreadable = [f"{key} {t.unreadable}" for key, t in states.items() if t.unreadable]
    if odd or unreadable:
        raise RecordingError(
            f"{given}: {', '.join(odd + unreadable)}; expected [T, width], [1, T, width] or [T, states, H], stored "
            "contiguously"
        )
    tokens = next((tensors[key] for key in _TOKEN_NAMES if key in tensors), None)
    return Features(
        name=name,
        form=form,
        path=given,
        tokens=tokens,
        loss_mask=tensors.get("loss_mask"),
        states=states,
        fingerprints={given: Fingerprint.of(given)},
    )


def _deepspec(folder: Path) -> list[Features]:
    """A cache of DeepSpec, version 2: raw arrays in shards, which an index points into."""
    manifest = _manifest(folder)
    hidden, layers = int(manifest["hidden_size"]), tuple(int(i) for i in manifest["target_layer_ids"])
    shards = {int(shard["shard_id"]): folder / str(shard["file_name"]) for shard in manifest["shards"]}
    index = (folder / _DEEPSPEC_INDEX).read_bytes()
    if len(index) % _DEEPSPEC_ENTRY.size:
        raise CheckpointError(
            f"{folder / _DEEPSPEC_INDEX} has {len(index)} bytes; expected entries of {_DEEPSPEC_ENTRY.size}: still "
            "being written, or truncated. Copy the cache again"
        )
    found = []
    for sample, shard, length, *offsets in _DEEPSPEC_ENTRY.iter_unpack(index):
        if shard not in shards or not shards[shard].is_file():
            raise CheckpointError(
                f"{folder / _DEEPSPEC_INDEX} places sample {sample} in shard {shard}, which is not there; the "
                f"manifest names {', '.join(path.name for path in shards.values())}. Copy the cache again"
            )
        found.append(_sample(folder, sample, shards[shard], length, offsets, hidden=hidden, layers=layers))
    return found


def _sample(
    folder: Path,
    sample: int,
    shard: Path,
    length: int,
    offsets: list[int],
    *,
    hidden: int,
    layers: tuple[int, ...],
) -> Features:
    arrays = (
        ("input_ids", "I32", (length,)),
        ("attention_mask", "U8", (length,)),
        ("loss_mask", "U8", (length,)),
        ("target_hidden_states", "BF16", (length, len(layers) * hidden)),
        ("target_last_hidden_states", "BF16", (length, hidden)),
    )
    stored = {
        name: StoredTensor(name, dtype, shape, shard, offset)
        for (name, dtype, shape), offset in zip(arrays, offsets, strict=True)
    }
    return Features(
        name=f"{folder.name}/{sample}",
        form=FORMS["deepspec"],
        path=folder,
        tokens=stored["input_ids"],
        loss_mask=stored["loss_mask"],
        states={name: tensor for name, tensor in stored.items() if tensor.dtype == "BF16"},
        fingerprints={shard: Fingerprint.of(shard)},
        layers=layers,
    )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / _DEEPSPEC_MANIFEST
    needed: Mapping[str, Callable[[Any], bool]] = {
        "hidden_size": lambda value: isinstance(value, int) and value > 0,
        "target_layer_ids": lambda value: isinstance(value, list) and all(isinstance(i, int) for i in value),
        "shards": lambda value: (
            isinstance(value, list) and all({"shard_id", "file_name"} <= set(shard) for shard in value)
        ),
    }
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        lacking = [key for key, sound in needed.items() if not sound(manifest[key])]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(
            f"{path} is not the manifest of a DeepSpec cache: {exc}. Copy the cache again"
        ) from exc
    if lacking:
        raise CheckpointError(f"{path}: {', '.join(lacking)} cannot be read. Copy the cache again")
    return dict(manifest)
