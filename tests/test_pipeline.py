"""The whole use: a checkpoint at one place, its recording at another, the run here, every step done once."""

import json
import shutil
from pathlib import Path

import pytest

from draftgauge.checkpoint import digest, open_checkpoint
from draftgauge.errors import FleetError
from draftgauge.fleet.pipeline import keep_outcome, run_plan
from draftgauge.fleet.plans import FleetPlan
from draftgauge.fleet.reach import reaching
from draftgauge.report.fleet import outcome_report, training_line
from draftgauge.runs import ELSEWHERE, open_run
from tests import tiny
from tests.yard import Yard, yard


@pytest.fixture
def made(tmp_path: Path) -> Yard:
    return yard(tmp_path)


def run(made: Yard, plan: FleetPlan) -> dict:
    with reaching(plan.fleet) as reach:
        return run_plan(reach, plan, made.log())


def test_from_the_trainers_file_to_the_report(made: Yard) -> None:
    made.checkpoint(10)
    plan = made.plan(check=True)
    outcome = run(made, plan)
    found = open_run(Path(outcome["run"]))
    assert found.path.parent == plan.results / "runs"
    assert (found.path / ELSEWHERE).read_text().startswith(f"lab:{made.folder}/lab/runs/")
    assert [(step["step"], step["place"]) for step in outcome["steps"]] == [
        ("look", "train"),
        ("read the trainer's log", "train"),
        ("stage", "lab"),
        ("check", "lab"),
        ("evaluate", "lab"),
        ("bring back", "workstation"),
    ]
    assert training_line(outcome) == "saved step 10; training is at 13, ktok_per_s 19.5"
    assert any(c["slug"] == "step-behind" for c in found.summary["caveats"])
    staged = list((made.folder / "lab" / "checkpoints").glob("step_10-*.safetensors"))
    assert len(staged) == 1
    assert (plan.results / "checks" / f"{outcome['name']}.json").exists()
    report = outcome_report(outcome, "THE RUN")
    assert "what ran" in report
    assert keep_outcome(plan, outcome, report).read_text() == report + "\n"

    again = run(made, made.plan(check=True))
    assert again["run"] == outcome["run"]
    assert {step["step"] for step in again["steps"] if step["skipped"]} == {"stage", "check", "evaluate"}
    assert again["tau"] == outcome["tau"]


def test_the_numbers_are_those_of_measuring_the_file_itself(made: Yard) -> None:
    checkpoint = made.checkpoint(10)
    outcome = run(made, made.plan())
    asked = ("--recording", tiny.recording().path, "--budgets", "4", "--max-blocks", "6")
    done = tiny.draftgauge("eval", checkpoint, *asked, "--json", cwd=made.folder)
    direct = json.loads(done.stdout)
    brought = open_run(Path(outcome["run"]))
    assert brought.summary["policies"] == direct["summary"]["policies"]
    assert brought.plan.checkpoint_digest == direct["run"]["plan"]["checkpoint_digest"]


def test_a_baseline_is_compared_and_gates_are_judged(made: Yard) -> None:
    made.checkpoint(10)
    made.checkpoint(20)
    first = run(made, made.plan(results="first"))
    baseline = {
        "run": str(Path(first["run"]).relative_to(made.folder)),
        "stored": "stored.json",
        "gates": [
            "tau>=1.0",
            "ddtree64.tau>=1.0",
            f"not worse than {Path(first['run']).relative_to(made.folder)} by 99",
        ],
    }
    (made.folder / "stored.json").write_text(json.dumps({"vanilla": 0.5}))
    outcome = run(made, made.plan(checkpoint="train:out/step_20/checkpoint.pt", baseline=baseline))
    assert outcome["comparison"]["baseline"] == first["name"]
    assert [gate["passed"] for gate in outcome["gates"]][:2] == [True, None]
    assert "has no ddtree64" in outcome["gates"][1]["text"]
    assert outcome["beside"] is not None
    report = outcome_report(outcome, "THE RUN")
    assert "gate passed: tau>=1.0" in report
    assert "paired on" in report


def test_a_baseline_that_cannot_be_compared_is_a_reason_and_no_failure(made: Yard) -> None:
    made.checkpoint(10)
    first = run(made, made.plan(results="first"))
    other = {"budgets": [4], "max_blocks": 3}
    outcome = run(made, made.plan(eval=other, baseline={"run": first["run"]}))
    assert (outcome["comparison"] is None) == bool(outcome["comparison_reason"])


