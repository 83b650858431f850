"""What a drafter sees of a recorded item, against the target's own hidden states."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.errors import RecordingError
from draftgauge.features import Recorded, as_torch, read_item
from draftgauge.record import Request, record_target
from draftgauge.target import load_target, observe
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors
from tests import tiny
from tests.golden import wiring_of

WIRING = wiring_of("draftA8")


@pytest.mark.parametrize("taps", [(1, 3), (3, 1), (5,), (5, 1)], ids=str)
@pytest.mark.parametrize("after_norm", [True, False], ids=["normed", "raw"])
def test_features_are_the_targets_hidden_states(taps: tuple[int, ...], after_norm: bool) -> None:
    recording, item = tiny.recording(), tiny.recording().item("five")
    target = load_target(tiny.workshop() / "target")
    tokens = as_torch(recording.tensors(item).tokens).long()
    with torch.inference_mode():
        states = target.model.model(tokens[None], output_hidden_states=True).hidden_states
        before_norm: list[torch.Tensor] = []
        hook = target.model.model.layers[5].register_forward_hook(lambda *a: before_norm.append(a[2]))
        target.model.model(tokens[None])
        hook.remove()
    last = states[6][0] if after_norm else before_norm[0].reshape(states[6][0].shape)
    expected = torch.cat([last if tap == 5 else states[tap + 1][0] for tap in taps], dim=1)

    wiring = dataclasses.replace(WIRING, taps=taps, tap_after_final_norm=after_norm)
    seen = read_item(recording, item, wiring=wiring, dtype=torch.float32)

    torch.testing.assert_close(seen.features, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen.tokens, tokens)
    assert seen.prompt_len == 5


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_rounds_where_the_target_rounds(compute: torch.dtype, tmp_path: Path) -> None:
    """A bfloat16 target scales what it has rounded already; any other order gives other last bits."""
    request = Request(taps=(5,), dtype="bfloat16", max_new_tokens=8)
    recording = record_target(
        tiny.workshop() / "target", tiny.prompt_set(["long"]), request=request, root=tmp_path
    )
    target = load_target(tiny.workshop() / "target", dtype="bfloat16")
    with torch.inference_mode():
        expected = target.decoder.norm(as_torch(recording.tensors(recording.items[0]).taps)[0])
    wiring = dataclasses.replace(WIRING, taps=(5,))
    seen = read_item(recording, recording.items[0], wiring=wiring, dtype=compute)
    assert seen.features.dtype == compute
    assert torch.equal(seen.features, expected.to(compute))


@pytest.mark.parametrize(
    ("max_blocks", "anchors"), [(None, range(5, 25)), (1, [5]), (3, [5, 6, 7]), (99, range(5, 25))]
)
def test_max_blocks_keeps_the_first_anchors(max_blocks: int | None, anchors: range | list[int]) -> None:
    item = tiny.recording().item("five")  # 5 + 21 tokens: anchors 5 to 24
    seen = read_item(tiny.recording(), item, wiring=WIRING, dtype=torch.float32, max_blocks=max_blocks)
    assert seen.anchors.tolist() == list(anchors)
    assert len(seen.tokens) == len(seen.features) == max(anchors) + 2


def test_a_tap_that_was_not_recorded_is_named() -> None:
    wiring = dataclasses.replace(WIRING, taps=(1, 2))
    with pytest.raises(RecordingError, match=r"\[2\] missing; record again with --taps 1,2"):
        read_item(tiny.recording(), tiny.recording().items[0], wiring=wiring, dtype=torch.float32)


def test_layers_around_the_taps_are_read_where_they_are_kept(tmp_path: Path) -> None:
    request = Request(taps=(1, 4), taps_around=True, max_new_tokens=4)
    names = ["one", "five", "long", "pair", "three", "four"]
    recording = record_target(
        tiny.workshop() / "target", tiny.prompt_set(names), request=request, root=tmp_path
    )
    first, last = recording.items[0], recording.items[-1]
    wiring = dataclasses.replace(WIRING, taps=(5, 1, 0), tap_after_final_norm=False)
    seen = read_item(recording, first, wiring=wiring, dtype=torch.float32)
    expected = observe(load_target(tiny.workshop() / "target"), seen.tokens.tolist(), taps=(5, 1, 0)).taps
    assert torch.equal(seen.features, torch.cat(list(expected), dim=1))
    with pytest.raises(
        RecordingError, match=r"of prompt four holds \[1, 4\]: \[5, 0\] missing; layers around"
    ):
        read_item(recording, last, wiring=wiring, dtype=torch.float32)


def test_anchors_are_all_positions_from_which_a_round_can_start() -> None:
    recorded = Recorded(torch.zeros(7, dtype=torch.long), 3, torch.zeros(7, 1))
    assert recorded.anchors.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.array([[1.5, -2.0]], np.float32), torch.tensor([[1.5, -2.0]])),
        (np.array([1.5], np.float16), torch.tensor([1.5], dtype=torch.float16)),
        (("BF16", np.array([0x3FC0, 0xC000], np.uint16)), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        (np.array([3, -1], np.int32), torch.tensor([3, -1], dtype=torch.int32)),
        (np.zeros((0, 4), np.float32), torch.empty(0, 4)),
    ],
    ids=["F32", "F16", "BF16", "I32", "empty"],
)
def test_stored_bytes_become_tensors(stored: object, expected: torch.Tensor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", {"x": stored}, metadata={})  # type: ignore[dict-item]
    tensor = as_torch(read_safetensors(tmp_path / "t.safetensors")[0]["x"])
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor, expected)


def test_an_element_type_that_nothing_computes_with_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"x": np.array([1, 0], np.bool_)}, metadata={})
    stored: StoredTensor = read_safetensors(path)[0]["x"]
    with pytest.raises(RecordingError, match=f"x is stored as {stored.dtype}"):
        as_torch(stored)
