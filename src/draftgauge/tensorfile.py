"""Where a tensor's bytes lie in a file, and safetensors files read and written with numpy alone.

A tensor is named, typed and located first; its bytes are read only when they are asked for. This module
knows the safetensors layout (8 bytes of header length, a JSON header, the data) and nothing of models,
drafters or torch. It writes to the path it is given; publishing a file atomically is the caller's part.

Offsets count from the start of the file.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from draftgauge.errors import CheckpointError

Array = Shaped[np.ndarray, "..."]
ByteProgress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) after every block of a long read."""

BLOCK_BYTES = 8 << 20
ITEM_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_NUMPY_NAMES = {"F": "float", "I": "int", "U": "uint", "C": "complex"}
_FROM_NUMPY = {"bool": "BOOL"} | {
    f"{_NUMPY_NAMES[code[0]]}{code[1:]}": code for code in ITEM_BYTES if code[1:].isdigit()
}  # {"float32": "F32", "uint8": "U8", ...}
_MAX_HEADER_BYTES = 100 << 20  # the limit of the reference implementation
_MAX_ITEMS = 1 << 48  # more than any disk holds; keeps absurd shapes out of arithmetic


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name there, its type and shape, and where its bytes begin.

    `unreadable` is empty, or says why the bytes cannot be taken as they lie (a transposed view, say);
    such a tensor can be listed, and asking for its bytes raises.

    Example:
        `StoredTensor("fc.weight", "BF16", (64, 128), Path("model.safetensors"), offset=2048)`
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    unreadable: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return self.numel * ITEM_BYTES[self.dtype]

    def mapped(self) -> UInt8[np.ndarray, " nbytes"]:
        """The bytes as a read-only uint8 memory map: nothing is read until it is touched.

        A file that is truncated while it is mapped kills the process; for one pass use `blocks`.

        Raises:
            CheckpointError: the bytes cannot be taken as they lie, or the file ends before them.
        """
        self._require_readable()
        if self.nbytes == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        if self.path.stat().st_size < self.offset + self.nbytes:
            raise self._too_short()
        return np.memmap(self.path, np.uint8, mode="r", offset=self.offset, shape=(self.nbytes,))

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
        """The bytes in order, in blocks of at most `block_bytes`, read rather than mapped.

        Raises:
            CheckpointError: the bytes cannot be taken as they lie, or the file ends before them.
        """
        self._require_readable()
        left = self.nbytes
        with open_to_read(self.path) as file:
            file.seek(self.offset)
            while left:
                block = file.read(min(left, block_bytes))
                if not block:
                    raise self._too_short()
                left -= len(block)
                yield block

    def sha256(self) -> str:
        """Hex SHA-256 of the bytes.

        Raises:
            CheckpointError: as `blocks`.
        """
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    def to_float32(self) -> Float32[np.ndarray, "..."]:
        """The values as a new float32 array of the tensor's shape; float64 is rounded.

        Raises:
            CheckpointError: the type is not a float, or the bytes cannot be read.
        """
        if self.dtype not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(
                f"{self.name} in {self.path} has type {self.dtype}; expected F32, BF16, F16 or F64. "
                "Save the unquantised weights"
            )
        self._require_readable()
        code = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.dtype]
        with open_to_read(self.path) as file:
            file.seek(self.offset)
            stored = np.fromfile(file, code, count=self.numel)
        if stored.size != self.numel:
            raise self._too_short()
        if self.dtype == "BF16":  # the upper half of a float32
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32, copy=False).reshape(self.shape)

    def _require_readable(self) -> None:
        if self.unreadable:
            raise CheckpointError(f"{self.name} in {self.path} {self.unreadable}")

    def _too_short(self) -> CheckpointError:
        return _truncated(self.path, self.offset + self.nbytes, f"the last byte of {self.name}")


@dataclass(frozen=True)
class Fingerprint:
    """What changes when a file is rewritten: size in bytes, time of modification, inode.

    Example:
        `Fingerprint(size=331832, mtime_ns=1764558720000000000, inode=131073)`
    """

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "Fingerprint":
        """The fingerprint of the file that `path` leads to now.

        Raises:
            CheckpointError: there is no such file any more.
        """
        try:
            stat = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)

    def require_unchanged(self, path: Path) -> None:
        """Raise if the file is no longer the one this fingerprint was taken of.

        Raises:
            CheckpointError: the file was replaced, rewritten or removed.
        """
        now = Fingerprint.of(path)
        if now != self:
            raise CheckpointError(
                f"{path} changed while it was read (was {self.size} bytes, is {now.size}; "
                f"inode {self.inode}, {now.inode}). Wait until its writer has finished, then run again"
            )


