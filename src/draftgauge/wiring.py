"""The wiring: every choice that turns a drafter's weights into a function, each with its provenance.

A value, nothing more: it knows neither files nor torch. `configs` reads it out of what a checkpoint says
about itself, `drafters` computes what it describes, and nothing else decides how a drafter is wired.

Glossary: *anchor* a, the last committed position; *row* o of the block stands at position a + o; *context*,
the tap features strictly below a; *tap* L, the output of the target's decoder layer L counted from 0, before
any later norm (-1 is the embedding).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftgauge.errors import WiringError


@dataclass(frozen=True)
class LayerAttention:
    """What the rows of a draft block may see in one layer.

    Row o of anchor a sees context key k when there is no window, or when k >= origin - window + 1, with
    origin a + o (`window_from = "row"`) or a (`"anchor"`); an inclusive window reaches one key further back.
    It sees row j of its own block unless `block_causal` hides j > o, or `block_window` hides the rows that
    are farther away than `reach`.
    """

    window: int | None = None
    window_from: Literal["row", "anchor"] = "row"
    window_inclusive: bool = False
    block_causal: bool = False
    block_window: bool = False

    @property
    def reach(self) -> int | None:
        """How many positions back from the origin a row may look; None where nothing bounds it."""
        return None if self.window is None else self.window - 1 + self.window_inclusive

    def __str__(self) -> str:
        inside = "causal" if self.block_causal else "bidirectional"
        if self.window is None:
            return f"full, {inside} in the block"
        bound = "inclusive" if self.window_inclusive else "exclusive"
        within = ", window inside the block too" if self.block_window else ""
        return f"window {self.window} from the {self.window_from} ({bound}), {inside} in the block{within}"


def _sliding(**fields: Any) -> LayerAttention:
    return LayerAttention(window=1, **fields)


#: What a layer that a config calls sliding does in each project's code. The window's width is filled in.
#: Source: the projects' own code, 2026 (docs/formats.md has the table in words).
SLIDING_LAYER: Mapping[str, LayerAttention] = {
    "zlab_2026_04": LayerAttention(),
    "zlab_2026_08": _sliding(block_causal=True, block_window=True),
    "zlab_2026_08_non_causal": _sliding(block_window=True),
    "specforge": _sliding(block_causal=True),
    "speculators": _sliding(window_from="anchor", window_inclusive=True, block_causal=True),
    "speculators_non_causal": _sliding(window_from="anchor", window_inclusive=True),
    "transformers": _sliding(window_inclusive=True, block_window=True),
    "modelopt": _sliding(),
}


def sliding_layer(convention: str, *, window: int) -> LayerAttention:
    """A sliding layer as the named project computes it.

    Raises:
        WiringError: The convention is not one of `SLIDING_LAYER`.
    """
    if convention not in SLIDING_LAYER:
        raise WiringError(
            f"attention convention {convention!r} is unknown; expected one of {', '.join(SLIDING_LAYER)}"
        )
    layer = SLIDING_LAYER[convention]
    return layer if layer.window is None else dataclasses.replace(layer, window=window)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched; the fields that a kind does not use stay None.

    Source: Hugging Face's `rope_parameters`: linear (Chen et al. 2023), llama3 (Llama 3.1), yarn
    (Peng et al. 2023).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __str__(self) -> str:
        return f"{self.kind} x {self.factor:g}"


@dataclass(frozen=True)
class Wiring:
    """The semantic contract of a drafter. `provenance[field]` says where each field's value came from.

    Units: sizes in elements, windows and block sizes in positions, taps in target layers counted from 0.
    `embedding_scale` multiplies rows of the embedding; a mask embedding of the drafter's own is used as stored.
    Example: `Wiring(taps=(1, 10, 19, 27), block_size=8, ...)` with `provenance["taps"]` equal to
    `"config.json: dflash_config.target_layer_ids"`.
    """

    taps: tuple[int, ...]
    block_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention: tuple[LayerAttention, ...]
    mask_token_id: int | None
    rope_dims: int
    vocab_size: int | None = None
    num_target_layers: int | None = None
    family: str = "dflash"
    predicts_from_anchor: bool = False
    tap_after_final_norm: bool = True
    mask_embedding: bool = False
    rope_layout: Literal["half", "interleaved"] = "half"
    rope_scaling: RopeScaling | None = None
    embedding: Literal["target", "own"] = "target"
    head: Literal["target", "own"] = "target"
    vocabulary_map: Literal["none", "offset", "absolute"] = "none"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def depth(self) -> int:
        """D: drafted tokens per block. Row 0 re-reads the anchor unless it predicts."""
        return self.block_size if self.predicts_from_anchor else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The block row that predicts depth 1."""
        return 0 if self.predicts_from_anchor else 1

    def as_dict(self) -> dict[str, Any]:
        """All fields but the provenance, as JSON-ready values; `wiring_from_dict` reads it back."""
        values = dataclasses.asdict(self)
        del values["provenance"]
        return values

    @property
    def digest(self) -> str:
        """Identity of the function: equal for wirings that differ only in provenance."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Wiring) if f.name != "provenance")
_DEFAULTED = {f.name for f in dataclasses.fields(Wiring) if f.default is not dataclasses.MISSING}


def wiring_from_dict(values: Mapping[str, Any], *, source: str) -> Wiring:
    """The wiring that `Wiring.as_dict` wrote; every field's provenance is `source`.

    Raises:
        WiringError: A field is unknown or missing.
    """
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        raise WiringError(
            f"{source}: unknown wiring field(s) {', '.join(unknown)}; known: {', '.join(FIELDS)}"
        )
    missing = [name for name in FIELDS if name not in values and name not in _DEFAULTED]
    if missing:
        raise WiringError(f"{source}: the wiring is incomplete; state also {', '.join(missing)}")
    plain = {name: parse_field(name, value, source=source) for name, value in values.items()}
    return validate(Wiring(**plain, provenance={name: f"{source}: {name}" for name in plain}))


_KINDS: Mapping[str, type] = {
    "rms_norm_eps": float,
    "rope_theta": float,
    "embedding_scale": float,
    "logit_scale": float,
    "logit_softcap": float,
    "family": str,
    "rope_layout": str,
    "embedding": str,
    "head": str,
    "vocabulary_map": str,
    "predicts_from_anchor": bool,
    "tap_after_final_norm": bool,
    "mask_embedding": bool,
}
_SCALING_NEEDS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position",),
}
_OPTIONAL = {"mask_token_id", "vocab_size", "num_target_layers", "logit_softcap", "rope_scaling"}


def parse_field(name: str, value: Any, *, source: str) -> Any:
    """One field's value as it stands in JSON or TOML, turned into the type that `Wiring` holds.

    Raises:
        WiringError: The value has another type than the field's.
    """
    try:
        if value is None and name in _OPTIONAL:
            return None
        if name == "taps":
            return tuple(_of_kind(int, tap) for tap in value)
        if name == "attention":
            return tuple(LayerAttention(**_typed(_LAYER_KINDS, layer)) for layer in value)
        if name == "rope_scaling":
            return RopeScaling(**_typed(_SCALING_KINDS, value))
        return _of_kind(_KINDS.get(name, int), value, choices=_CHOICES.get(name))
    except (TypeError, ValueError) as exc:
        raise WiringError(f"{source}: wiring field {name} = {value!r} cannot be read: {exc}") from exc


_LAYER_KINDS: Mapping[str, type] = {
    "window": int,
    "window_from": str,
    "window_inclusive": bool,
    "block_causal": bool,
    "block_window": bool,
}
_SCALING_KINDS: Mapping[str, type] = {"kind": str, "original_max_position": int}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": ("linear", "llama3", "yarn"),
    "window_from": ("row", "anchor"),
    "family": ("dflash",),
    "rope_layout": ("half", "interleaved"),
    "embedding": ("target", "own"),
    "head": ("target", "own"),
    "vocabulary_map": ("none", "offset", "absolute"),
}


def _typed(kinds: Mapping[str, type], values: Any) -> dict[str, Any]:
    """A nested value's fields by name; those without a kind of their own are floats, None stays None."""
    if not isinstance(values, Mapping):
        raise TypeError(f"expected fields with values, got {values!r}")
    return {
        name: None if value is None else _of_kind(kinds.get(name, float), value, choices=_CHOICES.get(name))
        for name, value in values.items()
    }


