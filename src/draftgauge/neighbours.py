"""The wirings near a given one: what a drafter might be wired as, if it is not what it is said to be.

Each neighbour changes one thing that configs, conversions and ports get wrong in silence. Knows wirings alone:
nothing here is loaded or measured.

Source: the kinds of fault that docs/faults.md lists.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftgauge.errors import WiringError
from draftgauge.wiring import SLIDING_LAYER, LayerAttention, Wiring, sliding_layer, validate

_ROPE_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
_BLOCK_SIZES = (4, 8, 16, 32)
#: Ids that drafters of known targets use as mask; one that a target's table lacks is not tried.
_MASK_TOKENS = (0, 151643, 151669, 248070)
#: More taps than this are swapped with their neighbours only.
_SWAPPED_IN_ALL_PAIRS = 6


@dataclass(frozen=True)
class Surroundings:
    """What is known around a drafter, from which its neighbours follow.

    `stored` are the canonical names of the checkpoint's tensors, `special_tokens` the target's, id by text.
    """

    num_target_layers: int
    vocab_size: int
    longest_context: int
    trained_block_size: int
    target_rope_theta: float | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """One neighbour: the `field` that it changes, how in words, the fields that state it, and the wiring."""

    field: str
    label: str
    settings: Mapping[str, Any]
    wiring: Wiring


#: How a candidate is described before it is built: in words, and the fields that it sets.
_Change = tuple[str, dict[str, Any]]
_Group = Callable[[Wiring, Surroundings], Iterator[_Change]]


def neighbours(wiring: Wiring, around: Surroundings) -> list[Candidate]:
    """Every possible wiring near the given one, each function once.

    Example:
        The first of a drafter with taps 1, 10, 19 and 27 is `Candidate("taps", "all taps one layer earlier",
        {"taps": (0, 9, 18, 26)}, ...)`.
    """
    found: list[Candidate] = []
    seen = {wiring.digest}
    for name, group in _GROUPS.items():
        for label, settings in group(wiring, around):
            try:
                other = validate(dataclasses.replace(wiring, **settings))
            except WiringError:  # no drafter can be wired so
                continue
            if other.digest not in seen:
                seen.add(other.digest)
                found.append(Candidate(name, label, settings, other))
    return found


def _taps(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    for step, way in ((-1, "earlier"), (1, "later")):
        yield f"all taps one layer {way}", {"taps": tuple(tap + step for tap in w.taps)}
    for i, tap in enumerate(w.taps):
        for step in (-1, 1):
            yield f"tap {tap} at layer {tap + step}", {"taps": (*w.taps[:i], tap + step, *w.taps[i + 1 :])}
    yield "taps in reverse order", {"taps": w.taps[::-1]}
    for i, j in itertools.combinations(range(len(w.taps)), 2):
        if len(w.taps) <= _SWAPPED_IN_ALL_PAIRS or j == i + 1:
            swapped = list(w.taps)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield f"taps {w.taps[i]} and {w.taps[j]} swapped", {"taps": tuple(swapped)}


def _final_norm(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    if around.num_target_layers - 1 in w.taps:
        other = not w.tap_after_final_norm
        yield f"the last tap {'after' if other else 'before'} the final norm", {"tap_after_final_norm": other}


def _rope_theta(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    target = around.target_rope_theta
    for theta in (*(() if target is None else (target,)), *_ROPE_THETAS):
        yield f"RoPE base {theta:g}" + " (the target's)" * (theta == target), {"rope_theta": theta}


def _rope_dims(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    for share in (1, 2, 4):
        dims = w.head_dim // share
        if dims % 2 == 0:
            yield f"RoPE on {dims} of {w.head_dim} dimensions", {"rope_dims": dims}


def _rope_layout(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    other = {"half": "interleaved", "interleaved": "half"}[w.rope_layout]
    yield f"RoPE layout {other}", {"rope_layout": other}


def _rope_scaling(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    if w.rope_scaling is not None:
        yield "RoPE without scaling", {"rope_scaling": None}


def _attention(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    sliding = [layer.window is not None for layer in w.attention]
    kinds: dict[str, list[bool]] = {}
    if any(sliding) and not all(sliding):
        kinds = {"the full layers": [not slides for slides in sliding], "the sliding layers": sliding}
    kinds["all layers"] = [True] * len(sliding)

    def changed(which: list[bool], change: Callable[[LayerAttention], LayerAttention]) -> dict[str, Any]:
        layers = zip(w.attention, which, strict=True)
        return {"attention": tuple(change(layer) if chosen else layer for layer, chosen in layers)}

    for kind, which in kinds.items():
        for causal in (True, False):
            inside = "causal" if causal else "bidirectional"
            yield f"{kind} {inside} in the block", changed(which, _setting(block_causal=causal))
    for label, change in _window_changes(w):
        yield f"{label} in the sliding layers", changed(sliding, change)
    widths = sorted({layer.window for layer in w.attention if layer.window} | {*_WINDOWS})
    for width in (width for width in widths if width < around.longest_context):
        full = [not slides for slides in sliding]
        yield f"a window of {width} in the full layers", changed(full, _setting(window=width))


def _window_changes(w: Wiring) -> Iterator[tuple[str, Callable[[LayerAttention], LayerAttention]]]:
    """What may be different about the layers that have a window."""
    windowed = [layer for layer in w.attention if layer.window is not None]
    if not windowed:
        return
    first = windowed[0]
    yield "no window", _setting(window=None)
    inclusive = not first.window_inclusive
    yield (
        f"the window's bound {'inclusive' if inclusive else 'exclusive'}",
        _setting(window_inclusive=inclusive),
    )
    other = "anchor" if first.window_from == "row" else "row"
    yield f"the window counted from the {other}", _setting(window_from=other)
    inside = not first.block_window
    yield f"{'a' if inside else 'no'} window inside the block", _setting(block_window=inside)
    for name in SLIDING_LAYER:
        yield f"the convention {name}", _as_convention(name)


def _as_convention(name: str) -> Callable[[LayerAttention], LayerAttention]:
    return lambda layer: sliding_layer(name, window=layer.window or 1)


def _setting(**fields: Any) -> Callable[[LayerAttention], LayerAttention]:
    return lambda layer: dataclasses.replace(layer, **fields)


def _anchor_row(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    other = not w.predicts_from_anchor
    yield f"row 0 {'predicts depth 1' if other else 're-reads the anchor'}", {"predicts_from_anchor": other}


def _mask(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    named = {i: text for text, i in around.special_tokens.items()}
    near = () if w.mask_token_id is None else tuple(w.mask_token_id + step for step in (-1, 1, -2, 2))
    if w.mask_embedding or w.mask_token_id is not None:
        ends = (around.vocab_size - 1, around.vocab_size - 2)
        for token in (*near, *named, *_MASK_TOKENS, *ends):
            if 0 <= token < around.vocab_size:
                words = f"mask token {token}" + (f" ({named[token]})" if token in named else "")
                yield (
                    words,
                    {"mask_token_id": token, **({"mask_embedding": False} if w.mask_embedding else {})},
                )
    if "mask_embedding" in around.stored:
        yield "the drafter's own mask embedding", {"mask_embedding": True}


def _ends(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    for end, tensor in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if tensor in around.stored:
            mine = getattr(w, end)
            other = "target" if mine == "own" else "own"
            extra = {"vocabulary_map": "none"} if end == "head" and other == "target" else {}
            yield f"the {'drafter' if other == 'own' else 'target'}'s {end}", {end: other, **extra}


def _vocabulary(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    if w.head == "own" and "d2t" in around.stored:
        for kind in ("offset", "absolute", "none"):
            yield f"d2t read as {kind}", {"vocabulary_map": kind}


def _embedding_scale(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    for scale in (1.0, math.sqrt(w.hidden_size)):
        yield f"embedding scaled by {scale:g}", {"embedding_scale": scale}


def _block_size(w: Wiring, around: Surroundings) -> Iterator[_Change]:
    b = w.block_size
    for size in (around.trained_block_size, b - 1, b + 1, b // 2, 2 * b, *_BLOCK_SIZES):
        yield f"block size {size}" + " (trained)" * (size == around.trained_block_size), {"block_size": size}


_GROUPS: Mapping[str, _Group] = {
    "taps": _taps,
    "tap_after_final_norm": _final_norm,
    "rope_theta": _rope_theta,
    "rope_dims": _rope_dims,
    "rope_layout": _rope_layout,
    "rope_scaling": _rope_scaling,
    "attention": _attention,
    "predicts_from_anchor": _anchor_row,
    "mask_token_id": _mask,
    "ends": _ends,
    "vocabulary_map": _vocabulary,
    "embedding_scale": _embedding_scale,
    "block_size": _block_size,
}