def open_to_read(path: Path) -> BinaryIO:
    """The file opened for reading bytes.

    Raises:
        CheckpointError: there is no such file, or it may not be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """List the tensors of a safetensors file, in the order of their bytes, and its metadata.

    Only the header is read. Returns `({"fc.weight": StoredTensor(...), ...}, {"format": "pt"})`.

    Raises:
        CheckpointError: no such file, not safetensors, damaged, truncated or still being written.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    before = Fingerprint.of(path)
    header, data_start = _read_header(path, before.size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "its metadata is not a mapping of strings")
    placed = sorted((_located(path, name, entry) for name, entry in header.items()), key=lambda at: at[1:])
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for tensor, start, stop in placed:
        if start != end or stop - start != tensor.nbytes:
            raise _damaged(
                path,
                f"{tensor.name} claims bytes {start} to {stop}; expected {end} to {end + tensor.nbytes}",
            )
        tensors[tensor.name] = StoredTensor(tensor.name, tensor.dtype, tensor.shape, path, data_start + start)
        end = stop
    if before.size < data_start + end:
        raise _truncated(path, data_start + end, "8 + header + data")
    if before.size > data_start + end:
        raise _damaged(path, f"it has {before.size} bytes; its header accounts for {data_start + end}")
    before.require_unchanged(path)
    return tensors, metadata


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Array | tuple[str, Array]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to `path` as safetensors, one at a time and without a copy of the whole.

    A value is an array, or `("BF16", array of uint16)` where numpy has no such type. Larger items come
    first, so that every tensor is aligned; otherwise the order given is kept. The same input gives the
    same bytes.

    Raises:
        ValueError: an array of a type that safetensors does not have, or a type code of another width.
    """
    coded = sorted(
        ((name, *_coded(name, value)) for name, value in tensors.items()),
        key=lambda item: -ITEM_BYTES[item[1]],
    )
    described = [(name, code, array.shape) for name, code, array in coded]
    with path.open("wb") as file:
        file.write(safetensors_head(described, metadata=metadata))
        for _, _, array in coded:
            if array.nbytes:
                file.write(_little_endian(array).reshape(-1).view(np.uint8).data)


def safetensors_head(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """What stands before the data of a safetensors file: names, type codes and shapes, in the order of the bytes.

    Its length is a multiple of 8. Larger items should come first, so that every tensor is aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, code, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(path: Path, file_size: int) -> tuple[dict[str, object], int]:
    with open_to_read(path) as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _truncated(path, 8, "the length of its header")
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise _damaged(path, f"its header would have {length} bytes, so this is not safetensors")
        text = file.read(length)
    if len(text) < length:
        raise _truncated(path, 8 + length, "8 + header, before any data")
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a mapping of names")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _located(path: Path, name: str, entry: object) -> tuple[StoredTensor, int, int]:
    """The tensor of one header entry, with the begin and end that the entry claims within the data."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{name} in {path} has type {dtype}; expected one of {', '.join(ITEM_BYTES)}. "
            "Save the weights in one of them"
        )
    if not _is_counts(shape) or not _is_counts(span) or len(span) != 2:
        raise _damaged(path, f"the entry of {name} is {str(entry)[:200]}")
    return StoredTensor(name, dtype, tuple(shape), path, offset=0), span[0], span[1]


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_ITEMS for n in value)


def _coded(name: str, value: Array | tuple[str, Array]) -> tuple[str, Array]:
    if not isinstance(value, tuple):
        code = _FROM_NUMPY.get(value.dtype.name)
        if code is None:
            raise ValueError(f"{name} has numpy type {value.dtype}, which safetensors does not have")
        return code, value
    code, array = value
    if ITEM_BYTES.get(code) != array.dtype.itemsize:
        raise ValueError(f"{name} is called {code} but its items have {array.dtype.itemsize} bytes")
    return code, array


def _little_endian(array: Array) -> Array:
    native_is_big = sys.byteorder == "big" and array.dtype.byteorder in "=|"
    if array.dtype.itemsize > 1 and (array.dtype.byteorder == ">" or native_is_big):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions")


def _truncated(path: Path, expected: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has {path.stat().st_size} bytes; expected {expected} ({what}): truncated or still being "
        "written. Wait for the writer to finish, or copy the file again"
    )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}. Copy the file again and compare its digest")
