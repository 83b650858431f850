"""The probe of a training is reproduced by evaluation, and a planted difference is found where it is."""

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.checkpoint import open_checkpoint
from draftgauge.drafters import as_torch
from draftgauge.pairing import open_drafter
from draftgauge.probe import Probe, find_probe, read_probe
from draftgauge.probing import probe_controls
from draftgauge.stated import wiring_of
from draftgauge.train import TrainPlan, train
from draftgauge.trust import Control
from draftgauge.wiring import LayerAttention
from tests import tiny
from tests.conftest import ROOT

CAUSAL = LayerAttention(block_causal=True)


@cache
def saved(autocast: bool) -> Path:
    plan = TrainPlan(steps=3, save_steps=(), mask_token_id=3, block_size=4, autocast=autocast)
    return train(tiny.recording(), plan, out=tiny.workshop() / f"probed {autocast}")


def probe_of(folder: Path) -> Probe:
    path = find_probe(folder)
    assert path is not None
    return read_probe(path)


def control(probe: Probe, *, autocast: bool = False, dtype: str = "float32", **changes: Any) -> Control:
    checkpoint = open_checkpoint(saved(autocast))
    wiring = dataclasses.replace(wiring_of(checkpoint), **changes)
    drafter = open_drafter(checkpoint, wiring, recording=tiny.recording(), dtype=dtype)
    (found,) = probe_controls(drafter, probe)
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_and_evaluation_compute_the_same(autocast: bool, dtype: str) -> None:
    probe = probe_of(saved(autocast))
    assert probe.dtype == ("bfloat16" if autocast else "float32")
    found = control(probe, autocast=autocast, dtype=dtype)
    assert found.verdict == "passed"
    assert found.values["choices"] == 18  # 6 anchors, depth 3


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"mask_token_id": 4}, "the rows before the first draft layer (row 1"),
        ({"embedding_scale": 2.0}, "the rows before the first draft layer (row 0"),
        ({"rope_theta": 1000.0}, "draft layer 0"),
        ({"rope_layout": "interleaved"}, "draft layer 0"),
        ({"attention": (CAUSAL, CAUSAL)}, "draft layer 0"),
        ({"attention": (LayerAttention(), CAUSAL)}, "draft layer 1"),
        ({"logit_softcap": 1.0}, "the output norm or the head"),
        ({"block_size": 5}, "the trainer drafts 3 tokens per block, the wiring 4"),
        ({"taps": (1, 3)}, "features are"),
    ],
)
def test_a_difference_is_found_where_it_is(changes: dict[str, Any], place: str) -> None:
    if "taps" in changes:
        probe = probe_of(saved(False))
        wide = dataclasses.replace(
            probe,
            tensors={
                **probe.tensors,
                "features": dataclasses.replace(probe.tensors["features"], shape=(9, 5)),
            },
        )
        assert place in control(wide).measured
        return
    found = control(probe_of(saved(False)), **changes)
    assert found.verdict == "failed"
    assert place in found.measured


def test_without_the_optional_tensors_the_depth_is_named() -> None:
    probe = probe_of(saved(False))
    bare = {n: t for n, t in probe.tensors.items() if n not in ("rows", "context", "final")}
    found = control(dataclasses.replace(probe, tensors=bare), rope_theta=1000.0)
    assert found.verdict == "failed"
    assert "the scores at depth 1" in found.measured


def test_the_snippet_of_the_page_writes_a_probe_that_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    theirs = probe_of(saved(False)).tensors
    checkpoint = open_checkpoint(saved(False))
    drafter = open_drafter(checkpoint, wiring_of(checkpoint), recording=tiny.recording(), dtype="float32")
    tokens, anchors = (as_torch(theirs[name]).long() for name in ("tokens", "anchors"))
    features = as_torch(theirs["features"]).clone()
    hidden = drafter.draft(drafter.context(features), anchors=anchors, anchor_tokens=tokens[anchors])
    names = {
        "logits": drafter.logits(hidden),
        "tokens": tokens,
        "anchors": anchors,
        "features": features,
        "step_folder": tmp_path,
    }
    with torch.no_grad():
        exec(snippet, names)
    assert control(probe_of(tmp_path)).verdict == "passed"
