"""What draftgauge does with files at another place: looks, reads byte ranges, writes at an offset, publishes.

The text of this file, and of `pump`, is sent to a place's `python3` over standard input, followed by one request as
JSON and, where something is written, by the bytes. Nothing is installed there, and no name ever stands in a command
line. So it needs Python 3.7 and its standard library alone. It knows nothing of checkpoints: what to read is told to
it in byte ranges.

Replies and refusals are single lines on standard error that begin with `MARK`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftgauge.fleet.pump import BLOCK_BYTES, relay, run, say, wide

#: Seconds without a byte after which a stream is given up: its other end is gone without saying so. Long, since a
#: reader that goes on in the middle first reads, and hashes, what it sent before.
SILENCE_S = 1800
#: Names of unfinished files and folders begin so; nothing else is ever removed.
PARTIAL = ".partial-"


class RefusalError(Exception):
    """Ends the work; `kind` is missing, changed, damaged, exists, space, short or denied."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


# --- looking -------------------------------------------------------------------------------------------


def look(request: dict[str, Any]) -> dict[str, Any]:
    """What stands at a path: its identity, and of a folder all files in it with theirs, in order of names."""
    path = request["path"]
    try:
        top = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return {"kind": "missing"}
        raise
    if stat.S_ISREG(top.st_mode):
        return {"kind": "file", "identity": identity(top)}
    if not stat.S_ISDIR(top.st_mode):
        return {"kind": "other"}
    files, skipped = [], []
    depth = request.get("depth", 64)
    for folder, folders, names in os.walk(path):
        inner = os.path.relpath(folder, path)
        level = 0 if inner == "." else inner.count(os.sep) + 1
        folders[:] = sorted(n for n in folders if not n.startswith(PARTIAL)) if level < depth else []
        for name in sorted(names):
            full = os.path.join(folder, name)
            try:
                entry = os.stat(full)
            except OSError:  # removed meanwhile, or a link to nowhere
                skipped.append(os.path.relpath(full, path))
                continue
            if stat.S_ISREG(entry.st_mode) and not name.startswith(PARTIAL):
                files.append([os.path.relpath(full, path), identity(entry)])
    return {"kind": "folder", "files": sorted(files), "skipped": skipped}


def identity(entry: os.stat_result) -> list[int]:
    """Size, time of change and inode: a file for which these are the same was not written meanwhile."""
    return [entry.st_size, entry.st_mtime_ns, entry.st_ino]


