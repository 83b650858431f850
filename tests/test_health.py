"""A recording that is right passes every control; each way of being wrong fails its own."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from draftgauge.health import recording_controls
from draftgauge.recording import MANIFEST, Recording, open_recording
from draftgauge.trust import Control
from tests import planted, tiny
from tests.faults import FAULTS, site_of
from tests.planting import Site

SLUGS = (
    *("features-finite", "features-vary", "taps-differ", "prefix-features", "final-state", "references-own"),
    *("references-degenerate", "target-files"),
)


def controls(recording: Recording, **asked) -> dict[str, Control]:
    found = recording_controls(recording, items=recording.items, **asked)
    return {control.slug: control for control in found}


def planted_fault(what: str, folder: Path) -> Site:
    (fault,) = [fault for fault in FAULTS if fault.what == what]
    return site_of(fault, folder)


@pytest.mark.parametrize("seed", range(3))
def test_all_pass_where_nothing_is_wrong(seed: int) -> None:
    found = controls(planted.shared_pair(seed).recording)
    assert tuple(found) == SLUGS
    assert {c.verdict for c in found.values()} == {"passed", "skipped"}
    assert [slug for slug, c in found.items() if c.verdict == "skipped"] == ["target-files"]


def test_a_recorded_target_passes_too() -> None:
    found = controls(tiny.recording())
    failed = [slug for slug, c in found.items() if c.verdict == "failed"]
    assert failed == []
    assert found["target-files"].verdict == "passed"
    assert found["prefix-features"].verdict == "skipped"  # no two of its prompts begin alike
    assert found["references-degenerate"].verdict == "caution"  # a random target soon loops
    assert "long (100%" in found["references-degenerate"].measured


@pytest.mark.parametrize(
    ("what", "slug", "words"),
    [
        ("NaN", "features-finite", "tap 1 of prompt0: 64 values"),
        ("all zeros", "features-vary", "tap 1 of prompt0 is zero throughout"),
        ("constant", "features-vary", "repeats its row"),
        ("two taps equal", "taps-differ", "tap 1 and tap 3 of prompt0 are equal"),
        ("one position too late", "prefix-features", "differ at position"),
        ("the recorded final state is after the norm", "final-state", "after the norm already"),
        ("every third token another's", "final-state", "not this target's own greedy text"),
        ("one completion loops", "references-degenerate", "prompt0 (100% of its tokens)"),
    ],
)
def test_a_planted_fault_is_named(tmp_path: Path, what: str, slug: str, words: str) -> None:
    recording = open_recording(planted_fault(what, tmp_path).recording)
    control = controls(recording, taps=(1, 3, 4))[slug]
    assert control.verdict in ("failed", "caution")
    assert words in f"{control.measured}; {control.advice}"


@pytest.mark.parametrize(("by", "words"), [(1, "one position late"), (-1, "one position early")])
def test_a_final_state_that_stands_beside_its_token_is_recognised(
    tmp_path: Path, by: int, words: str
) -> None:
    site = planted_fault("3 of 10", tmp_path)
    with site.items() as items:
        for tensors in items:
            tensors["final"] = np.roll(tensors["final"], by, axis=0)
    control = controls(open_recording(site.recording))["final-state"]
    assert control.verdict == "failed"
    assert words in str(control.advice)


def test_references_of_another_are_counted_from_the_manifest(tmp_path: Path) -> None:
    site = planted_fault("3 of 10", tmp_path)

    def change(value):
        for item in value["items"]:
            item["agreed"] -= 10
            item["near_ties"] = 1

    site.manifest(change)
    control = controls(open_recording(site.recording))["references-own"]
    assert control.verdict == "failed"
    assert "30 of" in control.measured
    assert "3 of them near-ties" in control.measured


def test_a_target_whose_tokenizer_or_config_changed_is_named(tmp_path: Path) -> None:
    recording, target = tiny.own_target(tmp_path)
    assert controls(recording)["target-files"].verdict == "passed"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    control = controls(recording)["target-files"]
    assert control.verdict == "failed"
    assert "config.json changed" in control.measured


def test_weights_that_are_newer_than_the_recording_are_a_caution(tmp_path: Path) -> None:
    recording, _ = tiny.own_target(tmp_path)
    manifest = recording.path / MANIFEST
    older = manifest.stat().st_mtime - 1000
    os.utime(manifest, (older, older))
    control = controls(recording)["target-files"]
    assert control.verdict == "caution"
    assert "model.safetensors is newer" in control.measured


def test_an_end_that_is_not_at_hand_skips_what_needs_it(tmp_path: Path) -> None:
    recording, target = tiny.own_target(tmp_path)
    (target / "model.safetensors").unlink()
    found = controls(recording)
    assert found["final-state"].verdict == found["target-files"].verdict == "skipped"
