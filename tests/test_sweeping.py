"""The command `sweep`."""

import csv
import json
from pathlib import Path

import pytest

from tests import tiny
from tests.test_sweep import RECORDING, plan


def test_the_command_prints_series_writes_a_table_and_says_what_failed(tmp_path: Path) -> None:
    path = plan(tmp_path, "[eval]\nnum_prompts = 2\nbudgets = [4, 16]\n", block_sizes=[4, 8])
    (tmp_path / "out" / "step_90" / "checkpoint.pt").write_bytes(b"cut short")
    done = tiny.draftgauge("sweep", path, "--table", "all.csv", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    wide = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert all(RECORDING in line or str(tmp_path) in line for line in wide), "only a path, to be copied whole"
    assert done.stdout.count("block size 4\n") == done.stdout.count("block size 8\n") == 1
    assert done.stdout.count("cut short") == 0
    assert done.stdout.count("step_90") >= 2
    assert "DDTree(16)" in done.stdout
    assert "6 of 6: " in done.stderr
    assert "of 6 combinations 2 could not be measured" in done.stderr
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["block_size"] for row in rows} == {"4", "8"}
    data = tiny.draftgauge("sweep", path, "--json", cwd=tmp_path)
    assert [row["step"] for row in json.loads(data.stdout)] == [8, None, 400] * 2


@pytest.mark.parametrize(
    ("table", "message"), [("all.xlsx", "ends in '.xlsx'"), ("there.csv", "exists already")]
)
def test_a_table_that_cannot_be_written_is_refused_before_the_work(
    table: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "there.csv").write_text("mine")
    done = tiny.draftgauge("sweep", plan(tmp_path), "--table", table, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "there.csv").read_text() == "mine"
