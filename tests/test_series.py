"""Series of checkpoints: as a watch writes them, and as runs of one training make them."""

import json
from pathlib import Path

import pytest

from draftgauge.errors import FleetError
from draftgauge.viewer.library import Library
from draftgauge.viewer.series import families, read_series, run_key
from tests.shelf import put_run, put_series, put_training, watch_row


def test_a_series_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    path = put_series(tmp_path, watch_row(500, 1.5), watch_row(1000, None))
    torn = json.dumps(watch_row(1500, 1.9))
    with path.open("a") as file:
        file.write(torn[: len(torn) // 2])
    before = path.read_bytes()
    series = read_series(path.parent, key="results/watch")
    assert [row.saved_step for row in series.rows] == [500, 1000]
    assert [row.verdict for row in series.rows] == ["trusted", "no number"]
    assert path.read_bytes() == before, "its writer is still at it"
    assert series.unread == 0
    with path.open("a") as file:
        file.write(torn[len(torn) // 2 :])
    assert len(read_series(path.parent, key="results/watch").rows) == 2, "a row ends with its line"
    assert series.name == "results"
    assert [(point.step, point.value) for point in series.points] == [(500, 1.5)]


def test_what_is_no_row_is_counted_or_refused(tmp_path: Path) -> None:
    path = put_series(tmp_path, watch_row(500, 1.5))
    with path.open("a") as file:
        file.write('{"step": 3}\nnonsense\n')
    assert read_series(path.parent, key="watch").unread == 2
    path.write_text("nonsense\n")
    with pytest.raises(FleetError, match="holds no row"):
        read_series(path.parent, key="watch")
    path.write_text("")
    assert read_series(path.parent, key="watch").rows == ()


def test_points_are_in_the_order_of_steps_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    rows = (watch_row(1000, 1.7), watch_row(500, 1.4), watch_row(500, 1.5, trusted=False))
    series = read_series(put_series(tmp_path, *rows).parent, key="watch")
    assert [(p.step, p.value, p.trusted) for p in series.points] == [(500, 1.5, False), (1000, 1.7, True)]


def test_runs_of_one_training_are_a_family(tmp_path: Path) -> None:
    put_training(tmp_path, {1000: 1.7, 250: 1.2, 500: 1.4})
    put_training(tmp_path / "other", {250: 1.1}, place="/train/exp3")
    put_run(
        tmp_path / "again", step=250, checkpoint="/train/exp2/step_250/model.pt", tau=1.25, started="2027"
    )
    put_run(tmp_path / "no-step", step=None)
    found = families(Library(tmp_path).look().runs)
    assert list(found) == ["again"], "named by its newest run; one step alone is no series"
    family = found["again"]
    assert family.place == "/train/exp2/step_*/model.pt"
    assert [(point.step, point.value) for point in family.points] == [(250, 1.25), (500, 1.4), (1000, 1.7)]


def test_the_run_of_a_row_is_the_one_beside_it_or_the_only_one(tmp_path: Path) -> None:
    for key in ("a/runs/x", "b/runs/x", "b/runs/y"):
        put_run(tmp_path / key)
    put_series(tmp_path / "a", *(watch_row(1, 1.5, run=f"/far/away/{name}") for name in ("x", "y", "z")))
    found = Library(tmp_path).look()
    (series,) = found.series
    runs = {row.key: row for row in found.runs}
    assert [run_key(row, runs, watched=series.key) for row in series.rows] == ["a/runs/x", "b/runs/y", None]
    assert run_key(series.rows[0], runs, watched="c/watch") is None, "two have this name"
