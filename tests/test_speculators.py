"""Drafters that speculators saved itself: read as they lie, and their logits are speculators' own.

tests/speculators_saves/make.py says how the folders came about.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgauge.checkpoint import open_checkpoint, require_tensors
from draftgauge.drafters import load_drafter
from draftgauge.errors import WiringError
from draftgauge.inspection import inspect_checkpoint
from draftgauge.stated import Stated, wiring_of
from draftgauge.wiring import LayerAttention, Wiring, sliding_layer, tensor_shapes

SAVES = Path(__file__).with_name("speculators_saves")
KINDS = ("from_anchor", "non_causal", "pruned")


def wiring(kind: str) -> Wiring:
    return wiring_of(open_checkpoint(SAVES / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_speculators_own(kind: str) -> None:
    checkpoint, blocks = open_checkpoint(SAVES / kind), np.load(SAVES / kind / "blocks.npz")
    read = wiring(kind)
    require_tensors(checkpoint, tensor_shapes(read))
    whole_head = torch.from_numpy(blocks["head"])
    embedding = torch.from_numpy(blocks["embedding"])
    # A pruned head comes from the file; the verifier's whole one is not at hand, and not needed.
    head = whole_head if len(whole_head) == len(embedding) else torch.zeros_like(embedding)
    drafter = load_drafter(read, checkpoint.tensors, embedding=embedding, head=head)
    context = drafter.context(torch.from_numpy(blocks["features"]))
    anchor = torch.tensor([int(blocks["anchor"])])
    hidden = drafter.draft(context, anchors=anchor, anchor_tokens=torch.tensor([int(blocks["anchor_token"])]))
    ours, theirs = drafter.logits(hidden)[0].numpy(), blocks["logits"][read.first_row :]
    if drafter.ends.target_ids is not None:  # ours are in the order of tokens, theirs in that of rows
        ids = torch.arange(len(whole_head)) + torch.from_numpy(_d2t(checkpoint))
        theirs = theirs[:, ids.argsort().numpy()]
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


def _d2t(checkpoint):
    stored = checkpoint.tensors["d2t"]
    return np.frombuffer(b"".join(stored.blocks()), "<i8").copy()


def test_what_the_configs_say() -> None:
    pruned, non_causal, from_anchor = wiring("pruned"), wiring("non_causal"), wiring("from_anchor")
    assert pruned.taps == (1, 3, 4), "ids are one higher there"
    assert pruned.provenance["taps"] == "config.json: aux_hidden_state_layer_ids, each one lower"
    assert pruned.provenance["hidden_size"].startswith(("config.json: transformer_layer_config.", "shape"))
    assert (pruned.vocabulary_map, non_causal.vocabulary_map) == ("offset", "none")
    assert (pruned.head, non_causal.head, pruned.embedding) == ("own", "target", "target")
    assert [w.predicts_from_anchor for w in (pruned, non_causal, from_anchor)] == [False, False, True]
    assert pruned.attention == (sliding_layer("speculators", window=8), LayerAttention())
    assert non_causal.attention == (sliding_layer("speculators_non_causal", window=8),) * 2
    assert from_anchor.attention == (LayerAttention(), LayerAttention())
    assert pruned.rope_theta == 5000.0
    assert pruned.tap_after_final_norm is False


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_has_to_be_stated(kind: str) -> None:
    assert inspect_checkpoint(SAVES / kind, Stated())["problems"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("aux_hidden_state_layer_ids"), "taps ="),
        (lambda c: c.pop("mask_token_id"), "mask_token_id ="),
        (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config of type NoneType"),
        (lambda c: c.update(speculators_model_type="dspark"), "speculators_model_type 'dspark'"),
        (lambda c: c["transformer_layer_config"].update(hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda c: c["transformer_layer_config"].pop("rope_parameters"), "rope_theta ="),
    ],
)
def test_what_is_missing_is_asked_for(change, said: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAVES / "pruned", tmp_path / "save"))
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WiringError, match=said):
        wiring_of(open_checkpoint(folder))
