"""A kept checkpoint that is edited through its hard link is noticed when the run is read again."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from draftgauge.acceptance import Policy
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.kept import checkpoint_caveat
from draftgauge.runs import CHECKPOINT, MANIFEST, Run, open_run
from tests import tiny

QUICK = Options(policies=(Policy("chain"),), num_prompts=1, anchors="walk")


@pytest.fixture(params=["directory", "pt", "safetensors"])
def measured(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Run, Path]:
    """A run, and the file of weights that it keeps."""
    if request.param == "pt":
        file = tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", config=tiny.drafter_config())
        source = file
    else:
        source = tiny.drafter_dir(tmp_path / "drafter")
        file = source / "model.safetensors"
        source = source if request.param == "directory" else file
    return evaluate_checkpoint(source, tiny.recording().path, QUICK, root=tmp_path / "runs"), file


def overwrite(file: Path) -> None:
    """Other bytes in the midst of the weights."""
    data = file.read_bytes()
    with file.open("r+b") as written:
        written.seek(len(data) // 2)
        written.write(bytes(64))


def said(run: Run) -> str:
    caveat = checkpoint_caveat(open_run(run.path))
    assert caveat is not None
    assert (caveat.slug, caveat.severity) == ("checkpoint-changed", "warning")
    return caveat.text


def test_what_nobody_touched_is_what_was_measured(measured: tuple[Run, Path]) -> None:
    assert checkpoint_caveat(open_run(measured[0].path)) is None


def test_a_new_time_alone_is_no_change(measured: tuple[Run, Path]) -> None:
    os.utime(measured[1], (1, 1))
    assert checkpoint_caveat(measured[0]) is None


def test_an_edit_in_place_is_a_warning_with_both_digests(measured: tuple[Run, Path]) -> None:
    run, file = measured
    overwrite(file)
    text = said(run)
    assert f"{file.name} was edited, its weights have digest " in text
    assert f"measured was {run.plan.checkpoint_digest[:16]}" in text


def test_a_kept_file_that_cannot_be_read_any_more_is_a_warning(measured: tuple[Run, Path]) -> None:
    run, file = measured
    with file.open("r+b") as cut:
        cut.truncate(100)
    assert f"{file.name} was edited and cannot be read (" in said(run)


def test_a_new_file_under_the_old_name_changes_nothing(measured: tuple[Run, Path]) -> None:
    """A trainer that writes anew and renames leaves the kept file alone."""
    run, file = measured
    file.unlink()
    file.write_bytes(b"other")
    assert checkpoint_caveat(run) is None


def test_a_kept_file_that_was_removed_is_a_warning(measured: tuple[Run, Path]) -> None:
    run, file = measured
    (run.path / CHECKPOINT / file.name).unlink()
    assert f"{file.name} was removed from it" in said(run)
    shutil.rmtree(run.path / CHECKPOINT)
    assert f"{file.name}" in said(run)


def test_a_config_that_was_edited_is_a_warning_though_the_weights_are_the_same(tmp_path: Path) -> None:
    drafter = tiny.drafter_dir(tmp_path / "drafter")
    run = evaluate_checkpoint(drafter, tiny.recording().path, QUICK, root=tmp_path / "runs")
    config = drafter / "config.json"
    os.utime(config, (1, 1))
    assert checkpoint_caveat(run) is None
    config.write_text(json.dumps(tiny.drafter_config() | {"rope_theta": 5.0}))
    assert "config.json was edited. The numbers" in said(run)


def test_a_run_that_keeps_nothing_is_not_doubted(measured: tuple[Run, Path]) -> None:
    run, file = measured
    manifest = {**run.manifest, "checkpoint_kept": "reference", "checkpoint_files": {}}
    overwrite(file)
    assert checkpoint_caveat(dataclasses.replace(run, manifest=manifest)) is None


def test_an_older_run_keeps_its_file_without_a_name_and_is_read_all_the_same(tmp_path: Path) -> None:
    """Its link is called `checkpoint`, and no stamps were noted."""
    file = tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", config=tiny.drafter_config())
    run = evaluate_checkpoint(file, tiny.recording().path, QUICK, root=tmp_path / "runs")
    shutil.rmtree(run.path / CHECKPOINT)
    (run.path / CHECKPOINT).hardlink_to(file)
    manifest = {name: value for name, value in run.manifest.items() if name != "checkpoint_files"}
    (run.path / MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint_caveat(open_run(run.path)) is None
    overwrite(file)
    assert "checkpoint.pt was edited, its weights have digest" in said(run)
