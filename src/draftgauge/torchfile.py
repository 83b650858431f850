"""`.pt` files of torch read without torch: what is in them, and where each tensor's bytes lie.

Such a file is a zip of stored, never compressed records: a pickle (`data.pkl`) that describes the values,
and one record per storage. The pickle is read as data, nothing in it is called; the bytes of the tensors
stay where they are. This module knows nothing of drafters or of what the values mean.

Source: torch/serialization.py and torch/_utils.py (the rebuild functions); APPNOTE.TXT of the zip format.
"""

import io
import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from draftgauge.errors import CheckpointError
from draftgauge.plainpickle import Global, Opaque, PickleError, Rebuild, Unfinished, joined, load_plain
from draftgauge.tensorfile import (
    BLOCK_BYTES,
    ITEM_BYTES,
    ByteProgress,
    Fingerprint,
    StoredTensor,
    open_to_read,
)

_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22  # without a comment; torch writes none
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra fields
_MAX_PICKLE_BYTES = 1 << 30
_RESAVE = "Save it again: torch.save(torch.load(path, weights_only=False), path) with torch 1.6 or later"
_COPY_AGAIN = "Copy the file again, or use another checkpoint"


@dataclass(frozen=True)
class Record:
    """One record of the zip: where its bytes begin in the file, how many, and their stored CRC-32."""

    name: str
    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class TorchFile:
    """The content of a `.pt` file: plain values in which every tensor is a `StoredTensor`.

    A tensor's name is its dotted path, `model_state_dict.fc.weight`. Values of classes that are not known
    are `Opaque`, and `opaque_classes` names those classes. `records` are the zip's, by name.
    """

    path: Path
    value: object
    opaque_classes: tuple[str, ...]
    records: dict[str, Record]
    fingerprint: Fingerprint

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor with its dotted path; a container that occurs twice is visited once."""
        yield from tensors_in(self.value)


@dataclass(frozen=True)
class ChecksumCount:
    """How many records agreed with their stored checksum, and how many have none to compare with."""

    checked: int
    absent: int


def read_torch_file(path: Path, *, part: tuple[int, int] | None = None) -> TorchFile:
    """Read the description of a `.pt` file, and no tensor's bytes.

    `part` is the offset and the length of one inside a bigger file; offsets still count from the file's start.

    Raises:
        CheckpointError: no such file, not this format, damaged, truncated or still being written.
    """
    before = Fingerprint.of(path)
    start, size = part or (0, before.size)
    with open_to_read(path) as whole:
        file = whole if part is None else _Part(whole, start, size)
        _require_zip(path, file, size)
        records = _records(path, file, size)
        data = _read(path, file, records["data.pkl"])
        if "byteorder" in records and _read(path, file, records["byteorder"]) != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine. {_RESAVE} on another one")
    records = {name: replace(record, offset=start + record.offset) for name, record in records.items()}
    layout = _Layout(path, records)
    try:
        value, opaque_classes = load_plain(
            data, rebuild=_REBUILD, persistent=_storage, leaf=layout.finish_leaf
        )
    except PickleError as error:
        raise CheckpointError(f"{path}: {error}. {_COPY_AGAIN}") from error
    before.require_unchanged(path)
    return TorchFile(path, value, opaque_classes, records, before)


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor within a value of a `.pt` file, with its dotted path from there."""
    yield from _walk(value, path, set())


def verify_checksums(
    torch_file: TorchFile, names: Iterable[str] | None = None, *, progress: ByteProgress | None = None
) -> ChecksumCount:
    """Compare the bytes of the named tensors (default: every record) with their stored CRC-32.

    torch itself never does this: a flipped byte loads silently. The record with the description is always
    among those compared. A file written with checksums switched off has none; they are counted as absent.

    Raises:
        CheckpointError: a record's bytes are not those that were written.
    """
    chosen = torch_file.records.values() if names is None else _records_of(torch_file, names)
    comparable = [record for record in chosen if record.crc or not record.size]
    done, total = 0, sum(record.size for record in comparable)
    with open_to_read(torch_file.path) as file:
        for record in comparable:
            crc, left = 0, record.size
            file.seek(record.offset)
            while left:
                block = file.read(min(left, BLOCK_BYTES))
                if not block:
                    raise _truncated(torch_file.path, record.offset + record.size - left)
                crc = zlib.crc32(block, crc)
                left -= len(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            if crc != record.crc:
                raise _wrong_checksum(torch_file, record, crc)
    return ChecksumCount(len(comparable), len(chosen) - len(comparable))


# --- the zip -------------------------------------------------------------------------------------------


class _Part(io.RawIOBase):
    """A part of a file, read as if it were a file of its own."""

    def __init__(self, whole: BinaryIO, start: int, size: int) -> None:
        self._whole, self._start, self._size, self._at = whole, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"position {at} is before the part")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._whole.seek(self._start + self._at)
        data = self._whole.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


_File = BinaryIO | _Part


