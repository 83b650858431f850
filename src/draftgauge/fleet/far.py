"""What draftgauge does at another place: looks, reads byte ranges, writes at an offset, publishes, runs.

The text of this file is sent to a place's `python3` over standard input, followed by one request as JSON and,
where something is written, by the bytes. Nothing is installed there, and no name ever stands in a command line.
So it needs Python 3.7 and its standard library alone, and imports nothing of this package. It knows nothing of
checkpoints: what to read is told to it in byte ranges.

Replies and refusals are single lines that begin with `MARK`; the first word after it is `reply` or `error`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

MARK = b"draftgauge-far "
BLOCK_BYTES = 1 << 20
#: Seconds without a byte after which a stream is given up: its other end is gone without saying so. Long, since
#: a reader that goes on in the middle first reads, and hashes, what it sent before.
SILENCE_S = 1800
#: Seconds without a sign of life from whoever started a command, after which it is ended.
QUIET_S = 120
#: Names of unfinished files and folders begin so; nothing else is ever removed.
PARTIAL = ".partial-"


class Refusal(Exception):
    """Ends the work; `kind` is missing, changed, damaged, exists, space, short or denied."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


# --- looking -------------------------------------------------------------------------------------------


def look(request):
    """What stands at a path: its identity, and of a folder all files in it with theirs, in order of names."""
    path = request["path"]
    try:
        top = os.stat(path)
    except OSError as error:
        if error.errno == 2 or isinstance(error, NotADirectoryError):
            return {"kind": "missing"}
        raise
    if stat.S_ISREG(top.st_mode):
        return {"kind": "file", "identity": identity(top), "resolved": os.path.realpath(path)}
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
    return {"kind": "folder", "files": files, "skipped": skipped}


def identity(entry):
    """Size, time of change and inode: a file for which these are the same was not written meanwhile."""
    return [entry.st_size, entry.st_mtime_ns, entry.st_ino]


def space(request):
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


def about(request):
    """This place: its Python, and of each folder asked for the space in it."""
    spaces = {path: space({"path": path}) for path in request.get("folders", [])}
    return {"python": "%d.%d.%d" % sys.version_info[:3], "host": os.uname().nodename, "space": spaces}


# --- reading -------------------------------------------------------------------------------------------


def send(request):
    """Writes the pieces to standard output from byte `skip` on; replies with the SHA-256 of all of them.

    A piece is text in base64, or a range of a file; a range may name the record that holds it with the CRC-32
    that it must have. Every file must be as it was looked at, before and after.
    """
    lower_priority(request.get("nice", 0))
    digest, skip, position = hashlib.sha256(), request.get("skip", 0), 0
    quiet, check = request.get("digest_only", False), Checks(request["identities"])
    with check, ThreadPoolExecutor(1) as side:
        for piece in request["pieces"]:
            for block in blocks_of(piece, check, bool(request.get("nice"))):
                hashed = side.submit(digest.update, block)
                fresh = memoryview(block)[max(0, skip - position) :]
                if fresh and not quiet:
                    write_all(1, fresh)
                position += len(block)
                hashed.result()
        check.again()
    return {"sha256": digest.hexdigest(), "bytes": position}


class Checks:
    """The files that are read, open, and each the one that was looked at."""

    def __init__(self, identities):
        self.expected = identities
        self.files = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.files.values():
            os.close(handle)

    def open(self, path):
        if path not in self.files:
            try:
                self.files[path] = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise Refusal("missing", "%s is gone" % path)
            self.require(path)
        return self.files[path]

    def again(self):
        for path in self.files:
            self.require(path)

    def require(self, path):
        if identity(os.fstat(self.files[path])) != self.expected[path]:
            raise Refusal("changed", "%s changed while it was read" % path)


def blocks_of(piece, check, gentle):
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
        text = "%s is damaged: the record of %s has CRC-32 %08x; expected %08x"
        raise Refusal("damaged", text % (path, piece["name"], seen, crc))


def ranged(handle, path, start, size, gentle):
    """The bytes of a range, in blocks; a gentle reader leaves the page cache to the others of its machine."""
    while size:
        block = os.pread(handle, min(size, BLOCK_BYTES), start)
        if not block:
            raise Refusal("changed", "%s became shorter while it was read" % path)
        if gentle:
            with contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(handle, start, len(block), os.POSIX_FADV_DONTNEED)
        yield block
        start += len(block)
        size -= len(block)


def lower_priority(nice):
    """Gives way to everything else at this place, on the processor and on the disk."""
    if nice:
        with contextlib.suppress(OSError):
            os.nice(nice)
        with contextlib.suppress(OSError):
            subprocess.call(
                ["ionice", "-c3", "-p", str(os.getpid())], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )


