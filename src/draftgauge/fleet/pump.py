"""Starts commands and moves bytes between them: at the workstation, or at another place that the bytes pass.

The text of this file is sent to places together with `far`, and so needs Python 3.7 and its standard library alone.
Knows nothing of files.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

MARK = b"draftgauge-far "
BLOCK_BYTES = 1 << 20
#: Seconds without a sign of life from whoever started a command, after which it is ended.
QUIET_S = 120.0


def say(kind: str, value: object) -> None:
    """One line on standard error for whoever asked: `reply`, `error` or `moved`, and a JSON value."""
    os.write(2, MARK + kind.encode() + b" " + json.dumps(value).encode() + b"\n")


def pump(
    reader: dict[str, Any], writer: dict[str, Any], limit: int | None, moved: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Starts both commands, moves the reader's output into the writer, and returns how both ended.

    A command is {"argv", "stdin"}, the latter in base64. `limit` is bytes per second or None; `moved` is told the
    bytes moved so far after every block. An end is {"code", "out", "err"}, texts cut to their ends.
    """
    with started(reader) as source, started(writer) as target:
        ends = [Tail(pipe(source.stderr)), Tail(pipe(target.stderr)), Tail(pipe(target.stdout))]
        feeder = threading.Thread(target=feed, args=(source, base64.b64decode(reader["stdin"])), daemon=True)
        feeder.start()
        try:
            write_all(pipe(target.stdin), base64.b64decode(writer["stdin"]))
            carry(pipe(source.stdout), pipe(target.stdin), limit, moved)
        except BrokenPipeError:  # the writer is gone: its end says why
            with contextlib.suppress(OSError):
                os.killpg(source.pid, signal.SIGTERM)
        pipe(source.stdout).close()
        with contextlib.suppress(BrokenPipeError):
            pipe(target.stdin).close()
        codes = source.wait(), target.wait()
        for end in ends:
            end.join()
    texts = [end.text() for end in ends]
    return [
        {"code": codes[0], "out": "", "err": texts[0]},
        {"code": codes[1], "out": texts[2], "err": texts[1]},
    ]


@contextlib.contextmanager
def started(command: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, which ends with the block, and with it whatever else it started."""
    process = subprocess.Popen(
        command["argv"],
        stdin=subprocess.PIPE,
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
                pipe(stream).close()


def pipe(stream: IO[bytes] | None) -> Any:
    """A stream of a process that was started with all three."""
    assert stream is not None
    return stream


def wide(handle: int) -> None:
    """Makes a pipe as wide as a block, where the system lets us: fewer turns for the same bytes."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, 1031, BLOCK_BYTES)  # F_SETPIPE_SZ, which older versions of Python do not name


def feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Gives a reader its request, and no more."""
    with contextlib.suppress(OSError):
        write_all(pipe(process.stdin), data)
    with contextlib.suppress(OSError):
        pipe(process.stdin).close()


def carry(source: Any, target: Any, limit: int | None, moved: Callable[[int], None]) -> None:
    """Moves bytes until the source ends, no faster than `limit` bytes per second."""
    total, begun = 0, time.monotonic()
    wide(source.fileno())
    wide(target.fileno())
    at_once = BLOCK_BYTES if limit is None else max(1, min(BLOCK_BYTES, limit // 10))
    while True:
        count = spliced(source.fileno(), target.fileno(), at_once)
        if not count:
            return
        total += count
        moved(total)
        if limit is not None:
            time.sleep(max(0.0, begun + total / limit - time.monotonic()))


def spliced(source: int, target: int, count: int) -> int:
    """Moves up to `count` bytes from pipe to pipe, inside the kernel where Python can ask for that (3.10 can)."""
    try:
        return os.splice(source, target, count)
    except (AttributeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        data = os.read(source, count)
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        return len(data)


def write_all(stream: Any, data: Any) -> None:
    """Writes to an unbuffered stream, which may take less than all at once."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


class Tail(threading.Thread):
    """Drains a stream and keeps its end."""

    LIMIT = 1 << 16

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self.stream, self.kept = stream, b""
        self.start()

    def run(self) -> None:
        """Reads until the stream ends."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                block = self.stream.read(BLOCK_BYTES)
                if not block:
                    return
                self.kept = (self.kept + block)[-self.LIMIT :]

    def text(self) -> str:
        """What was kept."""
        return self.kept.decode("utf-8", "replace")


def relay(request: dict[str, Any]) -> dict[str, Any]:
    """The pump at this place; says every half second how far it is."""
    last = [0.0]

    def moved(total: int) -> None:
        if time.monotonic() - last[0] > 0.5:
            last[0] = time.monotonic()
            say("moved", total)

    return {"ends": pump(request["reader"], request["writer"], request["limit"], moved)}


def run(request: dict[str, Any]) -> None:
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
