"""The probe of a training is reproduced by evaluation, and a planted difference is found where it is."""

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftgauge.checkpoint import open_checkpoint
from draftgauge.drafters import DFlash, as_torch
from draftgauge.features import read_item
from draftgauge.pairing import open_drafter
from draftgauge.probe import PROBE_FILE, Probe, find_probe, read_probe, write_probe
from draftgauge.probing import probe_controls, take_probe
from draftgauge.stated import wiring_of
from draftgauge.train import TrainPlan, train
from draftgauge.trust import Control
from draftgauge.wiring import LayerAttention
from tests import golden, planted, tiny
from tests.conftest import ROOT

CAUSAL = LayerAttention(block_causal=True)
STATES = ("context", "rows", "final")


@cache
def saved(autocast: bool) -> Path:
    plan = TrainPlan(steps=3, save_steps=(), mask_token_id=3, block_size=4, autocast=autocast)
    return train(tiny.recording(), plan, out=tiny.workshop() / f"probed {autocast}")


def probe_of(folder: Path) -> Probe:
    path = find_probe(folder)
    assert path is not None
    return read_probe(path)


def drafter_of(folder: Path, *, dtype: str = "float32", **changes: Any) -> DFlash:
    checkpoint = open_checkpoint(folder)
    wiring = dataclasses.replace(wiring_of(checkpoint), **changes)
    return open_drafter(checkpoint, wiring, recording=tiny.recording(), dtype=dtype)


def control(
    *, autocast: bool = False, dtype: str = "float32", probe: Probe | None = None, **changes: Any
) -> Control:
    drafter = drafter_of(saved(autocast), dtype=dtype, **changes)
    (found,) = probe_controls(drafter, probe or probe_of(saved(autocast)))
    return found


def without(probe: Probe, *names: str) -> Probe:
    return dataclasses.replace(probe, tensors={n: t for n, t in probe.tensors.items() if n not in names})


def rewritten(folder: Path, probe: Probe, changes: Mapping[str, np.ndarray | None]) -> Probe:
    """The probe with some of its tensors exchanged, or left out."""
    tensors: dict[str, Any] = {n: as_torch(stored).numpy() for n, stored in probe.tensors.items()} | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    write_probe(folder / PROBE_FILE, kept, dtype=probe.dtype)
    return read_probe(folder / PROBE_FILE)


# --- the same function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_and_evaluation_compute_the_same(autocast: bool, dtype: str) -> None:
    found = control(autocast=autocast, dtype=dtype)
    assert (found.slug, found.verdict, found.advice) == ("probe", "passed", None)
    values = found.values
    assert values["choices"] == 18  # 6 anchors, depth 3
    assert values["listed"] == 18 * 8
    assert values["largest_log_prob_difference"] < values["tolerance"]
    assert (values["tolerance"] < 1e-3) == (not autocast and dtype == "float32")
    if not autocast and dtype == "float32":
        assert (values["equal"], values["shared"]) == (18, 18 * 8)
        assert found.measured.startswith("18 of 18 first choices equal, log-probabilities within ")


def test_what_the_trainers_vocabulary_leaves_out_is_told() -> None:
    """After three steps the whole head still prefers tokens that occur in no completion."""
    found = control()
    probe, drafter = probe_of(saved(False)), drafter_of(saved(False))
    tokens, anchors, known = (as_torch(probe.tensors[n]).long() for n in ("tokens", "anchors", "vocabulary"))
    context = drafter.context(as_torch(probe.tensors["features"]))
    hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens[anchors])
    outside = int((~torch.isin(drafter.logits(hidden).argmax(-1), known)).sum())
    assert outside > 0
    assert (
        f"over the whole head {outside} first choice(s) are none of the {len(known)} tokens" in found.measured
    )


