"""How words become a command for a place, and what an end that failed means."""

import json
import shlex
from pathlib import Path

import pytest

from draftgauge.errors import (
    BeingWrittenError,
    ConnectionLostError,
    DraftgaugeError,
    FleetError,
    UnfinishedError,
)
from draftgauge.fleet.places import Fleet, read_fleet
from draftgauge.fleet.pump import MARK
from draftgauge.fleet.reach import End, Reach, reaching, refuse, reply_of

TEXT = """
[hosts.pve1]
ssh = "root@pve1"
reaches = { eval1 = "10.0.0.7" }

[hosts.eval1]
ssh = "eval1"

[containers.ct200]
host = "pve1"
kind = "pct"
id = "200"
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.toml").write_text(TEXT)
    return read_fleet(tmp_path / "fleet.toml")


def test_the_way_into_a_container_is_ssh_and_then_its_own_words(fleet: Fleet) -> None:
    with reaching(fleet) as reach:
        words = reach.words(fleet.place("ct200"), ("cat", "a b; rm -rf '/'\n$x"))
    assert words[:2] == ("ssh", "-T")
    assert "BatchMode=yes" in words
    dash = words.index("--")
    assert words[dash + 1] == "root@pve1"
    assert shlex.split(words[dash + 2]) == ["pct", "exec", "200", "--", "cat", "a b; rm -rf '/'\n$x"]
    assert len(words) == dash + 3


def test_seen_from_its_own_host_no_ssh_is_needed(fleet: Fleet) -> None:
    with reaching(fleet) as reach:
        assert reach.words(fleet.place("ct200"), ("true",), via="pve1") == (
            "pct",
            "exec",
            "200",
            "--",
            "true",
        )
        assert reach.words(fleet.place("workstation"), ("true",)) == ("true",)


def test_another_host_uses_the_address_that_it_knows(fleet: Fleet) -> None:
    with reaching(fleet) as reach:
        seen = reach.words(fleet.place("eval1"), ("true",), via="pve1")
        assert "10.0.0.7" in seen
        assert not any("Control" in word for word in seen), "no shared connection of ours is there"
        with pytest.raises(FleetError, match=r"hosts.eval1.reaches = \{ workstation = "):
            reach.words(fleet.place("workstation"), ("true",), via="eval1")


def test_small_requests_share_a_connection_in_a_folder_of_ours_alone(fleet: Fleet) -> None:
    with reaching(fleet) as reach:
        folder = Path(reach.sockets)
        assert folder.stat().st_mode & 0o777 == 0o700
        shared = reach.words(fleet.place("eval1"), ("true",), shared=True)
        bulk = reach.words(fleet.place("eval1"), ("true",))
    assert f"ControlPath={folder}/%C" in shared
    assert "ControlPath=none" in bulk
    assert not folder.exists()


def test_a_request_is_no_part_of_the_command_line(fleet: Fleet) -> None:
    with reaching(fleet) as reach:
        reach.without_python["ct200"] = False
        command = reach.command(fleet.place("ct200"), "look", {"path": "/secret name"})
    assert "secret" not in " ".join(command.argv)
    assert b"/secret name" in command.stdin


def said(kind: str, value: object) -> str:
    return f"motd\n{MARK.decode()}{kind} {json.dumps(value)}\n"


def test_a_reply_stands_between_what_the_machine_says_itself(fleet: Fleet) -> None:
    place = fleet.place("eval1")
    assert reply_of(place, End(0, "", said("reply", {"bytes": 3}) + "bye\n")) == {"bytes": 3}
    with pytest.raises(FleetError, match="exit code 0"):
        reply_of(place, End(0, "", "motd\n"))
    with pytest.raises(ConnectionLostError):
        reply_of(place, End(255, "", said("reply", {"bytes": 3})))


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (End(1, "", said("error", {"kind": "missing", "text": "x is gone"})), FleetError),
        (End(1, "", said("error", {"kind": "damaged", "text": "x is damaged"})), FleetError),
        (End(1, "", said("error", {"kind": "exists", "text": "x exists"})), FleetError),
        (End(1, "", said("error", {"kind": "denied", "text": "x"})), FleetError),
        (End(1, "", said("error", {"kind": "space", "text": "x"})), UnfinishedError),
        (End(1, "", said("error", {"kind": "changed", "text": "x"})), BeingWrittenError),
        (End(1, "", said("error", {"kind": "short", "text": "x"})), ConnectionLostError),
        (End(255, "", "ssh: connect to host x port 22: Connection timed out"), ConnectionLostError),
        (End(255, "", "client_loop: send disconnect: Broken pipe"), ConnectionLostError),
        (End(255, "", "x: Permission denied (publickey)."), FleetError),
        (End(255, "", "Host key verification failed."), FleetError),
        (End(255, "", "ssh: Could not resolve hostname x: Name or service not known"), FleetError),
        (End(1, "", "cat: write error: No space left on device"), UnfinishedError),
        (End(-9, "", ""), ConnectionLostError),
        (End(127, "", "sh: tail: not found"), FleetError),
    ],
)
def test_what_may_go_well_later_is_told_from_what_will_not(
    end: End, kind: type[DraftgaugeError], fleet: Fleet
) -> None:
    with pytest.raises(kind, match="eval1") as raised:
        refuse(fleet.place("eval1"), end)
    assert type(raised.value) is kind
    assert raised.value.exit_code == (1 if kind is FleetError else 5)


def test_the_machines_own_last_lines_are_in_the_message(fleet: Fleet) -> None:
    lines = "".join(f"line {n}\n" for n in range(20))
    with pytest.raises(FleetError) as raised:
        refuse(fleet.place("eval1"), End(1, "", lines))
    assert str(raised.value).splitlines()[1:] == [f"  line {n}" for n in range(15, 20)]


def test_a_program_that_is_missing_here_is_named(fleet: Fleet) -> None:
    reach = Reach(fleet, "/none")
    with pytest.raises(FleetError, match="no-such-program is not installed on this machine"):
        reach.start(fleet.place("eval1"), ("no-such-program",), 5.0)


def test_a_place_that_hangs_is_given_up(fleet: Fleet) -> None:
    with pytest.raises(ConnectionLostError, match="eval1 did not answer"):
        Reach(fleet, "/none").start(fleet.place("eval1"), ("sleep", "20"), 0.2)
