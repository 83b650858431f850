"""The command: it starts without torch, says its address, and ends when it is told to."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from draftgauge.cli import cli
from draftgauge.errors import InputError
from tests.shelf import put_run, put_training
from tests.tiny import command, environment

#: The command, and then what it has loaded; `loaded` comes after whatever the viewer itself prints.
LOADED = """
import sys, draftgauge.cli
try:
    draftgauge.cli.main()
finally:
    print("loaded", *(name for name in ("torch", "transformers", "scipy", "numba") if name in sys.modules))
"""


@contextlib.contextmanager
def started(*program: str) -> Iterator[subprocess.Popen[str]]:
    """A process, which is killed when the block ends, if it still runs."""
    process = subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_it_serves_without_torch_until_it_is_interrupted(tmp_path: Path) -> None:
    put_training(tmp_path / "runs", {1: 1.5, 2: 1.75})
    with started(sys.executable, "-c", LOADED, "view", str(tmp_path), "--json") as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += process.stdout.readline()
        said = json.loads(text)
        assert said["folder"] == str(tmp_path.resolve())
        for path in ("", "?text=step", "series", "recordings"):
            assert httpx2.get(said["url"] + path).status_code == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    assert rest.strip() == "loaded"


def test_killing_it_loses_nothing(tmp_path: Path) -> None:
    folder = put_run(tmp_path / "mine")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    with started(*command("view", tmp_path)) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert httpx2.get(url).status_code == 200
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing was written"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "is not a folder"),
        (["mine"], "view the folder that it lies in"),
        (["--host", "203.0.113.7"], "port 0"),
    ],
)
def test_what_cannot_be_viewed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    put_run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["view", *arguments])
    assert isinstance(result.exception, InputError)
    assert reason in str(result.exception)
