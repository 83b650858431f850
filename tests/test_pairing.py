"""Whether a checkpoint and a recording belong together, and the network that they make."""

import shutil
from pathlib import Path

import pytest
import torch

from draftgauge.checkpoint import open_checkpoint
from draftgauge.errors import RecordingError, WiringError
from draftgauge.pairing import fastest_dtype, open_drafter
from draftgauge.recording import Recording
from tests import tiny
from tests.golden import blocks_of, logits_of, wiring_of

WIRING = wiring_of("draftA8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_network_computes_in_the_asked_dtype(dtype: str) -> None:
    checkpoint = open_checkpoint(tiny.workshop() / "drafter")
    drafter = open_drafter(checkpoint, WIRING, recording=tiny.recording(), dtype=dtype)
    kinds = {parameter.dtype for parameter in drafter.parameters()}  # type: ignore[attr-defined]
    kinds |= {drafter.ends.embedding.dtype, drafter.ends.head.dtype}
    assert kinds == {getattr(torch, dtype)}


def test_the_fastest_dtype_is_measured_where_there_is_a_choice(tmp_path: Path) -> None:
    """Weights that are stored in float32 are computed in it: bfloat16 would round them."""
    assert fastest_dtype(open_checkpoint(tiny.workshop() / "drafter"), WIRING) == ("float32", {})
    narrow = {name: tensor.bfloat16() for name, tensor in tiny.weights().items()}
    stored = open_checkpoint(tiny.trainer_pt(tmp_path / "narrow.pt", narrow, config=tiny.drafter_config()))
    dtype, rates = fastest_dtype(stored, WIRING)
    assert rates.keys() == {"float32", "bfloat16"}
    assert min(rates.values()) > 0
    assert rates[dtype] == max(rates.values())


def test_the_network_has_the_checkpoints_weights_and_the_targets_ends() -> None:
    checkpoint = open_checkpoint(tiny.workshop() / "drafter")
    drafter = open_drafter(checkpoint, WIRING, recording=tiny.recording(), dtype="float32")
    golden = blocks_of("draftA8")
    expected = torch.from_numpy(golden["full__zlab_head"])[:, 1:]  # row 0 re-reads the anchor
    torch.testing.assert_close(logits_of(drafter, golden), expected, rtol=1e-4, atol=1e-4)


def test_another_dtype_is_refused() -> None:
    checkpoint = open_checkpoint(tiny.workshop() / "drafter")
    with pytest.raises(
        WiringError, match="'float16' is not computed with; expected --dtype float32 or bfloat16"
    ):
        open_drafter(checkpoint, WIRING, recording=tiny.recording(), dtype="float16")


@pytest.fixture
def own_target(tmp_path: Path) -> tuple[Recording, Path]:
    """A recording of a target that a test may change, and that target."""
    return tiny.own_target(tmp_path)


def test_a_target_that_changed_since_is_refused(own_target: tuple[Recording, Path]) -> None:
    recording, target = own_target
    checkpoint = open_checkpoint(tiny.workshop() / "drafter")
    open_drafter(checkpoint, WIRING, recording=recording, dtype="float32")
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = b"\0\0\0\0"  # its last tensor, the final norm
    path.write_bytes(bytes(content))
    with pytest.raises(RecordingError, match="changed since; record it again"):
        open_drafter(checkpoint, WIRING, recording=recording, dtype="float32")


def test_a_target_that_is_gone_is_refused(own_target: tuple[Recording, Path]) -> None:
    recording, target = own_target
    shutil.rmtree(target)
    checkpoint = open_checkpoint(tiny.workshop() / "drafter")
    with pytest.raises(RecordingError, match="record with --portable"):
        open_drafter(checkpoint, WIRING, recording=recording, dtype="float32")
