"""Runs this same command line at a place, and gives its output, its exit code and its own last lines.

The command ends with the connection that started it. Knows nothing of what the commands do.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftgauge.errors import FleetError, UnfinishedError
from draftgauge.fleet.places import WORKSTATION, Place
from draftgauge.fleet.reach import End, Reach, last_lines, refuse

HEARTBEAT_S = 10.0
#: Exit codes of our commands after which their output is a result.
_MEASURED = (0, 4)
_AGAIN_LATER = 5


@dataclass(frozen=True)
class Answer:
    """What a command of ours printed as JSON, and whether a control or gate failed."""

    value: Any
    code: int


def draftgauge_at(
    reach: Reach, place: Place, words: tuple[str, ...], *, said: Callable[[str], None]
) -> Answer:
    """Runs `draftgauge WORDS --json` at a place; `said` receives what it says while it works, line by line.

    Raises:
        FleetError: It ended with an error; the place and its own last lines are in the message.
        UnfinishedError: The connection or the place went away, or it asks to be run again.
    """
    python = sys.executable if place.name == WORKSTATION else place.python
    argv = [python, "-m", "draftgauge", *words, "--json"]
    end = _streamed(reach, place, argv, said)
    if end.code in _MEASURED:
        with contextlib.suppress(ValueError):
            return Answer(json.loads(end.out), end.code)
        raise FleetError(f"{place.name}: draftgauge {words[0]} printed no JSON:\n{last_lines(end.out)}")
    text = f"{place.name}: draftgauge {words[0]} ended with exit code {end.code}:\n{last_lines(end.err)}"
    if end.code == _AGAIN_LATER:
        raise UnfinishedError(text)
    if end.code == 255 or end.code < 0:
        refuse(place, end)
    if "No module named draftgauge" in end.err:
        text += (
            f"\nInstall draftgauge there, or name its Python: python = ... of {place.name} in the fleet file"
        )
    raise FleetError(text)


def version_at(reach: Reach, place: Place) -> str:
    """The version of draftgauge at a place; empty where its Python has none."""
    program = "from importlib import metadata; print(metadata.version('draftgauge'))"
    python = sys.executable if place.name == WORKSTATION else place.python
    code, out, _ = reach.start(place, reach.words(place, (python, "-c", program), shared=True), 30.0)
    return out.decode("utf-8", "replace").strip() if not code else ""


def _streamed(reach: Reach, place: Place, argv: list[str], said: Callable[[str], None]) -> End:
    """Starts words at a place and listens to them, with a sign of life in the other direction."""
    command = reach.command(place, "run", {"argv": argv})
    process = subprocess.Popen(
        command.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    ended = threading.Event()
    kept: list[str] = []
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = process.stderr

    def listen() -> None:
        for raw in errors:
            for line in raw.decode("utf-8", "replace").replace("\r", "\n").splitlines():
                if line.strip():
                    kept.append(line)
                    del kept[:-200]
                    said(f"{place.name}: {line}")

    def beat() -> None:
        with contextlib.suppress(OSError, ValueError):
            while not ended.wait(HEARTBEAT_S):
                process.stdin.write(b".")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]

    listener, beater = (
        threading.Thread(target=listen, daemon=True),
        threading.Thread(target=beat, daemon=True),
    )
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(command.stdin)
            process.stdin.flush()
        listener.start()
        beater.start()
        out = process.stdout.read()
        code = process.wait()
    finally:
        ended.set()
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
    listener.join(timeout=5.0)
    beater.join(timeout=5.0)
    process.stdout.close()
    errors.close()
    return End(code, out.decode("utf-8", "replace"), "\n".join(kept))