def test_a_wiring_file_travels_along(made: Yard) -> None:
    config = tiny.drafter_config()
    mask = config["dflash_config"].pop("mask_token_id")
    tiny.trainer_pt(made.checkpoint(10), step=10, config=config)
    with pytest.raises(
        FleetError, match=r"lab: draftgauge eval ended with exit code 1:\n(.*\n)*.*mask_token_id"
    ):
        run(made, made.plan())
    (made.folder / "mine.toml").write_text(f"mask_token_id = {mask}\n")
    outcome = run(made, made.plan(eval={"budgets": [4], "max_blocks": 6, "wiring": "mine.toml"}))
    assert outcome["tau"]["value"] > 0


def test_the_weights_that_a_plan_chooses_are_those_that_are_measured(made: Yard) -> None:
    made.checkpoint(10, ema_state_dict=tiny.weights())
    chosen = {"budgets": [4], "max_blocks": 6, "state_dict": "ema_state_dict"}
    outcome = run(made, made.plan(eval=chosen))
    alone = tiny.trainer_pt(made.folder / "alone.pt", config=tiny.drafter_config())
    brought = open_run(Path(outcome["run"]))
    assert brought.plan.checkpoint_digest == digest(open_checkpoint(alone))


def test_a_check_that_fails_there_makes_the_result_not_trusted(made: Yard) -> None:
    made.checkpoint(10)
    plan = made.plan(check=True)
    first = run(made, plan)
    kept = plan.results / "checks" / f"{first['name']}.json"
    kept.write_text(
        json.dumps(json.loads(kept.read_text()) | {"trusted": False, "failed": ["context-zeroed"]})
    )
    again = run(made, plan)
    assert (again["trusted"], "context-zeroed" in again["failed"]) == (False, True)
    assert "! NOT TRUSTED: " in outcome_report(again, "THE RUN")


def test_a_failure_says_at_which_place_and_with_its_own_last_lines(made: Yard) -> None:
    made.checkpoint(10)
    manifest = made.folder / "lab" / "recordings" / tiny.recording().path.name / "recording.json"
    manifest.write_text("{}")
    with pytest.raises(
        FleetError, match=r"lab: draftgauge eval ended with exit code 1:\n  error: .*recording"
    ):
        run(made, made.plan())


def test_what_is_missing_of_a_recording_is_recorded_or_said(made: Yard, tmp_path: Path) -> None:
    made.checkpoint(10)
    tiny.target_dir(made.folder / "lab" / "target", stops=[tiny.STOP])
    tiny.prompts_file(made.folder / "lab" / "prompts.jsonl")
    shutil.rmtree(made.folder / "lab" / "recordings")
    words = (
        "record",
        "--target",
        "target",
        "--prompts",
        "prompts.jsonl",
        "--taps",
        "1,3",
        "--num-prompts",
        2,
    )
    done = tiny.draftgauge(*words, "--max-new-tokens", "8", "--json", cwd=made.folder / "lab")
    partial = Path(json.loads(done.stdout)["path"]).name
    plan = {"recording": f"lab:recordings/{partial}", "eval": {"budgets": [4], "max_blocks": 4}}
    asked = {"prompts": str(made.folder / "lab" / "prompts.jsonl"), "max_new_tokens": 8}

    missing = made.plan(**plan, complete={"target": "/nowhere", **asked})
    outcome = run(made, missing)
    assert "not possible, so the 2 prompts" in next(
        s["text"] for s in outcome["steps"] if s["step"] == "complete the recording"
    )
    assert len(open_run(Path(outcome["run"])).summary["prompts"]) == 2

    target = str(made.folder / "lab" / "target")
    whole = run(made, made.plan(**plan, results="whole", complete={"target": target, **asked}))
    assert len(open_run(Path(whole["run"])).summary["prompts"]) == len(tiny.PROMPTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": None}, "`checkpoint` is missing"),
        ({"checkpoint": "train:out/none.pt"}, "none.pt does not exist"),
        ({"recording": "lab:recordings/none"}, "is no complete recording"),
        (
            {"trainer": {"log": "train:none.log", "pattern": "(?P<step>x)"}},
            "trainer.log: .*none.log does not exist",
        ),
        ({"recording": "train:recordings/x"}, "is no complete recording"),
    ],
)
def test_what_is_missing_is_named(changes: dict, said: str, made: Yard) -> None:
    made.checkpoint(10)
    with pytest.raises(FleetError, match=said):
        run(made, made.plan(**changes))
