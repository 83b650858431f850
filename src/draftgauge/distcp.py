"""Distributed checkpoints of torch (a folder with `.metadata` and `*.distcp`) read without torch or its processes.

`.metadata` is a pickle that says which tensors there are and where their chunks lie; it is read as data, nothing in
it is called. A tensor of one chunk stays where it is. One that was sharded over several is put together in a file of
the cache folder, once. This module knows nothing of drafters but how the name of a fusion of taps ends, by which
flat names are told apart into sets.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.errors import CheckpointError
from draftgauge.keys import canonical_name
from draftgauge.plainpickle import Global, Opaque, PickleError, load_plain
from draftgauge.store import cache_folder, publish_file, sha256_json
from draftgauge.tensorfile import (
    ITEM_BYTES,
    Array,
    ByteProgress,
    Fingerprint,
    StoredTensor,
    open_to_read,
    read_safetensors,
    safetensors_head,
)
from draftgauge.torchfile import DTYPE_CODES, ChecksumCount, read_torch_file, torch_size, verify_checksums

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
_MODULE = "torch.distributed.checkpoint.metadata"
#: Names that torch and Megatron write into `.metadata`; another one says that something else made the file.
_EXPECTED = ("torch.", "pathlib.", "megatron.")
_MAX_METADATA_BYTES = 1 << 30
_ASSEMBLED_VERSION = 1
_COPY_AGAIN = "Copy the whole folder again, or use another checkpoint"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where in which file it was written: `length` bytes from `start` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    start: int
    length: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class DistributedSave:
    """What a distributed checkpoint says: plain values, in which every tensor is a `StoredTensor`.

    A tensor that is not one element has its type and shape but is not located yet: `located` does that for those
    that are wanted, `chunks` has their parts by name. `fingerprints` are those of the files read so far.
    """

    path: Path
    value: object
    opaque_classes: tuple[str, ...]
    chunks: dict[str, tuple[Chunk, ...]]
    fingerprints: dict[Path, Fingerprint]


def read_distributed(folder: Path) -> DistributedSave:
    """Read the description of a distributed checkpoint, and the plain values beside its tensors.

    Values of an optimizer (`optim...`) are not read.

    Raises:
        CheckpointError: `.metadata` or a file is missing, damaged, truncated, or not of torch.
    """
    metadata = _metadata(folder)
    storage = _storage(folder, metadata)
    planner = metadata.get("planner_data")
    planner = planner if isinstance(planner, dict) else {}
    fingerprints = {folder / METADATA: Fingerprint.of(folder / METADATA)}
    opaque: set[str] = set()
    chunks: dict[str, tuple[Chunk, ...]] = {}
    tree: dict[Any, Any] = {}
    for name, entry in _mapping_of(folder, metadata, "state_dict_metadata").items():
        value: object
        if not isinstance(name, str):
            raise _unexpected(folder, f"a name in it is {_said(name)}")
        if _class_of(entry) == "TensorStorageMetadata":
            value, chunks[name] = _described_tensor(folder, name, entry.state, storage=storage)
        elif _class_of(entry) == "BytesStorageMetadata":
            value = Opaque("(a value that is not read)", None)
        else:
            raise _unexpected(folder, f"{name} is {_said(entry)}; expected a tensor or bytes")
        if not _is_of_optimizer(name):
            value = _plain_value(folder, name, value, storage=storage, seen=(fingerprints, opaque))
        _put(tree, planner.get(name), name, value)
    return DistributedSave(folder, _in_sets(tree), tuple(sorted(opaque)), chunks, fingerprints)


def located(
    save: DistributedSave, tensors: Mapping[str, object]
) -> tuple[dict[str, object], dict[Path, Fingerprint]]:
    """The same values with every tensor at its bytes, and the fingerprints of the files that hold them.

    Sharded tensors lie in one file of the cache folder, made now where it is not there yet.

    Raises:
        CheckpointError: chunks are missing, overlap, have another size, or their file is not whole.
        StoreError: the cache folder cannot be written.
    """
    found: dict[str, object] = dict(tensors)
    sharded: dict[str, StoredTensor] = {}
    files: dict[Path, Fingerprint] = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, StoredTensor):
            continue
        chunks = save.chunks[tensor.name]
        _require_cover(save.path, tensor, chunks)
        parts = [chunk for chunk in chunks if chunk.numel]
        files |= {chunk.path: _fingerprint(save.path, chunk.path) for chunk in parts}
        if not parts:
            found[key] = StoredTensor(tensor.name, tensor.dtype, tensor.shape, save.path / METADATA, 0)
        elif len(parts) == 1:
            found[key] = _part(tensor, parts[0])
        else:
            sharded[key] = tensor
    if sharded:
        whole = _assembled(save, sharded, files)
        found |= {key: whole[tensor.name] for key, tensor in sharded.items()}
    return found, files


def verify_distributed(
    folder: Path, tensors: Iterable[StoredTensor], *, progress: ByteProgress | None = None
) -> ChecksumCount:
    """Compare the chunks of tensors with their stored CRC-32, and what was put together with its chunks.

    Raises:
        CheckpointError: bytes are not those that were written.
    """
    save = read_distributed(folder)
    wanted = [(tensor, [chunk for chunk in save.chunks[tensor.name] if chunk.numel]) for tensor in tensors]
    total = sum(chunk.length for _, parts in wanted for chunk in parts)
    done, checked, absent = 0, 0, 0
    for tensor, parts in wanted:
        for chunk in parts:
            if _is_zip(chunk):
                part = read_torch_file(chunk.path, part=(chunk.start, chunk.length))
                count = verify_checksums(part, [""])
                checked, absent = checked + count.checked, absent + count.absent
            else:
                absent += 1
            done += chunk.length
            if progress is not None:
                progress(done, total)
        if len(parts) > 1 and _together(tensor, parts).tobytes() != b"".join(tensor.blocks()):
            raise CheckpointError(
                f"{tensor.path} is damaged: {tensor.name} is not what its {len(parts)} chunks in {folder} hold. "
                "Remove that file of the cache; it is made again"
            )
    return ChecksumCount(checked, absent)


# --- .metadata -----------------------------------------------------------------------------------------


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    size = Fingerprint.of(path).size
    if not 0 < size <= _MAX_METADATA_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes; expected the description of a distributed checkpoint, which is "
            "written last. Wait until it is saved, or copy the folder again"
        )
    with open_to_read(path) as file:
        data = file.read()
    try:
        value, classes = load_plain(
            data, rebuild={"torch.Size": torch_size}, persistent=_no_persistent, leaf=_leaf
        )
    except PickleError as error:
        raise CheckpointError(f"{path}: {error}. {_COPY_AGAIN}") from error
    strange = [name for name in classes if not name.startswith(_EXPECTED)]
    if strange:
        raise CheckpointError(
            f"{path} names {', '.join(strange[:3])}, which no distributed checkpoint of torch does; nothing of it "
            "was run. Give a folder that torch.distributed.checkpoint.save wrote"
        )
    if _class_of(value) != "Metadata" or not isinstance(value, Opaque) or not isinstance(value.state, dict):
        raise _unexpected(folder, f"it holds {_said(value)}")
    return value.state


def _no_persistent(persistent_id: object) -> object:
    raise PickleError("it refers to something outside of it")


def _leaf(value: object, path: str) -> object:
    if isinstance(value, Global) and value.name in DTYPE_CODES:
        return value.name
    return value


def _mapping_of(folder: Path, metadata: Mapping[str, Any], field: str) -> dict[Any, Any]:
    found = metadata.get(field)
    if not isinstance(found, dict):
        raise _unexpected(folder, f"its {field} is {_said(found)}; expected a mapping")
    return found


def _storage(folder: Path, metadata: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...]], Any]:
    """Where everything was written, by name and offsets; the latter are empty for what is no tensor."""
    found: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in _mapping_of(folder, metadata, "storage_data").items():
        match index, info:
            case (
                Opaque(state={"fqn": str(name), **at}),
                Opaque(
                    state={"relative_path": str(path), "offset": int(start), "length": int(length), **more}
                ),
            ) if min(start, length) >= 0 and _are_counts(at.get("offset", ())):
                if Path(path).name != path:
                    raise _unexpected(folder, f"it places {name} in {path!r}, not in a file beside it")
                if more.get("transform_descriptors"):
                    raise CheckpointError(
                        f"{folder / METADATA}: {name} was compressed or changed when it was written; only "
                        "chunks that are stored as they are can be read. Save without _extensions"
                    )
                offsets: Any = at.get("offset", ())
                found[name, offsets] = (folder / path, start, length)
            case _:
                raise _unexpected(folder, f"a place in it is {_said(info)}")
    return found


def _described_tensor(
    folder: Path, name: str, state: object, *, storage: Mapping[tuple[str, tuple[int, ...]], Any]
) -> tuple[object, tuple[Chunk, ...]]:
    """A tensor that is not located yet, and its chunks."""
    match state:
        case {
            "properties": Opaque(state=(str(dtype), *_) | {"dtype": str(dtype)}),
            "size": tuple(shape),
            "chunks": list(boxes),
        } if dtype in DTYPE_CODES and _are_counts(shape):
            pass
        case {"properties": Opaque(state=(Opaque(class_name=dtype), *_)), "chunks": list()}:
            return Opaque(f"torch.Tensor of {dtype}", None), ()
        case _:
            raise _unexpected(folder, f"the tensor {name} is described as {str(state)[:200]}")
    chunks = []
    for box in boxes:
        match box:
            case Opaque(state={"offsets": tuple(offsets), "sizes": tuple(sizes)}) if _are_counts(
                shape, offsets, sizes
            ):
                place = storage.get((name, offsets))
                if place is None and 0 not in sizes:
                    raise CheckpointError(
                        f"{folder / METADATA} does not say where the chunk of {name} at {list(offsets)} is. "
                        f"{_COPY_AGAIN}"
                    )
                chunks.append(Chunk(offsets, sizes, *(place or (folder / METADATA, 0, 0))))
            case _:
                raise _unexpected(folder, f"a chunk of {name} is {_said(box)}")
    first = chunks[0] if chunks else Chunk((), (), folder / METADATA, 0, 0)
    unreadable = f"lies in {len(chunks)} chunk(s) of {folder}, which were not looked for"
    tensor = StoredTensor(name, DTYPE_CODES[dtype], shape, first.path, first.start, unreadable)
    return tensor, tuple(chunks)


def _are_counts(*groups: object) -> bool:
    """Whether shape and box are tuples with the same number of dimensions, all of them counts."""
    tuples = [group for group in groups if isinstance(group, tuple)]
    same = len(tuples) == len(groups) and len({len(group) for group in tuples}) == 1
    return same and all(type(n) is int and 0 <= n < 1 << 48 for group in tuples for n in group)


def _plain_value(
    folder: Path,
    name: str,
    value: object,
    *,
    storage: Mapping[tuple[str, tuple[int, ...]], Any],
    seen: tuple[dict[Path, Fingerprint], set[str]],
) -> object:
    """What was saved as bytes, and a tensor of one element; anything else as it is."""
    scalar = value if isinstance(value, StoredTensor) and value.numel == 1 else None
    shape = () if scalar is None else scalar.shape
    offsets = (0,) * len(shape)
    place = storage.get((name, offsets))
    if (isinstance(value, StoredTensor) and scalar is None) or place is None:
        return value
    chunk = Chunk(offsets, shape, *place)
    fingerprints, opaque = seen
    fingerprints[chunk.path] = _fingerprint(folder, chunk.path)
    _require_within(name, chunk)
    if scalar is not None:
        return _part(scalar, chunk)
    if not _is_zip(chunk):
        return value
    read = read_torch_file(chunk.path, part=(chunk.start, chunk.length))
    opaque.update(read.opaque_classes)
    return read.value


def _put(tree: dict[Any, Any], path: object, name: str, value: object) -> None:
    """Places a value where it was in the state dict that was saved; under its whole name where that is not known."""
    known = isinstance(path, tuple) and path and all(isinstance(key, str | int) for key in path)
    keys = path if isinstance(path, tuple) and known else (name,)
    inside = tree
    for key in keys[:-1]:
        inside = inside.setdefault(key, {})
        if not isinstance(inside, dict):
            tree[name] = value
            return
    inside[keys[-1]] = value


def _in_sets(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Dotted names of one mapping, as FSDP saves them, divided into a mapping for each fusion of taps among them."""
    flat = {key: _in_sets(item) if isinstance(item, dict) else item for key, item in tree.items()}
    prefixes = {
        prefix for key in flat if isinstance(key, str) and (prefix := _before_fusion(key)) is not None
    }
    divided: dict[Any, Any] = {}
    for key, item in flat.items():
        prefix, rest = _divided(key, prefixes) if isinstance(key, str) else ("", key)
        if prefix and isinstance(divided.setdefault(prefix, {}), dict):
            divided[prefix][rest] = item
        else:
            divided[key] = item
    return divided


