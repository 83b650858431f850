"""A probe is read back as it was written, and refused where its parts contradict each other."""

import re
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
        ({"tokens": None, "top_ids": None}, "it lacks tokens, top_ids"),
        ({"anchors": np.array([4, 6, 7], np.int32)}, "top_ids is [2, 3, 2], anchors [3]: A is 2 and 3"),
        ({"rows": np.ones((2, 3, 4, 2), np.float32)}, "rows is [2, 3, 4, 2], anchors [2]: A is 3 and 2"),
        ({"context": np.ones((5, 2), np.float32)}, "context is [5, 2], features [6, 4]: S is 5 and 6"),
        (
            {"context": np.ones((6, 2), np.float32), "final": np.ones((2, 3, 4), np.float32)},
            "final is [2, 3, 4], context [6, 2]: H is 4 and 2",
        ),
        ({"anchors": np.array([4.0, 6.0], np.float32)}, "anchors is stored as F32; expected I32 or I64"),
        ({"features": np.ones((6, 4), np.int32)}, "features is stored as I32; expected F32 or BF16 or F16"),
        ({"tokens": np.arange(9, dtype=np.int32)[None]}, "tokens is [1, 9]; expected [T]"),
        ({"anchors": np.empty(0, np.int32)}, "anchors is [0]; expected [A]"),
        ({"anchors": np.array([4, 8], np.int32)}, "features ends at position 5, before the anchor 8"),
        ({"anchors": np.array([4, 60], np.int32)}, "tokens has 9 positions"),
        ({"anchors": np.array([-1, 4], np.int32)}, "tokens has 9 positions"),
        ({"top_ids": -SOUND["top_ids"]}, "negative ids"),
        ({"top_ids": np.ones_like(SOUND["top_ids"])}, "top_ids names a token twice at one depth"),
        ({"top_log_probs": SOUND["top_log_probs"][:, :, ::-1].copy()}, "rises along its last dimension"),
        ({"top_log_probs": -SOUND["top_log_probs"]}, "top_log_probs holds 3; a log-probability is at most 0"),
        ({"features": np.full((6, 4), np.nan, np.float32)}, "features holds values that are not finite"),
        ({"vocabulary": np.array([1, 2, 3], np.int32)}, "top_ids holds tokens that vocabulary lacks"),
    ],
)
def test_a_probe_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    tensors = {name: array for name, array in {**SOUND, **changes}.items() if array is not None}
    path = tmp_path / PROBE_FILE
    write_safetensors(path, tensors)
    with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
        read_probe(path)
    assert str(refused.value).startswith(f"{path} is no probe: ")
    path.unlink()
    with pytest.raises(CheckpointError, match=re.escape(words)):
        write_probe(path, tensors, dtype="float32")
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"version": "2"}, "its version is 2; this draftgauge reads 1"),
        ({"dtype": "bf16"}, "its dtype is 'bf16'; expected float32, tfloat32, float16, bfloat16"),
        ({"step": "40k"}, "its step is '40k'; expected a whole number"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(
    tmp_path: Path, metadata: dict[str, str], words: str
) -> None:
    write_safetensors(tmp_path / PROBE_FILE, SOUND, metadata=metadata)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read_probe(tmp_path / PROBE_FILE)


def test_metadata_may_be_absent(tmp_path: Path) -> None:
    write_safetensors(tmp_path / PROBE_FILE, SOUND)
    probe = read_probe(tmp_path / PROBE_FILE)
    assert (probe.dtype, probe.step) == ("", None)


def test_a_damaged_probe_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / PROBE_FILE
    write_probe(path, SOUND, dtype="float32")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=rf"{PROBE_FILE} has \d+ bytes; expected \d+ .* truncated"):
        read_probe(path)


def test_a_probe_is_not_overwritten(tmp_path: Path) -> None:
    write_probe(tmp_path / PROBE_FILE, SOUND, dtype="float32")
    with pytest.raises(StoreError, match="never overwritten"):
        write_probe(tmp_path / PROBE_FILE, SOUND, dtype="float32")
