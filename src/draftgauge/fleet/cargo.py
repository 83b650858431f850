"""What is moved: byte ranges at the source, and the files that they become.

Of a trainer's checkpoint it is the model's tensors and the plain values beside them, as safetensors whose header is
made here; of a drafter's folder what an evaluation reads; of everything else every byte. To decide this the files'
descriptions (a zip's directory, a header) are fetched into sparse files of the same size and opened as if the
checkpoint lay here. Knows nothing of routes, and moves nothing itself.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import posixpath
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftgauge.checkpoint import Checkpoint, open_checkpoint
from draftgauge.errors import BeingWrittenError, CheckpointError, FleetError
from draftgauge.fleet.places import Spot
from draftgauge.fleet.reach import Reach
from draftgauge.plainpickle import Opaque
from draftgauge.runs import CHECKPOINT, ELSEWHERE
from draftgauge.store import sha256_json
from draftgauge.tensorfile import StoredTensor, read_safetensors
from draftgauge.torchfile import Record, TorchFile, read_torch_file
from draftgauge.weights import STAGED, TORCH_SUFFIXES, Weights, read_weights

_SMALL_BYTES = 4096
_TEXT_BYTES = 64 << 20
_TAIL_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30

Piece = dict[str, Any]
Identity = Sequence[Any]


@dataclass(frozen=True)
class Cargo:
    """What one staging moves.

    `pieces` are texts in base64 and ranges of files at the source, which one after the other are the bytes of
    `outputs`, pairs of a path inside the target and a size; a single file has the path "". `identities` are those
    of the files that are read. `name` is what it is called where nobody says another name.
    """

    source: Spot
    name: str
    what: str
    pieces: tuple[Piece, ...]
    outputs: tuple[tuple[str, int], ...]
    identities: Mapping[str, Identity]
    step: int | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes arrive."""
        return sum(size for _, size in self.outputs)

    @property
    def is_slim(self) -> bool:
        """Whether one set of weights was taken out of a torch file, so that none has to be chosen any more."""
        return "text" in self.pieces[0]

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, the same while the source is the same and the same is taken of it."""
        return sha256_json(
            [
                self.source.place.name,
                self.source.path,
                dict(self.identities),
                list(self.outputs),
                list(self.pieces),
            ]
        )[:16]


def describe(reach: Reach, source: Spot, *, whole: bool = False, state_dict: str | None = None) -> Cargo:
    """Looks at the source and says what is to be moved.

    Raises:
        FleetError: Nothing is there, or nothing that can be moved.
        BeingWrittenError: It is still being written.
        CheckpointError: It is a checkpoint that no evaluation can read.
    """
    seen = reach.call(source.place, "look", path=source.path)
    if seen["kind"] == "missing":
        raise FleetError(f"{source} does not exist; check the path")
    if seen["kind"] == "other":
        raise FleetError(f"{source} is neither a file nor a folder; only these can be moved")
    python = reach.has_python(source.place)
    if seen["kind"] == "file":
        identity = seen["identity"]
        if not python:
            return _whole_file(source, identity, "the whole file, since there is no python3 at its place")
        if source.name.endswith(TORCH_SUFFIXES):
            return _torch_file(reach, source, identity, whole=whole, state_dict=state_dict)
        if source.name.endswith(".safetensors"):
            _skeleton_checked(reach, source, identity)
        return _whole_file(source, identity, "the whole file")
    files = dict(seen["files"])
    if not files:
        raise FleetError(f"{source} is an empty folder; there is nothing to move")
    if not python:
        raise FleetError(f"{source} is a folder, and a folder needs python3 at its place; give a file of it")
    top = [inner for inner in files if "/" not in inner]
    if "run.json" in files and not whole:
        return _run_folder(source, files)
    weights = [name for name in top if name.endswith((*TORCH_SUFFIXES, ".safetensors"))]
    if whole or not weights or "recording.json" in files:
        return _folder(source, files, f"the folder, {len(files)} files")
    return _drafter_folder(reach, source, {name: files[name] for name in top}, state_dict=state_dict)


# --- whole -----------------------------------------------------------------------------------------------


def _whole_file(source: Spot, identity: Identity, what: str) -> Cargo:
    size = identity[0]
    piece = {"path": source.path, "offset": 0, "size": size}
    return Cargo(source, source.name, what, (piece,), (("", size),), {source.path: identity})


def _folder(source: Spot, files: Mapping[str, Identity], what: str, *, step: int | None = None) -> Cargo:
    pieces, outputs, identities = [], [], {}
    for inner, identity in files.items():
        path = posixpath.join(source.path, inner)
        pieces.append({"path": path, "offset": 0, "size": identity[0]})
        outputs.append((inner, identity[0]))
        identities[path] = identity
    return Cargo(source, source.name, what, tuple(pieces), tuple(outputs), identities, step)


def _run_folder(source: Spot, files: Mapping[str, Identity]) -> Cargo:
    """A run without the checkpoint that it keeps, but with a note that says where that lies."""
    mine = {inner: identity for inner, identity in files.items() if not inner.startswith(f"{CHECKPOINT}/")}
    cargo = _folder(source, mine, f"the run, {len(mine)} files, without the checkpoint that it keeps")
    if len(mine) == len(files) or ELSEWHERE in files:
        return cargo
    text = f"{source.place.name}:{source.path}/{CHECKPOINT}\n".encode()
    note = {"text": base64.b64encode(text).decode()}
    return replace(cargo, pieces=(*cargo.pieces, note), outputs=(*cargo.outputs, (ELSEWHERE, len(text))))


# --- checkpoints -----------------------------------------------------------------------------------------


def _torch_file(
    reach: Reach, source: Spot, identity: Identity, *, whole: bool, state_dict: str | None
) -> Cargo:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / source.name
        _skeleton(reach, source, identity, local)
        with local.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if whole and not is_zip:
            return _whole_file(source, identity, "the whole file, which is no zip and has no checksums")
        with _spoken_of(source, local):
            torch_file = read_torch_file(local)
            if whole:
                pieces = _records_whole(torch_file, source.path, identity[0])
                what = "the whole file, its records' checksums compared while they are read"
                outputs = (("", identity[0]),)
                return Cargo(source, source.name, what, pieces, outputs, {source.path: identity})
            weights = read_weights(local, state_dict=state_dict)
            checkpoint = open_checkpoint(local, state_dict=state_dict)
            pieces, size = _slim(weights, checkpoint, {local: torch_file}, {local: source.path}, source)
    what = f"{len(weights.tensors)} tensors of {weights.state_dict or 'the file'} and the plain values"
    name = f"{posixpath.splitext(source.name)[0]}.safetensors"
    return Cargo(source, name, what, pieces, (("", size),), {source.path: identity}, checkpoint.step)


def _drafter_folder(
    reach: Reach, source: Spot, files: Mapping[str, Identity], *, state_dict: str | None
) -> Cargo:
    """The files of a drafter's folder that an evaluation reads; of torch files only the model's tensors."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / source.name
        local.mkdir()
        for name, identity in files.items():
            _skeleton(reach, source.below(name), identity, local / name)
        with _spoken_of(source, local):
            weights = read_weights(local, state_dict=state_dict)
            checkpoint = open_checkpoint(local, state_dict=state_dict)
        read = {path.name for path in weights.fingerprints} | ({"probe.safetensors"} & set(files))
        kept = {name: identity for name, identity in files.items() if name in read}
        if weights.kind != "trainer-pt":
            what = f"the {len(kept)} of {len(files)} files that an evaluation reads"
            return _folder(source, kept, what, step=checkpoint.step)
        (file,) = weights.tensor_files
        with _spoken_of(source, local):
            torch_files = {file: read_torch_file(file)}
            paths = {file: posixpath.join(source.path, file.name)}
            pieces, size = _slim(weights, checkpoint, torch_files, paths, source)
    rest = _folder(source, {name: kept[name] for name in kept if name != file.name}, "")
    what = f"{len(weights.tensors)} tensors of {file.name} and the plain values"
    what += f", and {', '.join(inner for inner, _ in rest.outputs)}" if rest.outputs else ""
    return Cargo(
        source=source,
        name=source.name,
        what=what,
        pieces=(*pieces, *rest.pieces),
        outputs=(("model.safetensors", size), *rest.outputs),
        identities={paths[file]: kept[file.name], **rest.identities},
        step=checkpoint.step,
    )


