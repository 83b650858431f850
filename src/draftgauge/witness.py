"""The target as a witness: where it is at hand, it says whether a recording and a trainer's probe are its own.

Extracts a few items again, all layers at once, so that a tap which is not what it claims is recognised as what it is.
Knows nothing of drafters.

Letters: T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from draftgauge.errors import TargetError
from draftgauge.features import as_torch
from draftgauge.probe import Probe
from draftgauge.progress import Progress, silent
from draftgauge.recording import AFTER_NORM, Item, Recording
from draftgauge.target import Target, load_target, observe
from draftgauge.targetfiles import function_digests, joint_digest
from draftgauge.trust import Control

_ITEMS = 3
#: What rounding may do to a layer's output, relative to its size, when it is computed again.
_TOLERANCE: Mapping[str, float] = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}
_EXPECTATION = "the target, asked again, gives the recorded features"


@dataclass(frozen=True)
class _Match:
    """What a stored state is: the layer whose output it equals, perhaps moved, and how far it is from its claim."""

    error: float
    found: str | None


def target_controls(
    recording: Recording, *, items: Sequence[Item], probe: Probe | None = None, progress: Progress = silent
) -> list[Control]:
    """What the target says of the recording, and of the features that a trainer's probe holds.

    Args:
        recording: The recording; its target's path says where the target may be.
        items: The prompts to choose a few from, the shortest first.
        probe: The trainer's probe, whose features are compared with every layer.
        progress: Shows the reading of the weights and the extraction.
    """
    folder = Path(recording.target.path)
    if not folder.is_dir():
        return [Control("re-extracted", _EXPECTATION, f"the target is not at {folder}", "skipped")]
    try:
        weights = _weights(recording, folder, progress=progress)
        target = load_target(folder, dtype=recording.plan.dtype)
    except TargetError as exc:
        return [Control("re-extracted", _EXPECTATION, f"the target cannot be asked: {exc}", "skipped")]
    chosen = sorted(items, key=lambda item: item.length)[:_ITEMS]
    shown = progress(chosen, label="ask the target", total=len(chosen), unit="prompt")
    return [
        weights,
        _taps(recording, target, list(shown)),
        *([] if probe is None else [_probed(target, probe)]),
    ]


def _weights(recording: Recording, folder: Path, *, progress: Progress) -> Control:
    """The target's weights and configs have the digest that was recorded."""
    actual = joint_digest(function_digests(folder, progress=progress))
    same = actual == recording.plan.target_digest
    return Control(
        "target-weights",
        "the weights and configs of the target at hand are those that were recorded",
        f"digest {actual[:16]}" + ("" if same else f", recorded was {recording.plan.target_digest[:16]}"),
        "passed" if same else "failed",
        {"digest": actual, "recorded": recording.plan.target_digest},
        None if same else "the target changed since: record it again",
    )


def _taps(recording: Recording, target: Target, items: Sequence[Item]) -> Control:
    tolerance = _TOLERANCE[target.dtype]
    worst, wrong, seen = 0.0, [], 0
    for item in items:
        stored = recording.tensors(item)
        layers = _all_layers(target, as_torch(stored.tokens).tolist())
        claims = dict(stored.outputs)
        last = recording.target.num_layers - 1
        if stored.final is not None:
            claims[last] = stored.final
        if recording.plan.last_layer == AFTER_NORM and last in claims:
            claims[last + 1] = claims.pop(last)
        for layer, states in claims.items():
            match = matched(as_torch(states).float(), layers, claimed=layer, tolerance=tolerance)
            worst, seen = max(worst, match.error), seen + 1
            if match.error > tolerance:
                what = match.found or "no layer of this target gives it"
                wrong.append(f"tap {layer} of {item.id} is off by {match.error:.2g}: {what}")
    rest = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return Control(
        "re-extracted",
        _EXPECTATION,
        f"{seen} states of {len(items)} prompt(s) within {worst:.2g} of their size (tolerance {tolerance:g})"
        if not wrong
        else "; ".join(wrong[:4]) + rest,
        "failed" if wrong else "passed",
        {"states": seen, "worst": worst, "tolerance": tolerance, "places": wrong},
        "the target changed since, or the recording is another's: record it again" if wrong else None,
    )


def _probed(target: Target, probe: Probe) -> Control:
    """The trainer's features are this target's, and of the layers that the drafter's wiring names."""
    tolerance = max(_TOLERANCE[target.dtype], _TOLERANCE["bfloat16"])
    features = as_torch(probe.tensors["features"]).float()
    tokens = as_torch(probe.tensors["tokens"]).tolist()[: len(features)]
    layers = _all_layers(target, tokens)
    hidden = next(iter(layers.values())).shape[1]
    parts = features.split(hidden, dim=1)
    named = [matched(part, layers, claimed=None, tolerance=tolerance).found for part in parts]
    unknown = [i for i, name in enumerate(named) if name is None]
    return Control(
        "probe-features",
        "the features that the trainer fed its drafter are outputs of this target's layers",
        "the trainer's taps, in order: " + ", ".join(name or "no layer of this target" for name in named),
        "failed" if unknown else "passed",
        {"taps": named},
        "the trainer saw another target, or another revision of it" if unknown else None,
    )


def _all_layers(target: Target, tokens: Sequence[int]) -> dict[int, Float[Tensor, "T H"]]:
    """The outputs of the embedding (-1) and of every layer, and the final state after the norm (layers)."""
    count = len(target.decoder.layers)
    taps = tuple(range(-1, count))
    seen = observe(target, tokens, taps=taps)
    return {**{tap: seen.taps[i].float() for i, tap in enumerate(taps)}, count: seen.normed.float()}


def matched(
    states: Float[Tensor, "T H"],
    layers: Mapping[int, Float[Tensor, "T H"]],
    *,
    claimed: int | None,
    tolerance: float,
) -> _Match:
    """What stored states are, among the outputs of all layers, as they stand or moved by one position.

    `layers` maps -1 to the embedding, then every layer; the highest entry is the last layer after the final norm.

    Example:
        States stored as layer 10 that are layer 11's: `_Match(0.31, "it is the output of layer 11")`.
    """
    error = float("inf") if claimed is None else _error(states, layers[claimed])
    if error <= tolerance:
        return _Match(error, f"layer {claimed}")
    highest = max(layers)
    for moved, words in ((0, ""), (1, ", one position late"), (-1, ", one position early")):
        errors = {
            layer: _error(_moved(states, moved), _moved(output, -moved)) for layer, output in layers.items()
        }
        best = min(errors, key=lambda layer: errors[layer])
        if errors[best] <= tolerance:
            name = f"layer {highest - 1} after the final norm" if best == highest else f"layer {best}"
            found = f"{name}{words}" if claimed is None else f"it is the output of {name}{words}"
            return _Match(error, found)
    return _Match(error, None)


def _moved(states: Float[Tensor, "T H"], by: int) -> Float[Tensor, "T2 H"]:
    """The states without the first, or without the last, so that two can be laid side by side."""
    return states[1:] if by > 0 else states[:-1] if by < 0 else states


def _error(a: Tensor, b: Tensor) -> float:
    """The typical difference of two states relative to their size: the median over positions."""
    if a.shape != b.shape:
        return float("inf")
    off = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-12)
    return float(torch.quantile(off, 0.9))
