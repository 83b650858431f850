"""The target, asked again, recognises what is stored under a tap's name."""

from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.probe import find_probe, read_probe
from draftgauge.recording import open_recording
from draftgauge.tensorfile import read_safetensors, write_safetensors
from draftgauge.train import TrainPlan, train
from draftgauge.trust import Control
from draftgauge.witness import matched, target_controls
from tests import tiny
from tests.planting import Site

LAYERS = {i: torch.randn(12, 8, generator=torch.Generator().manual_seed(i + 2)) for i in range(-1, 4)}


@pytest.mark.parametrize(
    ("states", "claimed", "found"),
    [
        (LAYERS[1], 1, "layer 1"),
        (LAYERS[2], 1, "it is the output of layer 2"),
        (LAYERS[-1], 0, "it is the output of layer -1"),
        (LAYERS[3], 2, "it is the output of layer 2 after the final norm"),
        (LAYERS[1].roll(1, 0), 1, "it is the output of layer 1, one position late"),
        (LAYERS[1].roll(-1, 0), 1, "it is the output of layer 1, one position early"),
        (LAYERS[1] + LAYERS[2], 1, None),
        (LAYERS[2], None, "layer 2"),
        (torch.zeros(12, 8), None, None),
    ],
)
def test_stored_states_are_recognised(states, claimed, found) -> None:
    assert matched(states, LAYERS, claimed=claimed, tolerance=0.01).found == found


def asked(folder: Path) -> dict[str, Control]:
    recording = open_recording(folder)
    return {c.slug: c for c in target_controls(recording, items=recording.items)}


def test_a_recording_of_the_target_at_hand_passes(tmp_path: Path) -> None:
    recording, _ = tiny.own_target(tmp_path)
    found = asked(recording.path)
    assert {slug: c.verdict for slug, c in found.items()} == {
        "target-weights": "passed",
        "re-extracted": "passed",
    }


def test_a_tap_of_another_layer_is_named_as_what_it_is(tmp_path: Path) -> None:
    recording = tiny.copied_recording(tmp_path / "copy")
    site = Site(tmp_path, tmp_path, recording.path, {})

    def change(value):
        value["plan"]["taps"] = [2, 3, 5]  # as if ids had been counted from another end

    site.manifest(change)
    control = asked(recording.path)["re-extracted"]
    assert control.verdict == "failed"
    assert "tap 2 of" in control.measured
    assert "it is the output of layer 1" in control.measured


def test_rows_that_moved_are_named(tmp_path: Path) -> None:
    recording = tiny.copied_recording(tmp_path / "copy")
    site = Site(tmp_path, tmp_path, recording.path, {})
    with site.items() as items:
        for tensors in items:
            tensors["taps"][0] = np.roll(tensors["taps"][0], 1, axis=0)
    assert "one position late" in asked(recording.path)["re-extracted"].measured


def test_a_target_that_was_tuned_since_is_found_out(tmp_path: Path) -> None:
    """A middle layer changed: the ends are the same, the files' sizes too."""
    recording, target = tiny.own_target(tmp_path)
    file = target / "model.safetensors"
    tensors = {
        n: np.array(t.mapped().view("<f4").reshape(t.shape)) for n, t in read_safetensors(file)[0].items()
    }
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.5
    file.unlink()
    write_safetensors(file, tensors)
    found = asked(recording.path)
    assert found["target-weights"].verdict == "failed"
    assert found["re-extracted"].verdict == "failed"
    assert "no layer of this target gives it" in found["re-extracted"].measured


def test_without_the_target_nothing_is_asked(tmp_path: Path) -> None:
    recording, target = tiny.own_target(tmp_path)
    target.rename(tmp_path / "elsewhere")
    (control,) = asked(recording.path).values()
    assert control.verdict == "skipped"
    assert "the target is not at" in control.measured


def test_the_trainers_taps_are_recognised_by_its_features(tmp_path: Path) -> None:
    plan = TrainPlan(steps=1, save_steps=(), mask_token_id=3, block_size=4)
    saved = train(tiny.recording(), plan, out=tmp_path / "training")
    path = find_probe(saved)
    assert path is not None
    found = target_controls(tiny.recording(), items=tiny.recording().items, probe=read_probe(path))
    control = {c.slug: c for c in found}["probe-features"]
    assert control.verdict == "passed"
    assert "layer 1, layer 3, layer 5" in control.measured
