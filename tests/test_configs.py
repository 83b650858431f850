"""Reading a wiring: who is believed, what is asked for, and that nothing is guessed."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from draftgauge.configs import OWN_KEY, read_wiring
from draftgauge.errors import WiringError
from draftgauge.wiring import FIELDS, LayerAttention, RopeScaling, Wiring, sliding_layer, tensor_shapes
from tests.golden import config_of, tensors_of, wiring_of

SHAPES = {key: stored.shape for key, stored in tensors_of("draftA8").items()}
#: A config as z-lab publishes them, complete.
ZLAB: dict[str, Any] = {**config_of("draftA8")["config"], "rope_theta": 1e6}
#: What has to be stated for a file without any config.
STATED: dict[str, Any] = {
    "taps": [1, 3],
    "block_size": 8,
    "mask_token_id": 255,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_dims": 16,
    "layer_types": ["full_attention", "full_attention"],
    "predicts_from_anchor": False,
    "num_target_layers": 6,
}


def read(
    config: Mapping[str, Any] | None = ZLAB,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    source: str = "config.json",
    **given: Any,
) -> Wiring:
    return read_wiring(
        config=config, config_source=source, shapes=shapes, given=given, given_source="--wiring fixed.toml"
    )


def without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def refusal(config: Mapping[str, Any] | None = ZLAB, **more: Any) -> str:
    """What the refusal of this config says."""
    with pytest.raises(WiringError) as caught:
        read(config, **more)
    return str(caught.value)


# --- one source at a time ------------------------------------------------------------------------------


def test_a_zlab_config_says_everything_and_every_field_says_where_from() -> None:
    w = read()
    assert (w.taps, w.block_size, w.mask_token_id, w.num_target_layers) == ((1, 3), 8, 255, 6)
    assert (w.num_layers, w.num_heads, w.num_kv_heads, w.head_dim, w.rope_dims) == (2, 4, 2, 16, 16)
    assert w.attention == (LayerAttention(), LayerAttention())
    assert set(w.provenance) == set(FIELDS)
    for field, source in {
        "taps": "config.json: dflash_config.target_layer_ids",
        "block_size": "config.json: block_size",
        "mask_token_id": "config.json: dflash_config.mask_token_id",
        "hidden_size": "config.json: hidden_size",
        "rope_theta": "config.json: rope_theta",
        "rope_dims": "default of the z-lab format: all of head_dim",
        "attention": "config.json: it names no layer_types, so no layer slides (no layer slides)",
        "predicts_from_anchor": "default of the z-lab format",
        "vocabulary_map": "the head is the target's",
        "logit_softcap": "default: nothing says otherwise",
    }.items():
        assert w.provenance[field] == source


def test_without_a_config_the_user_states_what_the_tensors_do_not_show() -> None:
    w = read(None, source="no config.json beside model.safetensors", **STATED)
    assert w == read(num_target_layers=6, vocab_size=None)
    assert w.provenance["taps"] == "--wiring fixed.toml: taps"
    assert w.provenance["hidden_size"] == "shape of norm.weight"
    assert w.provenance["num_layers"] == "number of layers.* in the file"
    assert w.provenance["num_kv_heads"] == "shape of layers.0.self_attn.k_proj.weight over head_dim 16"


def test_all_that_nobody_says_is_asked_for_at_once() -> None:
    message = refusal(None, source="no config.json beside model.safetensors", taps=[1, 3])
    assert "no config.json beside model.safetensors, and a guess would measure another drafter" in message
    asked = {line.split(" = ")[0].strip() for line in message.splitlines()[2:]}
    expected = {"block_size", "mask_token_id", "rope_theta", "rope_dims", "rms_norm_eps", "layer_types"}
    assert asked == expected | {"predicts_from_anchor", "num_target_layers"}


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        ("rope_theta", "rope_theta = 1000000.0"),
        ("rms_norm_eps", "rms_norm_eps = 1e-6"),
        ("block_size", "block_size = 16  (or --block-size 16)"),
    ],
)
def test_a_config_that_lacks_a_field_is_not_completed_by_a_guess(missing: str, asked: str) -> None:
    message = refusal(without(ZLAB, missing))
    assert asked in message
    assert message.count(" = ") == 1  # and nothing else is asked for


def test_a_checkpoint_of_our_trainer_carries_its_whole_wiring() -> None:
    own = wiring_of("draftA8", logit_softcap=30.0, tap_after_final_norm=False)
    w = read(json.loads(json.dumps({OWN_KEY: own.as_dict()})))
    assert w == own
    assert w.provenance["taps"] == f"config.json: {OWN_KEY}: taps"


def test_a_field_that_our_trainer_did_not_write_is_not_said_to_be_from_its_config() -> None:
    values = without(wiring_of("draftA8").as_dict(), "logit_scale")
    assert read({OWN_KEY: values}).provenance["logit_scale"] == "default: nothing says otherwise"


def test_the_fields_of_specforges_training_state_are_read() -> None:
    flat = {"dflash_target_layer_ids": [0, 2], "dflash_block_size": 16, "dflash_mask_token_id": 7}
    w = read(flat, source="t.pt: dflash_*", **without(STATED, "taps", "block_size", "mask_token_id"))
    assert (w.taps, w.block_size, w.mask_token_id) == ((0, 2), 16, 7)
    assert w.provenance["taps"] == "t.pt: dflash_*: dflash_target_layer_ids"


def test_words_that_scale_and_cap_are_read() -> None:
    words = {"input_embedding_scale": 8, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    w = read(ZLAB | {"dflash_config": ZLAB["dflash_config"] | words | {"predicts_from_anchor": True}})
    assert (w.embedding_scale, w.logit_scale, w.logit_softcap, w.depth) == (8.0, 0.5, 30.0, 8)


# --- who is believed -----------------------------------------------------------------------------------


def test_the_user_is_believed_before_the_config() -> None:
    w = read(taps=[0, 2], mask_token_id=3, rope_theta=500)
    assert (w.taps, w.mask_token_id, w.rope_theta) == ((0, 2), 3, 500.0)
    assert w.provenance["rope_theta"] == "--wiring fixed.toml: rope_theta"


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (
            ZLAB | {"hidden_size": 128},
            {},
            "hidden_size: 128 (config.json: hidden_size) contradicts 64 (shape of norm.weight)",
        ),
        (ZLAB | {"num_hidden_layers": 3}, {}, "contradicts 2 (number of layers.* in the file)"),
        (ZLAB | {"num_key_value_heads": 4}, {}, "num_kv_heads: 4"),
        (ZLAB, {"head_dim": 32}, "head_dim: 32 (--wiring fixed.toml: head_dim) contradicts 16"),
        (
            ZLAB | {"mask_token_id": 7},
            {},
            "config.json contradicts itself: {'dflash_config.mask_token_id': 255",
        ),
        (ZLAB | {"rope_parameters": {"rope_theta": 1e4}}, {}, "contradicts itself: {'rope_theta': 1000000.0"),
        (
            ZLAB | {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            {},
            "rope_scaling and rope_parameters differ in factor",
        ),
        (ZLAB, {"attention": [{}, {}], "sliding_window": 8}, "states attention and also sliding_window"),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], given: dict[str, Any], message: str) -> None:
    assert message in refusal(config, **given)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ZLAB | {"speculators_model_type": "eagle3"},
            "speculators_model_type 'eagle3' with a transformer_layer_config of type NoneType is not read",
        ),
        (ZLAB | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented; expected 'silu'"),
        (ZLAB | {"block_size": "8"}, "config.json: wiring field block_size = '8' cannot be read"),
        (ZLAB | {"rope_theta": "1e6"}, "config.json: wiring field rope_theta = '1e6' cannot be read"),
        (ZLAB | {"num_target_layers": 3}, "taps [3] are outside the target"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    assert message in refusal(config)


def test_an_unknown_word_of_the_user_is_refused_with_the_known_ones() -> None:
    message = refusal(mask_token=3)
    assert message.startswith("--wiring fixed.toml: unknown wiring field(s) mask_token; known: taps, ")
    assert message.endswith("convention, sliding_window, layer_types")


# --- RoPE ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "base", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            5e5,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4, "truncate": True}},
            5e5,
            RopeScaling("yarn", 4.0, original_max_position=512),  # as transformers: max_position_embeddings
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 128,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            5e5,
            RopeScaling("llama3", 8.0, 128, 1.0, 4.0),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(
    words: dict[str, Any], base: float, scaling: RopeScaling | None
) -> None:
    w = read(without(ZLAB, "rope_theta") | words)
    assert (w.rope_theta, w.rope_scaling) == (base, scaling)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not implemented; expected linear"),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7},
            "rope type 'yarn' with mscale is not implemented",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "with truncate is not implemented"),
        ({"full_attention": {"rope_theta": 1e4}}, "with full_attention is not implemented"),
        ({"rope_type": "yarn"}, "wiring field rope_scaling = {'kind': 'yarn'"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
    ],
)
def test_rope_scaling_that_is_not_computed_is_refused(section: dict[str, Any], message: str) -> None:
    assert message in refusal(ZLAB | {"rope_scaling": section})


@pytest.mark.parametrize(
    "words", [{"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}]
)
def test_a_partial_rotation_is_asked_for_because_code_differs_in_it(words: dict[str, Any]) -> None:
    assert "rope_dims = 128: how many of head_dim's dimensions are rotated" in refusal(ZLAB | words)
    assert read(ZLAB | words, rope_dims=4).rope_dims == 4


@pytest.mark.parametrize("words", [{}, {"partial_rotary_factor": 1.0}, {"head_dim": None}])
def test_all_of_head_dim_is_rotated_where_nothing_is_partial(words: dict[str, Any]) -> None:
    assert read(ZLAB | words).rope_dims == 16


# --- attention -----------------------------------------------------------------------------------------

TYPES = ["sliding_attention", "full_attention"]
SLIDING = ZLAB | {"layer_types": TYPES, "use_sliding_window": True, "sliding_window": 20}


def test_sliding_layers_ask_whose_code_trained_them() -> None:
    message = refusal(SLIDING)
    assert "convention = one of zlab_2026_04, zlab_2026_08" in message
    assert "layers slide (config.json: layer_types), and projects compute such layers differently" in message


def test_everything_that_is_missing_is_asked_for_at_once() -> None:
    """Who has answered should not be asked again: what depends on an answer is asked with it."""
    message = refusal({"layer_types": ["sliding_attention", "full_attention"]})
    for line in (
        "taps = ",
        "convention = ",
        "sliding_window = ",
        "num_target_layers = 36, and if the last of them",
    ):
        assert line in message


@pytest.mark.parametrize(
    "convention", ["zlab_2026_08", "specforge", "speculators_non_causal", "zlab_2026_04"]
)
def test_stating_the_convention_alone_keeps_the_configs_layers_and_window(convention: str) -> None:
    w = read(SLIDING, convention=convention)
    assert w.attention == (sliding_layer(convention, window=20), LayerAttention())
    sources = ("config.json: layer_types", "config.json: sliding_window", "--wiring fixed.toml: convention")
    assert w.provenance["attention"] == "; ".join(sources)


def test_stating_the_window_alone_keeps_the_rest() -> None:
    w = read(SLIDING | {"is_causal": False}, sliding_window=9)
    assert w.attention[0] == sliding_layer("zlab_2026_08_non_causal", window=9)


@pytest.mark.parametrize(
    ("causal", "convention"), [(True, "zlab_2026_08"), (False, "zlab_2026_08_non_causal")]
)
def test_is_causal_is_a_word_of_one_project_and_means_every_layer(causal: bool, convention: str) -> None:
    w = read(SLIDING | {"is_causal": causal})
    assert w.attention == (sliding_layer(convention, window=20), LayerAttention(block_causal=causal))


def test_a_stated_convention_outdoes_is_causal_in_every_layer() -> None:
    w = read(SLIDING | {"is_causal": True}, convention="zlab_2026_04")
    assert w.attention == (LayerAttention(), LayerAttention())


@pytest.mark.parametrize(
    ("words", "given", "attention"),
    [
        # The built config's window is None although layers are called sliding; whether they are causal in the
        # block is still the convention's.
        ({"use_sliding_window": False}, {"convention": "zlab_2026_08"}, LayerAttention(block_causal=True)),
        ({"use_sliding_window": False}, {"convention": "modelopt"}, LayerAttention()),
        # Without the switch only the user can say whether the window was built.
        (
            {"use_sliding_window": None},
            {"convention": "modelopt", "sliding_window": 20},
            sliding_layer("modelopt", window=20),
        ),
        ({"use_sliding_window": None}, {"convention": "zlab_2026_04"}, LayerAttention()),
    ],
)
def test_a_window_that_is_declared_but_not_built(
    words: dict[str, Any], given: dict[str, Any], attention: LayerAttention
) -> None:
    assert read(SLIDING | words, **given).attention == (attention, LayerAttention())


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (SLIDING | {"use_sliding_window": None}, {"convention": "modelopt"}, "sliding_window = 2048"),
        (None, STATED | {"layer_types": TYPES, "convention": "specforge"}, "sliding_window = 2048"),
        (SLIDING, {"convention": "z-lab"}, "attention convention 'z-lab' is unknown"),
        (SLIDING | {"layer_types": ["chunked_attention"] * 2}, {}, "expected one of full_attention, sliding"),
        (SLIDING | {"layer_types": TYPES[:1]}, {"convention": "modelopt"}, "attention describes 1 layers"),
        (
            SLIDING,
            {"convention": "modelopt", "sliding_window": 0},
            "sliding_window = 0; expected a number of",
        ),
        (SLIDING, {"convention": "modelopt", "sliding_window": True}, "sliding_window = True; expected"),
        (
            without(ZLAB, "layer_types") | {"use_sliding_window": True},
            {},
            'layer_types = ["full_attention", ...]',
        ),
        (None, without(STATED, "layer_types") | {"convention": "modelopt"}, "layer_types = ["),
    ],
)
def test_attention_that_is_not_known_is_asked_for(
    config: dict[str, Any] | None, given: dict[str, Any], message: str
) -> None:
    assert message in refusal(config, **given)


def test_a_stated_convention_outdoes_the_wiring_that_our_trainer_wrote() -> None:
    own = {OWN_KEY: wiring_of("draftA8").as_dict()}
    w = read(own, layer_types=TYPES, sliding_window=20, convention="modelopt")
    assert w.attention == (sliding_layer("modelopt", window=20), LayerAttention())


# --- what the file itself holds ------------------------------------------------------------------------


def test_a_mask_embedding_in_the_file_stands_in_for_the_token() -> None:
    shapes = {**SHAPES, "mask_embedding": (64,)}
    assert read(None, shapes=shapes, **without(STATED, "mask_token_id")).mask_embedding
    w = read(shapes=shapes)  # the config's token is known and not used
    assert (w.mask_embedding, w.mask_token_id) == (True, 255)


def test_stating_a_mask_token_beside_a_mask_embedding_is_refused_until_it_is_clear() -> None:
    shapes = {**SHAPES, "mask_embedding": (64,)}
    assert "state also mask_embedding = false" in refusal(shapes=shapes, mask_token_id=3)
    w = read(shapes=shapes, mask_token_id=3, mask_embedding=False)
    assert (w.mask_embedding, w.mask_token_id) == (False, 3)


@pytest.mark.parametrize(
    ("rows", "d2t", "given", "vocabulary_map"),
    [
        (256, False, {}, "none"),  # as many rows as the config's vocab_size
        (100, False, {"vocabulary_map": "none"}, "none"),
        (100, True, {"vocabulary_map": "offset"}, "offset"),
        (100, True, {"head": "target"}, "none"),
        (256, True, {}, None),
        (100, True, {}, None),
        (100, False, {}, None),
    ],
)
def test_how_rows_of_an_own_head_are_numbered_is_known_or_asked_for(
    rows: int, d2t: bool, given: dict[str, Any], vocabulary_map: str | None
) -> None:
    shapes = {**SHAPES, "lm_head.weight": (rows, 64)} | ({"d2t": (rows,)} if d2t else {})
    if vocabulary_map is None:
        assert 'vocabulary_map = "offset" if row i of the head is token i + d2t[i]' in refusal(shapes=shapes)
    else:
        w = read(shapes=shapes, **given)
        assert (w.vocabulary_map, w.head) == (vocabulary_map, given.get("head", "own"))


def test_own_ends_are_used_unless_the_user_says_otherwise() -> None:
    shapes = {**SHAPES, "embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)}
    assert (read(shapes=shapes).embedding, read(shapes=shapes).head) == ("own", "own")
    assert read(shapes=shapes, embedding="target").embedding == "target"
    assert set(tensor_shapes(read(shapes=shapes))) == set(shapes)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ({"num_target_layers": 6}, False),  # taps 1 and 3 of 6: the last layer is not tapped
        ({"num_target_layers": 4}, True),
        ({"num_target_layers": 4, "tap_after_final_norm": False}, False),
        ({}, True),
        ({"tap_after_final_norm": True}, False),
    ],
)
def test_the_norm_of_the_last_tap_is_asked_for_where_it_matters(words: dict[str, Any], asked: bool) -> None:
    given = without(STATED, "num_target_layers") | words
    if asked:
        assert "tap_after_final_norm = true" in refusal(None, **given)
    else:
        assert read(None, **given).tap_after_final_norm is words.get("tap_after_final_norm", True)


def test_a_name_that_is_no_layer_number_breaks_nothing() -> None:
    assert "num_layers: 2" in refusal(shapes={**SHAPES, "layers.norm.weight": (64,)})
