"""Two commands with bytes between them: how both ends are told, and that nothing outlives the pump."""

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftgauge.fleet.places import read_fleet
from draftgauge.fleet.pump import pump
from draftgauge.fleet.reach import reaching
from draftgauge.fleet.remote import draftgauge_at


def command(*argv: str, stdin: bytes = b"") -> dict[str, Any]:
    return {"argv": list(argv), "stdin": base64.b64encode(stdin).decode()}


def python(program: str) -> dict[str, Any]:
    return command(sys.executable, "-c", program)


def test_bytes_arrive_as_they_left() -> None:
    told: list[int] = []
    ends = pump(
        command("cat", stdin=bytes(range(256)) * 9000), command("sha256sum", stdin=b"head"), None, told.append
    )
    expected = subprocess.run(
        ["sha256sum"], input=b"head" + bytes(range(256)) * 9000, capture_output=True, check=True
    ).stdout
    assert ends[1]["out"].encode() == expected
    assert [end["code"] for end in ends] == [0, 0]
    assert told[-1] == 256 * 9000
    assert told == sorted(told)


def test_what_both_say_and_how_both_end_is_kept() -> None:
    ends = pump(
        python("import sys; print('data'); print('reader says', file=sys.stderr); sys.exit(3)"),
        python("import sys; sys.stdin.read(); print('writer says', file=sys.stderr); sys.exit(4)"),
        None,
        lambda _: None,
    )
    assert [(end["code"], end["err"].strip()) for end in ends] == [(3, "reader says"), (4, "writer says")]


def test_a_writer_that_goes_away_ends_the_reader() -> None:
    begun = time.monotonic()
    ends = pump(command("yes"), python("import sys; sys.exit(7)"), None, lambda _: None)
    assert ends[1]["code"] == 7
    assert ends[0]["code"] != 0
    assert time.monotonic() - begun < 20


def test_a_limit_is_kept() -> None:
    begun = time.monotonic()
    pump(command("head", "-c", "300000", "/dev/zero"), command("cat"), 200_000, lambda _: None)
    assert time.monotonic() - begun >= 1.4


def test_what_was_started_ends_with_an_interruption() -> None:
    started: list[int] = []

    def moved(_: int) -> None:
        listed = subprocess.run(
            ["pgrep", "-f", "draftgauge-pump-test"], capture_output=True, text=True, check=False
        )
        started.extend(map(int, listed.stdout.split()))
        raise KeyboardInterrupt

    endless = "import sys\nwhile True: sys.stdout.write('x' * 1000)  # draftgauge-pump-test"
    with pytest.raises(KeyboardInterrupt):
        pump(python(endless), command("cat"), None, moved)
    assert started
    time.sleep(0.2)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_remote_command_ends_with_its_connection(tmp_path: Path) -> None:
    """Killing the local end closes the far side's standard input, and what ran there ends."""
    program = (
        f"import time, os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    with reaching(read_fleet(None)) as reach:
        place = reach.fleet.place("workstation")
        far = reach.command(place, "run", {"argv": [sys.executable, "-c", program]})
    process = subprocess.Popen(far.argv, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(far.stdin)
    process.stdin.flush()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    process.stdin.close()
    assert process.wait(timeout=20) == 255
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def test_a_command_of_ours_runs_with_its_own_output() -> None:
    said: list[str] = []
    with reaching(read_fleet(None)) as reach:
        place = reach.fleet.place("workstation")
        answer = draftgauge_at(reach, place, ("recordings", "--recordings", "/nowhere"), said=said.append)
    assert (answer.code, answer.value) == (0, [])
