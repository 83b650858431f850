"""Reads a wiring out of what a checkpoint says about itself: its config, its tensors' shapes, its format.

Knows the words of the field's configs and the shapes of a DFlash drafter's tensors; knows neither files nor
torch. What nobody says is asked for by name: a wrong wiring loads, runs and measures something else, so
nothing here is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.errors import WiringError
from draftgauge.wiring import (
    FIELDS,
    SLIDING_LAYER,
    LayerAttention,
    Wiring,
    parse_field,
    sliding_layer,
    validate,
    wiring_from_dict,
)

Shapes = Mapping[str, tuple[int, ...]]
#: A field's value and where it came from.
Found = dict[str, tuple[Any, str]]

#: Under this key our trainer stores the complete wiring in a checkpoint's config.
OWN_KEY = "draftgauge_wiring"

#: What `--wiring FILE.toml` may hold besides the fields: the shorthand for `attention`.
SHORTHANDS = ("convention", "sliding_window", "layer_types")
_LAYER_TYPES = ("full_attention", "sliding_attention")

_HELP: Mapping[str, str] = {
    "taps": "taps = [1, 10, 19, 27]  (or --taps 1,10,19,27): outputs of target layers counted from 0",
    "block_size": "block_size = 16  (or --block-size 16)",
    "mask_token_id": "mask_token_id = 151669  (or --mask-token-id 151669)",
    "rope_theta": "rope_theta = 1000000.0: the rotary base that the drafter was trained with",
    "rope_dims": "rope_dims = 128: how many of head_dim's dimensions are rotated; code differs in whether it "
    "honours a partial_rotary_factor",
    "rms_norm_eps": "rms_norm_eps = 1e-6",
    "attention": 'layer_types = ["full_attention", ...], or with "sliding_attention" among them also '
    f"sliding_window = 2048 and convention = one of {', '.join(SLIDING_LAYER)}",
    "predicts_from_anchor": "predicts_from_anchor = false: whether row 0 predicts the next token",
    "vocabulary_map": 'vocabulary_map = "offset" if row i of the head is token i + d2t[i], "absolute" if it is '
    'd2t[i], "none" if it is token i',
}


def read_wiring(
    *,
    config: Mapping[str, Any] | None,
    config_source: str,
    shapes: Shapes,
    given: Mapping[str, Any] | None = None,
    given_source: str = "given",
) -> Wiring:
    """The complete wiring, from the user's word before the config's, the config's before the shapes'.

    Args:
        config: The checkpoint's config as plain values; None for a file that has none.
        config_source: How to name the config in provenance and messages, e.g. `"config.json"`.
        shapes: Shape of every model tensor by its canonical name.
        given: Fields that the user states, by field name (see also `SHORTHANDS`).
        given_source: How to name the user's word, e.g. `"--wiring fixed.toml"`.

    Raises:
        WiringError: A field is unknown to all sources (all such are listed with the line that would state
            them), two sources contradict each other, or the wiring is impossible.
    """
    shown = _from_shapes(shapes)
    stated = _given(given or {}, source=given_source)
    described = _described(config, source=config_source)
    _agree(shown, described)
    _agree(shown, stated)
    if "mask_token_id" in stated and "mask_embedding" in shown and "mask_embedding" not in stated:
        raise WiringError(
            "mask_token_id is stated, but the file holds a mask_embedding that stands in its place; "
            "state also mask_embedding = false to use the token"
        )
    if any(name in stated for name in SHORTHANDS):
        described.pop("attention", None)
    if "convention" in stated:
        described.pop("is_causal", None)
    found = shown | _defaults(config, source=config_source, known=shown | described) | described | stated
    found = _whole_vocabulary(found, shapes) | found
    found = _attention(found) | found
    _ask_for_missing(found, config=config, source=config_source)
    known = {name: found[name] for name in FIELDS if name in found}
    provenance = dict.fromkeys(FIELDS, "default: nothing says otherwise")
    provenance |= {name: where for name, (_, where) in known.items()}
    return validate(Wiring(**{name: value for name, (value, _) in known.items()}, provenance=provenance))


def described_fields(config: Mapping[str, Any] | None, *, source: str) -> dict[str, Any]:
    """What a config states itself, by field or shorthand: neither what its format leaves to a default, nor shapes.

    Example:
        `{"taps": (1, 10, 19, 27), "block_size": 8, "sliding_window": 2048}`.
    """
    said = _described(config, source=source)
    whole = _attention(said) if "is_causal" in said else {}
    return {name: value for name, (value, _) in (whole | said).items() if name in (*FIELDS, *SHORTHANDS)}


def _described(config: Mapping[str, Any] | None, *, source: str) -> Found:
    """What the config says, in our own words or in the field's."""
    if config is None:
        return {}
    if OWN_KEY not in config:
        return _from_config(config, source=source)
    own = wiring_from_dict(config[OWN_KEY], source=f"{source}: {OWN_KEY}")
    return {name: (getattr(own, name), where) for name, where in own.provenance.items()}