def _before_fusion(key: str) -> str | None:
    """`model` for `model.fc.weight`; None for a name that is no fusion of taps."""
    parts = key.split(".")
    for count in range(len(parts) - 1, -1, -1):
        if canonical_name(".".join(parts[count:])) == "fc.weight":
            return ".".join(parts[:count])
    return None


def _divided(key: str, prefixes: set[str]) -> tuple[str, str]:
    """The longest of the prefixes that a name has (or its optimizer's), and the rest of it."""
    own = [prefix for prefix in prefixes if prefix and key.startswith(f"{prefix}.")]
    prefix = max(own, key=len) if own else ""
    if not prefix and _is_of_optimizer(key.partition(".")[0]) and "." in key:
        prefix = key.partition(".")[0]
    return prefix, key[len(prefix) + 1 :] if prefix else key


def _is_of_optimizer(name: str) -> bool:
    return any(part.startswith("optim") for part in name.split("."))


# --- the chunks ----------------------------------------------------------------------------------------


def _require_cover(folder: Path, tensor: StoredTensor, chunks: tuple[Chunk, ...]) -> None:
    """Raise unless every element is in exactly one chunk."""
    where = f"{folder / METADATA}: {tensor.name} {list(tensor.shape)}"
    for chunk in chunks:
        ends = [start + size for start, size in zip(chunk.offsets, chunk.shape, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise CheckpointError(
                f"{where} has a chunk {list(chunk.shape)} at {list(chunk.offsets)}, beyond its end. {_COPY_AGAIN}"
            )
    parts = sorted((chunk for chunk in chunks if chunk.numel), key=lambda chunk: chunk.offsets)
    for one, other in itertools.combinations(parts, 2):
        if all(
            a < b + m and b < a + n
            for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
        ):
            raise CheckpointError(
                f"{where} has chunks that overlap: {list(one.shape)} at {list(one.offsets)} and "
                f"{list(other.shape)} at {list(other.offsets)}; expected each element once. {_COPY_AGAIN}"
            )
    covered = sum(chunk.numel for chunk in parts)
    if covered != tensor.numel:
        raise CheckpointError(
            f"{where} has {tensor.numel} elements; its {len(parts)} chunks hold {covered}: a rank's part is missing. "
            "Save again with all ranks, or use another checkpoint"
        )


def _fingerprint(folder: Path, path: Path) -> Fingerprint:
    if not path.exists():
        there = sum(1 for entry in folder.iterdir() if entry.name.endswith(DATA_SUFFIX))
        raise CheckpointError(
            f"{path} is missing; {folder / METADATA} places values in it, and {there} other *{DATA_SUFFIX} files are "
            "there. Copy the files of all ranks into the folder"
        )
    return Fingerprint.of(path)


def _require_within(name: str, chunk: Chunk) -> None:
    size = Fingerprint.of(chunk.path).size
    if size < chunk.start + chunk.length:
        raise CheckpointError(
            f"{chunk.path} has {size} bytes; expected at least {chunk.start + chunk.length}, the end of {name}: "
            "truncated or still being written. Wait until it is saved, or copy the file again"
        )


def _is_zip(chunk: Chunk) -> bool:
    with open_to_read(chunk.path) as file:
        file.seek(chunk.start)
        return file.read(4) == b"PK\x03\x04"


def _part(tensor: StoredTensor, chunk: Chunk) -> StoredTensor:
    """The bytes of one chunk: of torch.save, or of a file that is safetensors as a whole."""
    _require_within(tensor.name, chunk)
    if _is_zip(chunk):
        found = read_torch_file(chunk.path, part=(chunk.start, chunk.length)).value
    elif chunk.start:
        raise CheckpointError(
            f"{chunk.path} holds nothing of torch.save at byte {chunk.start}, where {tensor.name} should be: "
            "damaged, or saved as safetensors beside plain values. Copy it again, or save with the default format"
        )
    else:
        found = read_safetensors(chunk.path)[0].get(tensor.name)
    if not isinstance(found, StoredTensor) or (found.dtype, found.shape) != (tensor.dtype, chunk.shape):
        held = f"{found.dtype} {list(found.shape)}" if isinstance(found, StoredTensor) else _said(found)
        raise CheckpointError(
            f"{chunk.path} holds {held} at byte {chunk.start}; {METADATA} says {tensor.dtype} {list(chunk.shape)} of "
            f"{tensor.name}. The files are not of one save: copy the whole folder again"
        )
    return StoredTensor(
        tensor.name, tensor.dtype, chunk.shape, chunk.path, found.offset, unreadable=found.unreadable
    )


def _together(tensor: StoredTensor, chunks: Iterable[Chunk]) -> Array:
    """A sharded tensor, as unsigned integers of its items' width."""
    code = f"<u{ITEM_BYTES[tensor.dtype]}"
    whole = np.empty(tensor.shape, code)
    for chunk in chunks:
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
        data = b"".join(_part(tensor, chunk).blocks())
        whole[box] = np.frombuffer(data, code).reshape(chunk.shape)
    return whole


def _assembled(
    save: DistributedSave, tensors: Mapping[str, StoredTensor], files: Mapping[Path, Fingerprint]
) -> dict[str, StoredTensor]:
    """The sharded tensors by name in one safetensors file, named by what it was made of."""
    stamps = {str(path): asdict(fingerprint) for path, fingerprint in {**files, **save.fingerprints}.items()}
    names = sorted(tensor.name for tensor in tensors.values())
    identity = {"version": _ASSEMBLED_VERSION, "files": stamps, "tensors": names}
    path = cache_folder() / "assembled" / f"{sha256_json(identity)}.safetensors"
    if not path.exists():
        with publish_file(path) as partial:
            _write(partial, save, tensors.values())
            for file, fingerprint in files.items():
                fingerprint.require_unchanged(file)
    return read_safetensors(path)[0]


def _write(path: Path, save: DistributedSave, tensors: Iterable[StoredTensor]) -> None:
    """Safetensors of the given tensors, put together one at a time; larger items first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    with path.open("wb") as file:
        file.write(safetensors_head((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered))
        for tensor in ordered:
            parts = (chunk for chunk in save.chunks[tensor.name] if chunk.numel)
            file.write(_together(tensor, parts).reshape(-1).view(np.uint8).data)


# --- what is said --------------------------------------------------------------------------------------


def _class_of(value: object) -> str:
    """The class of torch's description, without its module; empty for anything else."""
    name = value.class_name if isinstance(value, Opaque) else ""
    return name.removeprefix(f"{_MODULE}.") if name.startswith(_MODULE) else ""


def _said(value: object) -> str:
    return value.class_name if isinstance(value, Opaque) else f"a {type(value).__name__}"


def _unexpected(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / METADATA} is not the description of a distributed checkpoint of torch: {what}. "
        "Give a folder that torch.distributed.checkpoint.save wrote"
    )
