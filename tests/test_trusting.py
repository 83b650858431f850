"""check, diagnose, gates and --like as commands: what is printed, what is written, which exit code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import planted, tiny
from tests.faults import FAULTS, site_of
from tests.tiny import draftgauge


def values(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def pair() -> planted.Pair:
    return planted.shared_pair(0)


@pytest.fixture(scope="module")
def run(pair: planted.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the pair, in `runs/first` of a folder of its own."""
    folder = tmp_path_factory.mktemp("commands")
    done = draftgauge(
        "eval", pair.checkpoint, "--recording", pair.recording.path, "--name", "first", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "controls    trusted" in done.stdout
    return folder / "runs" / "first"


def test_check_says_that_a_right_pair_is_trusted(pair: planted.Pair, tmp_path: Path) -> None:
    done = draftgauge("check", pair.checkpoint, "--recording", pair.recording.path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "controls    trusted" in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:])) <= 80


def test_a_failed_control_is_exit_code_4_for_check_and_for_eval(tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.what == "two taps equal"]
    site = site_of(fault, tmp_path / "site")
    for command in ("check", "eval"):
        done = draftgauge(command, site.checkpoint, "--recording", site.recording, cwd=tmp_path)
        assert done.returncode == 4, done.stderr
        assert "NOT TRUSTED: taps-differ" in done.stdout
        assert "taps-differ" in done.stderr
    (made,) = (tmp_path / "runs").iterdir()  # the run is kept, marked
    assert json.loads((made / "summary.json").read_text())["trust"]["trusted"] is False


def test_diagnose_writes_what_wiring_takes(pair: planted.Pair, tmp_path: Path) -> None:
    about = (pair.checkpoint, "--recording", pair.recording.path)
    done = draftgauge(
        "diagnose", *about, "--mask-token-id", 291, "--write", "fixed.toml", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert values(done)["settings"] == {"mask_token_id": 290}
    assert "wrote fixed.toml" in done.stderr
    again = draftgauge("check", *about, "--wiring", "fixed.toml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    refused = draftgauge("diagnose", *about, "--write", "fixed.toml", cwd=tmp_path)
    assert refused.returncode == 1
    assert "never overwritten" in refused.stderr


def test_a_gate_stops_with_exit_code_4(run: Path) -> None:
    folder = run.parents[1]
    passed = draftgauge("show", run, "--gate", "tau>=1.5", cwd=folder)
    assert passed.returncode == 0, passed.stderr
    assert "gate passed: tau>=1.5: tau of the chain is" in passed.stdout
    failed = draftgauge("show", run, "--gate", "tau>=1.5", "--gate", "tau>=5", "--json", cwd=folder)
    assert failed.returncode == 4
    assert [gate["passed"] for gate in values(failed)["gates"]] == [True, False]
    assert "gate 'tau>=5'" in failed.stderr


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("ddtree128.tau>=2", "ddtree128 is not measured; add it with --budgets"),
        ("not worse than runs/none by 0.1", "holds no run.json"),
        ("faster than light", "is not understood"),
    ],
)
def test_a_gate_that_cannot_be_answered_is_refused_before_the_work(
    pair: planted.Pair, tmp_path: Path, gate: str, words: str
) -> None:
    about = (pair.checkpoint, "--recording", pair.recording.path)
    done = draftgauge("eval", *about, "--gate", gate, cwd=tmp_path)
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_layers_around_the_taps_are_recorded_for_a_few_prompts(tmp_path: Path) -> None:
    target = tiny.target_dir(tmp_path / "target")
    prompts = tiny.prompts_file(tmp_path / "prompts.jsonl")
    done = draftgauge(
        *("record", "--target", target, "--prompts", prompts, "--taps", "1,3", "--taps-around"),
        *("--max-new-tokens", 6, "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    held = [item["around"] for item in values(done)["items"]]
    assert held == [[0, 2, 4]] * 5 + [[]]


def test_where_training_is_now_is_read_from_its_log_or_said(tmp_path: Path) -> None:
    recording = tiny.recording().path
    about = ("--recording", recording, "--out", "out", "--mask-token-id", 3, "--block-size", 4)
    trained = draftgauge("train", *about, "--steps", 4, "--save-steps", "2", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    for options, now in (((), 4), (("--trainer-step", 9), 9)):
        done = draftgauge(
            *("eval", "out/step_2", "--recording", recording, "--json", "--name", f"at{now}", *options),
            cwd=tmp_path,
        )
        said = {caveat["slug"]: caveat["text"] for caveat in values(done)["summary"]["caveats"]}
        assert f"of step 2; training is at step {now}." in said["step-behind"]
    last = draftgauge("eval", "out/step_4", "--recording", recording, "--json", cwd=tmp_path)
    assert "step-behind" not in {caveat["slug"] for caveat in values(last)["summary"]["caveats"]}


def test_like_measures_what_the_earlier_run_measured(pair: planted.Pair, run: Path) -> None:
    folder = run.parents[1]
    again = draftgauge("eval", pair.checkpoint, "--like", run, "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert values(again)["path"] == "runs/first"  # the same question is answered once
    other = draftgauge("eval", pair.checkpoint, "--like", run, "--budgets", "4", cwd=folder)
    assert other.returncode == 2
    assert "leave out --budgets" in other.stderr


def test_stored_numbers_are_shown_beside_a_run(run: Path, tmp_path: Path) -> None:
    stored = tmp_path / "old.json"
    stored.write_text(json.dumps({"vanilla": 0.778, "DDTree top-4": 1.111}))
    done = draftgauge("show", run, "--beside", stored, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "coverage@4 streak" in done.stdout
    assert "0.778" in done.stdout