def _defaults(config: Mapping[str, Any] | None, *, source: str, known: Found) -> Found:
    """What the field's configs mean where they say nothing."""
    if config is None or OWN_KEY in config:
        return {}
    found: Found = {}
    if config.get("num_hidden_layers") is not None and not config.get("use_sliding_window"):
        every = ["full_attention"] * int(config["num_hidden_layers"])
        found["layer_types"] = (every, f"{source}: it names no layer_types, so no layer slides")
    if config.keys() & {"dflash_config", "target_layer_ids", "dflash_target_layer_ids"}:
        default = "default of the z-lab format"
        found["predicts_from_anchor"] = (False, default)
        if "dflash_target_layer_ids" not in config:
            found["tap_after_final_norm"] = (True, f"{default}: a last layer is tapped after its norm")
        if "head_dim" in known and not _rotates_partially(config):
            found["rope_dims"] = (known["head_dim"][0], f"{default}: all of head_dim")
    return found | _of_project(config, source=source)


def _of_project(config: Mapping[str, Any], *, source: str) -> Found:
    """What a config means because it shows whose code wrote it."""
    if config.get("model_type") == "muse_glimmer_assistant":
        where = f"{source}: model_type, transformers' own DFlash"
        every = (["sliding_attention"] * int(config.get("num_hidden_layers") or 0), where)
        window = _window(config.get("sliding_window", 2048), f"{source}: sliding_window, 2048 if not said")
        return {"convention": ("transformers", where), "sliding_window": window, "layer_types": every}
    if "DSparkModel" in str(config.get("architectures")):
        where = f"{source}: architectures, DeepSpec's; row 0 predicts, a layer is tapped before the norm"
        return {"predicts_from_anchor": (True, where), "tap_after_final_norm": (False, where)}
    where = f"{source}: dflash_target_layer_ids, SpecForge's"
    return {"convention": ("specforge", where)} if "dflash_target_layer_ids" in config else {}


def _given(given: Mapping[str, Any], *, source: str) -> Found:
    unknown = sorted(set(given) - set(FIELDS) - set(SHORTHANDS))
    if unknown:
        raise WiringError(
            f"{source}: unknown wiring field(s) {', '.join(unknown)}; "
            f"known: {', '.join((*FIELDS, *SHORTHANDS))}"
        )
    found: Found = {
        name: (parse_field(name, value, source=source), f"{source}: {name}")
        for name, value in given.items()
        if name in FIELDS
    }
    shorthands = [name for name in SHORTHANDS if name in given]
    if shorthands and "attention" in given:
        raise WiringError(f"{source} states attention and also {', '.join(shorthands)}; leave one out")
    if "sliding_window" in given:
        found["sliding_window"] = _window(given["sliding_window"], f"{source}: sliding_window")
    if "convention" in given:
        found["convention"] = (given["convention"], f"{source}: convention")
    if "layer_types" in given:
        found["layer_types"] = _kinds(given["layer_types"], f"{source}: layer_types")
    return found


def _window(value: Any, where: str) -> tuple[int, str]:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WiringError(f"{where} = {value!r}; expected a number of positions, as in 2048")
    return value, where


def _kinds(value: Any, where: str) -> tuple[list[str], str]:
    if not isinstance(value, list | tuple) or not set(map(str, value)) <= set(_LAYER_TYPES):
        raise WiringError(f"{where} = {value!r}; expected one of {', '.join(_LAYER_TYPES)} for every layer")
    return list(value), where


