"""The table of a sweep: its series, and what could not be measured."""

from typing import Any

from draftgauge.report.grid import grid_report


def tau(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.5, "high": value + 0.5}


def outcome(step: int | None, size: int | None, reason: str | None = None, **tau_of: float) -> dict[str, Any]:
    """A sweep's outcome as plain values."""
    run = None if reason else f"step_{step}-1a2b3c4d"
    value: dict[str, Any] = {
        "checkpoint": f"out/step_{step}",
        "recording": "recordings/1f2e",
        "reason": reason,
    }
    value |= {"block_size": size, "run": run, "step": None if reason else step, "trusted": step != 90}
    return value | {"tau": {slug: tau(number) for slug, number in tau_of.items()}}


def test_a_series_is_a_table_with_the_chain_and_the_largest_tree() -> None:
    text = grid_report(
        [
            outcome(8, 16, chain=1.25, ddtree4=1.5, ddtree64=2.0),
            outcome(90, 16, chain=2.25, ddtree4=2.5, ddtree64=3.0),
            outcome(8, 32, chain=1.0),
        ]
    )
    assert (
        text
        == """\
recordings/1f2e, block size 16

                          tau                     tau
run               step  chain        95 %  DDTree(64)        95 %  trust
------------------------------------------------------------------------
step_8-1a2b3c4d      8  1.250  0.75, 1.75       2.000  1.50, 2.50    yes
step_90-1a2b3c4d    90  2.250  1.75, 2.75       3.000  2.50, 3.50     NO

recordings/1f2e, block size 32

                         tau
run              step  chain        95 %  trust
-----------------------------------------------
step_8-1a2b3c4d     8  1.000  0.50, 1.50    yes"""
    )


def test_what_could_not_be_measured_stands_below_with_its_reason() -> None:
    text = grid_report([outcome(8, 16, chain=1.25), outcome(90, None, "checkpoint.pt is cut short")])
    failure = "! out/step_90 on recordings/1f2e, block size its own: checkpoint.pt is cut short"
    assert text.endswith(f"\n\n{failure}")
    assert text.startswith("recordings/1f2e, block size 16\n")
    only = grid_report([outcome(90, None, "checkpoint.pt is cut short")])
    assert only == failure


def test_a_series_stays_one_table_whatever_comes_between() -> None:
    text = grid_report(
        [
            outcome(8, 16, chain=1.0),
            outcome(90, None, "checkpoint.pt is cut short"),
            outcome(200, 4, chain=2.0),
            outcome(400, 16, chain=3.0),
        ]
    )
    assert text.count("block size 16\n") == text.count("block size 4\n") == 1
    first, second = text.split("recordings/1f2e, block size 4\n")
    assert "step_8-" in first
    assert "step_400-" in first
    assert "step_200-" in second
