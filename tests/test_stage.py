"""Staging beyond what every transport must do: lost connections, limits, notes, and what is said of a plan."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftgauge.errors import ConnectionLostError, FleetError
from draftgauge.fleet.cargo import describe
from draftgauge.fleet.places import Fleet, read_fleet
from draftgauge.fleet.reach import Reach, reaching
from draftgauge.fleet.stage import TRIES_WITHOUT_PROGRESS, landing, plan_staging, stage
from draftgauge.report.fleet import staging_report
from draftgauge.store import PARTIAL
from tests import tiny
from tests.transports import moved

#: Lets so many bytes of a sender through and then ends as ssh does, as long as the counter is above 0.
FLAKY = """
import subprocess, sys
counter, limit, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
data = sys.stdin.buffer.read()
process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdin.write(data)
process.stdin.close()
left = int(open(counter).read())
flaky = left > 0 and b'"verb": "send"' in data and b'"skip"' in data
sent = 0
while block := process.stdout.read(4096):
    if flaky and sent + len(block) > limit:
        open(counter, "w").write(str(left - 1))
        process.kill()
        print("Connection to host closed by remote host.", file=sys.stderr)
        sys.exit(255)
    sys.stdout.buffer.write(block)
    sent += len(block)
sys.exit(process.wait())
"""


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    (tmp_path / "flaky.py").write_text(FLAKY)
    file = tmp_path / "counter"
    file.write_text("0")
    return file


@pytest.fixture
def fleet(tmp_path: Path, counter: Path) -> Fleet:
    words = [sys.executable, str(tmp_path / "flaky.py"), str(counter)]
    text = f"""
[containers.flaky]
host = "workstation"
enter = {[*words, "300000"]}

[containers.dead]
host = "workstation"
enter = {[*words, "0"]}

[containers.slow]
host = "workstation"
enter = ["env"]
bandwidth = "1 MB/s"
"""
    (tmp_path / "fleet.toml").write_text(text.replace("'", '"'))
    return read_fleet(tmp_path / "fleet.toml")


@pytest.fixture
def reach(fleet: Fleet) -> Iterator[Reach]:
    with reaching(fleet) as opened:
        yield opened


def test_lost_connections_are_made_anew_as_long_as_bytes_arrive(
    reach: Reach, counter: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(bytes(range(250)) * 4000)
    counter.write_text("2")
    cargo = describe(reach, reach.fleet.spot(f"flaky:{tmp_path}/source"))
    told: list[int] = []
    staged = stage(
        reach, plan_staging(reach, cargo, reach.fleet.spot(f"{tmp_path}/target")), moved=told.append
    )
    assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
    assert counter.read_text() == "0"
    assert staged.moved_bytes == 1_000_000
    assert told[-1] == 1_000_000


def test_a_connection_that_brings_nothing_is_given_up(reach: Reach, counter: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 10_000)
    counter.write_text("100")
    cargo = describe(reach, reach.fleet.spot(f"dead:{tmp_path}/source"))
    with pytest.raises(ConnectionLostError, match="dead: ended with exit code 255"):
        stage(reach, plan_staging(reach, cargo, reach.fleet.spot(f"{tmp_path}/target")), moved=moved)
    assert int(counter.read_text()) == 100 - TRIES_WITHOUT_PROGRESS
    assert not (tmp_path / "target").exists()


def test_a_bandwidth_limit_holds(reach: Reach, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 1_500_000)
    cargo = describe(reach, reach.fleet.spot(f"slow:{tmp_path}/source"))
    begun = time.monotonic()
    stage(reach, plan_staging(reach, cargo, reach.fleet.spot(f"{tmp_path}/target")), moved=moved)
    assert time.monotonic() - begun > 1.4


def test_where_a_cargo_lands(reach: Reach, tmp_path: Path) -> None:
    source = tiny.trainer_pt(tmp_path / "checkpoint.pt", config=tiny.drafter_config())
    cargo = describe(reach, reach.fleet.spot(f"slow:{source}"))
    folder = reach.fleet.spot(str(tmp_path / "in"))
    assert landing(cargo, folder, inside=True).path == f"{tmp_path}/in/checkpoint.safetensors"
    assert landing(cargo, folder.below("x.safetensors"), inside=False).path == f"{tmp_path}/in/x.safetensors"
    with pytest.raises(FleetError, match=r"a name that ends in \.safetensors, or --whole"):
        landing(cargo, folder.below("x.pt"), inside=False)


def test_a_folder_in_the_way_says_how_to_put_it_inside(reach: Reach, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_bytes(b"y")
    cargo = describe(reach, reach.fleet.spot(f"slow:{tmp_path}/source"))
    with pytest.raises(FleetError, match="end the path with / to put it inside"):
        plan_staging(reach, cargo, reach.fleet.spot(f"{tmp_path}/folder"))


def test_a_plan_says_what_will_happen(reach: Reach, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 2000)
    cargo = describe(reach, reach.fleet.spot(f"slow:{tmp_path}/source"))
    target = reach.fleet.spot(f"{tmp_path}/in/target")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{PARTIAL}{cargo.fingerprint}-target").write_bytes(b"x" * 500)
    said = staging_report(plan_staging(reach, cargo, target).as_dict())
    assert "2.0 kB, of which 500 B are there" in said
    assert "slow -> workstation (container)" in said or "slow -> workstation" in said
    assert not (tmp_path / "in" / "target").exists()