def taken(pair: planted.Pair, folder: Path, *, trainer: str) -> Probe:
    """The probe that a trainer of the planted drafter would write: `autocast`, or in a dtype throughout."""
    checkpoint, item = open_checkpoint(pair.checkpoint), pair.recording.items[0]
    dtype = "float32" if trainer == "autocast" else trainer
    drafter = open_drafter(checkpoint, pair.wiring, recording=pair.recording, dtype=dtype)
    seen = read_item(pair.recording, item, wiring=pair.wiring, dtype=getattr(torch, dtype))
    anchors = torch.linspace(item.prompt_len, item.prompt_len + 48, 6).long()
    features = seen.features[: int(anchors[-1])]

    def scores() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=trainer == "autocast"):
            tokens = seen.tokens[anchors]
            return drafter.logits(
                drafter.draft(drafter.context(features), anchors=anchors, anchor_tokens=tokens)
            )

    ids = drafter.ends.target_ids
    said = "float32" if trainer == "float32" else "bfloat16"
    tensors = take_probe(
        drafter,
        scores,
        names=torch.arange(planted.VOCABULARY) if ids is None else ids,
        tokens=seen.tokens,
        features=features,
        anchors=anchors,
        dtype=said,
    )
    write_probe(folder / PROBE_FILE, tensors, dtype=said)
    return read_probe(folder / PROBE_FILE)


def replayed(pair: planted.Pair, probe: Probe, **changes: Any) -> Control:
    wiring = dataclasses.replace(pair.wiring, **changes)
    checkpoint = open_checkpoint(pair.checkpoint)
    drafter = open_drafter(checkpoint, wiring, recording=pair.recording, dtype="float32")
    (found,) = probe_controls(drafter, probe)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trainer", ["autocast", "bfloat16"])
def test_a_network_that_rounding_moves_far_is_given_more_room(
    trainer: str, seed: int, tmp_path: Path
) -> None:
    """The planted weights are so sharp that bfloat16 moves a row of the block by more than a twentieth."""
    pair = planted.shared_pair(seed)
    probe = taken(pair, tmp_path, trainer=trainer)
    exact = taken(pair, tmp_path / "exact", trainer="float32")
    rows, theirs = (as_torch(p.tensors["rows"]).float() for p in (exact, probe))
    assert float(((rows - theirs).norm(dim=-1) / rows.norm(dim=-1)).max()) > 0.05
    assert replayed(pair, probe).verdict == "passed"
    assert replayed(pair, exact).verdict == "passed"
    wrong = replayed(pair, probe, rope_theta=5000.0)
    assert wrong.verdict == "failed"
    assert "draft layer 0" in wrong.measured


# --- where they part -----------------------------------------------------------------------------------------

PLACES: list[tuple[dict[str, Any], str, str]] = [
    ({"rms_norm_eps": 0.01}, "the fused context, at 16 of 16 positions", "hidden_norm (rms_norm_eps 0.01)"),
    (
        {"mask_token_id": 4},
        "the block before the first draft layer, in rows 1, 2, 3, most in row 1 (depth 1)",
        "here mask_token_id 4; the trainer's mask row is the embedding of token 3",
    ),
    (
        {"embedding_scale": 2.0},
        "the block before the first draft layer, in every row, most in row 0, by 1 of their size",
        "embedding_scale (2) act there",
    ),
    ({"rope_theta": 1000.0}, "draft layer 0, in every row", "RoPE (base 1000, 16 of 16 dimensions, half)"),
    ({"rope_dims": 8}, "draft layer 0, in every row", "8 of 16 dimensions"),
    ({"rope_layout": "interleaved"}, "draft layer 0, in every row", "interleaved"),
    # The last row of a block sees all the others either way.
    ({"attention": (CAUSAL, CAUSAL)}, "draft layer 0, in rows 0, 1, 2, most in", "causal in the block"),
    (
        {"attention": (LayerAttention(), CAUSAL)},
        "draft layer 1, in rows 0, 1, 2, most",
        "causal in the block",
    ),
    ({"attention": (LayerAttention(), LayerAttention(window=4))}, "draft layer 1, in every row", "window 4"),
    ({"logit_scale": 0.5}, "the scores, first at depth 1 (anchor 1)", "the head (the target's or its own)"),
    ({"logit_softcap": 1.0}, "the scores, first at depth 1 (anchor 1)", "logit_softcap"),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("changes", "place", "advice"), PLACES, ids=[next(iter(p[0])) for p in PLACES])