def _of_kind(kind: type, value: Any, *, choices: tuple[str, ...] | None = None) -> Any:
    """The value, if it is of the kind: a whole number is also a float, a truth value is no number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        name = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]
        raise TypeError(f"expected {name}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if choices is not None and value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return value


def validate(wiring: Wiring) -> Wiring:
    """The same wiring, once it is known to describe a possible function.

    Raises:
        WiringError: A field is out of range or contradicts another; the message names both.
    """
    problems = [*_size_problems(wiring), *_layer_problems(wiring), *_end_problems(wiring)]
    if problems:
        raise WiringError(f"{problems[0]}; state what the drafter was trained with in --wiring FILE.toml")
    return wiring


_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def _size_problems(w: Wiring) -> list[str]:
    layers = w.num_target_layers
    bad_taps = [t for t in w.taps if t < -1 or (layers is not None and t >= layers)]
    highest = "the last layer's" if layers is None else str(layers - 1)
    small = [f"{name} {getattr(w, name)}" for name in _SIZES if getattr(w, name) < 1]
    checks = [
        (len(w.taps) == 0, "taps is empty, expected the target layers that the drafter reads"),
        (len(set(w.taps)) < len(w.taps), f"taps {list(w.taps)} name a layer twice"),
        (
            bool(bad_taps),
            f"taps {bad_taps} are outside the target, whose layer outputs are -1 (embedding) to {highest}, "
            "counted from 0",
        ),
        (w.block_size < 2, f"block_size {w.block_size} drafts nothing, expected 2 or more"),
        (bool(small), f"{', '.join(small)}: expected 1 or more"),
        (
            w.num_kv_heads > 0 and w.num_heads % w.num_kv_heads != 0,
            f"num_heads {w.num_heads} is not a multiple of num_kv_heads {w.num_kv_heads}",
        ),
    ]
    return [message for failed, message in checks if failed]


def _layer_problems(w: Wiring) -> list[str]:
    checks = [
        (
            not 0 < w.rope_dims <= w.head_dim or w.rope_dims % 2 != 0,
            f"rope_dims {w.rope_dims} must be even and at most head_dim {w.head_dim}",
        ),
        (not w.rope_theta > 1, f"rope_theta {w.rope_theta:g} must be more than 1"),
        (not w.rms_norm_eps >= 0, f"rms_norm_eps {w.rms_norm_eps:g} must not be negative"),
        (
            len(w.attention) != w.num_layers,
            f"attention describes {len(w.attention)} layers, the drafter has {w.num_layers}",
        ),
        (
            any(layer.window is not None and layer.window < 1 for layer in w.attention),
            "an attention window must be 1 or more positions",
        ),
    ]
    return [message for failed, message in checks if failed] + _scaling_problems(w.rope_scaling)


def _scaling_problems(scaling: RopeScaling | None) -> list[str]:
    if scaling is None:
        return []
    lacking = [name for name in _SCALING_NEEDS[scaling.kind] if not getattr(scaling, name)]
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    checks = [
        (bool(lacking), f"rope_scaling {scaling} needs {', '.join(lacking)}"),
        (not scaling.factor >= 1, f"rope_scaling {scaling} must stretch by 1 or more"),
        (
            low is not None and high is not None and not low < high,
            f"rope_scaling {scaling}: low_freq_factor {low} must be below high_freq_factor {high}",
        ),
    ]
    return [message for failed, message in checks if failed]


def _end_problems(w: Wiring) -> list[str]:
    cap = w.logit_softcap
    checks = [
        (
            w.mask_token_id is None and not w.mask_embedding,
            "mask_token_id is not set and the drafter has no mask embedding of its own",
        ),
        (
            w.mask_token_id is not None and w.mask_token_id < 0,
            f"mask_token_id {w.mask_token_id} is negative",
        ),
        (cap is not None and not cap > 0, f"logit_softcap {cap} must be positive"),
        (w.logit_scale == 0 or w.embedding_scale == 0, "a scale of 0 drafts the same everywhere"),
        (
            w.vocabulary_map != "none" and w.head != "own",
            "a pruned vocabulary (vocabulary_map) needs the drafter's own head",
        ),
    ]
    return [message for failed, message in checks if failed]


def tensor_shapes(wiring: Wiring) -> dict[str, tuple[int, ...]]:
    """The tensors that the network reads, with their shapes; sizes that only the file knows are -1.

    Names are z-lab's: 11 per layer and 3 more, then what the wiring says is the drafter's own.
    """
    w, hidden = wiring, wiring.hidden_size
    query, key = w.num_heads * w.head_dim, w.num_kv_heads * w.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(w.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(w.num_layers):
        layer = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (w.head_dim,),
            "self_attn.k_norm": (w.head_dim,),
            "mlp.gate_proj": (w.intermediate_size, hidden),
            "mlp.up_proj": (w.intermediate_size, hidden),
            "mlp.down_proj": (hidden, w.intermediate_size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if w.embedding == "own":
        shapes["embed_tokens.weight"] = (-1, hidden)
    if w.head == "own":
        shapes["lm_head.weight"] = (-1, hidden)
    if w.vocabulary_map != "none":
        shapes["d2t"] = (-1,)
    if w.mask_embedding:
        shapes["mask_embedding"] = (hidden,)
    return shapes
