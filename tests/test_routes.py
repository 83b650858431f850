"""Which way is taken, and why; hosts that reach each other are stood in for by what was asked once already."""

from pathlib import Path

import pytest

from draftgauge.fleet.places import Fleet, read_fleet
from draftgauge.fleet.reach import Reach
from draftgauge.fleet.routes import plan_route, reaches

TEXT = """
[hosts.pve1]
ssh = "pve1"

[hosts.eval1]
ssh = "eval1"

[containers.ct200]
host = "pve1"
kind = "pct"
id = "200"

[containers.box]
host = "eval1"
kind = "docker"
id = "box"
"""
TIMED_OUT = "Connection timed out"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.toml").write_text(TEXT)
    return read_fleet(tmp_path / "fleet.toml")


def reach(fleet: Fleet, *, forward: str, backward: str, without_python: tuple[str, ...] = ()) -> Reach:
    return Reach(
        fleet,
        "/none",
        without_python={name: name in without_python for name in fleet.places},
        ways={("pve1", "eval1"): forward, ("eval1", "pve1"): backward},
    )


def route(made: Reach, one: str, other: str) -> str:
    return str(plan_route(made, made.fleet.place(one), made.fleet.place(other)))


def test_two_hosts_that_do_not_reach_each_other_meet_at_the_workstation(fleet: Fleet) -> None:
    made = reach(fleet, forward="No route to host", backward=TIMED_OUT)
    assert route(made, "ct200", "eval1") == (
        "ct200 -> pve1 (container) -> workstation -> eval1, because eval1 cannot reach pve1: Connection timed out; "
        "pve1 cannot reach eval1: No route to host"
    )
    assert route(made, "ct200", "box").startswith(
        "ct200 -> pve1 (container) -> workstation -> eval1 (container) -> box, because "
    )


def test_a_host_that_reaches_the_other_moves_the_bytes_itself(fleet: Fleet) -> None:
    pushed = reach(fleet, forward="", backward=TIMED_OUT)
    assert (
        route(pushed, "ct200", "eval1")
        == "ct200 -> pve1 (container) -> eval1, because pve1 reaches eval1 itself"
    )
    pulled = reach(fleet, forward=TIMED_OUT, backward="")
    assert plan_route(pulled, fleet.place("ct200"), fleet.place("eval1")).pump.name == "eval1"


def test_a_host_without_python_cannot_pump(fleet: Fleet) -> None:
    made = reach(fleet, forward="", backward=TIMED_OUT, without_python=("pve1",))
    assert plan_route(made, fleet.place("pve1"), fleet.place("eval1")).pump.name == "workstation"


def test_on_one_host_nothing_leaves_it(fleet: Fleet) -> None:
    made = reach(fleet, forward=TIMED_OUT, backward=TIMED_OUT)
    assert route(made, "ct200", "pve1") == "ct200 -> pve1 (container)"
    assert (
        route(made, "pve1", "ct200") == "pve1 (container) -> ct200"
        or route(made, "pve1", "ct200") == "pve1 -> ct200"
    )


def test_the_workstation_is_an_end_as_any_other(fleet: Fleet) -> None:
    made = reach(fleet, forward=TIMED_OUT, backward=TIMED_OUT)
    assert route(made, "ct200", "workstation") == "ct200 -> pve1 (container) -> workstation"
    assert route(made, "workstation", "eval1") == "workstation -> eval1"


def test_a_host_without_an_address_for_the_other_says_what_to_write(fleet: Fleet) -> None:
    made = Reach(fleet, "/none", without_python=dict.fromkeys(fleet.places, False))
    said = reaches(made, fleet.place("eval1"), fleet.place("workstation"))
    assert "hosts.eval1.reaches" in said
