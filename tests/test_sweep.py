"""Sweeps: every combination of a plan, each the run that `eval` would make, and none twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.acceptance import Policy
from draftgauge.errors import FleetError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.runs import Run, list_runs
from draftgauge.stated import Stated
from draftgauge.sweep import Combination, Outcome, read_sweep, run_sweep
from tests import tiny

RECORDING = str(tiny.recording().path)


def plan(folder: Path, text: str = "", **lists: Any) -> Path:
    """A plan file in a folder with the saves of steps 400, 90 and 8."""
    for step in (400, 90, 8):
        state = tiny.weights()
        state["fc.weight"][0, 0] += step
        save = folder / "out" / f"step_{step}" / "checkpoint.pt"
        if not save.exists():
            tiny.trainer_pt(save, state, global_step=step, config=tiny.drafter_config())
    said = {"checkpoints": ["out/step_*"], "recordings": [RECORDING]} | lists
    path = folder / "plan.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items()) + text)
    return path


def names(sweep: Any) -> list[tuple[str, int | None]]:
    return [(Path(c.checkpoint).name, c.block_size) for c in sweep.combinations]


def test_combinations_go_series_by_series_in_the_order_of_steps(tmp_path: Path) -> None:
    sweep = read_sweep(plan(tmp_path, block_sizes=[8, 4]))
    steps = ["step_8", "step_90", "step_400"]
    assert names(sweep) == [(step, 8) for step in steps] + [(step, 4) for step in steps]
    assert {c.recording for c in sweep.combinations} == {Path(RECORDING)}
    own = read_sweep(plan(tmp_path, checkpoints=["out/step_90", "out/step_*", "hf://owner/drafter@main"]))
    assert names(own) == [("step_90", None), ("step_8", None), ("step_400", None), ("drafter@main", None)]


def test_a_name_is_taken_as_it_is_and_a_pattern_leaves_out_what_is_hidden(tmp_path: Path) -> None:
    path = plan(tmp_path, checkpoints=["out/*", "a[1]", "."])
    (tmp_path / "out" / ".partial-7-step_9").mkdir()
    (tmp_path / "a[1]").mkdir()
    found = [c.checkpoint for c in read_sweep(path).combinations]
    places = ("out/step_8", "out/step_90", "out/step_400", "a[1]", "")
    assert found == [str(tmp_path / place) for place in places]


def test_no_budgets_are_no_trees(tmp_path: Path) -> None:
    text = "[eval]\nbudgets = []\nnum_prompts = 1\n"
    (outcome,) = run_sweep(
        read_sweep(plan(tmp_path, text, checkpoints=["out/step_8"])), root=tmp_path / "runs"
    )
    assert outcome.run is not None
    assert list(outcome.run.summary["policies"]) == ["chain", "coverage4", "coverage8"]


@pytest.mark.parametrize(
    ("lists", "text", "message"),
    [
        ({"checkpoints": []}, "", "checkpoints is empty"),
        ({"checkpoints": ["nowhere/*"]}, "", "checkpoints names 'nowhere/\\*', and nothing is found there"),
        ({"recordings": ["nowhere"]}, "", "recordings names 'nowhere', and nothing is found"),
        ({"recordings": ["out"]}, "", r"plan\.toml: recordings: .* holds no recording\.json"),
        ({"recordings": ["hf://owner/name"]}, "", r"plan\.toml: recordings: hf:/owner/name is not a folder"),
        ({"checkpoints": ["out/**x"]}, "", "checkpoints names 'out/\\*\\*x', and nothing is found there"),
        ({}, "[eval]\nbudgets = [5000]\n", r"plan\.toml: eval: DDTree\(5000\) is too large"),
        ({"checkpoints": ["x" * 300]}, "", "checkpoints names 'x+', and nothing is found there"),
        (
            {"recordings": [RECORDING, f"{RECORDING}/../{Path(RECORDING).name}"]},
            "",
            "is the same as .*take one",
        ),
        ({"block_sizes": [4, 4]}, "", "block_sizes names 4 twice"),
        ({"block_sizes": [0]}, "", r"Expected `int` >= 1 .*block_sizes"),
        ({"block_sizes": [4]}, "[eval]\nblock_size = 8\n", "both say the block size"),
        ({"checkpoint": "out"}, "", "unknown field `checkpoint`"),
        ({}, "[eval]\nbudget = [4]\n", "unknown field `budget`"),
        ({}, "[eval]\nwiring = 'no.toml'\n", r"plan\.toml: eval\.wiring: .*no\.toml cannot be read"),
        ({}, "[eval", "is not TOML"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(
    lists: dict[str, Any], text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FleetError, match=message):
        read_sweep(plan(tmp_path, text, **lists))


def test_every_run_is_the_one_that_eval_makes_and_none_is_made_twice(tmp_path: Path) -> None:
    text = "[eval]\nbudgets = [4]\nchain_lengths = [2]\ncoverage = [2]\nnum_prompts = 2\nanchors = 'walk'\n"
    sweep = read_sweep(plan(tmp_path, text, block_sizes=[8, 4]))
    first = list(run_sweep(sweep, root=tmp_path / "runs"))
    assert [outcome.combination for outcome in first] == list(sweep.combinations)
    alone = evaluate_checkpoint(
        tmp_path / "out" / "step_90",
        RECORDING,
        Options(
            Stated(block_size=4),
            policies=tuple(map(Policy.parse, ("chain", "chain2", "ddtree4", "coverage2"))),
            anchors="walk",
            num_prompts=2,
        ),
        root=tmp_path / "alone",
    )
    (same,) = (o.run for o in first if o.run is not None and o.run.plan == alone.plan)
    assert same.summary == alone.summary
    before = {run.name for run in list_runs(tmp_path / "runs")}
    again = list(run_sweep(sweep, root=tmp_path / "runs"))
    assert [outcome.run for outcome in again] == [outcome.run for outcome in first]
    assert {run.name for run in list_runs(tmp_path / "runs")} == before
    assert len(before) == 6


def test_what_cannot_be_measured_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    path = plan(tmp_path, "[eval]\nnum_prompts = 1\nbudgets = [4]\n")
    (tmp_path / "out" / "step_90" / "checkpoint.pt").write_bytes(b"cut short")
    found = list(run_sweep(read_sweep(path), root=tmp_path / "runs"))
    assert [outcome.run is None for outcome in found] == [False, True, False]
    assert "checkpoint.pt" in str(found[1].reason)
    value = found[1].as_dict()
    assert (value["run"], value["trusted"], value["tau"], value["reason"]) == (
        None,
        None,
        {},
        found[1].reason,
    )


def test_an_outcome_says_what_a_table_needs(tmp_path: Path) -> None:
    run: Run = evaluate_checkpoint(
        tiny.workshop() / "drafter", RECORDING, Options(num_prompts=2), root=tmp_path
    )
    value = Outcome(Combination("here", Path(RECORDING), None), run).as_dict()
    assert value["block_size"] == 8
    assert value["tau"]["chain"] == run.summary["policies"]["chain"]["tau_response"]
    assert value["trusted"] == (not run.failed_controls)
    json.dumps(value, allow_nan=False)
