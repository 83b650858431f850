"""The run directory: published whole, found again, and never half."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.errors import RunError
from draftgauge.runs import (
    BLOCKS,
    CHECKPOINT,
    MANIFEST,
    SUMMARY,
    BlockWriter,
    Plan,
    Run,
    changed_files,
    find_run,
    found_runs,
    list_runs,
    new_run,
    open_run,
    package_version,
    run_path,
)
from draftgauge.store import write_json

PLAN = Plan(
    checkpoint_digest="c" * 64,
    recording_digest="r" * 64,
    wiring={"block_size": 8, "predicts_from_anchor": False},
    prompts=("a", "b"),
    policies=("chain", "coverage4"),
    anchors="all",
    dtype="float32",
    max_blocks=None,
    trained_block_size=8,
    target_digest="t" * 64,
    template="chat",
    instrument="0.1.0",
)
OTHER = dataclasses.replace(PLAN, max_blocks=3)


def write(root: Path, name: str, *, plan: Plan = PLAN, files: tuple[Path, ...] = ()) -> Path:
    with new_run(root / name, plan, facts={"checkpoint": {"step": 7}}, checkpoint=files) as folder:
        with BlockWriter(folder / BLOCKS) as writer:
            writer.write(
                "a", {"anchor": np.array([3, 4], np.int32), "rank": np.array([[0, 2], [1, 9]], np.int32)}
            )
            writer.write("b", {"anchor": np.array([5], np.int32), "rank": np.array([[7, 7]], np.int32)})
        write_json(folder / SUMMARY, {"version": 1, "policies": {}, "prompts": {}})
    return root / name


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"0" * 1000)
    return path


def test_a_run_says_what_it_was_made_of(tmp_path: Path, weights: Path) -> None:
    run = open_run(write(tmp_path, "mine", files=(weights,)))
    assert (run.name, run.plan) == ("mine", PLAN)
    manifest = run.manifest
    assert manifest["plan_digest"] == PLAN.digest
    assert manifest["checkpoint"] == {"step": 7}
    assert manifest["checkpoint_kept"] == "hard link"
    assert manifest["versions"]["numpy"] == np.__version__
    assert manifest["duration_s"] >= 0
    assert sorted(path.name for path in run.path.iterdir()) == sorted([MANIFEST, SUMMARY, BLOCKS, CHECKPOINT])


def test_blocks_of_prompt_after_prompt_are_one_table(tmp_path: Path) -> None:
    rows = open_run(write(tmp_path, "mine")).blocks().to_pylist()
    assert rows == [
        {"prompt": "a", "anchor": 3, "rank": [0, 2]},
        {"prompt": "a", "anchor": 4, "rank": [1, 9]},
        {"prompt": "b", "anchor": 5, "rank": [7, 7]},
    ]


def test_only_the_blocks_that_are_asked_for_are_read(tmp_path: Path) -> None:
    run = open_run(write(tmp_path, "mine"))
    assert run.blocks(["anchor"]).to_pydict() == {"anchor": [3, 4, 5]}
    assert run.blocks(["anchor"], prompt="b").to_pydict() == {"anchor": [5]}
    assert run.blocks(prompt="a").column("rank").to_pylist() == [[0, 2], [1, 9]]
    assert run.blocks(prompt="c").num_rows == 0


def test_lists_are_flat_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    array[1, 2, 1] = np.nan
    with BlockWriter(tmp_path / "b.parquet") as writer:
        writer.write("a", {"anchor": np.array([0, 1]), "log_prob": array})
    run = Run(tmp_path, {}, {})
    (tmp_path / "b.parquet").rename(tmp_path / BLOCKS)
    assert run.blocks().column("log_prob").to_pylist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, None]]


def test_the_checkpoint_is_the_same_file_and_no_copy(tmp_path: Path, weights: Path) -> None:
    run = write(tmp_path / "runs", "mine", files=(weights,))
    assert (run / CHECKPOINT / "weights.pt").samefile(weights)
    assert weights.stat().st_nlink == 2
    weights.unlink()  # a trainer that rotates its saves
    assert (run / CHECKPOINT / "weights.pt").read_bytes() == b"0" * 1000


def edit_in_place(path: Path) -> None:
    with path.open("r+b") as file:  # the trainer's own file, which is the kept one too
        file.write(b"1")


def edit_and_hide_the_time(path: Path) -> None:
    before = path.stat()
    edit_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def save_anew(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"1" * 1000)


@pytest.mark.parametrize(
    ("happens", "changed"),
    [
        (lambda path: path.read_bytes(), False),
        (edit_in_place, True),
        (edit_and_hide_the_time, True),
        (lambda path: path.write_bytes(b"1"), True),
        (os.utime, True),  # a new time alone: the content has to be looked at
        # What a trainer and other runs do to their own links leaves the kept bytes alone.
        (save_anew, False),
        (Path.unlink, False),
        (lambda path: (path.parent / "another run's").hardlink_to(path), False),
    ],
    ids=["read", "edited", "hidden", "rewritten", "touched", "new-save", "removed", "kept-again"],
)
def test_a_kept_file_may_have_changed_where_its_stamps_do_not_say_otherwise(
    happens: Callable[[Path], Any], changed: bool, tmp_path: Path, weights: Path
) -> None:
    run = open_run(write(tmp_path / "runs", "mine", files=(weights,)))
    happens(weights)
    assert changed_files(run) == (["weights.pt"] if changed else [])


def test_an_edit_while_the_run_is_made_is_noticed(tmp_path: Path, weights: Path) -> None:
    with new_run(tmp_path / "mine", PLAN, facts={}, checkpoint=(weights,)) as folder:
        edit_in_place(weights)
        write_json(folder / SUMMARY, {"version": 1, "policies": {}, "prompts": {}})
    assert changed_files(open_run(tmp_path / "mine")) == ["weights.pt"]


def test_a_kept_file_that_is_gone_has_changed(tmp_path: Path, weights: Path) -> None:
    run = write(tmp_path, "mine", files=(weights,))
    (run / CHECKPOINT / "weights.pt").unlink()
    assert changed_files(open_run(run)) == ["weights.pt"]


def test_without_stamps_or_kept_files_there_is_all_or_nothing_to_look_at(
    tmp_path: Path, weights: Path
) -> None:
    """A run of a version that noted no stamps; a run that keeps nothing."""
    run = write(tmp_path, "mine", files=(weights,))
    manifest = json.loads((run / MANIFEST).read_text())
    del manifest["checkpoint_files"]
    manifest["checkpoint"] = {"files": ["weights.pt"]}
    (run / MANIFEST).write_text(json.dumps(manifest))
    assert changed_files(open_run(run)) == ["weights.pt"]
    assert changed_files(open_run(write(tmp_path, "bare", plan=OTHER))) == []


def test_a_damaged_run_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    write(tmp_path, "good")
    broken = write(tmp_path, "broken", plan=OTHER)
    (broken / SUMMARY).write_text("{")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / MANIFEST).write_text('{"kind": "something else", "version": 1}')
    (foreign / SUMMARY).write_text("{}")
    assert [run.name for run in list_runs(tmp_path)] == ["good"]
    found = find_run(tmp_path, PLAN)
    assert found is not None
    assert found.name == "good"
    everything = found_runs(tmp_path)
    assert list(everything) == ["good", "broken", "foreign"]
    assert everything["good"] == found
    assert "not readable" in str(everything["broken"])
    assert "something else" in str(everything["foreign"])


def test_a_directory_is_kept_as_a_folder_of_links(tmp_path: Path, weights: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    run = write(tmp_path / "runs", "mine", files=(config, weights))
    kept = run / CHECKPOINT
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "weights.pt"]
    assert (kept / "weights.pt").samefile(weights)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
@pytest.mark.parametrize("count", [1, 2])
def test_where_no_link_is_possible_nothing_is_copied(tmp_path: Path, count: int) -> None:
    elsewhere = Path("/dev/shm") / f"draftgauge-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        files = tuple(elsewhere / f"{i}.safetensors" for i in range(count))
        for file in files:
            file.write_bytes(b"0")
        if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs a second file system")
        run = write(tmp_path, "mine", files=files)
        assert open_run(run).manifest["checkpoint_kept"] == "reference"
        assert not (run / CHECKPOINT).exists()
    finally:
        shutil.rmtree(elsewhere)


def test_run_json_is_written_last_and_nothing_is_there_before(tmp_path: Path, weights: Path) -> None:
    seen = {}
    with new_run(tmp_path / "mine", PLAN, facts={}, checkpoint=(weights,)) as folder:
        assert folder.parent == tmp_path
        # Kept first, in case the trainer removes it.
        assert (folder / CHECKPOINT / "weights.pt").samefile(weights)
        write_json(folder / SUMMARY, {"version": 1, "policies": {}, "prompts": {}})
        (folder / BLOCKS).write_bytes(b"")
        seen = {path.name for path in folder.iterdir()}
        assert list_runs(tmp_path) == []
        assert not (tmp_path / "mine").exists()
    assert seen == {CHECKPOINT, SUMMARY, BLOCKS}
    assert [run.name for run in list_runs(tmp_path)] == ["mine"]


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_run(tmp_path / "mine", PLAN, facts={}, checkpoint=()):
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".partial-17-killed").mkdir()
    (tmp_path / ".partial-17-killed" / BLOCKS).write_bytes(b"half")
    write(tmp_path, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "mine")
    before = (tmp_path / "mine" / MANIFEST).read_bytes()
    with pytest.raises(RunError, match=r"run mine: .*exists already and is never overwritten"):
        write(tmp_path, "mine", plan=OTHER)
    assert (tmp_path / "mine" / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("name", ["", ".", "..", ".mine", "a/b", "../b", "/b"])
def test_a_name_that_no_listing_would_show_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be called"):
        run_path(tmp_path, PLAN, label="x", name=name)


def test_a_run_without_a_name_is_called_after_label_and_plan(tmp_path: Path) -> None:
    assert run_path(tmp_path, PLAN, label="step_7") == tmp_path / f"step_7-{PLAN.digest[:8]}"
    assert run_path(tmp_path, PLAN, label="step_7", name="mine") == tmp_path / "mine"


def test_a_run_is_found_by_what_it_answers(tmp_path: Path) -> None:
    assert find_run(tmp_path / "nowhere", PLAN) is None
    write(tmp_path, "mine")
    found = find_run(tmp_path, PLAN)
    assert found is not None
    assert found.name == "mine"
    assert find_run(tmp_path, OTHER) is None
    assert find_run(tmp_path, PLAN, name="mine") == found
    assert find_run(tmp_path, PLAN, name="other") is None


def test_runs_are_listed_oldest_first_and_unfinished_ones_never(tmp_path: Path) -> None:
    for name, day in (("b", "02"), ("a", "03"), ("c", "01")):
        change(write(tmp_path, name) / MANIFEST, started=f"2026-01-{day}T00:00:00Z")
    shutil.copytree(tmp_path / "a", tmp_path / ".partial-77-d")
    shutil.copytree(tmp_path / "a", tmp_path / "e")
    (tmp_path / "e" / MANIFEST).unlink()
    (tmp_path / "notes.txt").write_text("")
    assert [run.name for run in list_runs(tmp_path)] == ["c", "b", "a"]
    assert list_runs(tmp_path / "nowhere") == []


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            RunError, match=r"no run.json: it is no complete run; `draftgauge runs` lists those"
        ):
            open_run(path)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (MANIFEST, {"version": 2}, "has version 2, expected 1; open it with the draftgauge that wrote it"),
        (SUMMARY, {"version": None}, "has version None, expected 1"),
        (
            MANIFEST,
            {"kind": "draftgauge recording"},
            "is of kind 'draftgauge recording', expected 'draftgauge run'",
        ),
    ],
    ids=["newer", "no version", "kind"],
)
def test_a_run_of_another_kind_or_version_is_refused(
    file: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    change(write(tmp_path, "mine") / file, **values)
    with pytest.raises(RunError, match=message):
        open_run(tmp_path / "mine")


@pytest.mark.parametrize("text", ["{", "[]", "\xff", ""], ids=["cut", "no object", "no text", "empty"])
@pytest.mark.parametrize("file", [MANIFEST, SUMMARY])
def test_a_damaged_run_is_named(file: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, "mine") / file
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=f"mine/{file}.*remove the run's folder and evaluate again"):
        open_run(tmp_path / "mine")


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        (MANIFEST, "plan", "run.json lacks plan; remove the run's folder"),
        (MANIFEST, "plan_digest", "run.json lacks plan_digest;"),
        (MANIFEST, "started", "run.json lacks started;"),
        (SUMMARY, "policies", "summary.json lacks policies;"),
        (SUMMARY, "prompts", "summary.json lacks prompts;"),
    ],
)
def test_a_run_that_lacks_a_part_is_named_and_stops_no_listing(
    file: str, key: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "mine") / file
    path.write_text(json.dumps({name: v for name, v in json.loads(path.read_text()).items() if name != key}))
    write(tmp_path, "other", plan=OTHER)
    with pytest.raises(RunError, match=message):
        open_run(tmp_path / "mine")
    assert [run.name for run in list_runs(tmp_path)] == ["other"]
    assert list(found_runs(tmp_path)) == ["other", "mine"]
    assert isinstance(found_runs(tmp_path)["mine"], str)


@pytest.mark.parametrize(
    "plan", [[], {}, {**dataclasses.asdict(PLAN), "colour": "red"}], ids=["list", "less", "more"]
)
def test_a_plan_of_other_fields_is_refused(plan: Any, tmp_path: Path) -> None:
    change(write(tmp_path, "mine") / MANIFEST, plan=plan)
    with pytest.raises(
        RunError, match="its plan has not the fields checkpoint_digest, recording_digest, wiring,"
    ):
        open_run(tmp_path / "mine")


def test_a_run_without_its_summary_is_named(tmp_path: Path) -> None:
    (write(tmp_path, "mine") / SUMMARY).unlink()
    with pytest.raises(RunError, match=r"mine/summary.json is missing"):
        open_run(tmp_path / "mine")


def test_versions_are_those_installed() -> None:
    assert package_version("numpy") == np.__version__
    assert package_version("no-such-package") is None