def _slim(
    weights: Weights,
    checkpoint: Checkpoint,
    torch_files: Mapping[Path, TorchFile],
    paths: Mapping[Path, str],
    source: Spot,
) -> tuple[tuple[Piece, ...], int]:
    """A safetensors file of the weights, as pieces; its metadata holds what else the checkpoint says."""
    tensors = sorted(
        ((name, tensor) for name, tensor in weights.tensors.items() if isinstance(tensor, StoredTensor)),
        key=lambda pair: pair[1].offset,
    )
    header: dict[str, Any] = {"__metadata__": {STAGED: _staged(weights, checkpoint, source)}}
    end = 0
    for name, tensor in tensors:
        if tensor.unreadable:
            raise CheckpointError(
                f"{tensor.name} in {source} {tensor.unreadable}. Or move the file as it is: --whole"
            )
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    pieces: list[Piece] = [{"text": base64.b64encode(head).decode()}]
    for name, tensor in tensors:
        if tensor.nbytes:
            record = _record_of(torch_files[tensor.path], tensor)
            piece = {"path": paths[tensor.path], "offset": tensor.offset, "size": tensor.nbytes, "name": name}
            pieces.append(piece | _compared(record))
    return tuple(pieces), len(head) + end


def _staged(weights: Weights, checkpoint: Checkpoint, source: Spot) -> str:
    """What `weights` would find beside the tensors in the original file, as JSON."""
    content = {
        "version": 1,
        "source": str(source),
        "state_dict": weights.state_dict,
        "config": weights.config,
        "config_source": weights.config_source,
        "step": checkpoint.step,
        "step_source": checkpoint.step_source,
        "extras": weights.extras,
        "opaque_classes": weights.opaque_classes,
    }
    return json.dumps(content, default=_plain_value, sort_keys=True)


