"""Weights that are idle, untrained, copied or too large for a dtype are named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.pairing import open_drafter, open_pair
from draftgauge.soundness import soundness_controls
from draftgauge.stated import Stated
from draftgauge.trust import Control
from tests import planted
from tests.faults import FAULTS, site_of
from tests.planting import Site


def controls(checkpoint: Path, recording: Path, *, dtype: str = "float32") -> dict[str, Control]:
    pair = open_pair(checkpoint, recording, stated=Stated())

    def reopen(other: str):
        return open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=other)

    found = soundness_controls(reopen(dtype), pair.recording, items=pair.items, reopen=reopen)
    return {control.slug: control for control in found}


def planted_fault(what: str, folder: Path) -> Site:
    (fault,) = [fault for fault in FAULTS if fault.what == what]
    return site_of(fault, folder)


@pytest.mark.parametrize(
    "changes", [{}, {"mask_embedding": True}, {"head": "own", "vocabulary_map": "offset"}]
)
def test_all_pass_where_nothing_is_wrong(changes: dict) -> None:
    pair = planted.shared_pair(2, **changes)
    found = controls(pair.checkpoint, pair.recording.path)
    assert tuple(found) == ("tensors-used", "tensors-trained", "dtype")
    assert found["tensors-used"].verdict == found["tensors-trained"].verdict == "passed"
    assert found["dtype"].verdict in ("passed", "caution")  # random weights flip more than trained ones
    assert found["tensors-used"].values["tensors"] == 25 + ("mask_embedding" in changes)


def test_looking_at_the_weights_leaves_them_as_they_are() -> None:
    pair = open_pair(
        planted.shared_pair(2).checkpoint, planted.shared_pair(2).recording.path, stated=Stated()
    )
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    soundness_controls(drafter, pair.recording, items=pair.items, reopen=lambda _: drafter)
    assert all(torch.equal(before[name], weight) for name, weight in drafter.named_parameters())


def test_a_layer_that_adds_nothing_hides_its_weights(tmp_path: Path) -> None:
    site = planted_fault("a layer that adds nothing", tmp_path)
    control = controls(site.checkpoint, site.recording)["tensors-used"]
    assert control.verdict == "failed"
    assert "layers.1.self_attn.q_proj.weight" in control.values["idle"]
    assert not [name for name in control.values["idle"] if name.startswith("layers.0")]


@pytest.mark.parametrize(
    ("what", "verdict", "words"),
    [
        ("a layer that is a copy", "failed", "layers.1.self_attn.q_proj.weight equals layers.0."),
        ("norms at their initial value", "caution", "hidden_norm.weight is 1 throughout"),
    ],
)
def test_weights_as_they_began_are_named(tmp_path: Path, what: str, verdict: str, words: str) -> None:
    site = planted_fault(what, tmp_path)
    control = controls(site.checkpoint, site.recording)["tensors-trained"]
    assert control.verdict == verdict
    assert words in control.measured


def scaled(name: str, by: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] *= by

    return change


def test_values_beyond_float16_are_a_caution_and_its_place_is_named(tmp_path: Path) -> None:
    site = planted_fault("float16 would overflow in the tap fusion", tmp_path)
    control = controls(site.checkpoint, site.recording)["dtype"]
    assert control.verdict == "caution"
    assert control.values["largest"] > 65504
    assert control.values["largest_in"] == "fc"


def test_values_that_are_not_finite_fail(tmp_path: Path) -> None:
    site = planted_fault("float16 would overflow in the tap fusion", tmp_path)
    with site.weights() as tensors:
        scaled("fc.weight", 1e33)(tensors)
    control = controls(site.checkpoint, site.recording)["dtype"]
    assert control.verdict == "failed"


def test_another_dtype_changes_few_choices() -> None:
    pair = planted.shared_pair(2)
    there, back = (
        controls(pair.checkpoint, pair.recording.path, dtype=d)["dtype"] for d in ("float32", "bfloat16")
    )
    assert there.values["flipped"] == pytest.approx(back.values["flipped"], abs=0.05)
    assert 0 < there.values["flipped"] < 0.1
