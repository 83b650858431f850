"""A kept checkpoint that is edited through its hard link is noticed when the run is read again."""

import os
from pathlib import Path

import pytest

from draftgauge.evaluate import evaluate_checkpoint
from draftgauge.kept import checkpoint_caveat
from draftgauge.runs import Run, open_run
from tests import tiny


@pytest.fixture(params=["directory", "pt"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Run, Path]:
    if request.param == "pt":
        config = {**tiny.drafter_config(), "mask_token_id": 255}
        source = tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", config=config)
        file = source
    else:
        source = tiny.drafter_dir(tmp_path / "drafter")
        file = source / "model.safetensors"
    return evaluate_checkpoint(source, tiny.recording().path, root=tmp_path / "runs"), file


def test_what_nobody_touched_is_what_was_measured(run: tuple[Run, Path]) -> None:
    assert checkpoint_caveat(open_run(run[0].path)) is None


def test_a_new_time_alone_is_no_change(run: tuple[Run, Path]) -> None:
    os.utime(run[1], (1, 1))
    assert checkpoint_caveat(run[0]) is None


def test_an_edit_in_place_is_a_warning(run: tuple[Run, Path]) -> None:
    made, file = run
    data = file.read_bytes()
    with file.open("r+b") as written:
        written.write(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])
    caveat = checkpoint_caveat(made)
    assert caveat is not None
    assert (caveat.slug, caveat.severity) == ("checkpoint-changed", "warning")
    assert "was edited" in caveat.text


def test_a_new_file_under_the_old_name_changes_nothing(run: tuple[Run, Path]) -> None:
    """A trainer that writes anew and renames leaves the kept file alone."""
    made, file = run
    file.unlink()
    file.write_bytes(b"other")
    assert checkpoint_caveat(made) is None
