"""A watch over three real hosts while a trainer writes, and while links, servers and the watch itself fail."""

import io
import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.hosts.fleet import Hosts
from tests.test_three_hosts import FLEET, Desk
from tests.yard import Yard, yard

pytestmark = pytest.mark.hosts
SERIES = "/data/plan/watch/series.jsonl"
PLAN = """
fleet = "fleet.toml"
recording = "eval1:recordings/{recording}"
check = false

[eval]
budgets = [4]
max_blocks = 6

[trainer]
log = "ct200:train.log"
pattern = 'step (?P<step>\\d+) .*?(?P<ktok_per_s>[\\d.]+) Ktok/s'

[watch]
folder = "ct200:out"
match = "step_*/checkpoint.pt"
order = "oldest"
every_s = 0.5
"""


class Training:
    """The trainer in the container, the watch on the workstation, and what the series holds."""

    def __init__(self, desk: Desk, made: Yard) -> None:
        self.desk, self.made = desk, made
        self.files: dict[int, Path] = {}
        self.process: subprocess.Popen[Any] | None = None
        self.log = made.folder / "watch.log"

    def saves(self, step: int) -> bytes:
        self.files[step] = self.made.checkpoint(step)
        return self.files[step].read_bytes()

    def writes(self, step: int, data: bytes, *, more: bool = False) -> None:
        """Writes a checkpoint in the container, or a further part of it."""
        program = f'mkdir -p "$(dirname "$1")" && cat {">>" if more else ">"} "$1"'
        self.desk.hosts.run(
            "train", "sh", "-c", program, "sh", f"/data/out/step_{step}/checkpoint.pt", input=data
        )

    def watches(self) -> None:
        words = self.desk.words("watch", "/data/plan.toml", "--until", "step=40")
        with self.log.open("ab") as out:
            self.process = self.desk.hosts.start(
                "ws", "env", "OMP_NUM_THREADS=1", *words, stdout=out, stderr=subprocess.STDOUT
            )

    def rows(self) -> list[dict[str, Any]]:
        done = self.desk.hosts.run("ws", "cat", SERIES, check=False)
        return [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []

    def measured(self, step: int, *, within_s: float = 120) -> dict[str, Any]:
        """Waits for the row of a step."""
        begun = time.monotonic()
        while True:
            for row in self.rows():
                if row["saved_step"] == step:
                    return row
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() - begun > within_s:
                self.process.kill()
                self.process.wait()
                pytest.fail(f"step {step} was not measured: {self.log.read_text()[-5000:]}")
            time.sleep(0.1)

    def staging(self, step: int) -> None:
        """Waits until a part of a checkpoint lies at the evaluation host."""
        begun = time.monotonic()
        program = f"stat -c %s /data/dg/checkpoints/.partial-*step_{step}-* 2>/dev/null || echo 0"
        while int(self.desk.hosts.run("eval", "sh", "-c", program).stdout.split()[0]) < 20_000:
            assert time.monotonic() - begun < 60, f"step {step} is not staged: {self.rows()}"
            time.sleep(0.05)


@pytest.fixture
def training(hosts: Hosts, tmp_path: Path) -> Training:
    desk = Desk(hosts)
    made = yard(tmp_path)
    desk.write("/data/fleet.toml", FLEET.replace('id = "200"', 'id = "200"\nbandwidth = "100 kB/s"'))
    recording = tiny.recording().path
    desk.write("/data/plan.toml", PLAN.format(recording=recording.name))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(recording, arcname=recording.name)
    hosts.run(
        "eval",
        "sh",
        "-c",
        "mkdir -p /data/dg/recordings && tar -xC /data/dg/recordings",
        input=packed.getvalue(),
    )
    desk.write("/data/train.log", "step 41 loss 2.0 | 19.5 Ktok/s\n", host="train")
    return Training(desk, made)


def tau_measured_here(training: Training, step: int) -> Any:
    """What the same file gives where it lies."""
    asked = ("--recording", tiny.recording().path, "--budgets", "4", "--max-blocks", "6", "--json")
    done = tiny.draftgauge("eval", training.files[step], *asked, cwd=training.made.folder)
    return json.loads(done.stdout)["summary"]["policies"]["chain"]["tau_response"]


def test_every_checkpoint_is_measured_once_and_rightly_through_every_fault(training: Training) -> None:
    training.writes(10, training.saves(10))
    training.watches()
    first = training.measured(10)
    assert first["trainer"] == {"step": 41, "ktok_per_s": 19.5}

    whole = training.saves(15)
    training.writes(15, whole[: len(whole) // 2])  # a trainer that takes its time
    training.writes(20, training.saves(20))
    training.staging(20)
    training.desk.hosts.cut("eval")  # silent, in the middle of the file
    time.sleep(18)
    training.desk.hosts.mend("eval")
    training.measured(20)
    training.writes(15, whole[len(whole) // 2 :], more=True)
    training.measured(15)

    training.writes(25, training.saves(25))
    training.staging(25)
    training.desk.hosts.kill_connections("train")  # the server of the source
    training.measured(25)

    training.writes(30, training.saves(30))
    training.staging(30)
    training.desk.hosts.run("ws", "pkill", "-9", "-f", "draftgauge watch")  # the relay itself
    assert training.process is not None
    training.process.wait(timeout=30)
    assert 30 not in [row["saved_step"] for row in training.rows()]
    training.watches()
    training.measured(30)

    training.writes(35, training.saves(35))
    training.staging(35)
    training.desk.hosts.run("train", "rm", "-r", "/data/out/step_35")  # rotated away while it is read
    training.writes(40, training.saves(40))
    training.measured(40)
    assert training.process.wait(timeout=60) == 0

    rows = training.rows()
    steps = [row["saved_step"] for row in rows]
    assert sorted(set(steps) - {35}) == [10, 15, 20, 25, 30, 40]
    assert len(steps) == len(set(steps)), "each once"
    for row in rows:
        assert row["reason"] == ""
        assert row["tau"] == tau_measured_here(training, row["saved_step"])
    left = training.desk.hosts.run("eval", "sh", "-c", "ls -A /data/dg/checkpoints").stdout.decode().split()
    parts = [name for name in left if name.startswith(".partial-")]
    assert len(parts) <= 1
    assert all("step_35" in name for name in parts), "only what cannot be finished any more is left"