def write_all(handle, data):
    signal.alarm(SILENCE_S)
    while data:
        data = data[os.write(handle, data) :]


# --- writing -------------------------------------------------------------------------------------------


def holds(request):
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


def output(part, inner):
    return os.path.join(part, inner) if inner else part


def receive(request):
    """Writes standard input into the part from byte `skip` on; replies with the SHA-256 of what is on the disk.

    The same bytes always go to the same places, so that a receiver that outlived its connection does no harm.
    """
    part, skip = request["part"], request["skip"]
    require_partial(part)
    follower = Follower(part, request["outputs"])
    follower.start()
    try:
        written = receive_into(part, request["outputs"], skip, follower)
    finally:
        follower.stop()
        follower.join()
    if follower.error is not None:
        raise follower.error
    total = sum(size for _, size in request["outputs"])
    if written != total:
        raise Refusal("short", "%d of %d bytes arrived" % (written, total))
    return {"sha256": follower.digest.hexdigest(), "bytes": written}


def receive_into(part, outputs, skip, follower):
    start = 0
    for inner, size in outputs:
        path, end = output(part, inner), start + size
        if end > skip or not size:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                position = max(skip, start)
                while position < end:
                    signal.alarm(SILENCE_S)
                    block = sys.stdin.buffer.read1(min(BLOCK_BYTES, end - position))
                    if not block:
                        return position
                    pwrite_all(handle, block, position - start)
                    position += len(block)
                    follower.reached(position)
                os.ftruncate(handle, size)
                os.fsync(handle)
            finally:
                os.close(handle)
        start = end
        follower.reached(max(start, skip))
    if sys.stdin.buffer.read(1):
        raise Refusal("short", "more bytes arrived than were announced")
    return start


def pwrite_all(handle, data, position):
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, position)
        view, position = view[done:], position + done


class Follower(threading.Thread):
    """Hashes what has been written, from the files, behind the writer."""

    def __init__(self, part, outputs):
        super().__init__(daemon=True)
        self.part, self.outputs = part, outputs
        self.digest, self.error = hashlib.sha256(), None
        self.limit, self.stopped, self.changed = 0, False, threading.Condition()

    def reached(self, position):
        with self.changed:
            self.limit = position
            self.changed.notify()

    def stop(self):
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def run(self):
        try:
            start = 0
            for inner, size in self.outputs:
                self.follow(output(self.part, inner), start, size)
                start += size
        except OSError as error:
            self.error = error

    def follow(self, path, start, size):
        position, handle = 0, None
        try:
            while position < size:
                with self.changed:
                    self.changed.wait_for(lambda: self.limit > start + position or self.stopped)
                    if self.limit <= start + position:
                        return
                    ready = min(size, self.limit - start) - position
                handle = os.open(path, os.O_RDONLY) if handle is None else handle
                block = os.pread(handle, min(ready, BLOCK_BYTES), position)
                if not block:
                    return
                self.digest.update(block)
                position += len(block)
        finally:
            if handle is not None:
                os.close(handle)


def publish(request):
    """Renames a verified part to its name, which must be free, and makes both last."""
    part, path = request["part"], request["path"]
    require_partial(part)
    if os.path.isdir(part):
        if os.path.lexists(path):
            raise Refusal("exists", "%s exists already and is never overwritten" % path)
        os.rename(part, path)
    else:
        try:
            os.link(part, path)  # unlike a rename, it never takes the place of a file
        except FileExistsError:
            raise Refusal("exists", "%s exists already and is never overwritten" % path)
        os.unlink(part)
    sync(os.path.dirname(path) or ".")
    return {}


def note(request):
    """Writes a small text file of ours whole, in the place of an earlier one."""
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    partial = os.path.join(os.path.dirname(path), "%s%d" % (PARTIAL, os.getpid()))
    with open(partial, "w", encoding="utf-8") as file:
        file.write(request["text"])
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return {}


def text_of(request):
    """The last `limit` bytes of a text file, or nothing where there is none."""
    try:
        with open(request["path"], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - request["limit"]))
            return {"text": file.read(request["limit"]).decode("utf-8", "replace")}
    except FileNotFoundError:
        return {"text": None}


def remove(request):
    """Removes a part of ours."""
    part = request["part"]
    require_partial(part)
    if os.path.isdir(part) and not os.path.islink(part):
        shutil.rmtree(part)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return {}


def require_partial(path):
    if not os.path.basename(path).startswith(PARTIAL):
        raise Refusal("denied", "%s is not an unfinished file of ours" % path)


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- moving and running --------------------------------------------------------------------------------