def _from_shapes(shapes: Shapes) -> Found:
    """The sizes that the tensors themselves show."""

    def dim(name: str, axis: int) -> tuple[int, str] | None:
        shape = shapes.get(name)
        return None if shape is None or len(shape) <= axis else (shape[axis], f"shape of {name}")

    first = "layers.0.self_attn"
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    found: Found = {}
    sizes = {
        "hidden_size": dim("norm.weight", 0),
        "intermediate_size": dim("layers.0.mlp.gate_proj.weight", 0),
        "head_dim": dim(f"{first}.q_norm.weight", 0),
    }
    found |= {name: size for name, size in sizes.items() if size is not None}
    if layers:
        found["num_layers"] = (len(layers), "number of layers.* in the file")
    if "head_dim" in found:
        head_dim = found["head_dim"][0]
        for field, name in (
            ("num_heads", f"{first}.q_proj.weight"),
            ("num_kv_heads", f"{first}.k_proj.weight"),
        ):
            rows = dim(name, 0)
            if rows is not None and rows[0] % head_dim == 0:
                found[field] = (rows[0] // head_dim, f"shape of {name} over head_dim {head_dim}")
    for field, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if name in shapes:
            found[field] = ("own", f"the file holds {name}")
    if "mask_embedding" in shapes:
        found["mask_embedding"] = (True, "the file holds mask_embedding")
        found["mask_token_id"] = (None, "the file holds mask_embedding")
    return found


def _whole_vocabulary(found: Found, shapes: Shapes) -> Found:
    """That row i of the head is token i, where nothing else is possible."""
    if found.get("head", ("target", ""))[0] == "target":
        return {"vocabulary_map": ("none", "the head is the target's")}
    name = "embed_tokens.weight"
    size, where = found.get("vocab_size", (shapes.get(name, (None,))[0], name))
    if "d2t" not in shapes and shapes.get("lm_head.weight", (None,))[0] == size:
        return {"vocabulary_map": ("none", f"no d2t, and a row of lm_head.weight for each of {where}")}
    return {}


_PLAIN = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_target_layers",
}
#: Further words of a layers' config that are read.
_ALIKE = ("hidden_act", "max_position_embeddings", "partial_rotary_factor")
_DRAFT = {
    "block_size": "block_size",
    "target_layer_ids": "taps",
    "mask_token_id": "mask_token_id",
    "predicts_from_anchor": "predicts_from_anchor",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "logit_softcap",
}


def _from_config(config: Mapping[str, Any], *, source: str) -> Found:
    """Fields as a z-lab style config says them; `dflash_config` and the top level may both hold them."""
    if "speculators_model_type" in config:
        return _from_speculators(config, source=source)
    inner = config.get("dflash_config")
    draft: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    found: Found = {}
    for key, field in _PLAIN.items():
        if config.get(key) is not None:
            found[field] = (parse_field(field, config[key], source=source), f"{source}: {key}")
    for key, field in _DRAFT.items():
        places = {
            f"dflash_config.{key}": draft.get(key),
            key: config.get(key),
            f"dflash_{key}": config.get(f"dflash_{key}"),  # SpecForge's training_state.pt
        }
        told = {where: value for where, value in places.items() if value is not None}
        if len({repr(value) for value in told.values()}) > 1:
            raise WiringError(f"{source} contradicts itself: {told}; correct the copy that is wrong")
        for where, value in told.items():
            found.setdefault(field, (parse_field(field, value, source=source), f"{source}: {where}"))
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise WiringError(f"{source}: hidden_act {activation!r} is not implemented; expected 'silu'")
    found |= _rope(config, source=source)
    return found | _layer_types(config, source=source)


