"""Replays the trainer's probe: do training and evaluation compute the same function, and if not, where do they part?

The trainer's own features go through the network as the wiring describes it; the comparison walks in the order of
the computation, so the first difference names the place. Knows nothing of recordings.

Letters: S positions, F features, A anchors, D depth, B block rows, H hidden size, L layers, K choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftgauge.drafters import DFlash
from draftgauge.features import as_torch
from draftgauge.probe import Probe
from draftgauge.trust import Control

_CHOICES = 8
_EXPECTATION = "training and evaluation compute the same function"
#: What rounding may do to values of size 1, by the coarser of the two dtypes.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2, "float16": 1e-2}
#: What rounding may do to a log-probability.
_LOG_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25, "float16": 0.05}
_ADVICE = {
    "context": "fc, hidden_norm and the order of the taps act there",
    "embedding": "the mask token, the embedding and its scale, and the anchor row act there",
    "layer": "RoPE, the masks of the block and the windows act there",
    "choices": "the output norm, the head, its scale and the vocabulary act there",
}


@dataclass(frozen=True)
class _Computed:
    """What the evaluation computes on a probe's input; `names` are the tokens of `log_probs`, ascending."""

    context: Float[Tensor, "S H"]
    rows: Float[Tensor, "L1 A B H"]
    final: Float[Tensor, "A D H"]
    log_probs: Float[Tensor, "A D V"]
    names: Int[Tensor, " V"]


@torch.inference_mode()
def probe_controls(drafter: DFlash, probe: Probe) -> list[Control]:
    """Whether the drafter computes what its trainer computed; where they part if it does not."""
    misfit = _misfit(drafter, probe)
    if misfit is not None:
        return [
            Control("probe", _EXPECTATION, misfit, "failed", advice="compare the wiring with the trainer's")
        ]
    coarser = "bfloat16" if "bfloat16" in (probe.dtype, _dtype(drafter)) else probe.dtype
    tolerance, log_tolerance = _TOLERANCE.get(coarser, 1e-3), _LOG_TOLERANCE.get(coarser, 5e-3)
    ours = _compute(drafter, probe)
    ids, theirs = _tensor(probe, "top_ids").long(), _tensor(probe, "top_log_probs").float()
    places = torch.searchsorted(ours.names, ids).clamp(max=len(ours.names) - 1)
    gap = (ours.log_probs.gather(2, places) - theirs).abs()
    best = ours.names[ours.log_probs.argmax(-1)]
    agreed, count = int((best == ids[:, :, 0]).sum()), ids[:, :, 0].numel()
    values = {"choices": count, "equal": agreed, "largest_log_prob_difference": float(gap.max())}
    found = f"{agreed} of {count} first choices equal, log-probabilities within {float(gap.max()):.3g}"
    place = _parting(ours, probe, tolerance)
    if place is None and float(gap.max()) > log_tolerance:
        place = "the output norm or the head", "choices"
    if place is None:
        return [Control("probe", _EXPECTATION, found, "passed", values)]
    where, kind = place
    apart = (gap.amax(dim=(0, 2)) > log_tolerance).nonzero()
    if len(apart):
        where += f", and the scores at depth {1 + int(apart[0])}"
    return [
        Control(
            "probe",
            _EXPECTATION,
            f"they part at {where}; {found}",
            "failed",
            {**values, "parts_at": where},
            f"{_ADVICE[kind]}: compare those fields of the wiring with the trainer's",
        )
    ]


@torch.no_grad()
def take_probe(
    drafter: DFlash, *, tokens: Int[Tensor, " T"], features: Float[Tensor, "S F"], anchors: Int[Tensor, " A"]
) -> dict[str, np.ndarray]:
    """What a trainer's network computes at some anchors, as `probe.write_probe` takes it.

    Called in the trainer's own process and precision: that is what evaluation is to be compared with.
    """
    with _watched(drafter) as seen:
        context = drafter.context(features)
        hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens[anchors])
        log_probs = drafter.logits(hidden).float().log_softmax(-1)
    best = log_probs.topk(min(_CHOICES, log_probs.shape[-1]), dim=-1)
    table = drafter.ends.target_ids
    ids = best.indices if table is None else table[best.indices]
    return {
        "tokens": tokens.int().numpy(),
        "features": features.float().numpy(),
        "anchors": anchors.int().numpy(),
        "top_ids": ids.int().numpy(),
        "top_log_probs": best.values.numpy(),
        "rows": torch.stack(seen["rows"]).numpy(),
        "context": seen["context"][0].numpy(),
        "final": hidden.float().numpy(),
    }


