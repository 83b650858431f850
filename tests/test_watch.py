"""A watch: which checkpoints are measured, in which order, once each, and what a restart finds."""

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.errors import FleetError, StoreError
from draftgauge.fleet.plans import FleetPlan
from draftgauge.fleet.reach import reaching
from draftgauge.fleet.watch import Series, Until, watch
from draftgauge.report.fleet import series_report
from tests.yard import Yard, yard

WATCH = {"folder": "train:out", "match": "step_*/checkpoint.pt", "every_s": 0.2}


@pytest.fixture
def made(tmp_path: Path) -> Yard:
    return yard(tmp_path)


def watched(made: Yard, plan: FleetPlan, until: Until) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    with reaching(plan.fleet) as reach:
        watch(reach, plan, until, made.log, on_row=lambda row, _: told.append(row))
    return told


def once(made: Yard, **table: Any) -> list[dict[str, Any]]:
    return watched(made, made.plan(watch=WATCH | table), Until(once=True))


def test_each_is_measured_once_newest_first_and_a_restart_goes_on(made: Yard) -> None:
    for step in (100, 20):
        made.checkpoint(step)
    hook = [sys.executable, "-c", "import sys, json; open('hook.jsonl', 'a').write(sys.stdin.read() + '\\n')"]
    hook[2] = hook[2].replace("hook.jsonl", str(made.folder / "hook.jsonl"))
    rows = once(made, on_result=hook)
    assert [row["saved_step"] for row in rows] == [100, 20], "by number, not by text"
    assert all(row["tau"]["value"] > 0 and row["trainer"]["step"] == 13 for row in rows)
    assert [
        json.loads(line)["saved_step"] for line in (made.folder / "hook.jsonl").read_text().splitlines()
    ] == [100, 20]
    assert once(made) == []
    made.checkpoint(20)  # saved again: another file
    assert [row["saved_step"] for row in once(made)] == [20]
    table = series_report(Series.read(made.folder / "plan" / "watch" / "series.jsonl").rows)
    assert [line.split()[0] for line in table.splitlines()[2:5]] == ["20", "20", "100"]


def test_what_never_becomes_whole_is_passed_over_and_what_is_broken_is_said(made: Yard) -> None:
    whole = made.checkpoint(10)
    torn = made.checkpoint(30)
    torn.write_bytes(torn.read_bytes()[:-1000])
    strange = made.folder / "train" / "out" / "step_20" / "checkpoint.pt"
    strange.parent.mkdir()
    shutil.copy(whole, strange)
    torch.save({"model": {"x": torch.ones(3)}}, strange)
    rows = once(made)
    assert [Path(row["source"].partition(":")[2]).parent.name for row in rows] == ["step_20", "step_10"]
    assert "holds no mapping of names to tensors" in rows[0]["reason"]
    assert rows[0]["tau"] is None
    assert rows[1]["tau"]["value"] > 0
    assert "! train:" in series_report(rows).replace("\n", " ")
    assert any("step_30" in line and "still being written" in line for line in made.said)
    made.checkpoint(30)
    assert [row["saved_step"] for row in once(made)] == [30]


def test_it_waits_for_new_ones_and_ends_at_a_step(made: Yard) -> None:
    made.checkpoint(10)
    late = threading.Timer(4.0, lambda: made.checkpoint(20))
    late.start()
    try:
        rows = watched(made, made.plan(watch=WATCH | {"order": "oldest"}), Until(step=20))
    finally:
        late.join()
    assert [row["saved_step"] for row in rows] == [10, 20]


def test_a_gate_that_passes_ends_it(made: Yard) -> None:
    for step in (10, 20):
        made.checkpoint(step)
    rows = watched(made, made.plan(watch=WATCH), Until(gates=("tau>=1.0",)))
    assert [row["saved_step"] for row in rows] == [20]
    assert rows[0]["gates_passed"] is True


def test_places_that_refuse_whatever_the_checkpoint_end_it(made: Yard) -> None:
    for step in (10, 20, 30):
        made.checkpoint(step)
    manifest = next((made.folder / "lab" / "recordings").glob("*/recording.json"))
    whole = manifest.read_text()
    manifest.write_text("{}")
    with pytest.raises(FleetError, match="two checkpoints in a row could not be measured"):
        once(made)
    manifest.write_text(whole)
    assert [row["saved_step"] for row in once(made)] == [30, 20, 10], "what was refused is tried again"


def test_a_folder_that_is_not_there_yet_is_waited_for(made: Yard) -> None:
    shutil.rmtree(made.folder / "train" / "out")
    late = threading.Timer(1.0, lambda: made.checkpoint(10))
    late.start()
    try:
        rows = watched(made, made.plan(watch=WATCH), Until(step=10))
    finally:
        late.join()
    assert [row["saved_step"] for row in rows] == [10]
    assert any("does not exist yet" in line for line in made.said)


def test_checkpoints_that_are_rotated_away_are_no_failure(made: Yard) -> None:
    for step in (10, 20, 30):
        made.checkpoint(step)

    def rotate() -> Iterator[None]:
        shutil.rmtree(made.folder / "train" / "out" / "step_10")
        yield

    told: list[int] = []
    plan = made.plan(watch=WATCH)
    with reaching(plan.fleet) as reach:

        def on_row(row: dict[str, Any], _: Any) -> None:
            told.append(row["saved_step"])
            if len(told) == 1:
                list(rotate())

        watch(reach, plan, Until(once=True), made.log, on_row=on_row)
    assert told == [30, 20]


def test_two_watches_do_not_write_one_series(made: Yard) -> None:
    made.checkpoint(10)
    plan = made.plan(watch=WATCH)
    ended = threading.Event()

    def first() -> None:
        with reaching(plan.fleet) as reach:
            watch(reach, plan, Until(step=99), made.log, on_row=lambda *_: None)
        ended.set()

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    folder = plan.results / "watch"
    while not (folder / ".lock").exists():
        time.sleep(0.02)
    with pytest.raises(StoreError, match="being written by another process"):
        watched(made, plan, Until(once=True))
    made.checkpoint(99)
    assert ended.wait(60)


def test_a_torn_last_line_of_a_series_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "series.jsonl"
    row = {"source": "a", "identity": "b", "reason": "ünï"}
    path.write_text(json.dumps(row, ensure_ascii=False) + '\n{"source": "c", "iden')
    series = Series.read(path)
    assert series.rows == [row]
    series.add({"source": "d", "identity": "e"})
    assert [r["source"] for r in Series.read(path).rows] == ["a", "d"]


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "series.jsonl"
    path.write_text('{"source": "a", "identity": "b"}\nnonsense\n')
    with pytest.raises(FleetError, match=r"series.jsonl, line 2"):
        Series.read(path)


@pytest.mark.parametrize("text", ["20000", "step=", "steps=3", "tau>2"])
def test_until_is_understood_or_refused(text: str) -> None:
    with pytest.raises(FleetError, match="expected step=NUMBER"):
        Until.parse(text)
    assert Until.parse("step=20000") == Until(step=20000)


def test_a_plan_without_a_watch_says_so(made: Yard) -> None:
    with pytest.raises(FleetError, match=r"has no \[watch\]"):
        watched(made, made.plan(), Until(once=True))


def test_a_hook_that_fails_stops_nothing(made: Yard) -> None:
    made.checkpoint(10)
    rows = once(made, on_result=[sys.executable, "-c", "import sys; sys.exit('no mail')"])
    assert len(rows) == 1
    assert any("ended with exit code 1: no mail" in line for line in made.said)
