"""Trackers: what is logged, where a series begins and ends, and that nothing is lost where a tracker fails.

TensorBoard is always tried; the others where their packages are installed, and named where they are not.
"""

import dataclasses
import importlib.util
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftgauge.cli import cli
from draftgauge.errors import InputError, UnfinishedError
from draftgauge.runs import Run, list_runs, open_run
from draftgauge.trackers import TRACKERS, Entry, entry_of, log_run, require_tracker
from tests import tiny
from tests.yard import yard

STEPS = (7, 20)


def saved(folder: Path, step: int) -> Path:
    """A trainer's save: weights of its own at every step, so that each is a run of its own."""
    state = tiny.weights()
    state["norm.weight"] *= 1 + step / 1000
    path = folder / f"step_{step}" / "checkpoint.pt"
    return tiny.trainer_pt(path, state, step=step, config=tiny.drafter_config())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two checkpoints of one training."""
    folder = tmp_path_factory.mktemp("trackers")
    for step in STEPS:
        evaluated(
            saved(folder / "training", step), folder / "runs", "--num-prompts", 5, "--budgets", "4", code=0
        )
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> list[Run]:
    """The same, in a folder that a tracker may write to."""
    root = tmp_path / "runs"
    found = sorted(list_runs(made / "runs"), key=lambda run: run.manifest["checkpoint"]["step"])
    return [dataclasses.replace(run, path=root / run.name) for run in found]


def evaluated(checkpoint: Path, root: Path, *asked: object, code: int) -> Any:
    where = ("--recording", tiny.recording().path, "--runs", root)
    result = CliRunner().invoke(cli, [str(a) for a in ("eval", checkpoint, *where, *asked, "--json")])
    kinds = {0: type(None), 1: InputError, 5: UnfinishedError}
    assert isinstance(result.exception, kinds[code]), result.output
    return result


def test_names_are_the_same_everywhere_and_values_those_of_the_run(runs: list[Run]) -> None:
    entry = entry_of(runs[0])
    tau = runs[0].summary["policies"]["ddtree4"]["tau_response"]
    assert entry.step == 7
    assert entry.scalars["draftgauge/ddtree4/tau_response"] == tau["value"]
    assert entry.scalars["draftgauge/ddtree4/tau_response_low"] == tau["low"]
    assert entry.scalars["draftgauge/ddtree4/tau_response_high"] == tau["high"]
    assert entry.scalars["draftgauge/depth3/survival"] == runs[0].summary["per_depth"]["survival"][2]
    assert entry.scalars["draftgauge/trusted"] == 1.0
    assert entry.run["run"] == runs[0].name
    assert entry.shared["recording_digest"] == runs[0].plan.recording_digest
    assert all(name.startswith("draftgauge/") for name in entry.scalars)


def test_what_is_absent_is_not_logged(runs: list[Run]) -> None:
    summary = json.loads(json.dumps(runs[0].summary))
    summary["per_depth"] = None
    summary["policies"]["chain"]["tau_response"]["low"] = None
    del summary["trust"]
    scalars = entry_of(dataclasses.replace(runs[0], summary=summary)).scalars
    assert "draftgauge/chain/tau_response_low" not in scalars
    assert "draftgauge/chain/tau_response_high" in scalars
    assert not any("depth" in name or "trusted" in name for name in scalars)


def with_checkpoint(run: Run, **values: Any) -> Run:
    manifest = {**run.manifest, "checkpoint": {**run.manifest["checkpoint"], **values}}
    return dataclasses.replace(run, manifest=manifest)


def with_plan(run: Run, **values: Any) -> Run:
    return dataclasses.replace(run, manifest={**run.manifest, "plan": {**run.manifest["plan"], **values}})


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/x/out/step_7/checkpoint.pt", "out"),
        ("/x/out/step_0007.safetensors", "out"),
        ("/x/out/step_7", "out"),
        ("/x/out/latest.pt", "out"),
        ("/x/out/step_17/a7b.pt", "step_17"),
        ("a.pt", "draftgauge"),
    ],
)
def test_a_series_is_called_after_the_folder_of_its_checkpoints(
    path: str, folder: str, runs: list[Run]
) -> None:
    series = entry_of(with_checkpoint(runs[0], path=path)).series
    assert series.rpartition("-")[0] == folder


def test_what_was_fetched_lies_at_its_address(runs: list[Run]) -> None:
    fetched = with_checkpoint(runs[0], path="/cache/0a7b", url="hf://owner/drafter@1f2e/step_7")
    assert entry_of(fetched).series.startswith("drafter@1f2e-")
    assert entry_of(fetched).run["checkpoint"] == "hf://owner/drafter@1f2e/step_7"


def test_checkpoints_measured_alike_are_one_series_and_others_are_not(runs: list[Run]) -> None:
    first, second = runs
    assert entry_of(first).series == entry_of(second).series
    others = [
        with_checkpoint(first, path="/other/step_7/checkpoint.pt"),
        with_plan(first, recording_digest="0" * 64),
        with_plan(first, prompts=["one"]),
        with_plan(first, dtype="bfloat16"),
        with_plan(first, wiring={**first.plan.wiring, "block_size": 4}),
    ]
    assert len({entry_of(run).series for run in (first, *others)}) == 6


def test_a_run_without_a_step_is_refused(runs: list[Run]) -> None:
    with pytest.raises(InputError, match=r"has no step.*call the file or folder step_N"):
        entry_of(with_checkpoint(runs[0], step=None))


def test_whatever_a_tracker_raises_the_run_is_said_to_be_kept(runs: list[Run]) -> None:
    def failing(entry: Entry, folder: Path) -> None:
        raise ZeroDivisionError("no server")

    with pytest.raises(UnfinishedError, match=r"was measured and is kept in .*ZeroDivisionError: no server"):
        log_run(runs[0], failing)


def test_what_a_tracker_prints_is_not_on_stdout(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    log_run(runs[0], lambda entry, folder: print(f"hello from {entry.series}"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from training-" in captured.err


def test_a_tracker_that_is_not_known_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match="'paper' is not known; expected tensorboard, wandb, mlflow, trackio"
    ):
        require_tracker("paper")
    monkeypatch.setitem(TRACKERS, "paper", ("no_such_package", lambda entry, folder: None))  # type: ignore[misc]
    with pytest.raises(
        InputError, match=r"no_such_package, which is not installed: pip install 'draftgauge\[paper\]'"
    ):
        require_tracker("paper")


def test_each_tracker_has_an_extra_of_its_name() -> None:
    option = next(o for o in cli.commands["eval"].params if o.name == "log_to")
    assert list(option.type.choices) == list(TRACKERS)  # type: ignore[attr-defined]


# --- TensorBoard ------------------------------------------------------------------------------------------


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.fixture(scope="module")
def board(made: Path) -> Path:
    """The folder of the series, written by the command."""
    result = CliRunner().invoke(cli, ["runs", "--runs", str(made / "runs"), "--log-to", "tensorboard"])
    assert result.exit_code == 0, result.output
    (series,) = (made / "runs" / "tensorboard").iterdir()
    return series


def test_tensorboard_shows_a_line_over_steps(board: Path, made: Path) -> None:
    found = events(board)
    by_step = {run.manifest["checkpoint"]["step"]: run for run in list_runs(made / "runs")}
    scalars = found.Scalars("draftgauge/chain/tau_response")
    assert [event.step for event in scalars] == list(STEPS)
    for event in scalars:
        expected = by_step[event.step].summary["policies"]["chain"]["tau_response"]["value"]
        assert event.value == pytest.approx(expected, rel=1e-6)
    assert set(found.Tags()["scalars"]) == set(entry_of(by_step[7]).scalars)
    texts = found.Tensors("draftgauge/run/text_summary")
    assert by_step[7].name in texts[0].tensor_proto.string_val[0].decode()


def test_what_was_logged_is_not_logged_twice(board: Path, made: Path) -> None:
    before = sorted(path.name for path in board.iterdir())
    for run in list_runs(made / "runs"):
        log_run(run, require_tracker("tensorboard"))
    assert sorted(path.name for path in board.iterdir()) == before
    assert len(before) == len(STEPS)


def test_eval_logs_what_it_measured(tmp_path: Path) -> None:
    result = evaluated(
        saved(tmp_path, 3), tmp_path / "runs", "--num-prompts", 1, "--log-to", "tensorboard", code=0
    )
    run = open_run(json.loads(result.stdout)["path"])
    (series,) = (tmp_path / "runs" / "tensorboard").iterdir()
    (event,) = events(series).Scalars("draftgauge/chain/tau_response")
    assert event.step == 3
    assert event.value == pytest.approx(run.summary["policies"]["chain"]["tau_response"]["value"])


def test_eval_keeps_and_prints_what_cannot_be_logged(tmp_path: Path) -> None:
    asked = ("--num-prompts", 1, "--log-to", "tensorboard")
    result = evaluated(tiny.workshop() / "drafter", tmp_path / "runs", *asked, code=1)
    assert "has no step" in result.stderr
    assert open_run(json.loads(result.stdout)["path"])
    (tmp_path / "runs" / "tensorboard").write_text("a file where the folder should be")
    result = evaluated(saved(tmp_path, 3), tmp_path / "runs", *asked, code=5)
    assert "was measured and is kept" in result.stderr
    assert len(list_runs(tmp_path / "runs")) == 2


def test_a_list_logs_the_runs_that_have_a_step(made: Path, tmp_path: Path) -> None:
    evaluated(tiny.workshop() / "drafter", tmp_path, "--num-prompts", 1, code=0)
    result = CliRunner().invoke(cli, ["runs", "--runs", str(tmp_path), "--log-to", "tensorboard"])
    assert "1 of 1 run(s) were not logged" in str(result.exception)
    assert "has no step" in result.stderr


def test_a_watch_logs_each_checkpoint_into_one_series(tmp_path: Path) -> None:
    made = yard(tmp_path)
    for step in (20, 100):
        made.checkpoint(step)
    watched = {"folder": "train:out", "match": "step_*/checkpoint.pt", "order": "oldest", "every_s": 0.2}
    plan = made.plan(watch=watched)
    asked = ["watch", str(tmp_path / "plan.toml"), "--once", "--log-to", "tensorboard"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    (series,) = (plan.results / "runs" / "tensorboard").iterdir()
    assert [event.step for event in events(series).Scalars("draftgauge/chain/tau_response")] == [20, 100]


# --- those that may be installed --------------------------------------------------------------------------


def installed(name: str) -> None:
    if importlib.util.find_spec(TRACKERS[name][0]) is None:
        pytest.skip(f"{name} is not installed here: pip install 'draftgauge[{name}]'")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Libraries of others warn of what is theirs."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_wandb_keeps_both_steps(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for run in runs:
        log_run(run, require_tracker("wandb"))
    found = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(found) == len(STEPS)
    assert len({path.name for path in found}) == 1, "one run, resumed"
    for path, run in zip(found, runs, strict=True):
        kept = path.read_bytes()
        assert b"draftgauge/chain/tau_response" in kept
        assert run.name.encode() in kept


def test_mlflow_keeps_one_run_with_both_steps(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    installed("mlflow")
    import mlflow

    has_sql = importlib.util.find_spec("sqlalchemy") is not None
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db" if has_sql else f"file://{tmp_path}/mlruns")
    for run in runs:
        log_run(run, require_tracker("mlflow"))
    (found,) = mlflow.search_runs(experiment_names=["draftgauge"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "draftgauge/chain/tau_response")
    expected = [run.summary["policies"]["chain"]["tau_response"]["value"] for run in runs]
    assert [(metric.step, metric.value) for metric in history] == list(zip(STEPS, expected, strict=True))
    assert found.data.params["draftgauge.recording_digest"] == runs[0].plan.recording_digest
    assert runs[1].name in found.data.tags["draftgauge.step_20"]


def test_trackio_keeps_one_run_with_both_steps(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    installed("trackio")
    if "trackio" in sys.modules:
        pytest.skip("trackio reads where to keep its files when it is first imported")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for run in runs:
        log_run(run, require_tracker("trackio"))
    with sqlite3.connect(tmp_path / "draftgauge.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for _, step, _ in rows] == list(STEPS)
    assert {name for name, _, _ in rows} == {entry_of(runs[0]).series}
    for (_, _, metrics), run in zip(rows, runs, strict=True):
        expected = run.summary["policies"]["chain"]["tau_response"]["value"]
        assert json.loads(metrics)["draftgauge/chain/tau_response"] == expected


def test_no_tracker_is_configured_by_the_tests() -> None:
    assert not any(name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")) for name in os.environ)