def pump(reader, writer, limit, moved):
    """Starts both commands, moves the reader's output into the writer, and returns how both ended.

    A command is {"argv", "stdin"}, the latter in base64. `limit` is bytes per second or None; `moved` is told
    the bytes moved so far after every block. An end is {"code", "out", "err"}, texts cut to their ends.
    """
    with started(reader, stdin=subprocess.PIPE) as source, started(writer, stdin=subprocess.PIPE) as target:
        ends = [Tail(source.stderr), Tail(target.stderr), Tail(target.stdout)]
        feeder = threading.Thread(target=feed, args=(source, base64.b64decode(reader["stdin"])), daemon=True)
        feeder.start()
        try:
            write_all_to(target.stdin, base64.b64decode(writer["stdin"]))
            carry(source.stdout, target.stdin, limit, moved)
        except BrokenPipeError:  # the writer is gone: its end says why
            with contextlib.suppress(OSError):
                os.killpg(source.pid, signal.SIGTERM)
        source.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            target.stdin.close()
        codes = source.wait(), target.wait()
        for end in ends:
            end.join()
    texts = [end.text() for end in ends]
    return [
        {"code": codes[0], "out": "", "err": texts[0]},
        {"code": codes[1], "out": texts[2], "err": texts[1]},
    ]


@contextlib.contextmanager
def started(command, stdin):
    """A command in a session of its own, which ends with the block, whatever else it started included."""
    process = subprocess.Popen(
        command["argv"],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                stream.close()


def feed(process, data):
    with contextlib.suppress(OSError):
        process.stdin.write(data)
    with contextlib.suppress(OSError):
        process.stdin.close()


def carry(source, target, limit, moved):
    total, begun = 0, time.monotonic()
    buffer = memoryview(bytearray(BLOCK_BYTES if limit is None else max(1, min(BLOCK_BYTES, limit // 10))))
    while True:
        count = source.readinto(buffer)
        if not count:
            return
        write_all_to(target, buffer[:count])
        total += count
        moved(total)
        if limit is not None:
            time.sleep(max(0.0, begun + total / limit - time.monotonic()))


def write_all_to(stream, data):
    data = memoryview(data)
    while data:
        data = data[stream.write(data) :]


class Tail(threading.Thread):
    """Drains a stream and keeps its end."""

    LIMIT = 1 << 16

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.stream, self.kept = stream, b""
        self.start()

    def run(self):
        with contextlib.suppress(OSError, ValueError):
            while True:
                block = self.stream.read(BLOCK_BYTES)
                if not block:
                    return
                self.kept = (self.kept + block)[-self.LIMIT :]

    def text(self):
        return self.kept.decode("utf-8", "replace")


def relay(request):
    """The pump at this place; says every half second on standard error how far it is."""
    last = [0.0]

    def moved(total):
        if time.monotonic() - last[0] > 0.5:
            last[0] = time.monotonic()
            say("moved", total)

    return {"ends": pump(request["reader"], request["writer"], request["limit"], moved)}


def run(request):
    """Runs a command of this place with the standard output and error of ours; ends with its exit code.

    It ends with the connection: when standard input closes, or gives no sign of life for long, so does the command.
    """
    process = subprocess.Popen(request["argv"], stdin=subprocess.DEVNULL, start_new_session=True)
    heard = time.monotonic()
    while process.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready:
            heard = time.monotonic()
        if (ready and not os.read(0, 4096)) or time.monotonic() - heard > QUIET_S:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            sys.exit(255)
    code = process.returncode
    sys.exit(code if code >= 0 else 128 - code)


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


def say(kind, value):
    os.write(2, MARK + kind.encode() + b" " + json.dumps(value).encode() + b"\n")


def main():
    """Reads one request from standard input, does it, replies."""
    data = sys.stdin.buffer
    request = json.loads(data.read(int(data.readline())).decode("utf-8"))
    try:
        say("reply", VERBS[request["verb"]](request))
    except Refusal as refusal:
        say("error", {"kind": refusal.kind, "text": str(refusal)})
        sys.exit(1)
    except OSError as error:
        kinds = {2: "missing", 13: "denied", 1: "denied", 30: "denied", 28: "space", 122: "space", 17: "exists"}
        name = error.filename if isinstance(error.filename, str) else request.get("part") or request.get("path")
        text = "%s: %s" % (name, error.strerror) if name else str(error)
        say("error", {"kind": kinds.get(error.errno, "system"), "text": text})
        sys.exit(1)


if __name__ == "__main__":
    main()
