"""The file of vLLM's hidden-state connector: its lock is honoured, and what it must hold."""

import fcntl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.engines.calls import Patience
from draftgauge.engines.connector import read_states
from draftgauge.errors import AnswerError, BeingWrittenError
from draftgauge.tensorfile import write_safetensors
from tests.engine_servers import AT_ONCE

STATES = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
TOKENS = np.array([5, 9, 2], np.int64)


def written(path: Path, **tensors: Any) -> Path:
    kept: Mapping[str, Any] = tensors or {"hidden_states": ("BF16", STATES), "token_ids": TOKENS}
    write_safetensors(path, kept)
    return path


def test_states_are_taken_as_they_lie(tmp_path: Path) -> None:
    seen = read_states(written(tmp_path / "s.safetensors"), patience=AT_ONCE, remedy="so")
    np.testing.assert_array_equal(seen.states, STATES)
    assert (seen.dtype, seen.remedy) == ("BF16", "so")
    assert seen.token_ids is not None
    assert seen.token_ids.tolist() == [5, 9, 2]


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with (tmp_path / "s.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            time.sleep(0.02)
            written(path)
            fcntl.flock(lock, fcntl.LOCK_UN)

        writer = threading.Thread(target=finish)
        writer.start()
        patience = Patience(attempts=100_000, wait_s=0.001, longest_s=0.001)
        assert read_states(path, patience=patience, remedy="").states.shape == (3, 2, 2)
        writer.join()


def test_a_lock_that_stays_is_waited_for_up_to_a_bound(tmp_path: Path) -> None:
    path = written(tmp_path / "s.safetensors")
    with (tmp_path / "s.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BeingWrittenError, match=r"still being written: .* 4 tries; .*same command"):
            read_states(path, patience=AT_ONCE, remedy="")


def test_a_lock_that_nobody_holds_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "s.safetensors")
    (tmp_path / "s.safetensors.lock").touch()
    assert read_states(path, patience=AT_ONCE, remedy="").dtype == "BF16"
    assert path.is_file()  # the server's own


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"hidden_states": ("BF16", STATES)}, r"holds hidden_states \[3, 2, 2\]; expected"),
        ({"hidden_states": ("BF16", STATES[0]), "token_ids": TOKENS}, r"expected hidden_states \[T, S, H\]"),
        ({"hidden_states": ("BF16", STATES), "token_ids": TOKENS.astype(np.float32)}, "has type F32"),
    ],
)
def test_a_file_of_something_else(tensors: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s.safetensors", **tensors)
    with pytest.raises(AnswerError, match=said):
        read_states(path, patience=AT_ONCE, remedy="")


def test_a_file_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(AnswerError, match="on a disk that both"):
        read_states(tmp_path / "s.safetensors", patience=AT_ONCE, remedy="")
    path = written(tmp_path / "s.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(AnswerError, match=r"cannot be read: .* truncated"):
        read_states(path, patience=AT_ONCE, remedy="")
