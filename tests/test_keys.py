import pytest

from draftgauge.keys import FAMILIES, canonical_name, foreign_family, unused_reason

LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("fc.weight", "fc.weight"),
        ("module.fc.weight", "fc.weight"),
        ("module.model.draft_model.fc.weight", "fc.weight"),
        ("_orig_mod.module._fsdp_wrapped_module." + LAYER, LAYER),
        ("layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.weight", LAYER),
        ("model.midlayer.self_attn.q_proj.weight", LAYER),
        ("encoder.fc.weight", "fc.weight"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        ("my_model.fc.weight", "my_model.fc.weight"),
        ("layers.0.module.weight", "layers.0.module.weight"),
        ("encoder.other.weight", "encoder.other.weight"),
    ],
)
def test_one_spelling_for_all(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.12.mlp.down_proj.weight", None),
        ("layers.0.post_attention_layernorm.weight", None),
        ("embed_tokens.weight", None),
        ("d2t", None),
        ("mask_embedding", None),
        ("verifier_norm.weight", "not part of the drafter's function: the verifier's own"),
        ("layers.0.self_attn.rotary_emb.inv_freq", "computed from the wiring"),
        ("t2d", "only the inverse of d2t"),
        ("layers.00.mlp.down_proj.weight", "not a tensor of a DFlash drafter"),
        ("fc.weight_2", "not a tensor of a DFlash drafter"),
    ],
)
def test_what_takes_no_part_has_a_reason(name: str, reason: str | None) -> None:
    assert unused_reason(name) == reason


SHOWN_BY = {
    "DFlash 2": ["layers.0.short_conv.base_kernel", "candidate_selector.proj.weight"],
    "DSpark": ["markov_head.w.weight", "model.confidence_head.bias"],
    "Domino": ["prefix_gru.weight_ih_l0", "embed_proj.weight"],
    "Laguna": [
        "layers.1.self_attn.qkv_proj.weight",
        "layers.0.self_attn.g_proj.weight",
        "aux_hidden_norms.0.weight",
    ],
    "DFlash with attention sinks": ["layers.0.self_attn.attention_sink_bias", "layers.0.self_attn.sinks"],
    "DFlash with Gemma's layers": [
        "layers.0.pre_feedforward_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight",
        "layers.0.layer_scalar",
    ],
    "EAGLE-3": ["layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"],
    "MTP": ["eh_proj.weight", "mtp.fc.weight", "layers.0.enorm.weight", "pre_fc_norm_hidden.weight"],
    "Medusa": ["medusa_head.0.linear.weight"],
    "DFlash with a mixture of experts": ["layers.0.mlp.experts.3.up_proj.weight", "layers.0.mlp.gate.weight"],
    "DFlash with biases": ["layers.0.self_attn.q_proj.bias", "fc.bias"],
    "quantised": ["layers.0.mlp.up_proj.weight_scale", "layers.0.mlp.up_proj.qweight", "fc.weight_packed"],
    "an adapter": ["layers.0.mlp.up_proj.lora_A.default.weight"],
}
DFLASH = ["fc.weight", "hidden_norm.weight", "norm.weight", LAYER, "d2t", "lm_head.weight"]


def test_each_family_is_named_with_the_tensor_that_shows_it() -> None:
    assert SHOWN_BY.keys() == {family.name for family in FAMILIES}
    for name, shown in SHOWN_BY.items():
        for tensor in shown:
            found = foreign_family([*DFLASH, tensor])
            assert found is not None
            assert (found[0].name, found[1]) == (name, tensor)


def test_a_midlayer_is_eagle_3_only_without_the_norm_of_the_taps() -> None:
    eagle = ["fc.weight", "norm.weight", "model.midlayer.self_attn.q_proj.weight", "d2t"]
    found = foreign_family(eagle)
    assert found is not None
    assert (found[0].name, found[1]) == ("EAGLE-3", "model.midlayer.self_attn.q_proj.weight")
    assert foreign_family([*eagle, "encoder.output_norm_enc.weight"]) is None


def test_dflash_and_another_models_part_are_no_foreign_family() -> None:
    assert foreign_family(DFLASH) is None
    assert foreign_family([*DFLASH, "target.layers.0.self_attn.qkv_proj.weight", "target.fc.bias"]) is None
