"""Staging as a ratio: against a bare `ssh cat` of the same bytes, on three hosts in namespaces, in the same run.

    python bench/stage.py               needs root, and what `make hosts` installs; kept in bench/history.jsonl

(hop) 1 GB from the training host to the workstation, hashed at both ends and published; (relay) the same from the
training host through the workstation to the evaluation host, against `ssh cat | ssh cat`; (again) a staging killed at
90 %: how many bytes moved twice. Planning is not counted: it asks hosts that cannot reach each other, which takes
ssh's time-out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.records import Record, found  # noqa: E402 - as a script it stands in the wrong folder first

BYTES = 1_000_000_000
ROUNDS = 3
FLEET = """
[hosts.workstation]
keep_free = "1 MB"
[hosts.pve1]
ssh = "train"
[hosts.eval1]
ssh = "eval"
keep_free = "1 MB"
"""


def main() -> None:
    """Makes the hosts, measures on the workstation among them, keeps the ratios."""
    from bench.history import keep
    from tests.hosts.fleet import Hosts, why_not

    if reason := why_not():
        sys.exit(f"the three hosts cannot be made here: {reason}")
    records: list[Record] = []
    for rate in ("", "1gbit"):
        with tempfile.TemporaryDirectory() as folder:
            hosts = Hosts(Path(folder), train="3g", ws="3g", eval="3g")
            hosts.environment |= {"RATE": rate}
            try:
                hosts.up()
                hosts.run("train", "sh", "-c", f"head -c {BYTES} /dev/urandom > /data/big.dat")
                words = (sys.executable, str(Path(__file__).resolve()), "--on-workstation")
                done = hosts.run("ws", *words, text=True)
            finally:
                hosts.down()
        records += ratios(json.loads(done.stdout), rate=rate)
    keep(records, left_out={})


def ratios(value: dict[str, list[float]], *, rate: str = "") -> Iterator[Record]:
    """The ratios of one kind of links, and what they are made of; what moves twice does not depend on the links."""
    for way in ("hop", "relay"):
        ours, bare = (statistics.median(value[f"{way} {kind}"]) for kind in ("ours", "bare"))
        yield found(f"stage-{way}{f'-{rate}' if rate else ''}", bare / ours, ours_s=ours, bare_s=bare)
    if not rate:
        again = value["again bytes"][0]
        yield found("stage-again", again / BYTES, bytes=again)


def on_workstation() -> None:
    """Measures: ours and the rival in turns."""
    from draftgauge.fleet.cargo import describe
    from draftgauge.fleet.places import read_fleet
    from draftgauge.fleet.reach import Reach, reaching
    from draftgauge.fleet.stage import plan_staging, stage

    file = Path("/data/fleet.toml")
    file.write_text(FLEET)
    fleet = read_fleet(file)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: object) -> None:
        started = time.perf_counter()
        work()  # type: ignore[operator]
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    def ours(reach: Reach, target: str) -> object:
        staging = plan_staging(reach, describe(reach, fleet.spot("pve1:/data/big.dat")), fleet.spot(target))
        return lambda: stage(reach, staging, moved=lambda _: None)

    def shell(program: str) -> object:
        return lambda: subprocess.run(["sh", "-c", program], check=True)

    with reaching(fleet) as reach:
        for number in range(ROUNDS):
            timed("hop ours", ours(reach, f"/data/hop{number}"))
            subprocess.run(["sh", "-c", "rm /data/hop*"], check=True)
            timed("hop bare", shell("ssh train cat /data/big.dat > /data/bare && rm /data/bare"))
            timed("relay ours", ours(reach, f"eval1:/data/relay{number}"))
            subprocess.run(["ssh", "eval", "rm /data/relay*"], check=True)
            timed(
                "relay bare",
                shell("ssh train cat /data/big.dat | ssh eval 'cat > /data/bare && rm /data/bare'"),
            )
    seconds["again bytes"] = [killed_at_90_percent()]
    print(json.dumps(seconds))


def killed_at_90_percent() -> float:
    """Bytes that moved twice: what both tries moved, less the file."""
    words = [sys.executable, "-m", "draftgauge", "stage", "--fleet", "/data/fleet.toml"]
    words += ["pve1:/data/big.dat", "/data/again", "--json"]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = Path("/data")
    while sum(file.stat().st_size for file in part.glob(".partial-*")) < 0.9 * BYTES:
        time.sleep(0.002)
    first.kill()
    first.wait()
    time.sleep(1.0)  # until the receiver has seen the end of its input
    held = sum(file.stat().st_size for file in part.glob(".partial-*"))
    second = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return float(held + second["moved_bytes"] - BYTES)


if __name__ == "__main__":
    on_workstation() if "--on-workstation" in sys.argv else main()
