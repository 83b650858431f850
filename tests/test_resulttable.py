"""The results table: a row for each run and policy, equal to what the runs say, in both formats."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from draftgauge.cli import cli
from draftgauge.errors import InputError, StoreError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.resulttable import SCHEMA, require_table, results_table, write_results
from draftgauge.runs import Run, list_runs
from tests import tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on all anchors of a checkpoint without a step, and one on walks of a checkpoint with one."""
    folder = tmp_path_factory.mktemp("table")
    trainer = tiny.trainer_pt(folder / "step_7" / "checkpoint.pt", step=7, config=tiny.drafter_config())
    asked = {"full": Options(), "walk": Options(anchors="walk", num_prompts=2, max_blocks=9)}
    for name, path in (("full", tiny.workshop() / "drafter"), ("walk", trainer)):
        evaluate_checkpoint(path, tiny.recording().path, asked[name], root=folder / "runs", name=name)
    return folder / "runs"


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    return {run.name: run for run in list_runs(root)}


@pytest.fixture(scope="module")
def rows(runs: dict[str, Run]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["run"], row["policy"]): row for row in results_table(runs.values()).to_pylist()}


def test_there_is_a_row_for_each_run_and_policy(runs: dict[str, Run], rows: dict[Any, Any]) -> None:
    assert set(rows) == {(name, slug) for name, run in runs.items() for slug in run.summary["policies"]}


def test_a_row_says_what_the_run_says(runs: dict[str, Run], rows: dict[tuple[str, str], Any]) -> None:
    for (name, slug), row in rows.items():
        run = runs[name]
        policy = run.summary["policies"][slug]
        for estimate in ("tau_response", "tau_pooled", "streak_response", "streak_pooled"):
            assert row[estimate] == policy[estimate]["value"]
            assert row[f"{estimate}_low"] == policy[estimate]["low"]
            assert row[f"{estimate}_high"] == policy[estimate]["high"]
        assert row["rounds"] == policy["counts"]["rounds"]
        assert row["ended_not_selected"] == policy["counts"]["ended_not_selected"]
        assert row["as_pooled"] == policy["conventions"]["pooled"]
        assert row["recording_digest"] == run.plan.recording_digest
        assert row["block_size"] == 8
        assert row["trusted"] is run.summary["trust"]["trusted"]
        assert row["caveats"].split(";") == [caveat["slug"] for caveat in run.summary["caveats"]]


def test_what_is_absent_is_null(rows: dict[tuple[str, str], Any]) -> None:
    assert rows["full", "chain"]["step"] is None
    assert rows["walk", "chain"]["step"] == 7
    assert rows["full", "chain"]["all_anchor_streak"] is not None
    assert rows["walk", "chain"]["all_anchor_streak"] is None
    assert rows["full", "chain"]["max_blocks"] is None
    assert rows["walk", "chain"]["max_blocks"] == 9


def test_a_run_of_an_earlier_version_has_nulls(runs: dict[str, Run]) -> None:
    summary = {name: value for name, value in runs["full"].summary.items() if name != "trust"}
    (row, *_) = results_table([dataclasses.replace(runs["full"], summary=summary)]).to_pylist()
    assert row["trusted"] is None
    assert row["failed_controls"] == ""


def test_both_files_hold_the_same(root: Path, tmp_path: Path, runs: dict[str, Run]) -> None:
    expected = results_table(runs.values())
    write_results(tmp_path / "r.parquet", runs.values())
    write_results(tmp_path / "r.csv", runs.values())
    assert pq.read_table(tmp_path / "r.parquet").equals(expected)
    with (tmp_path / "r.csv").open(newline="") as file:
        said = list(csv.DictReader(file))
    assert [row["policy"] for row in said] == expected["policy"].to_pylist()
    assert [float(row["tau_response"]) for row in said] == expected["tau_response"].to_pylist()
    assert {row["step"] for row in said if row["run"] == "full"} == {""}


def test_no_runs_are_a_table_without_rows(tmp_path: Path) -> None:
    write_results(tmp_path / "r.csv", [])
    assert (tmp_path / "r.csv").read_text().strip().replace('"', "").split(",") == SCHEMA.names


def test_a_table_is_named_by_its_form_and_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"r\.xlsx ends in '\.xlsx'; name the table NAME\.csv or NAME\.parquet"
    ):
        write_results(tmp_path / "r.xlsx", [])
    write_results(tmp_path / "r.csv", [])
    with pytest.raises(StoreError, match="never overwritten"):
        write_results(tmp_path / "r.csv", [])


def test_the_command_writes_it_and_names_what_it_leaves_out(root: Path, tmp_path: Path) -> None:
    (root / "damaged").mkdir(exist_ok=True)
    (root / "damaged" / "run.json").write_text("{")
    result = CliRunner().invoke(cli, ["runs", "--runs", str(root), "--table", str(tmp_path / "r.parquet")])
    assert result.exit_code == 0, result.output
    assert "! damaged is left out: " in result.stderr
    assert f"wrote {tmp_path / 'r.parquet'}" in result.stderr
    assert set(pq.read_table(tmp_path / "r.parquet")["run"].to_pylist()) == {"full", "walk"}


def test_pandas_loads_results_and_blocks_with_a_line(
    root: Path, tmp_path: Path, runs: dict[str, Run]
) -> None:
    """The lines of docs/results.md."""
    write_results(tmp_path / "results.parquet", runs.values())
    results = pd.read_parquet(tmp_path / "results.parquet")
    assert results.set_index(["run", "policy"]).loc[("full", "chain"), "rounds"] == 34
    blocks = pd.read_parquet(root / "full" / "blocks.parquet")
    assert len(blocks) == runs["full"].blocks().num_rows
    assert list(blocks["rank"].iloc[0]) == runs["full"].blocks()["rank"][0].as_py()


def test_a_name_is_judged_before_there_is_anything_to_write(tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_bytes(b"")
    require_table(tmp_path / "new.csv")
    with pytest.raises(InputError, match=r"ends in '\.txt'; name the table NAME\.csv or NAME\.parquet"):
        require_table(tmp_path / "new.txt")
    with pytest.raises(StoreError, match="exists already and is never overwritten"):
        require_table(tmp_path / "there.parquet")
