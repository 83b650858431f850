"""The wiring: its arithmetic, its identity, and every way in which one can be impossible."""

import dataclasses
import json
import math
from typing import Any

import pytest

from draftgauge.errors import WiringError
from draftgauge.wiring import (
    FIELDS,
    SLIDING_LAYER,
    LayerAttention,
    RopeScaling,
    Wiring,
    parse_field,
    sliding_layer,
    tensor_shapes,
    validate,
    wiring_from_dict,
)
from tests.golden import DRAFTERS, tensors_of, wiring_of

YARN = RopeScaling("yarn", 4.0, original_max_position=512)


def wiring(**changes: Any) -> Wiring:
    """A possible wiring, with some fields changed."""
    plain = Wiring(
        taps=(1, 3),
        block_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention=(LayerAttention(), LayerAttention()),
        mask_token_id=255,
        rope_dims=16,
        num_target_layers=6,
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("layer", "reach", "words"),
    [
        (LayerAttention(), None, "full, bidirectional in the block"),
        (LayerAttention(block_causal=True), None, "full, causal in the block"),
        # Window 4 seen from position 10: 7, 8, 9, 10 exclusive; 6 as well inclusive.
        (LayerAttention(window=4), 3, "window 4 from the row (exclusive), bidirectional in the block"),
        (
            LayerAttention(window=4, window_from="anchor", window_inclusive=True, block_window=True),
            4,
            "window 4 from the anchor (inclusive), bidirectional in the block, window inside the block too",
        ),
    ],
)
def test_how_far_a_layer_sees(layer: LayerAttention, reach: int | None, words: str) -> None:
    assert (layer.reach, str(layer)) == (reach, words)


@pytest.mark.parametrize("convention", SLIDING_LAYER)
def test_a_convention_fixes_everything_but_the_width(convention: str) -> None:
    narrow, wide = sliding_layer(convention, window=5), sliding_layer(convention, window=20)
    assert narrow.window == (None if convention == "zlab_2026_04" else 5)
    assert dataclasses.replace(narrow, window=wide.window) == wide


def test_an_unknown_convention_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WiringError, match="'zlab' is unknown; expected one of zlab_2026_04, zlab_2026_08"):
        sliding_layer("zlab", window=5)


@pytest.mark.parametrize(("predicts", "depth", "first_row"), [(False, 7, 1), (True, 8, 0)])
def test_depth_follows_from_the_anchor_row(predicts: bool, depth: int, first_row: int) -> None:
    w = wiring(predicts_from_anchor=predicts)
    assert (w.depth, w.first_row) == (depth, first_row)


CHANGES: dict[str, Any] = {
    "taps": (3, 1),
    "block_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention": (LayerAttention(), LayerAttention(block_causal=True)),
    "mask_token_id": 254,
    "rope_dims": 8,
    "vocab_size": 256,
    "num_target_layers": 7,
    "family": "other",
    "predicts_from_anchor": True,
    "tap_after_final_norm": False,
    "mask_embedding": True,
    "rope_layout": "interleaved",
    "rope_scaling": YARN,
    "embedding": "own",
    "head": "own",
    "vocabulary_map": "offset",
    "embedding_scale": 8.0,
    "logit_scale": 0.5,
    "logit_softcap": 30.0,
}


def test_every_field_has_a_change_to_try() -> None:
    assert set(CHANGES) == set(FIELDS)


@pytest.mark.parametrize("field", CHANGES)
def test_the_digest_sees_every_field(field: str) -> None:
    assert wiring(**{field: CHANGES[field]}).digest != wiring().digest


def test_the_digest_does_not_see_where_fields_came_from() -> None:
    assert wiring(provenance={"taps": "config.json"}).digest == wiring().digest


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, {"logit_softcap": 30.0, "vocab_size": 256}])
def test_what_was_written_is_read_back(changes: dict[str, Any]) -> None:
    w = wiring(**changes)
    back = wiring_from_dict(json.loads(json.dumps(w.as_dict())), source="plan")
    assert back == w
    assert back.digest == w.digest
    assert back.provenance == {name: f"plan: {name}" for name in FIELDS}


def test_a_stored_wiring_without_a_field_names_it() -> None:
    values = wiring().as_dict()
    del values["taps"], values["rope_dims"], values["logit_scale"]  # the last has a default
    with pytest.raises(WiringError, match=r"run.json: the wiring is incomplete; state also taps, rope_dims$"):
        wiring_from_dict(values, source="run.json")


def test_a_stored_wiring_with_an_unknown_field_names_it() -> None:
    with pytest.raises(WiringError, match=r"unknown wiring field\(s\) temperature; known: taps, block_size"):
        wiring_from_dict({**wiring().as_dict(), "temperature": 1.0}, source="run.json")