def _from_speculators(config: Mapping[str, Any], *, source: str) -> Found:
    """Fields as speculators says them: layer ids one higher, and the layers in a config of their own."""
    kind, layers = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "dflash" or not isinstance(layers, Mapping):
        raise WiringError(
            f"{source}: speculators_model_type {kind!r} with a transformer_layer_config of type "
            f"{type(layers).__name__} is not read; expected 'dflash' with a mapping"
        )
    inner = f"{source}: transformer_layer_config"
    # What only the outer config says; the inner one is in the words of every other config.
    plain = {key: value for key, value in layers.items() if key in _PLAIN or "rope" in key or key in _ALIKE}
    plain |= {key: config[key] for key in ("block_size", "mask_token_id") if key in config}
    found = {
        field: (value, where.replace(f"{source}: ", f"{inner}.") if field not in _DRAFT.values() else where)
        for field, (value, where) in _from_config(plain, source=source).items()
    }
    ids, anchor = config.get("aux_hidden_state_layer_ids"), bool(config.get("sample_from_anchor", False))
    if ids is not None:
        taps = parse_field("taps", [number - 1 for number in ids], source=source)
        found["taps"] = (taps, f"{source}: aux_hidden_state_layer_ids, each one lower")
    found["predicts_from_anchor"] = (anchor, f"{source}: sample_from_anchor, false if not said")
    found["tap_after_final_norm"] = (False, "speculators: every state is taken before the final norm")
    if "head_dim" in found and not _rotates_partially(layers):
        found["rope_dims"] = (found["head_dim"][0], "speculators: all of head_dim")
    pruned = config.get("draft_vocab_size") != layers.get("vocab_size")
    found["vocabulary_map"] = ("offset" if pruned else "none", f"{source}: draft_vocab_size")
    types, window = layers.get("layer_types"), layers.get("sliding_window")
    if types is None or window is None:
        every = ["full_attention"] * int(layers.get("num_hidden_layers") or 0)
        return found | {"layer_types": (every, f"{inner}: no sliding_window, so no layer slides")}
    bidirectional = bool(config.get("sliding_window_non_causal", False))
    convention = "speculators_non_causal" if bidirectional else "speculators"
    found["layer_types"] = _kinds(types, f"{inner}.layer_types")
    found["sliding_window"] = _window(window, f"{inner}.sliding_window")
    found["convention"] = (convention, f"{source}: sliding_window_non_causal, false if not said")
    return found


def _rotates_partially(config: Mapping[str, Any]) -> bool:
    """True where the config says so, at the top or, since transformers 5, in `rope_parameters`."""
    nested = config.get("rope_parameters") or {}
    factors = {config.get("partial_rotary_factor"), nested.get("partial_rotary_factor")}
    return not factors <= {None, 1}


_SCALING_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
#: Words of a rope section that are read elsewhere, or that do not matter for positions of text.
_OTHER_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
}


