"""The commands that work across machines, as a user types them, and how what they find is shown."""

import json
import subprocess
from pathlib import Path

import pytest

from draftgauge.report.fleet import series_report, training_line
from tests import tiny
from tests.yard import Yard, yard


@pytest.fixture
def made(tmp_path: Path) -> Yard:
    return yard(tmp_path)


def draftgauge(made: Yard, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = tiny.draftgauge(*words, cwd=made.folder)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def test_stage_shows_its_plan_moves_and_finds_it_there(made: Yard) -> None:
    made.checkpoint(10)
    words = ("stage", "--fleet", "fleet.toml", "train:out/step_10/checkpoint.pt", "lab:in/")
    plan = draftgauge(made, *words, "--dry-run").stdout
    assert (
        "what     27 tensors of model_state_dict" in plan
        or "tensors of model_state_dict and the plain" in plan
    )
    assert not (made.folder / "lab" / "in").exists()
    first = draftgauge(made, *words)
    assert first.stdout.startswith("lab:")
    assert "bytes moved" in first.stdout
    assert "checkpoint.safetensors" in first.stdout
    again = json.loads(draftgauge(made, *words, "--json").stdout)
    assert (again["already_there"], again["moved_bytes"], again["step"]) == (True, 0, 10)


def test_stage_without_a_fleet_works_here(made: Yard) -> None:
    source = made.checkpoint(10)
    draftgauge(made, "stage", source, "slim.safetensors")
    shown = json.loads(draftgauge(made, "inspect", "slim.safetensors", "--json").stdout)
    assert shown["step"] == 10 if "step" in shown else True
    other = made.checkpoint(20)
    done = draftgauge(made, "stage", other, "slim.safetensors", code=1)
    assert "exists already and holds something else" in done.stderr


def test_stage_may_store_on_the_way(made: Yard) -> None:
    made.checkpoint(10)
    words = (
        "stage",
        "--fleet",
        "fleet.toml",
        "train:out/step_10/checkpoint.pt",
        "lab:in/",
        "--store",
        "kept",
    )
    plans = json.loads(draftgauge(made, *words, "--dry-run", "--json").stdout)
    assert [Path(plan["target"].partition(":")[2] or plan["target"]).parent.name for plan in plans] == [
        "kept",
        "in",
    ]
    draftgauge(made, *words)
    stored, there = (made.folder / at / "checkpoint.safetensors" for at in ("kept", "lab/in"))
    assert stored.read_bytes() == there.read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("stage", "--fleet", "fleet.toml", "trian:x", "lab:y"), 1, "Did you mean train?"),
        (("stage", "--fleet", "fleet.toml", "train:none", "lab:y"), 1, "none does not exist"),
        (("stage", "--fleet", "flet.toml", "train:x", "lab:y"), 1, "flet.toml cannot be read"),
        (("stage", "train:x", "lab:y"), 1, "no fleet file was given (--fleet FILE, or `fleet` in a plan)"),
        (("fleet", "check", "none.toml"), 1, "none.toml cannot be read"),
        (("run", "none.toml"), 1, "none.toml cannot be read"),
        (("watch", "plan.toml", "--until", "20000"), 1, "expected step=NUMBER"),
        (("watch", "plan.toml", "--gate", "tau is good"), 1, "is not understood"),
        (("watch", "plan.toml", "--once"), 1, "has no [watch]"),
        (("stage",), 2, "Missing argument"),
    ],
)
def test_a_mistake_is_named(words: tuple[str, ...], code: int, said: str, made: Yard) -> None:
    made.plan()
    assert said in draftgauge(made, *words, code=code).stderr


def test_fleet_check_in_text_and_as_data(made: Yard) -> None:
    said = draftgauge(made, "fleet", "check", "fleet.toml").stdout
    assert {"train", "lab", "workstation"} <= {line.split(" ")[0] for line in said.splitlines()}
    value = json.loads(draftgauge(made, "fleet", "check", "fleet.toml", "--json").stdout)
    assert value["places"]["lab"]["draftgauge"]
    (made.folder / "fleet.toml").write_text(
        '[containers.gone]\nhost = "workstation"\nenter = ["sh", "-c", "exit 3", "sh"]\n'
    )
    assert "no answer from gone" in draftgauge(made, "fleet", "check", "fleet.toml", code=5).stderr


def test_run_prints_the_report_and_keeps_it(made: Yard) -> None:
    made.checkpoint(10)
    made.plan(baseline={"gates": ["tau>=9"]})
    done = draftgauge(made, "run", "plan.toml", code=4)
    assert "measured, but failed: gate 'tau>=9'" in done.stderr
    assert "saved step 10; training is at 13" in done.stdout
    assert "gate FAILED: tau>=9" in done.stdout
    (report,) = (made.folder / "plan" / "reports").glob("*.txt")
    assert report.read_text() == done.stdout
    value = json.loads(draftgauge(made, "run", "plan.toml", "--json", code=4).stdout)
    assert value["saved_step"] == 10
    assert json.loads(report.with_suffix(".json").read_text()) == value


def test_watch_prints_its_series(made: Yard) -> None:
    for step in (10, 20):
        made.checkpoint(step)
    made.plan(
        watch={"folder": "train:out", "match": "step_*/checkpoint.pt", "every_s": 0.1, "order": "oldest"}
    )
    done = draftgauge(made, "watch", "plan.toml", "--until", "step=20")
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["10", "20"]
    failed = draftgauge(made, "watch", "plan.toml", "--once", "--gate", "tau>=99", code=4)
    assert "no checkpoint passed tau>=99" in failed.stderr
    assert len(list((made.folder / "plan" / "reports").glob("*.txt"))) == 2


def test_where_training_is_in_a_sentence() -> None:
    outcome = {"saved_step": 4000, "trainer": {"step": 5329, "ktok_per_s": 19.5}}
    assert training_line(outcome) == "saved step 4000; training is at 5329, ktok_per_s 19.5"
    assert (
        training_line({"saved_step": None, "trainer": {"step": 7}})
        == "saved of no stated step; training is at 7"
    )
    assert training_line({"saved_step": 1, "trainer": {}}) == ""


def test_a_series_is_in_order_of_steps() -> None:
    def row(step: int | None, value: float | None, reason: str = "") -> dict:
        tau = None if value is None else {"value": value, "low": value - 1, "high": value + 1}
        return {
            "source": f"a/{step}",
            "saved_step": step,
            "tau": tau,
            "difference": None,
            "trusted": value is not None or None,
            "trainer": {},
            "reason": reason,
        }

    said = series_report([row(1000, 2.5), row(None, None, "damaged"), row(900, 2.25)])
    assert [line.split()[0] for line in said.splitlines()[2:5]] == ["900", "1000", "-"]
    assert "! a/None: damaged" in said
    assert "1.25, 3.25" in said
