"""A probe is read back as it was written, and refused where its parts contradict each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.errors import CheckpointError, StoreError
from draftgauge.probe import PROBE_FILE, find_probe, read_probe, write_probe
from draftgauge.tensorfile import write_safetensors

SOUND: dict[str, np.ndarray] = {
    "tokens": np.arange(9, dtype=np.int32),
    "features": np.ones((6, 4), np.float32),
    "anchors": np.array([4, 6], np.int32),
    "top_ids": np.array([[[1, 2], [3, 4], [5, 6]]] * 2, np.int32),
    "top_log_probs": np.array([[[-0.1, -3.0]] * 3] * 2, np.float32),
}


def test_a_probe_is_read_back(tmp_path: Path) -> None:
    write_probe(tmp_path / PROBE_FILE, SOUND, dtype="bfloat16", step=7)
    path = find_probe(tmp_path)
    assert path == find_probe(tmp_path / "checkpoint.pt") == tmp_path / PROBE_FILE
    assert path is not None
    probe = read_probe(path)
    assert (probe.dtype, probe.step, probe.depth) == ("bfloat16", 7, 3)
    assert {name: stored.shape for name, stored in probe.tensors.items()} == {
        name: array.shape for name, array in SOUND.items()
    }


def test_where_there_is_none_none_is_found(tmp_path: Path) -> None:
    assert find_probe(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"features": None}, "it lacks features"),
        ({"anchors": np.array([4, 6, 7], np.int32)}, "A is"),
        ({"anchors": np.array([4.0, 6.0], np.float32)}, "anchors is stored as F32"),
        ({"anchors": np.array([4, 8], np.int32)}, "features ends at position 5, before the anchor 8"),
        ({"anchors": np.array([4, 60], np.int32)}, "tokens has 9 positions"),
        ({"top_log_probs": SOUND["top_log_probs"][:, :, ::-1].copy()}, "rises along its last dimension"),
        ({"top_log_probs": -SOUND["top_log_probs"]}, "at most 0"),
        ({"features": np.full((6, 4), np.nan, np.float32)}, "not finite"),
        ({"vocabulary": np.array([1, 2, 3], np.int32)}, "tokens that vocabulary lacks"),
    ],
)
def test_a_probe_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    tensors = {name: array for name, array in {**SOUND, **changes}.items() if array is not None}
    path = tmp_path / PROBE_FILE
    write_safetensors(path, tensors)
    with pytest.raises(CheckpointError, match=words):
        read_probe(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=words):
        write_probe(path, tensors, dtype="float32")
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


def test_a_probe_is_not_overwritten(tmp_path: Path) -> None:
    write_probe(tmp_path / PROBE_FILE, SOUND, dtype="float32")
    with pytest.raises(StoreError, match="never overwritten"):
        write_probe(tmp_path / PROBE_FILE, SOUND, dtype="float32")