@pytest.mark.parametrize(
    ("field", "value", "parsed"),
    [
        ("taps", [1, 3], (1, 3)),
        ("rope_theta", 1000000, 1e6),
        ("mask_token_id", None, None),
        ("predicts_from_anchor", True, True),
        ("attention", [{"window": 8, "block_causal": True}], (LayerAttention(window=8, block_causal=True),)),
        ("attention", [{"window": None}], (LayerAttention(),)),
        ("rope_scaling", {"kind": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
    ],
)
def test_values_of_json_and_toml_are_read(field: str, value: Any, parsed: Any) -> None:
    assert parse_field(field, value, source="x") == parsed


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("block_size", 8.0, "expected a whole number, got 8.0"),
        ("block_size", True, "expected a whole number, got True"),
        ("block_size", None, "expected a whole number, got None"),
        ("taps", [1, "3"], "expected a whole number, got '3'"),
        ("taps", 3, "not iterable"),
        ("rope_theta", "1e6", "expected a number, got '1e6'"),
        ("rope_theta", True, "expected a number, got True"),
        ("rope_theta", math.nan, "expected a finite number"),
        ("logit_scale", math.inf, "expected a finite number"),
        ("predicts_from_anchor", 1, "expected true or false, got 1"),
        ("rope_layout", "neox", "expected one of half, interleaved"),
        ("family", "dspark", "expected one of dflash"),
        ("embedding", "drafter", "expected one of target, own"),
        ("head", None, "expected a word, got None"),
        ("vocabulary_map", "relative", "expected one of none, offset, absolute"),
        ("attention", [{"windows": 8}], "windows"),
        ("attention", [8], "expected fields with values, got 8"),
        ("attention", [{"window": "8"}], "expected a whole number, got '8'"),
        ("attention", [{"window_from": "block"}], "expected one of row, anchor"),
        ("attention", [{"block_causal": "yes"}], "expected true or false, got 'yes'"),
        ("rope_scaling", {"kind": "dynamic", "factor": 2.0}, "expected one of linear, llama3, yarn"),
        ("rope_scaling", {"kind": "linear"}, "factor"),
        ("rope_scaling", {"kind": "linear", "factor": "2"}, "expected a number, got '2'"),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: Any, reason: str) -> None:
    with pytest.raises(WiringError) as caught:
        parse_field(field, value, source="--wiring fixed.toml")
    message = str(caught.value)
    assert message.startswith(f"--wiring fixed.toml: wiring field {field} = {value!r} cannot be read: ")
    assert reason in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": ()}, "taps is empty"),
        ({"taps": (1, 1)}, "taps [1, 1] name a layer twice"),
        ({"taps": (1, 6)}, "taps [6] are outside the target, whose layer outputs are -1 (embedding) to 5"),
        ({"taps": (-2, 1), "num_target_layers": None}, "taps [-2] are outside the target"),
        ({"block_size": 1}, "block_size 1 drafts nothing"),
        ({"num_kv_heads": 0}, "num_kv_heads 0: expected 1 or more"),
        ({"num_layers": 0, "attention": ()}, "num_layers 0: expected 1 or more"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_dims": 18}, "rope_dims 18 must be even and at most head_dim 16"),
        ({"rope_dims": 7}, "rope_dims 7 must be even"),
        ({"rope_dims": 0}, "rope_dims 0 must be even"),
        ({"rope_theta": 1.0}, "rope_theta 1 must be more than 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 must not be negative"),
        ({"attention": (LayerAttention(),)}, "attention describes 1 layers, the drafter has 2"),
        ({"attention": (LayerAttention(window=0),) * 2}, "an attention window must be 1 or more positions"),
        ({"rope_scaling": RopeScaling("yarn", 4.0)}, "rope_scaling yarn x 4 needs original_max_position"),
        (
            {"rope_scaling": RopeScaling("llama3", 8.0, 512)},
            "rope_scaling llama3 x 8 needs low_freq_factor, high_freq_factor",
        ),
        (
            {"rope_scaling": RopeScaling("llama3", 8.0, 512, 4.0, 4.0)},
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        ({"rope_scaling": RopeScaling("linear", 0.5)}, "rope_scaling linear x 0.5 must stretch by 1 or more"),
        ({"mask_token_id": None}, "mask_token_id is not set and the drafter has no mask embedding"),
        ({"mask_token_id": -1}, "mask_token_id -1 is negative"),
        ({"logit_softcap": 0.0}, "logit_softcap 0.0 must be positive"),
        ({"embedding_scale": 0.0}, "a scale of 0"),
        ({"vocabulary_map": "offset"}, "a pruned vocabulary (vocabulary_map) needs the drafter's own head"),
    ],
)
def test_impossible_wirings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError) as caught:
        validate(wiring(**changes))
    assert message in str(caught.value)
    assert str(caught.value).endswith("in --wiring FILE.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"taps": (-1, 5)},
        {"mask_token_id": None, "mask_embedding": True},
        {"vocabulary_map": "absolute", "head": "own"},
        {"rope_scaling": RopeScaling("llama3", 8.0, 512, 1.0, 4.0)},
    ],
)
def test_possible_wirings_pass_unchanged(changes: dict[str, Any]) -> None:
    w = wiring(**changes)
    assert validate(w) is w


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_tensors_are_those_of_a_zlab_file(name: str) -> None:
    stored = {key: tensor.shape for key, tensor in tensors_of(name).items()}
    assert tensor_shapes(wiring_of(name)) == stored
    assert len(stored) == 11 * wiring_of(name).num_layers + 3


def test_what_is_the_drafters_own_is_among_the_tensors() -> None:
    own = wiring(embedding="own", head="own", vocabulary_map="offset", mask_embedding=True)
    assert dict(tensor_shapes(own).items() - tensor_shapes(wiring()).items()) == {
        "embed_tokens.weight": (-1, 64),
        "lm_head.weight": (-1, 64),
        "d2t": (-1,),
        "mask_embedding": (64,),
    }