def test_a_difference_is_found_where_it_is(
    changes: dict[str, Any], place: str, advice: str, autocast: bool
) -> None:
    found = control(autocast=autocast, **changes)
    assert found.verdict == "failed"
    assert found.measured.startswith(f"they part at {place}")
    assert found.measured.startswith(f"they part at {found.values['parts_at']}; ")
    assert found.advice is not None
    assert advice in found.advice


def test_states_that_differ_by_a_factor_alone_are_told_so() -> None:
    assert "; ours are 2 times as long and point the same way" in control(embedding_scale=2.0).measured
    assert "times as long" not in control(mask_token_id=4).measured


@pytest.mark.parametrize(
    ("ends", "place"),
    [("head", "the scores"), ("embedding", "the block before the first draft layer, in every row")],
)
def test_other_ends_are_found(ends: str, place: str) -> None:
    drafter = drafter_of(saved(False))
    other = torch.randn(getattr(drafter.ends, ends).shape, generator=torch.Generator().manual_seed(0))
    drafter.ends = dataclasses.replace(drafter.ends, **{ends: other})
    (found,) = probe_controls(drafter, probe_of(saved(False)))
    assert found.measured.startswith(f"they part at {place}")


@pytest.mark.parametrize(
    ("part", "place"),
    [("fc", "the fused context"), ("layers.1.mlp.up_proj", "draft layer 1"), ("norm", "the output norm")],
)
def test_other_weights_are_found(part: str, place: str) -> None:
    drafter = drafter_of(saved(False))
    weight = drafter.get_parameter(f"{part}.weight")
    weight.data = weight.data * torch.linspace(0.9, 1.1, weight.shape[-1])
    (found,) = probe_controls(drafter, probe_of(saved(False)))
    assert found.measured.startswith(f"they part at {place}")


def test_what_is_not_a_number_is_no_agreement() -> None:
    drafter = drafter_of(saved(False))
    weight = drafter.get_parameter("layers.1.mlp.down_proj.weight")
    weight.data = torch.full_like(weight.data, torch.nan)
    (found,) = probe_controls(drafter, probe_of(saved(False)))
    assert found.verdict == "failed"
    assert "draft layer 1" in found.measured


@pytest.mark.parametrize(
    ("absent", "place", "advice"),
    [
        (
            ("context", "rows", "final"),
            "the scores, first at depth 1 (anchor 1)",
            "let the trainer write them",
        ),
        (("rows",), "the output norm", "rms_norm_eps"),
        (("context",), "draft layer 0", "so does the fused context, which the probe does not hold"),
    ],
    ids=str,
)
def test_what_the_trainer_left_out_makes_the_place_less_sure(
    absent: tuple[str, ...], place: str, advice: str
) -> None:
    probe = without(probe_of(saved(False)), *absent)
    assert control(probe=probe).verdict == "passed"
    found = control(probe=probe, rope_theta=1000.0)
    assert found.measured.startswith(f"they part at {place}")
    assert found.advice is not None
    assert advice in found.advice


def test_a_choice_that_the_trainer_does_not_list_is_no_agreement(tmp_path: Path) -> None:
    """Every log-probability that it lists is right, but we put another token before them."""
    probe = without(probe_of(saved(False)), *STATES)
    lists = {n: as_torch(probe.tensors[n]).numpy()[:, :, 1:].copy() for n in ("top_ids", "top_log_probs")}
    found = control(probe=rewritten(tmp_path, probe, lists))
    assert found.verdict == "failed"
    assert "0 of 18 first choices equal" in found.measured


