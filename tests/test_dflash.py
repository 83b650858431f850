"""The DFlash network against other code's logits, slow references, and every choice of the wiring."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftgauge.drafters import as_torch
from draftgauge.drafters.dflash import (
    DFlash,
    Ends,
    RMSNorm,
    Rope,
    block_mask,
    context_mask,
    rope_frequencies,
)
from draftgauge.wiring import SLIDING_LAYER, LayerAttention, RopeScaling, sliding_layer
from tests.golden import DRAFTERS, blocks_of, config_of, drafter_of, logits_of, tensors_of, wiring_of

#: Which convention each implementation of the golden vectors follows in its sliding layers.
IMPLEMENTATIONS = {
    "zlab_pypi_causal_default": "zlab_2026_08",
    "zlab_pypi_noncausal": "zlab_2026_08_non_causal",
    "zlab_head_window_ignored": "zlab_2026_04",
    "specforge_train": "specforge",
    "speculators_causal_default": "speculators",
    "speculators_noncausal": "speculators_non_causal",
    "transformers_native_noncausal_inclusive": "transformers",
}
#: The golden sliding vectors: all layers but the last slide, W = 20.
SLIDING = {
    "draftA8": ["sliding_attention", "full_attention"],
    "draftA16": ["sliding_attention", "sliding_attention", "full_attention"],
}


def sliding_drafter(name: str, convention: str, *, window: int = 20) -> DFlash:
    return drafter_of(name, convention=convention, sliding_window=window, layer_types=SLIDING[name])


def one_at_a_time(drafter: DFlash, blocks: dict[str, np.ndarray]) -> Tensor:
    """The logits of each anchor from a context that ends before it."""
    tokens, features = (
        torch.from_numpy(blocks["token_ids"]).long(),
        torch.from_numpy(blocks["context_feature"]),
    )
    rows = []
    for anchor in torch.from_numpy(blocks["anchors"]).long():
        context = drafter.context(features[:anchor])
        rows.append(drafter.draft(context, anchors=anchor[None], anchor_tokens=tokens[anchor][None]))
    return drafter.logits(torch.cat(rows))


# --- against other code --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_logits_are_zlabs(name: str) -> None:
    blocks = blocks_of(name)
    logits = logits_of(drafter_of(name), blocks).numpy()
    np.testing.assert_allclose(logits, blocks["full__zlab_head"][:, 1:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sliding_layers_are_computed_as_each_project_does(name: str, implementation: str) -> None:
    blocks = blocks_of(name)
    logits = logits_of(sliding_drafter(name, IMPLEMENTATIONS[implementation]), blocks).numpy()
    np.testing.assert_allclose(logits, blocks[f"swa20__{implementation}"][:, 1:], atol=2e-5, rtol=0)


ROPES: list[tuple[dict[str, Any], RopeScaling | None]] = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        RopeScaling("llama3", 8.0, 256, 1.0, 4.0),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        RopeScaling("yarn", 4.0, 512),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
        },
        RopeScaling("yarn", 16.0, 64, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
    ),
    # Low and high of the ramp fall on one pair.
    (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
        RopeScaling("yarn", 2.0, 8),
    ),
]


@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("dims", [16, 64])
@pytest.mark.parametrize(("words", "scaling"), ROPES)
def test_rope_frequencies_are_those_of_transformers(
    words: dict[str, Any], scaling: RopeScaling | None, dims: int, base: float
) -> None:
    config = transformers.Qwen3Config(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=dims,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **words},
    )
    kind = words["rope_type"]
    if kind == "default":
        expected, factor = base ** (-torch.arange(0, dims, 2) / dims), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    w = dataclasses.replace(
        wiring_of("draftA8"), head_dim=dims, rope_dims=dims, rope_theta=base, rope_scaling=scaling
    )
    frequencies, ours = rope_frequencies(w)
    torch.testing.assert_close(frequencies, expected, rtol=2e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-12)


def test_every_scaling_of_rope_changes_the_frequencies() -> None:
    """So that the comparison above cannot hold for the wrong reason."""
    frequencies = []
    for _, scaling in ROPES[:-1]:
        w = dataclasses.replace(wiring_of("draftA8"), head_dim=64, rope_dims=64, rope_scaling=scaling)
        frequencies.append(tuple(rope_frequencies(w)[0].tolist()))
    assert len(set(frequencies)) == len(frequencies)


# --- against slow references ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dims", [16, 4, 2])
def test_rotation_pair_by_pair(layout: str, dims: int) -> None:
    scaling = RopeScaling("yarn", 4.0, 64)
    w = dataclasses.replace(
        wiring_of("draftA8"), rope_dims=dims, rope_layout=layout, rope_theta=100.0, rope_scaling=scaling
    )
    frequencies, factor = rope_frequencies(w)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 7, 300])
    expected = x.double().clone()
    for i, position in enumerate(positions.tolist()):
        for j in range(dims // 2):
            first, second = (2 * j, 2 * j + 1) if layout == "interleaved" else (j, j + dims // 2)
            angle = position * float(frequencies[j])
            for head in range(5):
                turned = complex(x[i, head, first], x[i, head, second]) * factor
                turned *= complex(math.cos(angle), math.sin(angle))
                expected[i, head, first], expected[i, head, second] = turned.real, turned.imag
    rotated = Rope(w)(x, positions[:, None])
    torch.testing.assert_close(rotated, expected.float(), rtol=0, atol=1e-4)


# The rules of docs/formats.md as they stand there: context key k and block row j seen from row o of anchor a.
TABLE = {
    "zlab_2026_04": (lambda k, a, o, W: True, lambda j, o, W: True),
    "zlab_2026_08": (lambda k, a, o, W: k > a + o - W, lambda j, o, W: j <= o and o - j < W),
    "zlab_2026_08_non_causal": (lambda k, a, o, W: k > a + o - W, lambda j, o, W: abs(o - j) < W),
    "specforge": (lambda k, a, o, W: k > a + o - W, lambda j, o, W: j <= o),
    "speculators": (lambda k, a, o, W: k >= a - W, lambda j, o, W: j <= o),
    "speculators_non_causal": (lambda k, a, o, W: k >= a - W, lambda j, o, W: True),
    "transformers": (lambda k, a, o, W: k >= a + o - W, lambda j, o, W: abs(o - j) <= W),
    "modelopt": (lambda k, a, o, W: k > a + o - W, lambda j, o, W: True),
}


def test_the_table_has_every_convention() -> None:
    assert set(TABLE) == set(SLIDING_LAYER)


@pytest.mark.parametrize("window", [1, 3, 5, 40])
@pytest.mark.parametrize("convention", TABLE)
def test_masks_row_by_row(convention: str, window: int) -> None:
    layer = sliding_layer(convention, window=window)
    sees_key, sees_row = TABLE[convention]
    # The second sequence begins at key 6 of 20; its anchors count from there.
    anchors, starts, rows, length = (3, 6, 9, 13), (0, 0, 6, 6), 5, 20
    far = context_mask(
        layer, anchors=torch.tensor(anchors), starts=torch.tensor(starts), rows=rows, length=length
    )
    near = block_mask(layer, rows=rows)
    for i, (a, start) in enumerate(zip(anchors, starts, strict=True)):
        for o in range(rows):
            for key in range(length):
                k = key - start
                assert bool(far[i, o, key]) == (0 <= k < a and sees_key(k, a, o, window)), (a, o, k)
    for o in range(rows):
        for j in range(rows):
            assert bool(near[o, j]) == sees_row(j, o, window), (o, j)


def test_the_norm_is_computed_in_float32() -> None:
    x = torch.tensor([[300.0, 400.0]], dtype=torch.float16)  # 300² overflows float16
    norm = RMSNorm(2, eps=0.0).to(torch.float16)
    norm.weight.data = torch.tensor([1.0, 2.0], dtype=torch.float16)
    # Mean square 125000, root 353.553: 0.848528 and 2 x 1.131371.
    torch.testing.assert_close(
        norm(x), torch.tensor([[0.848528, 2.262742]], dtype=torch.float16), rtol=1e-3, atol=0
    )


# --- one pass, piece by piece, side by side --------------------------------------------------------------

WIRINGS: list[tuple[str, str | None]] = [
    ("draftA8", None),
    ("draftB8", None),
    *(("draftA16", convention) for convention in ("zlab_2026_08", "speculators", "transformers")),
]


def drafter_for(name: str, convention: str | None) -> DFlash:
    return drafter_of(name) if convention is None else sliding_drafter(name, convention)


@pytest.mark.parametrize(("name", "convention"), WIRINGS)
def test_many_anchors_in_one_pass_equal_one_at_a_time(name: str, convention: str | None) -> None:
    drafter, blocks = drafter_for(name, convention), blocks_of(name)
    torch.testing.assert_close(logits_of(drafter, blocks), one_at_a_time(drafter, blocks), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "convention"), WIRINGS)
@pytest.mark.parametrize("cuts", [(1,), (5, 6, 40), tuple(range(1, 64))])
def test_a_context_built_piece_by_piece_equals_one_shot(
    name: str, convention: str | None, cuts: tuple[int, ...]
) -> None:
    drafter, blocks = drafter_for(name, convention), blocks_of(name)
    features = torch.from_numpy(blocks["context_feature"])
    bounds = [0, *cuts, len(features)]
    pieces = [drafter.context(features[low:high], first_position=low) for low, high in pairwise(bounds)]
    context, whole = pieces[0].extended(*pieces[1:]), drafter.context(features)
    assert context.length == whole.length == len(features)
    for ours, theirs in zip((*context.keys, *context.values), (*whole.keys, *whole.values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_the_first_positions_of_a_context_are_its_prefix() -> None:
    drafter, features = drafter_of("draftA8"), torch.from_numpy(blocks_of("draftA8")["context_feature"])
    short, whole = drafter.context(features[:9]), drafter.context(features).upto(9)
    assert short.length == whole.length == 9
    torch.testing.assert_close(short.keys, whole.keys, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "convention"), WIRINGS)
def test_two_sequences_in_one_context_do_not_see_each_other(name: str, convention: str | None) -> None:
    drafter, blocks = drafter_for(name, convention), blocks_of(name)
    tokens, features = (
        torch.from_numpy(blocks["token_ids"]).long(),
        torch.from_numpy(blocks["context_feature"]),
    )
    sequences = [(tokens, features), (tokens.flip(0), features[10:50].flip(0))]
    anchors = [torch.tensor([5, 30, 63]), torch.tensor([2, 39])]
    alone = [
        drafter.draft(drafter.context(part), anchors=a, anchor_tokens=ids[a])
        for (ids, part), a in zip(sequences, anchors, strict=True)
    ]
    first, second = (drafter.context(part) for _, part in sequences)
    together = drafter.draft(
        first.extended(second),
        anchors=torch.cat(anchors),
        anchor_tokens=torch.cat([ids[a] for (ids, _), a in zip(sequences, anchors, strict=True)]),
        starts=torch.tensor([0, 0, 0, first.length, first.length]),
    )
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "convention"), WIRINGS)
def test_features_at_the_anchor_and_after_it_change_nothing(name: str, convention: str | None) -> None:
    drafter, blocks = drafter_for(name, convention), blocks_of(name)
    anchor = int(blocks["anchors"][4])
    alone = blocks | {"anchors": blocks["anchors"][4:5]}
    seen, hidden = blocks["context_feature"].copy(), blocks["context_feature"].copy()
    seen[anchor - 1] += 1.0
    hidden[anchor:] = np.random.default_rng(0).normal(size=hidden[anchor:].shape)
    logits = logits_of(drafter, alone)
    assert torch.equal(logits_of(drafter, alone | {"context_feature": hidden}), logits)
    assert not torch.allclose(logits_of(drafter, alone | {"context_feature": seen}), logits, atol=1e-3)


def test_an_anchor_beyond_the_context_is_our_mistake() -> None:
    drafter, features = drafter_of("draftA8"), torch.from_numpy(blocks_of("draftA8")["context_feature"])
    with pytest.raises(AssertionError, match="context ends before the anchor"):
        drafter.draft(
            drafter.context(features[:8]), anchors=torch.tensor([9]), anchor_tokens=torch.tensor([1])
        )


@pytest.mark.parametrize("name", ["draftA8", "draftA16"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    tensors, w = tensors_of(name), wiring_of(name)
    target = tensors_of(config_of(name)["target"])
    narrow = DFlash(
        w,
        Ends(
            as_torch(target["model.embed_tokens.weight"]).bfloat16(),
            as_torch(target["lm_head.weight"]).bfloat16(),
        ),
    ).bfloat16()
    narrow.load_state_dict({key: as_torch(stored) for key, stored in tensors.items()})
    blocks = blocks_of(name)
    tokens, anchors = torch.from_numpy(blocks["token_ids"]).long(), torch.from_numpy(blocks["anchors"]).long()
    with torch.inference_mode():
        context = narrow.context(torch.from_numpy(blocks["context_feature"]).bfloat16())
        logits = narrow.logits(narrow.draft(context, anchors=anchors, anchor_tokens=tokens[anchors]))
    wide = logits_of(drafter_of(name), blocks)
    assert logits.dtype == torch.bfloat16
    # 8 bits of mantissa over a few layers: a few per cent of the logits' spread.
    assert float((logits.float() - wide).abs().mean() / wide.std()) < 0.03
    agree = (logits.float().argmax(-1) == wide.argmax(-1)).float().mean()
    assert float(agree) > 0.9


# --- every field of the wiring ---------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "embedding_scale": {"embedding_scale": 2.0},
    "logit_scale": {"logit_scale": 0.5},
    "logit_softcap": {"logit_softcap": 3.0},
    "mask_token_id": {"mask_token_id": 3},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "rope_theta": {"rope_theta": 500.0},
    "rope_dims": {"rope_dims": 8},
    "rope_layout": {"rope_layout": "interleaved"},
    "rope_scaling": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "taps in another order": {"taps": [3, 1]},
    "window": {"attention": [{"window": 6}, {}]},
    "window of the second layer": {"attention": [{}, {"window": 6}]},
    "causal in the block": {"attention": [{"block_causal": True}, {}]},
    "window inside the block": {"attention": [{"window": 3, "block_window": True}, {}]},
    "block_size": {"block_size": 6},
    "predicts_from_anchor": {"predicts_from_anchor": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_choice_changes_the_logits(change: str) -> None:
    blocks = blocks_of("draftA8")
    plain, changed = drafter_of("draftA8"), drafter_of("draftA8", **CHANGES[change])
    if change.startswith("taps"):  # the network reads features in the order given: the recording's rows move
        order = torch.from_numpy(blocks["context_feature"]).unflatten(1, (2, 64)).flip(1).flatten(1)
        blocks = blocks | {"context_feature": order.numpy()}
        assert changed.wiring.taps == (3, 1)
    ours, theirs = logits_of(changed, blocks), logits_of(plain, blocks_of("draftA8"))
    depth = min(ours.shape[1], theirs.shape[1])
    assert float((ours[:, :depth] - theirs[:, :depth]).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"window": 6}, {"window": 7}),
        ({"window": 6, "window_from": "row"}, {"window": 6, "window_from": "anchor"}),
        ({"window": 6}, {"window": 6, "window_inclusive": True}),
        ({"window": 3}, {"window": 3, "block_window": True}),
        ({"window": 3, "block_causal": True}, {"window": 3}),
    ],
)
def test_every_choice_of_a_window_changes_the_logits(one: dict[str, Any], other: dict[str, Any]) -> None:
    blocks = blocks_of("draftA8")
    a, b = (logits_of(drafter_of("draftA8", attention=[layer, {}]), blocks) for layer in (one, other))
    assert float((a - b).abs().max()) > 1e-3


def test_an_inclusive_window_is_one_wider() -> None:
    blocks = blocks_of("draftA8")
    inclusive = drafter_of("draftA8", attention=[{"window": 6, "window_inclusive": True}, {}])
    wider = drafter_of("draftA8", attention=[{"window": 7}, {}])
    assert torch.equal(logits_of(inclusive, blocks), logits_of(wider, blocks))


def test_scale_and_cap_of_the_logits() -> None:
    blocks = blocks_of("draftA8")
    logits = logits_of(drafter_of("draftA8"), blocks)
    shaped = logits_of(drafter_of("draftA8", logit_scale=0.5, logit_softcap=3.0), blocks)
    torch.testing.assert_close(shaped, 3.0 * torch.tanh(logits * 0.5 / 3.0), rtol=0, atol=1e-5)


def test_the_embedding_scale_multiplies_anchor_and_mask_rows() -> None:
    blocks, drafter = blocks_of("draftA8"), drafter_of("draftA8")
    drafter.ends = dataclasses.replace(drafter.ends, embedding=drafter.ends.embedding * 2.0)
    scaled = drafter_of("draftA8", embedding_scale=2.0)
    torch.testing.assert_close(logits_of(scaled, blocks), logits_of(drafter, blocks), rtol=0, atol=1e-5)


def test_a_mask_embedding_is_used_as_stored() -> None:
    blocks, token = blocks_of("draftA8"), drafter_of("draftA8", embedding_scale=2.0)
    w = dataclasses.replace(token.wiring, mask_embedding=True, mask_token_id=None)
    vector = token.ends.embedding[255] * 2.0

    def with_mask(value: Tensor) -> Tensor:
        drafter = DFlash(w, token.ends)
        drafter.load_state_dict({**token.state_dict(), "mask_embedding": value})
        with torch.inference_mode():
            return logits_of(drafter, blocks)

    torch.testing.assert_close(with_mask(vector), logits_of(token, blocks), rtol=0, atol=1e-5)
    assert not torch.allclose(with_mask(vector + 1.0), logits_of(token, blocks), atol=1e-2)


def test_a_block_that_predicts_from_the_anchor_drafts_its_first_row_too() -> None:
    blocks = blocks_of("draftA8")
    predicting = logits_of(drafter_of("draftA8", predicts_from_anchor=True), blocks)
    plain = logits_of(drafter_of("draftA8"), blocks)
    assert predicting.shape[1] == plain.shape[1] + 1 == 8
    torch.testing.assert_close(predicting[:, 1:], plain, rtol=0, atol=1e-6)
    golden = blocks["full__zlab_head"]
    np.testing.assert_allclose(predicting.numpy(), golden, atol=2e-5, rtol=0)


def test_layers_may_differ() -> None:
    w = wiring_of("draftA8", attention=[{"window": 6}, {"block_causal": True}])
    assert w.attention == (LayerAttention(window=6), LayerAttention(block_causal=True))
    drafter = drafter_of("draftA8", attention=[{"window": 6}, {"block_causal": True}])
    assert [layer.self_attn.layer for layer in drafter.stack] == list(w.attention)