def _rope(config: Mapping[str, Any], *, source: str) -> Found:
    """Base and scaling; transformers 5 moved both into `rope_parameters`, older files have `rope_scaling`."""
    nested, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    differing = [key for key in older if key in nested and older[key] != nested[key]]
    places = {"rope_theta": config.get("rope_theta"), "rope_parameters.rope_theta": nested.get("rope_theta")}
    bases = {
        where: parse_field("rope_theta", value, source=source)
        for where, value in places.items()
        if value is not None
    }
    if differing or len(set(bases.values())) > 1:
        what = f"rope_scaling and rope_parameters differ in {', '.join(differing)}" if differing else bases
        raise WiringError(f"{source} contradicts itself: {what}; correct the copy that is wrong")
    found: Found = {}
    for where, base in bases.items():
        found.setdefault("rope_theta", (base, f"{source}: {where}"))
    scaling = {key: value for key, value in {**older, **nested}.items() if value is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    unknown = sorted(set(scaling) - set(_SCALING_KEYS) - _OTHER_ROPE_KEYS)
    if scaling.get("truncate") is True:  # what is computed anyway
        unknown.remove("truncate")
    if kind not in ("default", "linear", "llama3", "yarn") or unknown:
        what = f"rope type {kind!r}" + (f" with {', '.join(unknown)}" if unknown else "")
        raise WiringError(
            f"{source}: {what} is not implemented; expected linear, llama3 or yarn with "
            f"{', '.join(_SCALING_KEYS)}"
        )
    if kind == "default":
        return found
    names = {"original_max_position_embeddings": "original_max_position"}
    values = {names.get(key, key): scaling[key] for key in _SCALING_KEYS if key in scaling}
    if kind in ("llama3", "yarn"):
        values.setdefault("original_max_position", config.get("max_position_embeddings"))
    parsed = parse_field("rope_scaling", {"kind": kind, **values}, source=source)
    found["rope_scaling"] = (parsed, f"{source}: {'rope_parameters' if nested else 'rope_scaling'}")
    return found


def _layer_types(config: Mapping[str, Any], *, source: str) -> Found:
    """Which layers slide and how far, as far as the config says; a window that it does not use is none."""
    found: Found = {}
    uses_window, window = config.get("use_sliding_window"), config.get("sliding_window")
    if config.get("layer_types") is not None:
        found["layer_types"] = _kinds(config["layer_types"], f"{source}: layer_types")
    # Code that builds on Qwen3's config drops the window unless use_sliding_window is true; other code does
    # not know that switch. Without it, only the user can say which was meant.
    if uses_window is False:
        found["sliding_window"] = (None, f"{source}: use_sliding_window is false")
    elif uses_window is not None and window is not None:
        found["sliding_window"] = _window(window, f"{source}: sliding_window")
    if config.get("is_causal") is not None:
        causal = bool(config["is_causal"])
        found["is_causal"] = (causal, f"{source}: is_causal")
        convention = "zlab_2026_08" if causal else "zlab_2026_08_non_causal"
        found["convention"] = (convention, f"{source}: is_causal, a word of zlab_2026_08")
    return found


def _attention(found: Found) -> Found:
    """Every layer's attention, from the kinds of layers, a window and a project's convention, if these are known."""
    if "layer_types" not in found or _about_sliding(found):
        return {}
    types, source = found["layer_types"]
    causal, _ = found.get("is_causal", (False, ""))
    full = LayerAttention(block_causal=causal)
    if "sliding_attention" not in types:
        return {"attention": ((full,) * len(types), f"{source} (no layer slides)")}
    convention, told = found["convention"]
    window, width_told = found.get("sliding_window", (None, ""))
    sliding = sliding_layer(convention, window=window or 1)
    if window is None:
        sliding = LayerAttention(block_causal=sliding.block_causal)
    layers = tuple(sliding if kind == "sliding_attention" else full for kind in types)
    return {"attention": (layers, "; ".join(filter(None, (source, width_told, told))))}


def _about_sliding(found: Found) -> list[str]:
    """The lines that would state what nobody says of layers that slide."""
    types, source = found["layer_types"]
    if "sliding_attention" not in types:
        return []
    lines = []
    convention, _ = found.get("convention", (None, ""))
    if convention is None:
        lines.append(
            f"convention = one of {', '.join(SLIDING_LAYER)}: whose code trained the drafter; layers slide "
            f"({source}), and projects compute such layers differently"
        )
    if "sliding_window" not in found and convention != "zlab_2026_04":
        lines.append("sliding_window = 2048: how far back such a layer looks")
    return lines


#: Ends may be held by the file and yet be the target's, which only the config or the user can say.
_NOT_IN_SHAPES = ("embedding", "head", "mask_embedding", "mask_token_id")


def _agree(shown: Found, told: Found) -> None:
    """Neither the config nor the user may contradict the tensors, except where those cannot tell."""
    for name, (value, where) in shown.items():
        if name in told and name not in _NOT_IN_SHAPES and told[name][0] != value:
            said, source = told[name]
            raise WiringError(
                f"{name}: {said} ({source}) contradicts {value} ({where}); one of the two belongs to another "
                "checkpoint: give the config that was saved with these weights"
            )


_REQUIRED = (
    "taps",
    "block_size",
    "mask_token_id",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_dims",
    "predicts_from_anchor",
    "vocabulary_map",
)


def _ask_for_missing(found: Found, *, config: Mapping[str, Any] | None, source: str) -> None:
    """Asks for everything that nobody says at once: who has answered should not be asked again."""
    missing = [_HELP.get(name, f"{name} = ...") for name in _REQUIRED if name not in found]
    if "attention" not in found:
        missing += _about_sliding(found) if "layer_types" in found else [_HELP["attention"]]
    missing += _about_last_tap(found)
    if not missing:
        return
    where = f"{source} does not say all" if config is not None else source
    lines = "\n".join(f"  {line}" for line in missing)
    raise WiringError(
        f"the wiring is not known completely: {where}, and a guess would measure another drafter.\n"
        f"State what the drafter was trained with, in a file given as --wiring FILE.toml:\n{lines}"
    )


def _about_last_tap(found: Found) -> list[str]:
    """The line that would state where the last layer is tapped, unless it is known that it is not."""
    if "tap_after_final_norm" in found:
        return []
    layers, taps = (found.get(name, (None, ""))[0] for name in ("num_target_layers", "taps"))
    asked = "tap_after_final_norm = true: whether it is taken after the target's final norm"
    if layers is None:
        return [f"num_target_layers = 36, and if the last of them is tapped also {asked}"]
    if taps is None:
        return [f"if layer {layers - 1}, the target's last, is tapped, also {asked}"]
    return (
        [asked.replace("it is", f"layer {layers - 1}, the target's last, is")] if layers - 1 in taps else []
    )
