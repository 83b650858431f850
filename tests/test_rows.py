"""A run and a recording in a list: the few values of their manifests, or why there are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import RecordingError, RunError
from draftgauge.runs import MANIFEST, SUMMARY, open_run
from draftgauge.viewer.rows import Estimate, read_recording, read_run, without_step
from tests.shelf import put_recording, put_run, summary
from tests.test_runs import change


def test_a_run_is_read_without_its_blocks(tmp_path: Path) -> None:
    row = read_run(put_run(tmp_path / "mine", tau=1.5, trusted=False), key="runs/mine")
    assert (row.key, row.name, row.step, row.checkpoint) == ("runs/mine", "mine", 7, "/train/step_7/model.pt")
    assert row.tau == Estimate(1.5, 1.3, 1.8)
    assert (row.trusted, row.verdict, row.failed) == (False, "not trusted", ("context-zeroed",))
    assert (row.prompts, row.prompt_set, row.recording) == (2, "builtin:coding10", "1f2e3d4c5b6a7980")
    assert row.warnings == ("few-prompts",)


def test_the_headline_is_the_chain_wherever_it_stands(tmp_path: Path) -> None:
    folder = put_run(tmp_path / "mine", tau=1.5)
    policies = {"ddtree4": {"label": "DDTree(4)", "tau_response": {"value": 9.0}}, **summary(1.5)["policies"]}
    change(folder / SUMMARY, policies=policies)
    assert read_run(folder, key="mine").tau.value == 1.5


def test_a_run_from_before_controls_says_so(tmp_path: Path) -> None:
    row = read_run(put_run(tmp_path / "old", trusted=None), key="old")
    assert (row.trusted, row.verdict) == (None, "no controls")


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        (MANIFEST, {"kind": "somebody's run"}, "is of kind"),
        (MANIFEST, {"version": 2}, "has version 2, expected 1"),
        (MANIFEST, {"plan": {"taps": [1]}}, "its plan has not the fields"),
        (SUMMARY, {"version": None}, "has version None"),
        (SUMMARY, {"policies": [1, 2]}, "is not what a run of version 1 holds"),
        (MANIFEST, {"checkpoint": {"step": "seven"}}, "is not what a run of version 1 holds"),
    ],
)
def test_what_is_no_run_is_refused_with_the_reason(
    tmp_path: Path, file: str, values: dict[str, Any], reason: str
) -> None:
    folder = put_run(tmp_path / "mine")
    change(folder / file, **values)
    with pytest.raises(RunError, match=reason):
        read_run(folder, key="mine")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "draftgauge run"', "\udcffx", "[" * 100_000])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    folder = put_run(tmp_path / "mine")
    (folder / SUMMARY).write_text(text, errors="surrogateescape")
    with pytest.raises(RunError):
        read_run(folder, key="mine")


def test_what_a_list_reads_is_what_the_run_says(tmp_path: Path) -> None:
    """The quick reading and the whole one agree."""
    folder = put_run(tmp_path / "mine", tau=2.25)
    row, run = read_run(folder, key="mine"), open_run(folder)
    assert row.tau.value == run.summary["policies"]["chain"]["tau_response"]["value"]
    assert row.started == run.manifest["started"]
    assert list(row.failed) == run.failed_controls


@pytest.mark.parametrize(
    ("path", "step", "place"),
    [
        ("exp2/step_04000/model.pt", 4000, "exp2/step_*/model.pt"),
        ("exp2/step_4000", None, "exp2/step_4000"),
        ("exp40001/step_4000", 4000, "exp40001/step_*"),
        ("exp2/last.pt", 4000, "exp2/last.pt"),
    ],
)
def test_only_the_step_is_left_open_in_a_path(path: str, step: int | None, place: str) -> None:
    assert without_step(path, step) == place


def test_other_ways_of_measuring_are_other_families(tmp_path: Path) -> None:
    rows = [
        read_run(put_run(tmp_path / f"{i}", step=i, checkpoint=f"/x/step_{i}", **said), key=f"{i}")
        for i, said in enumerate([{}, {}, {"dtype": "bfloat16"}, {"max_blocks": 3}, {"template": "raw"}])
    ]
    assert rows[0].family == rows[1].family
    assert len({row.family for row in rows}) == 4


def test_a_recording_says_what_it_holds(tmp_path: Path) -> None:
    row = read_recording(put_recording(tmp_path / "kept"), key="recordings/kept")
    assert (row.name, row.taps, row.prompts, row.failed) == ("kept", (1, 3, 5), 6, 0)
    assert (row.agreement, row.near_ties) == (1.0, 0)


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    folder = put_recording(tmp_path / "kept")
    value = json.loads((folder / "recording.json").read_text())
    (folder / "recording.json").write_text(json.dumps({**value, "items": "all of them"}))
    with pytest.raises(RecordingError):
        read_recording(folder, key="kept")