# --- what cannot be compared ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"block_size": 5},
            "the trainer drafts 3 tokens per block, the wiring 4 (block_size 5, row 0 re-reads the anchor)",
        ),
        (
            {"predicts_from_anchor": True},
            "the trainer drafts 3 tokens per block, the wiring 4 (block_size 4, row 0 predicts)",
        ),
        (
            {"block_size": 3, "predicts_from_anchor": True},
            "the trainer's rows are [3, 6, 4, 64], the wiring's [3, 6, 3, 64]",
        ),
    ],
    ids=str,
)
def test_another_block_is_told_in_words(changes: dict[str, Any], words: str) -> None:
    found = control(**changes)
    assert (found.verdict, found.measured) == ("failed", words)


def test_another_number_of_taps_is_told_in_words() -> None:
    """The golden drafter reads two taps of the same target, the trained one three."""
    (found,) = probe_controls(golden.drafter_of("draftA8"), probe_of(saved(False)))
    expected = "the trainer gives fc 192 values per position, the wiring 2 taps of 64"
    assert (found.verdict, found.measured) == ("failed", expected)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("embedding", "the embedding has 1 rows"),
        ("head", "the drafter's head of 1 rows lacks it"),
    ],
)
def test_tokens_that_the_target_does_not_have_are_told_in_words(end: str, words: str) -> None:
    drafter = drafter_of(saved(False))
    drafter.ends = dataclasses.replace(drafter.ends, **{end: getattr(drafter.ends, end)[:1]})
    (found,) = probe_controls(drafter, probe_of(saved(False)))
    assert found.verdict == "failed"
    assert words in found.measured
    assert found.advice is not None
    assert "another target" in found.advice


def test_a_pruned_vocabulary_is_compared_by_the_targets_ids(tmp_path: Path) -> None:
    pair = planted.pair(tmp_path / "pair", items=1, tokens=60, vocabulary_map="offset", head="own")
    probe = taken(pair, tmp_path, trainer="float32")
    assert "vocabulary" not in probe.tensors  # all of the head, which is the drafter's own
    found = replayed(pair, probe)
    assert (found.verdict, found.values["equal"]) == ("passed", 30)
    drafter = open_drafter(
        open_checkpoint(pair.checkpoint), pair.wiring, recording=pair.recording, dtype="float32"
    )
    ids = drafter.ends.target_ids
    assert ids is not None
    drafter.ends = dataclasses.replace(drafter.ends, target_ids=ids - int(ids[0]) + 1)
    (moved,) = probe_controls(drafter, probe)
    assert moved.verdict == "failed"
    assert re.search("lacks it|the scores", moved.measured)


def test_a_probe_of_another_step_is_no_witness() -> None:
    drafter, probe = drafter_of(saved(False)), probe_of(saved(False))
    (found,) = probe_controls(drafter, probe, step=4)
    assert (found.verdict, found.measured) == ("skipped", "the probe is of step 3, the checkpoint of step 4")
    for step in (3, None):
        assert probe_controls(drafter, probe, step=step)[0].verdict == "passed"


# --- the page ------------------------------------------------------------------------------------------------


def test_the_snippet_of_the_page_writes_a_probe_that_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
    snippet, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    theirs, drafter = probe_of(saved(False)).tensors, drafter_of(saved(False))
    tokens, anchors = (as_torch(theirs[name]).long() for name in ("tokens", "anchors"))
    features = as_torch(theirs["features"]).clone()
    hidden = drafter.draft(drafter.context(features), anchors=anchors, anchor_tokens=tokens[anchors])
    names = {
        "logits": drafter.logits(hidden),
        "tokens": tokens,
        "anchors": anchors,
        "features": features,
        "step_folder": tmp_path,
        "step": 3,
    }
    with torch.no_grad():
        exec(snippet, names)
    probe = probe_of(tmp_path)
    assert (probe.dtype, probe.step) == ("bfloat16", 3)
    assert control(probe=probe).verdict == "passed"
    assert control(probe=probe, rope_theta=1000.0).verdict == "failed"