def _require_zip(path: Path, file: _File, size: int) -> None:
    """Tell a finished zip from a truncated one, from torch's older format and from anything else."""
    start = file.read(4)
    file.seek(max(0, size - _ZIP_END_BYTES))
    if start == b"PK\x03\x04":
        if not file.read(4) == _ZIP_END:
            raise _truncated(path, size)
    elif size == 0 or not start.strip(b"\0"):
        raise _truncated(path, size)
    elif start.startswith(b"\x80"):
        raise CheckpointError(f"{path} is in the format of torch before 1.6, which is not a zip. {_RESAVE}")
    else:
        raise CheckpointError(
            f"{path} begins with {start!r}; expected a .pt file of torch, a zip that begins with b'PK'. "
            "Give the trainer's checkpoint, or a .safetensors file under that ending"
        )


def _records(path: Path, file: _File, size: int) -> dict[str, Record]:
    """The records by name, below the one folder that torch puts around them."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: its zip directory is damaged ({error}). {_COPY_AGAIN}") from error
    names = [entry.filename for entry in entries]
    roots = [n.removesuffix("data.pkl") for n in names if n == "data.pkl" or n.endswith("/data.pkl")]
    roots = [root for root in roots if root.count("/") <= 1]
    if len(roots) != 1:
        raise CheckpointError(
            f"{path} is a zip with {len(roots)} records named data.pkl; expected one, as torch.save writes. "
            f"It holds {', '.join(names[:5]) or 'nothing'}. Give the file that torch.save wrote"
        )
    root = roots[0]
    if f"{root}constants.pkl" in names or any(name.startswith(f"{root}code/") for name in names):
        raise CheckpointError(
            f"{path} is a TorchScript program, not a checkpoint. "
            "Save its weights: torch.save(torch.jit.load(path).state_dict(), 'weights.pt')"
        )
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: two records of its zip have the same name. {_COPY_AGAIN}")
    return {
        entry.filename.removeprefix(root): _record(path, file, size, entry, root)
        for entry in entries
        if entry.filename.startswith(root)
    }


def _record(path: Path, file: _File, size: int, entry: zipfile.ZipInfo, root: str) -> Record:
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise CheckpointError(
            f"{path}: the record {entry.filename} is compressed or encrypted; torch stores records as they "
            f"are. {_RESAVE}"
        )
    header = b""
    if 0 <= entry.header_offset < size:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER.size)
    if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{path}: the record {entry.filename} is not where it should be. {_COPY_AGAIN}")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    # The local extra fields differ from the directory's: torch pads there, so that data is aligned.
    offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if offset + entry.file_size > size:
        raise _truncated(path, size)
    return Record(entry.filename.removeprefix(root), offset, entry.file_size, entry.CRC)


def _read(path: Path, file: _File, record: Record) -> bytes:
    if record.size > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path}: its {record.name} has {record.size} bytes; expected less than {_MAX_PICKLE_BYTES}. "
            "Save tensors as tensors, not inside other objects"
        )
    file.seek(record.offset)
    data = file.read(record.size)
    if record.crc and zlib.crc32(data) != record.crc:
        raise CheckpointError(f"{path} is damaged: {record.name} fails its checksum. {_COPY_AGAIN}")
    return data


def _records_of(torch_file: TorchFile, names: Iterable[str]) -> list[Record]:
    """The records that hold the named tensors, with the description, in the order of the file."""
    tensors = dict(torch_file.tensors())
    ordered = sorted(torch_file.records.values(), key=lambda record: record.offset)
    starts = [record.offset for record in ordered]
    chosen = {"data.pkl": torch_file.records["data.pkl"]}
    for name in names:
        record = ordered[bisect_right(starts, tensors[name].offset) - 1]
        chosen[record.name] = record
    return sorted(chosen.values(), key=lambda record: record.offset)


def _wrong_checksum(torch_file: TorchFile, record: Record, crc: int) -> CheckpointError:
    end = record.offset + record.size
    held = [name for name, tensor in torch_file.tensors() if record.offset <= tensor.offset < end]
    return CheckpointError(
        f"{torch_file.path} is damaged: record {record.name} ({', '.join(held[:3]) or 'no tensor'}) has "
        f"CRC-32 {crc:08x}; expected {record.crc:08x}. {_COPY_AGAIN}"
    )


def _truncated(path: Path, size: int) -> CheckpointError:
    return CheckpointError(
        f"{path} ({size} bytes) does not end with a zip directory: truncated or still being "
        "written. Wait for the trainer to finish saving, or copy the file again"
    )


# --- the values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    code: str | None  # None: bytes without a type
    type_name: str
    key: str
    numel: int


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it: a strided view of a storage, counted in elements."""

    storage: _Storage
    code: str | None
    type_name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """Places views in the file."""

    path: Path
    records: dict[str, Record]

    def finish_leaf(self, value: object, name: str) -> object:
        if isinstance(value, _View):
            return self._placed(value, name)
        if isinstance(value, _Storage):
            return Opaque(f"torch.{value.type_name}", None)
        if isinstance(value, Global) and re.fullmatch(r"torch\.[a-z]\w*", value.name):
            return value.name  # a dtype or a layout
        return value

    def _placed(self, view: _View, name: str) -> object:
        if view.code is None:
            return Opaque(f"torch.Tensor of {view.type_name}", None)
        record = self.records.get(f"data/{view.storage.key}")
        if record is None:
            raise CheckpointError(
                f"{self.path} has no record data/{view.storage.key}, which holds {name}. {_COPY_AGAIN}"
            )
        item_bytes = ITEM_BYTES[view.code]
        storage_item_bytes = ITEM_BYTES[view.storage.code or "U8"]
        last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
        beyond = 0 not in view.shape and (last + 1) * item_bytes > record.size
        if beyond or view.storage.numel != record.size // storage_item_bytes:
            raise CheckpointError(
                f"{self.path} is damaged: {name} {list(view.shape)} of {view.code} does not fit its record "
                f"data/{view.storage.key} of {record.size} bytes. {_COPY_AGAIN}"
            )
        unreadable = "" if _is_contiguous(view) else _NOT_CONTIGUOUS.format(list(view.stride))
        offset = record.offset + (0 if 0 in view.shape else view.offset * item_bytes)
        return StoredTensor(name, view.code, view.shape, self.path, offset, unreadable)