def _misfit(drafter: DFlash, probe: Probe) -> str | None:
    """Why the probe cannot be put into this network; None if it can."""
    w = drafter.wiring
    width = probe.tensors["features"].shape[1]
    if width != len(w.taps) * w.hidden_size:
        return f"the trainer's features are {width} wide, the wiring's {len(w.taps)} taps of {w.hidden_size}"
    if probe.depth != w.depth:
        return f"the trainer drafts {probe.depth} tokens per block, the wiring {w.depth} (block size {w.block_size})"
    rows = probe.tensors.get("rows")
    expected = (w.num_layers + 1, probe.tensors["anchors"].shape[0], w.block_size, w.hidden_size)
    if rows is not None and rows.shape != expected:
        return f"the trainer's rows are {list(rows.shape)}, the wiring's {list(expected)}"
    if int(_tensor(probe, "anchors").max()) > probe.tensors["features"].shape[0]:
        return "the trainer's features end before the last anchor"
    return None


def _compute(drafter: DFlash, probe: Probe) -> _Computed:
    compute = drafter.ends.embedding.dtype
    anchors = _tensor(probe, "anchors").long()
    tokens = _tensor(probe, "tokens").long()
    with _watched(drafter) as seen:
        context = drafter.context(_tensor(probe, "features").to(compute))
        hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens[anchors])
    logits, names = drafter.logits(hidden).float(), drafter.ends.target_ids
    names = torch.arange(logits.shape[-1]) if names is None else names
    if "vocabulary" in probe.tensors:  # the trainer normalised over these alone
        kept = torch.isin(names, _tensor(probe, "vocabulary").long())
        logits, names = logits[..., kept], names[kept]
    return _Computed(
        seen["context"][0], torch.stack(seen["rows"]), hidden.float(), logits.log_softmax(-1), names
    )


@contextlib.contextmanager
def _watched(drafter: DFlash) -> Iterator[dict[str, list[Tensor]]]:
    """The fused context, and the block's rows before the layers and after each, as a pass leaves them."""
    seen: dict[str, list[Tensor]] = {"context": [], "rows": []}
    parts = dict(drafter.named_modules())
    last = f"layers.{drafter.wiring.num_layers - 1}"

    def entering(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["rows"].append(inputs[0].float())

    def fused(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen["context"].append(output.float())

    def leaving(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen["rows"][-1] = (
            seen["rows"][-1] + output.float()
        )  # what the last layer gives: its middle, and the MLP's

    with contextlib.ExitStack() as stack:
        stack.callback(parts["hidden_norm"].register_forward_hook(fused).remove)
        entrances = [f"layers.{i}.input_layernorm" for i in range(drafter.wiring.num_layers)]
        for name in (*entrances, f"{last}.post_attention_layernorm"):
            stack.callback(parts[name].register_forward_pre_hook(entering).remove)
        stack.callback(parts[f"{last}.mlp"].register_forward_hook(leaving).remove)
        yield seen


def _parting(ours: _Computed, probe: Probe, tolerance: float) -> tuple[str, str] | None:
    """Where the two computations first differ, and what kind of place that is; None where they do not."""
    if "context" in probe.tensors:
        off = _relative(ours.context, _tensor(probe, "context").float())
        if float(off.max()) > tolerance:
            position = int(off.argmax())
            return f"the fused context (position {position}, by {float(off.max()):.2g})", "context"
    if "rows" not in probe.tensors:
        return None
    theirs = _tensor(probe, "rows").float()
    for i, (mine, other) in enumerate(zip(ours.rows, theirs, strict=True)):
        off = _relative(mine, other)
        if float(off.max()) > tolerance:
            row = int((off > tolerance).any(dim=0).nonzero()[0])
            by = f"row {row} of the block, by {float(off.max()):.2g}"
            if i == 0:
                return f"the rows before the first draft layer ({by})", "embedding"
            return f"draft layer {i - 1} ({by})", "layer"
    if "final" in probe.tensors:
        off = _relative(ours.final, _tensor(probe, "final").float())
        if float(off.max()) > tolerance:
            return f"the output norm (by {float(off.max()):.2g})", "choices"
    return None


def _relative(mine: Tensor, theirs: Tensor) -> Tensor:
    """The difference of two states against the size of the trainer's, per state."""
    off: Tensor = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)
    return off


def _tensor(probe: Probe, name: str) -> Tensor:
    return as_torch(probe.tensors[name])


def _dtype(drafter: DFlash) -> str:
    return str(drafter.ends.embedding.dtype).removeprefix("torch.")