def _plain_value(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return value.class_name if isinstance(value, Opaque) else f"({type(value).__name__})"


def _record_of(torch_file: TorchFile, tensor: StoredTensor) -> Record:
    for record in torch_file.records.values():
        if record.offset <= tensor.offset and tensor.offset + tensor.nbytes <= record.offset + record.size:
            return record
    raise CheckpointError(f"{tensor.name} lies in no record of {torch_file.path}")


def _compared(record: Record) -> Piece:
    """How a range is compared with the checksum of its record; torch can leave checksums out."""
    if not record.crc:
        return {}
    return {"record": record.offset, "record_size": record.size, "crc": record.crc}


def _records_whole(torch_file: TorchFile, path: str, size: int) -> tuple[Piece, ...]:
    """The file from beginning to end, every record with its checksum."""
    pieces: list[Piece] = []
    position = 0
    for record in sorted(torch_file.records.values(), key=lambda record: record.offset):
        if not record.size:
            continue
        if record.offset > position:
            pieces.append({"path": path, "offset": position, "size": record.offset - position})
        piece = {"path": path, "offset": record.offset, "size": record.size, "name": record.name}
        pieces.append(piece | _compared(record))
        position = record.offset + record.size
    if position < size:
        pieces.append({"path": path, "offset": position, "size": size - position})
    return tuple(pieces)


# --- descriptions ----------------------------------------------------------------------------------------


def _skeleton_checked(reach: Reach, source: Spot, identity: Identity) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / source.name
        _skeleton(reach, source, identity, local)
        with _spoken_of(source, local):
            read_safetensors(local)


def _skeleton(reach: Reach, source: Spot, identity: Identity, local: Path) -> None:
    """A sparse file of the source's size that holds what describes it, each byte at its place."""
    size = identity[0]
    with local.open("wb") as file:
        file.truncate(size)

        def fetch(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            ranges = [(start, min(length, size - start)) for start, length in ranges if start < size]
            got = _ranges(reach, source, identity, ranges)
            for (start, _), data in zip(ranges, got, strict=True):
                file.seek(start)
                file.write(data)
            return got

        if source.name.endswith(TORCH_SUFFIXES):
            _fetch_zip(fetch, size)
        elif source.name.endswith(".safetensors"):
            head = b"".join(fetch([(0, 8)]))
            length = int.from_bytes(head, "little")
            if len(head) == 8 and length < _TEXT_BYTES:
                fetch([(8, length)])
        elif source.name.endswith(".json") and size <= _TEXT_BYTES:
            fetch([(0, size)])


def _fetch_zip(fetch: Any, size: int) -> None:
    """The directory of a zip, the headers of its records, and the records that are small or describe others."""
    fetch([(0, 8)])
    entries: list[zipfile.ZipInfo] = []
    tail_bytes = _TAIL_BYTES
    while True:
        start = max(0, size - tail_bytes)
        (tail,) = fetch([(start, size - start)]) or (b"",)
        try:
            with zipfile.ZipFile(_Tail(tail, start)) as archive:
                entries = archive.infolist()
            break
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
            if start == 0 or tail_bytes >= _TEXT_BYTES:
                return  # damaged or no zip: the reader of torch files says what it is
            tail_bytes *= 8
    headers = fetch([(entry.header_offset, _LOCAL_HEADER_BYTES) for entry in entries])
    small = []
    for entry, header in zip(entries, headers, strict=True):
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if entry.file_size <= _SMALL_BYTES or entry.filename.endswith("data.pkl"):
            small.append((entry.header_offset + _LOCAL_HEADER_BYTES + lengths, entry.file_size))
    fetch(small)


class _Tail(io.BytesIO):
    """The end of a file that is not here; what lies before it cannot be read."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self.start = start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The position in the whole file."""
        if whence == os.SEEK_SET:
            if offset < self.start:
                raise ValueError("before the part that was fetched")
            return super().seek(offset - self.start) + self.start
        return super().seek(offset, whence) + self.start

    def tell(self) -> int:
        """The position in the whole file."""
        return super().tell() + self.start


def _ranges(reach: Reach, source: Spot, identity: Identity, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    if not ranges:
        return []
    pieces = [{"path": source.path, "offset": start, "size": length} for start, length in ranges]
    data = reach.read(source.place, pieces, {source.path: identity})
    parts, position = [], 0
    for _, length in ranges:
        parts.append(data[position : position + length])
        position += length
    return parts


@contextlib.contextmanager
def _spoken_of(source: Spot, local: Path) -> Iterator[None]:
    """Errors about the local stand-in speak of the source; of a file still being written they say to wait."""
    try:
        yield
    except CheckpointError as error:
        text = str(error).replace(str(local), str(source))
        if "still being written" in text:
            raise BeingWrittenError(text) from error
        raise type(error)(text) from error