def space(request: dict[str, Any]) -> dict[str, Any]:
    """Free bytes for us where a path would be written, and whether it can be; the nearest folder that exists."""
    folder = request["path"]
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    system = os.statvfs(folder)
    return {
        "folder": folder,
        "free_bytes": system.f_bavail * system.f_frsize,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


def about(request: dict[str, Any]) -> dict[str, Any]:
    """This place: its Python, and of each folder asked for the space in it."""
    spaces = {path: space({"path": path}) for path in request.get("folders", [])}
    return {"python": ".".join(map(str, sys.version_info[:3])), "host": os.uname().nodename, "space": spaces}


# --- reading -------------------------------------------------------------------------------------------


def send(request: dict[str, Any]) -> dict[str, Any]:
    """Writes the pieces to standard output from byte `skip` on; replies with the SHA-256 of all of them.

    A piece is text in base64, or a range of a file; a range may name the record that holds it with the CRC-32
    that it must have. Every file must be as it was looked at, before and after.
    """
    lower_priority(request.get("nice", 0))
    digest, skip, position = hashlib.sha256(), request.get("skip", 0), 0
    quiet, check = request.get("digest_only", False), Checks(request["identities"])
    wide(1)
    with check, ThreadPoolExecutor(1) as side:
        for piece in request["pieces"]:
            for block in blocks_of(piece, check, bool(request.get("nice"))):
                hashed = side.submit(digest.update, block)
                fresh = memoryview(block)[max(0, skip - position) :]
                if fresh and not quiet:
                    write_out(fresh)
                position += len(block)
                hashed.result()
        check.again()
    return {"sha256": digest.hexdigest(), "bytes": position}


class Checks:
    """The files that are read, open, and each the one that was looked at."""

    def __init__(self, identities: dict[str, list[int]]) -> None:
        self.expected = identities
        self.files: dict[str, int] = {}

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.files.values():
            os.close(handle)

    def open(self, path: str) -> int:
        """The handle of a file, which must be the one that was looked at."""
        if path not in self.files:
            try:
                self.files[path] = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                raise RefusalError("missing", f"{path} is gone") from error
            self.require(path)
        return self.files[path]

    def again(self) -> None:
        """That none of the files changed since."""
        for path in self.files:
            self.require(path)

    def require(self, path: str) -> None:
        """That a file is the one that was looked at."""
        if identity(os.fstat(self.files[path])) != self.expected[path]:
            raise RefusalError("changed", f"{path} changed while it was read")


def blocks_of(piece: dict[str, Any], check: Checks, gentle: bool) -> Iterator[bytes]:
    """The bytes of a piece; a record is read whole where its checksum is compared."""
    if "text" in piece:
        yield base64.b64decode(piece["text"])
        return
    path, start, size = piece["path"], piece["offset"], piece["size"]
    handle = check.open(path)
    if "crc" not in piece:
        yield from ranged(handle, path, start, size, gentle)
        return
    begin, length, crc, seen = piece["record"], piece["record_size"], piece["crc"], 0
    position = begin
    for block in ranged(handle, path, begin, length, gentle):
        seen = zlib.crc32(block, seen)
        inside = block[max(0, start - position) : max(0, start + size - position)]
        position += len(block)
        if inside:
            yield inside
    if seen != crc:
        text = f"{path} is damaged: the record of {piece['name']} has CRC-32 {seen:08x}; expected {crc:08x}"
        raise RefusalError("damaged", text)


def ranged(handle: int, path: str, start: int, size: int, gentle: bool) -> Iterator[bytes]:
    """The bytes of a range, in blocks; a gentle reader leaves the page cache to the others of its machine."""
    while size:
        block = os.pread(handle, min(size, BLOCK_BYTES), start)
        if not block:
            raise RefusalError("changed", f"{path} became shorter while it was read")
        if gentle:
            with contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(handle, start, len(block), os.POSIX_FADV_DONTNEED)
        yield block
        start += len(block)
        size -= len(block)


def lower_priority(nice: int) -> None:
    """Gives way to everything else at this place, on the processor and on the disk."""
    if nice:
        with contextlib.suppress(OSError):
            os.nice(nice)
        with contextlib.suppress(OSError):
            subprocess.call(
                ["ionice", "-c3", "-p", str(os.getpid())],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def write_out(data: memoryview) -> None:
    """Writes to standard output, and gives up where nobody takes it."""
    signal.alarm(SILENCE_S)
    while data:
        data = data[os.write(1, data) :]


# --- writing -------------------------------------------------------------------------------------------


def holds(request: dict[str, Any]) -> dict[str, Any]:
    """How many bytes of the outputs a part holds already, counted from the beginning without a gap."""
    held = 0
    for inner, size in request["outputs"]:
        try:
            there = os.stat(output(request["part"], inner)).st_size
        except FileNotFoundError:
            break
        held += min(there, size)
        if there < size:
            break
    return {"bytes": held}


def output(part: str, inner: str) -> str:
    """Where an output lies in a part; a single file is the part itself."""
    if os.path.isabs(inner) or ".." in inner.split(os.sep):
        raise RefusalError("denied", f"{inner} leads out of {part}")
    return os.path.join(part, inner) if inner else part


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Writes standard input into the part from byte `skip` on; replies with the SHA-256 of the whole part.

    What the part held before is read from the disk. The same bytes always go to the same places, so that a receiver
    that outlived its connection does no harm.
    """
    part, skip, start = request["part"], request["skip"], 0
    require_partial(part)
    digest = hashlib.sha256()
    wide(0)
    with ThreadPoolExecutor(1) as side:
        for inner, size in request["outputs"]:
            path, held = output(part, inner), max(0, min(skip - start, size))
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                for block in ranged(handle, path, 0, held, False):
                    digest.update(block)
                arrived = receive_into(handle, held, size, lambda block: side.submit(digest.update, block))
                if arrived == size:
                    os.ftruncate(handle, size)
                    os.fsync(handle)
            finally:
                os.close(handle)
            start += arrived
            if arrived != size:
                raise RefusalError(
                    "short", f"{start} of {sum(n for _, n in request['outputs'])} bytes arrived"
                )
    data: Any = sys.stdin.buffer
    if data.read(1):
        raise RefusalError("short", "more bytes arrived than were announced")
    return {"sha256": digest.hexdigest(), "bytes": start}


def receive_into(handle: int, position: int, size: int, hashing: Callable[[bytes], Any]) -> int:
    """Puts standard input into one output, each block hashed while it is written; returns how far it came."""
    data: Any = sys.stdin.buffer
    while position < size:
        signal.alarm(SILENCE_S)
        block = data.read1(min(BLOCK_BYTES, size - position))
        if not block:
            break
        hashed = hashing(block)
        pwrite_all(handle, block, position)
        position += len(block)
        hashed.result()
    signal.alarm(0)
    return position


def pwrite_all(handle: int, data: bytes, position: int) -> None:
    """Writes at a position, which may take several writes."""
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, position)
        view, position = view[done:], position + done


def publish(request: dict[str, Any]) -> dict[str, Any]:
    """Renames a verified part to its name, which must be free, and makes both last."""
    part, path = request["part"], request["path"]
    require_partial(part)
    if os.path.isdir(part):
        if os.path.lexists(path):
            raise RefusalError("exists", f"{path} exists already and is never overwritten")
        os.rename(part, path)
    else:
        try:
            os.link(part, path)  # unlike a rename, it never takes the place of a file
        except FileExistsError as error:
            raise RefusalError("exists", f"{path} exists already and is never overwritten") from error
        os.unlink(part)
    sync(os.path.dirname(path) or ".")
    return {}


def note(request: dict[str, Any]) -> dict[str, Any]:
    """Writes a small text file of ours whole, in the place of an earlier one."""
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    partial = os.path.join(os.path.dirname(path), f"{PARTIAL}{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(request["text"])
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return {}


def text_of(request: dict[str, Any]) -> dict[str, Any]:
    """The last `limit` bytes of a text file, or nothing where there is none."""
    try:
        with open(request["path"], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - request["limit"]))
            return {"text": file.read(request["limit"]).decode("utf-8", "replace")}
    except FileNotFoundError:
        return {"text": None}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Removes a part of ours."""
    part = request["part"]
    require_partial(part)
    if os.path.isdir(part) and not os.path.islink(part):
        shutil.rmtree(part)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return {}


def require_partial(path: str) -> None:
    """That a path is one of our unfinished ones, before it is written, moved or removed."""
    if not os.path.basename(path).startswith(PARTIAL):
        raise RefusalError("denied", f"{path} is not an unfinished file of ours")


def sync(path: str) -> None:
    """Makes a folder's names last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- requests ----------------------------------------------------------------------------------------

#: Verbs that neither read standard input nor write standard output: here they are answered without a process.
QUIET = ("look", "space", "about", "holds", "publish", "note", "text", "remove")
VERBS = {
    "look": look,
    "space": space,
    "about": about,
    "send": send,
    "holds": holds,
    "receive": receive,
    "publish": publish,
    "note": note,
    "text": text_of,
    "remove": remove,
    "relay": relay,
    "run": run,
}


KINDS = {
    errno.ENOENT: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.ENOSPC: "space",
    errno.EDQUOT: "space",
    errno.EEXIST: "exists",
}


def answer(request: dict[str, Any]) -> tuple[str, Any]:
    """Does what is asked; `reply` and the reply, or `error` and what is wrong."""
    try:
        return "reply", VERBS[request["verb"]](request)
    except RefusalError as refusal:
        return "error", {"kind": refusal.kind, "text": str(refusal)}
    except OSError as error:
        name = (
            error.filename if isinstance(error.filename, str) else request.get("part") or request.get("path")
        )
        text = f"{name}: {error.strerror}" if name else str(error)
        return "error", {"kind": KINDS.get(error.errno or 0, "system"), "text": text}


def main() -> None:
    """Reads one request from standard input, does it, replies."""
    data = sys.stdin.buffer
    kind, value = answer(json.loads(data.read(int(data.readline())).decode("utf-8")))
    say(kind, value)
    sys.exit(0 if kind == "reply" else 1)
