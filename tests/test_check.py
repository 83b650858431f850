"""`check` runs every control there is, and a run carries those that cost little."""

from pathlib import Path

import pytest

from draftgauge.check import block_size_effect, check_checkpoint, quick_controls
from draftgauge.errors import CheckpointError
from draftgauge.pairing import open_drafter, open_pair
from draftgauge.stated import Stated
from draftgauge.train import TrainPlan, train
from tests import planted, tiny
from tests.faults import FAULTS, site_of

QUICK = {
    *("features-finite", "features-vary", "taps-differ", "prefix-features", "final-state", "references-own"),
    *("references-degenerate", "target-files", "context-zeroed", "context-shuffled", "no-leak", "floor"),
    *("ceiling", "mask-token"),
}
THOROUGH = {
    *("context-swapped", "context-by-prompt", "context-moved-later", "context-moved-earlier"),
    *("tensors-used", "tensors-trained", "dtype", "probe", "re-extracted"),
}


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_that_is_right_is_trusted(seed: int) -> None:
    pair = planted.shared_pair(seed)
    value = check_checkpoint(pair.checkpoint, pair.recording.path, seed=seed)
    assert value["trusted"] is True
    assert {control["slug"] for control in value["controls"]} == QUICK | THOROUGH
    raised = {c["slug"]: c["measured"] for c in value["controls"] if c["verdict"] in ("failed", "undecided")}
    assert raised == {}


def test_what_the_trainer_and_the_target_say_belongs_to_it(tmp_path: Path) -> None:
    plan = TrainPlan(steps=2, save_steps=(), mask_token_id=3, block_size=4)
    saved = train(tiny.recording(), plan, out=tmp_path / "training")
    value = check_checkpoint(saved, tiny.recording().path)
    verdicts = {control["slug"]: control["verdict"] for control in value["controls"]}
    for slug in ("probe", "probe-features", "target-weights", "re-extracted"):
        assert verdicts[slug] == "passed", slug
    assert value["step"] == 2


def test_the_probe_is_of_the_block_size_that_was_trained(tmp_path: Path) -> None:
    """Whoever measures with another block size still learns whether both compute the same."""
    plan = TrainPlan(steps=1, save_steps=(), mask_token_id=3, block_size=4)
    saved = train(tiny.recording(), plan, out=tmp_path / "training")
    value = check_checkpoint(saved, tiny.recording().path, stated=Stated(block_size=3))
    assert {c["slug"]: c["verdict"] for c in value["controls"]}["probe"] == "passed"


def test_nothing_is_drafted_from_features_that_are_not_finite(tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.what == "NaN"]
    site = site_of(fault, tmp_path)
    value = check_checkpoint(site.checkpoint, site.recording)
    assert value["failed"] == ["features-finite"]
    assert not [c for c in value["controls"] if c["slug"].startswith("context")]


def test_a_checkpoint_that_lacks_tensors_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.what == "a layer missing"]
    site = site_of(fault, tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp"):
        check_checkpoint(site.checkpoint, site.recording)


def opened(**stated):
    made = planted.shared_pair(0)
    pair = open_pair(made.checkpoint, made.recording.path, stated=Stated(**stated))
    return pair, open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")


@pytest.mark.parametrize(("blocks", "expected"), [(10, 16), (900, 45), (1_000_000, 128)])
def test_a_control_costs_a_twentieth_of_the_measurement(blocks: int, expected: int) -> None:
    pair, drafter = opened()
    found = {control.slug: control for control in quick_controls(pair, drafter, blocks=blocks)}
    assert found.keys() == QUICK
    assert found["ceiling"].values["anchors"] == expected


def test_the_effect_of_another_block_size_is_measured_to_a_depth_that_both_reach() -> None:
    assert block_size_effect(*opened(), blocks=600) is None
    used, trained, anchors, depth = block_size_effect(*opened(block_size=12), blocks=600)
    assert depth == 5
    assert anchors == 128
    assert 0.7 < used < trained < 1.6
    assert block_size_effect(*opened(block_size=4), blocks=600)[3] == 3


def test_where_no_completion_is_long_enough_the_effect_is_absent() -> None:
    assert block_size_effect(*opened(block_size=200), blocks=600) is None