_NOT_CONTIGUOUS = (
    "is a view with strides {}, so its elements are not in order. "
    "Save it with .contiguous(), or export the drafter as safetensors"
)


def _is_contiguous(view: _View) -> bool:
    step = 1
    for n, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if n > 1 and stride != step:
            return 0 in view.shape
        step *= n
    return True


def _walk(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(value, StoredTensor):
        yield path, value
        return
    if isinstance(value, Opaque):
        value = value.state
    if not isinstance(value, dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _walk(item, joined(path, key), seen)


def _storage(persistent_id: object) -> object:
    match persistent_id:
        case ("storage", Global(name=class_name), str(key), str(), int(numel)) if numel >= 0:
            type_name = class_name.rpartition(".")[2]
            return _Storage(_STORAGE_CODES.get(type_name), type_name, key, numel)
    raise PickleError("a persistent id is not (storage, class, key, place, size)")


def _view(storage: object, offset: object, shape: object, stride: object, *_: object) -> object:
    if not isinstance(storage, _Storage):
        return NotImplemented
    return _checked_view(storage, storage.code, storage.type_name, (offset, shape, stride))


def _view_with_dtype(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    _grad: object,
    _hooks: object,
    *rest: object,
) -> object:
    if not isinstance(storage, _Storage) or not rest or not isinstance(rest[0], Global):
        return NotImplemented
    type_name = rest[0].name
    return _checked_view(storage, DTYPE_CODES.get(type_name), type_name, (offset, shape, stride))


def _checked_view(storage: _Storage, code: str | None, type_name: str, place: tuple[object, ...]) -> _View:
    match place:
        case (int(offset), tuple(shape), tuple(stride)) if len(shape) == len(stride):
            if all(isinstance(n, int) and 0 <= n < 1 << 48 for n in (offset, *shape, *stride)):
                return _View(storage, code, type_name, offset, shape, stride)
    raise PickleError("a tensor's offset, shape and strides are not counts")


def _parameter(data: object, *_: object) -> object:
    return data if isinstance(data, _View) else NotImplemented


def _from_type(function: object, cls: object, args: object, *_: object) -> object:
    """A tensor that carries attributes; subclasses, which may hold anything else, stay opaque."""
    match function, cls, args:
        case Global(name=made_by), Global(name=class_name), tuple(values) if class_name in _PLAIN_CLASSES:
            if made_by in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
                return _REBUILD[made_by](*values)
    return NotImplemented


def torch_size(values: object = ()) -> object:
    """What `torch.Size` makes: a tuple."""
    return tuple(values) if isinstance(values, list | tuple) else NotImplemented


def _device(kind: object, index: object = None) -> object:
    if isinstance(kind, str) and isinstance(index, int | None):
        return kind if index is None else f"{kind}:{index}"
    return NotImplemented


def _numpy_scalar(dtype: object, data: object = b"") -> object:
    match dtype, data:
        case Unfinished(class_name="numpy.dtype", args=(str(code), *_), state=state), bytes():
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
            if re.fullmatch(r"[biuf][1248]", code) and order in ("<", "|") and len(data) == int(code[1]):
                return np.frombuffer(data, code if code == "b1" else f"<{code}")[0].item()
    return NotImplemented


_REBUILD: dict[str, Rebuild] = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_with_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": torch_size,
    "torch.device": _device,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
_PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_STORAGE_CODES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "ComplexFloatStorage": "C64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
#: The types that safetensors has as well, by torch's names for them.
DTYPE_CODES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
