"""Everything across three real hosts: an sshd each, no way between training and evaluation, containers in training.

What `pct` is, is a stand-in over real LXC (tests/hosts/pct); the rest is real.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.fleet import Hosts

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
FLEET = f"""
[hosts.workstation]
keep_free = "1 MB"

[hosts.pve1]
ssh = "train"
work = "/data/pve1"
keep_free = "1 MB"

[containers.ct200]
host = "pve1"
kind = "pct"
id = "200"
work = "/data"
keep_free = "1 MB"

[containers.ct201]
host = "pve1"
kind = "pct"
id = "201"
work = "/data"
keep_free = "1 MB"

[hosts.eval1]
ssh = "eval"
work = "/data/dg"
python = "{PYTHON}"
keep_free = "1 MB"
"""


class Desk:
    """The workstation's folder, and draftgauge run there."""

    def __init__(self, made: Hosts) -> None:
        self.hosts = made
        self.fleet = "/data/fleet.toml"
        self.write("/data/fleet.toml", FLEET)

    def write(self, path: str, text: str, *, host: str = "ws") -> None:
        program = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self.hosts.run(host, "sh", "-c", program, "sh", path, input=text.encode())

    def words(self, *words: object) -> list[str]:
        return [PYTHON, "-m", "draftgauge", *map(str, words)]

    def draftgauge(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.hosts.run("ws", *self.words(*words), check=False, text=True)
        assert done.returncode == code, (words, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def stage(self, source: str, target: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.draftgauge("stage", "--fleet", self.fleet, source, target, *more, code=code)


@pytest.fixture(scope="module")
def desk(hosts: Hosts) -> Desk:
    return Desk(hosts)


@pytest.fixture
def big(desk: Desk) -> Iterator[str]:
    """A file of 200 MB in the training container, random so that no part of it is like another."""
    program = (
        "mkdir -p /data/out && cd /data/out && head -c 200000000 /dev/urandom > big.dat && sha256sum big.dat"
    )
    digest = desk.hosts.run("train", "sh", "-c", program).stdout.split()[0].decode()
    yield digest
    desk.hosts.run("train", "sh", "-c", "rm -rf /data/out")
    desk.hosts.run("eval", "sh", "-c", "rm -rf /data/dg/in /data/filler")


def digest_at(desk: Desk, host: str, path: str) -> str:
    return str(desk.hosts.run(host, "sha256sum", path).stdout.split()[0].decode())


def part_bytes(desk: Desk) -> int:
    """How much of a staging the evaluation host holds so far."""
    program = "stat -c %s /data/dg/in/.partial-* 2>/dev/null || echo 0"
    return int(desk.hosts.run("eval", "sh", "-c", program).stdout.split()[0])


def interrupted(desk: Desk, fault: Callable[[subprocess.Popen[Any]], None]) -> tuple[int, str]:
    """Starts a staging of the big file, and does something to it in the middle; how it ended, and what it said."""
    words = desk.words("stage", "--fleet", "/data/slow.toml", "ct200:out/big.dat", "eval1:in/big.dat")
    desk.write("/data/slow.toml", FLEET.replace('id = "200"', 'id = "200"\nbandwidth = "40 MB/s"'))
    process = desk.hosts.start("ws", *words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    begun = time.monotonic()
    while part_bytes(desk) < 20_000_000:
        assert time.monotonic() - begun < 60, process.communicate(timeout=5)
        time.sleep(0.05)
    fault(process)
    _, said = process.communicate(timeout=150)
    return process.returncode, said


def went_on(desk: Desk, digest: str) -> None:
    """The same command again: it moves only the rest, and everything is right."""
    held = part_bytes(desk)
    assert held > 0
    assert desk.hosts.run("eval", "test", "-e", "/data/dg/in/big.dat", check=False).returncode, (
        "never half-visible"
    )
    value = json.loads(desk.stage("ct200:out/big.dat", "eval1:in/big.dat", "--json").stdout)
    assert value["moved_bytes"] <= 200_000_000 - held
    assert (value["sha256"], digest_at(desk, "eval", "/data/dg/in/big.dat")) == (digest, digest)
    assert desk.hosts.run("eval", "sh", "-c", "ls -A /data/dg/in").stdout.split() == [
        b".big.dat.staged.json",
        b"big.dat",
    ]


def test_the_hosts_are_what_they_should_be(hosts: Hosts) -> None:
    assert hosts.run("ws", "ssh", "train", "hostname").stdout == b"train\n"
    assert hosts.run("ws", "ssh", "eval", "hostname").stdout == b"eval\n"
    for one, other in (("train", "eval"), ("eval", "train")):
        done = hosts.run(
            one, "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", other, "true", check=False
        )
        assert done.returncode == 255
    assert hosts.run("ws", "ssh", "train", "pct", "exec", "200", "--", "python3", "-V").stdout
    assert hosts.run("ws", "ssh", "train", "pct exec 201 -- python3 -V", check=False).returncode == 127


def test_the_stand_in_for_pct_fails_as_the_real_one(hosts: Hosts) -> None:
    """Exit code 0 and an empty file where there was one: why `pct pull` is never used."""
    program = (
        "echo old > /data/pulled; pct pull 200 /nothing/here /data/pulled; echo $?; stat -c %s /data/pulled"
    )
    done = hosts.run("train", "sh", "-c", program)
    assert done.stdout.split() == [b"0", b"0"]


@pytest.mark.parametrize("place", ["pve1", "ct200", "ct201"])
def test_every_transport_passes_the_conformance_suite(place: str, desk: Desk) -> None:
    desk.write("/data/conformance.toml", FLEET)
    done = desk.hosts.run(
        "ws",
        *(
            "env",
            "DRAFTGAUGE_TEST_FLEET=/data/conformance.toml",
            f"PATH={Path(PYTHON).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        ),
        *(PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", place),
        str(ROOT / "tests" / "test_transports.py"),
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_fleet_check_explains_the_route(desk: Desk) -> None:
    value = json.loads(desk.draftgauge("fleet", "check", desk.fleet, "--json").stdout)
    assert {name: place["problem"] for name, place in value["places"].items()} == dict.fromkeys(
        ("workstation", "pve1", "eval1", "ct200", "ct201"), ""
    )
    assert value["places"]["ct201"]["python"] is None
    assert value["places"]["eval1"]["draftgauge"]
    refusals = {(way["from"], way["to"]): way["refusal"] for way in value["ways"]}
    assert refusals["eval1", "pve1"] == "Connection timed out"
    routes = {(route["from"], route["to"]): route["text"] for route in value["routes"]}
    assert routes["ct200", "eval1"].startswith("ct200 -> pve1 (container) -> workstation -> eval1, because ")
    assert "eval1 cannot reach pve1: Connection timed out" in routes["ct200", "eval1"]
    assert "Connection timed out" in desk.draftgauge("fleet", "check", desk.fleet).stdout


def test_a_dry_run_moves_nothing(desk: Desk, big: str) -> None:
    said = desk.stage("ct200:out/big.dat", "eval1:in/", "--dry-run").stdout
    assert "ct200 -> pve1 (container) -> workstation -> eval1" in said
    assert "200.0 MB" in said
    assert desk.hosts.run("eval", "test", "-e", "/data/dg/in", check=False).returncode


def test_a_killed_command_goes_on(desk: Desk, big: str) -> None:
    code, _ = interrupted(desk, lambda process: desk.hosts.run("ws", "pkill", "-9", "-f", "draftgauge stage"))
    assert code != 0
    went_on(desk, big)


def test_a_killed_connection_is_made_anew_by_itself(desk: Desk, big: str) -> None:
    code, said = interrupted(desk, lambda _: desk.hosts.kill_connections("eval"))
    assert code == 0, said
    assert digest_at(desk, "eval", "/data/dg/in/big.dat") == big


def test_a_killed_source_connection_is_made_anew_by_itself(desk: Desk, big: str) -> None:
    code, said = interrupted(desk, lambda _: desk.hosts.kill_connections("train"))
    assert code == 0, said
    assert digest_at(desk, "eval", "/data/dg/in/big.dat") == big


@pytest.mark.parametrize("host", ["eval", "train"])
def test_a_link_that_falls_silent_is_noticed_and_waited_for(host: str, desk: Desk, big: str) -> None:
    """Neither end is told. The orphan at the far side may still write when the link is back: the same bytes."""

    def silence(_: subprocess.Popen[Any]) -> None:
        desk.hosts.cut(host)
        time.sleep(20)
        desk.hosts.mend(host)

    code, said = interrupted(desk, silence)
    assert code == 0, said
    assert digest_at(desk, "eval", "/data/dg/in/big.dat") == big


def test_a_full_disk_that_was_cleared_goes_on(desk: Desk, big: str) -> None:
    def fill(_: subprocess.Popen[Any]) -> None:
        desk.hosts.run("eval", "sh", "-c", "dd if=/dev/zero of=/data/filler bs=1M 2>/dev/null || true")

    code, said = interrupted(desk, fill)
    assert code == 5, said
    assert "Make room there" in said
    desk.hosts.run("eval", "rm", "/data/filler")
    went_on(desk, big)


def test_too_little_space_is_said_before_the_first_byte(desk: Desk, big: str) -> None:
    desk.hosts.run("eval", "sh", "-c", "dd if=/dev/zero of=/data/filler bs=1M 2>/dev/null || true")
    done = desk.stage("ct200:out/big.dat", "eval1:in/big.dat", code=5)
    assert "needs 200.0 MB" in done.stderr
    assert desk.hosts.run("eval", "test", "-e", "/data/dg/in", check=False).returncode


def test_a_source_that_is_replaced_meanwhile_is_not_published(desk: Desk, big: str) -> None:
    program = "head -c 200000000 /dev/zero > /data/out/new && mv /data/out/new /data/out/big.dat"
    code, said = interrupted(desk, lambda _: desk.hosts.run("train", "sh", "-c", program))
    assert code in (0, 5), said
    published = desk.hosts.run("eval", "test", "-e", "/data/dg/in/big.dat", check=False).returncode == 0
    # The file that was being read lives on until it is closed: then everything of it arrives, and it is that one.
    assert not published or digest_at(desk, "eval", "/data/dg/in/big.dat") == big


def test_a_source_that_is_written_in_place_meanwhile_is_refused(desk: Desk, big: str) -> None:
    """What rsync and pct take for a good copy."""
    program = "dd if=/dev/zero of=/data/out/big.dat bs=1M seek=150 count=1 conv=notrunc 2>/dev/null"
    code, said = interrupted(desk, lambda _: desk.hosts.run("train", "sh", "-c", program))
    assert code == 5, said
    assert "changed while it was read" in said
    assert desk.hosts.run("eval", "test", "-e", "/data/dg/in/big.dat", check=False).returncode


def test_a_source_that_is_deleted_meanwhile_arrives_or_is_said_to_be_gone(desk: Desk, big: str) -> None:
    code, said = interrupted(desk, lambda _: desk.hosts.run("train", "rm", "/data/out/big.dat"))
    if code == 0:
        assert digest_at(desk, "eval", "/data/dg/in/big.dat") == big
    else:
        assert "gone" in said


def test_a_relay_may_store(desk: Desk, big: str) -> None:
    desk.stage("ct200:out/big.dat", "eval1:in/big.dat", "--store", "/data/stored")
    assert digest_at(desk, "ws", "/data/stored/big.dat") == big
    assert digest_at(desk, "eval", "/data/dg/in/big.dat") == big
    desk.hosts.run("ws", "rm", "-r", "/data/stored")


def test_a_place_that_does_not_answer_is_named(desk: Desk) -> None:
    nobody = f"{desk.hosts.environment['HOSTS_NET']}.1.77"
    desk.write("/data/lost.toml", FLEET + f'\n[hosts.lost]\nssh = "{nobody}"\n')
    done = desk.draftgauge("fleet", "check", "/data/lost.toml", code=5)
    assert "lost" in done.stderr
    assert "! lost" in done.stdout
    again = desk.draftgauge("stage", "--fleet", "/data/lost.toml", "lost:/x", "eval1:in/x", code=5)
    assert "lost" in again.stderr


def test_within_one_host_the_host_pumps(desk: Desk, big: str) -> None:
    value = json.loads(desk.stage("ct200:out/big.dat", "pve1:in/big.dat", "--json").stdout)
    assert value["route"] == ["ct200", "pve1 (container)"]
    assert digest_at(desk, "train", "/data/pve1/in/big.dat") == big
    desk.hosts.run("train", "rm", "-r", "/data/pve1/in")


def test_a_host_that_reaches_another_pumps_by_its_own_ssh(desk: Desk, big: str) -> None:
    """The other is the same host again under another name: to ssh it is another one."""
    for name in ("id_ed25519", "known_hosts"):
        data = desk.hosts.run("ws", "sh", "-c", f"cat ~/.ssh/{name}").stdout.replace(b"train ", b"127.0.0.1 ")
        desk.hosts.run("train", "sh", "-c", f"umask 077 && cat > ~/.ssh/{name}", input=data)
    twin = '\n[hosts.twin]\nssh = "train"\nwork = "/data/twin"\nkeep_free = "1 MB"\n'
    fleet = FLEET.replace('ssh = "train"', 'ssh = "train"\nreaches = { twin = "127.0.0.1" }') + twin
    desk.write("/data/twin.toml", fleet)
    words = ("stage", "--fleet", "/data/twin.toml", "ct200:out/big.dat", "twin:in/big.dat", "--json")
    value = json.loads(desk.draftgauge(*words).stdout)
    assert value["route"] == ["ct200", "pve1 (container)", "twin"]
    assert value["route_why"] == "pve1 reaches twin itself"
    assert digest_at(desk, "train", "/data/twin/in/big.dat") == big
    desk.hosts.run("train", "sh", "-c", "rm -r /data/twin ~/.ssh/id_ed25519 ~/.ssh/known_hosts")
