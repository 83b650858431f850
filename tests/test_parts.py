"""The parts of an unfinished run: kept until it is complete, found again, and removed by the last who needs them."""

from pathlib import Path

import numpy as np
import pytest

from draftgauge.errors import StoreError
from draftgauge.parts import Parts, packed
from draftgauge.runs import flat_lists
from tests.test_runs import PLAN

BLOCKS = {"a": {"anchor": np.array([3, 4], np.int32), "rank": np.array([[0, 2], [1, 9]], np.int32)}}
NO_BLOCKS = {"b": {"anchor": np.zeros(0, np.int32), "rank": np.zeros((0, 2), np.int32)}}


def unfinished(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_what_is_packed_is_read_as_it_was(tmp_path: Path) -> None:
    with Parts(tmp_path, PLAN, checkpoint=()) as parts:
        parts.add(0, packed({**BLOCKS, **NO_BLOCKS}))
        table = parts.read(0)
        assert table["prompt"].to_pylist() == ["a", "a"]
        assert table["anchor"].to_pylist() == [3, 4]
        assert flat_lists(table["rank"]).tolist() == [[0, 2], [1, 9]]
        parts.add(1, packed(NO_BLOCKS))
        assert flat_lists(parts.read(1)["rank"]).shape == (0, 2)


def test_parts_outlive_a_failure_and_are_found_again(tmp_path: Path) -> None:
    def failing() -> None:
        with Parts(tmp_path, PLAN, checkpoint=()) as parts:
            parts.add(2, packed(BLOCKS))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with Parts(tmp_path, PLAN, checkpoint=()) as parts:
        assert [parts.has(index) for index in range(4)] == [False, False, True, False]
        parts.discard()
    assert unfinished(tmp_path) == []


def test_nothing_stays_where_nothing_was_measured(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    with pytest.raises(ZeroDivisionError), Parts(tmp_path / "runs", PLAN, checkpoint=(weights,)):
        raise ZeroDivisionError
    assert unfinished(tmp_path / "runs") == []


def test_a_checkpoint_that_its_trainer_removes_is_kept(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    with Parts(tmp_path / "runs", PLAN, checkpoint=(weights,)) as parts:
        weights.unlink()
        (kept,) = parts.checkpoint
        assert kept.name == weights.name
        assert kept.read_bytes() == b"weights"


def test_the_last_process_of_a_plan_removes_its_parts(tmp_path: Path) -> None:
    with Parts(tmp_path, PLAN, checkpoint=()) as slow:
        slow.add(0, packed(BLOCKS))
        with Parts(tmp_path, PLAN, checkpoint=()) as fast:
            fast.add(0, packed(NO_BLOCKS))  # the first one stays: of one plan they are the same
            fast.discard()
        assert slow.read(0)["anchor"].to_pylist() == [3, 4]
        slow.discard()
    assert unfinished(tmp_path) == []


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with Parts(tmp_path, PLAN, checkpoint=()) as parts:
        parts.add(0, b"no parquet")
        with pytest.raises(StoreError, match=r"00000\.parquet, a part .* remove it, and the same command"):
            parts.read(0)
        with pytest.raises(StoreError, match=r"00001\.parquet"):
            parts.read(1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with (
        pytest.raises(StoreError, match=r"runs/\.unfinished-.* cannot be written"),
        Parts(tmp_path / "runs", PLAN, checkpoint=()),
    ):
        pass
