"""Stored numbers beside a run, in words: shown, labelled, and neither compared nor tested."""

import json
from pathlib import Path

from draftgauge.beside import beside, read_stored
from draftgauge.compare import compare_runs
from draftgauge.report.comparison import comparison_report, stored_report
from tests.test_compare import run


def test_stored_numbers_stand_beside_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"vanilla": 0.778, "DDTree top-4": 1.111, "DDTree top-8": 1.467}))
    text = stored_report(
        beside(run("late", {"a": [3, 1], "b": [2]}), read_stored(path), path=Path("old.json"))
    )
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("coverage@4 streak"))
    assert line.split()[2:5] == ["DDTree", "top-4", "1.111"]
    assert "without provenance nothing is compared or tested" in " ".join(text.split())
    assert "coverage@k" in text


def test_a_run_that_is_not_trusted_is_marked_in_a_comparison() -> None:
    ours, theirs = run("late", {"a": [1]}), run("early", {"a": [1]})
    theirs.summary["trust"] = {"trusted": False, "failed": ["final-state"], "controls": []}
    assert "! early is NOT TRUSTED: final-state failed" in comparison_report(compare_runs(ours, theirs))
