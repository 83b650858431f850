"""Replays the trainer's probe: do training and evaluation compute the same function, and if not, where do they part?

The trainer's own features go through the network as the wiring describes it; the comparison walks in the order of
the computation, so the first difference names the place. What rounding may do there is measured, not guessed: it is
what happens when every part of the network is off by a rounding of the coarser dtype. Knows nothing of recordings.

Letters: S positions, F features, A anchors, D depth, B block rows, H hidden size, K choices, V tokens, T tokens of
the sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftgauge.drafters import DFlash
from draftgauge.features import as_stored, as_torch
from draftgauge.probe import Probe
from draftgauge.trust import Control

_CHOICES = 8
_EXPECTATION = "training and evaluation compute the same function"
#: Two neighbouring numbers near 1. In float32 it is not the format that tells two machines apart but the order in
#: which they add tens of thousands of products.
_SPACING: Mapping[str, float] = {
    "float32": 2.0**-17,
    "tfloat32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
#: Rounding differs by at most so many times what the largest of a few trials shows.
_MARGIN, _TRIALS = 2.0, 3

#: A place in the network: a tensor of the probe, and the index of `rows` (0 before the layers, i after layer i - 1).
Place = tuple[str, int]


@dataclass(frozen=True)
class _Computed:
    """What one pass computes, in order: states by place, then scores of the tokens `names`, ascending.

    `first` are the first choices over the whole head, whatever the trainer normalises over.
    """

    states: Mapping[Place, Float[Tensor, "*lead H"]]
    log_probs: Float[Tensor, "A D V"]
    names: Int[Tensor, " V"]
    first: Int[Tensor, "A D"]


class _Parting(NamedTuple):
    """The first place where two computations differ, in words, and what acts there."""

    where: str
    advice: str


@torch.inference_mode()
def probe_controls(drafter: DFlash, probe: Probe, *, step: int | None = None) -> list[Control]:
    """Whether the drafter computes what its trainer computed; where they part if it does not.

    Args:
        drafter: The network with the checkpoint's weights, as it is evaluated.
        probe: The trainer's probe.
        step: The checkpoint's step, if it is known: a probe of another step is no witness.
    """
    if None not in (step, probe.step) and step != probe.step:
        stale = f"the probe is of step {probe.step}, the checkpoint of step {step}"
        return [
            Control("probe", _EXPECTATION, stale, "skipped", advice="give the checkpoint that it lies beside")
        ]
    misfit = _misfit(drafter, probe)
    if misfit is not None:
        return [Control("probe", _EXPECTATION, misfit.where, "failed", advice=misfit.advice)]
    ours = _compute(drafter, probe)
    spacing = max(_SPACING[probe.dtype or "bfloat16"], _SPACING[_dtype(drafter)])
    tolerances, log_tolerance = _tolerances(drafter, probe, ours, spacing=spacing)
    gap = _gap(ours, _whole(probe, "top_ids"), _float(probe, "top_log_probs"))
    found, values = _choices(ours, probe, gap, tolerance=log_tolerance)
    parting = _parting(drafter, probe, ours, tolerances) or _scores_part(probe, gap, tolerance=log_tolerance)
    if parting is None:
        return [Control("probe", _EXPECTATION, found, "passed", values)]
    return [
        Control(
            "probe",
            _EXPECTATION,
            f"they part at {parting.where}; {found}",
            "failed",
            {**values, "parts_at": parting.where},
            parting.advice,
        )
    ]


@torch.no_grad()
def take_probe(
    drafter: DFlash,
    scores: Callable[[], Float[Tensor, "A D V"]],
    *,
    names: Int[Tensor, " V"],
    tokens: Int[Tensor, " T"],
    features: Float[Tensor, "S F"],
    anchors: Int[Tensor, " A"],
    dtype: str,
) -> dict[str, Any]:
    """What a trainer computes at some anchors of one sequence, as `probe.write_probe` takes it.

    Args:
        drafter: The network that is being trained.
        scores: The trainer's own computation, in its own precision: the logits that its loss is made of.
        names: The token of every logit.
        tokens: The sequence.
        features: What `fc` is given below the last anchor.
        anchors: Where the blocks begin.
        dtype: What the trainer computes in; the states are stored in it.
    """
    with _watched(drafter) as seen:
        best = scores().float().log_softmax(-1).topk(min(_CHOICES, len(names)), dim=-1)
    states = {
        "context": seen.context[0],
        "rows": torch.stack(seen.rows),
        "final": seen.final[0],
    }
    halved = features.bfloat16()  # loses nothing where the target was recorded in bfloat16
    values = {
        "tokens": tokens.int(),
        "features": halved if torch.equal(halved.float(), features.float()) else features,
        "anchors": anchors.int(),
        "top_ids": names[best.indices].int(),
        "top_log_probs": best.values,
        **{name: state.to(getattr(torch, dtype)) for name, state in states.items()},
    }
    if len(names) < len(drafter.ends.head):
        values["vocabulary"] = names.int()
    return {name: as_stored(value) for name, value in values.items()}


def _misfit(drafter: DFlash, probe: Probe) -> _Parting | None:
    """Why the probe cannot be put into this network; None if it can."""
    w, shapes = drafter.wiring, {name: stored.shape for name, stored in probe.tensors.items()}
    (positions, width), (count, depth, _) = shapes["features"], shapes["top_ids"]
    if width != len(w.taps) * w.hidden_size:
        return _Parting(
            f"the trainer gives fc {width} values per position, the wiring {len(w.taps)} taps of {w.hidden_size}",
            "state the taps that the drafter was trained with (--taps)",
        )
    if depth != w.depth:
        row = "predicts" if w.predicts_from_anchor else "re-reads the anchor"
        return _Parting(
            f"the trainer drafts {depth} tokens per block, the wiring {w.depth} (block_size {w.block_size}, row 0 "
            f"{row})",
            "state block_size and predicts_from_anchor as the drafter was trained with them (--wiring)",
        )
    expected = {
        "context": (positions, w.hidden_size),
        "rows": (w.num_layers + 1, count, w.block_size, w.hidden_size),
        "final": (count, depth, w.hidden_size),
    }
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            return _Parting(
                f"the trainer's {name} are {list(shapes[name])}, the wiring's {list(shape)}",
                "compare the wiring's sizes with the trainer's",
            )
    return _unknown_tokens(drafter, probe)


def _unknown_tokens(drafter: DFlash, probe: Probe) -> _Parting | None:
    """Tokens of the probe that the embedding or the head has no row for."""
    ends = drafter.ends
    anchor_tokens = _whole(probe, "tokens")[_whole(probe, "anchors")]
    named = torch.cat([_whole(probe, n).flatten() for n in ("top_ids", "vocabulary") if n in probe.tensors])
    lacking = named[~torch.isin(named, _names(drafter))].unique()
    if int(anchor_tokens.max()) >= len(ends.embedding):
        token, rows = int(anchor_tokens.max()), len(ends.embedding)
        return _Parting(f"an anchor is token {token}, the embedding has {rows} rows", _OTHER_TARGET)
    if len(lacking):
        missing = f"the trainer scores token {int(lacking[0])}; the drafter's head of {len(ends.head)} rows lacks it"
        mapped = f"vocabulary_map ({drafter.wiring.vocabulary_map}) acts there: compare it with the trainer's"
        return _Parting(missing, _OTHER_TARGET if ends.target_ids is None else mapped)
    return None


_OTHER_TARGET = "the drafter was trained for another target, or for one with more tokens: record that one"


def _compute(drafter: DFlash, probe: Probe, *, spacing: float | None = None, seed: int = 0) -> _Computed:
    """What the network makes of the probe's input; with `spacing` every part of it is off by a rounding."""
    anchors, tokens = _whole(probe, "anchors"), _whole(probe, "tokens")
    rounding = contextlib.nullcontext() if spacing is None else _rounded(drafter, spacing, seed=seed)
    with rounding, _watched(drafter) as seen:
        context = drafter.context(as_torch(probe.tensors["features"]).to(drafter.ends.embedding.dtype))
        hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens[anchors])
        logits, names = drafter.logits(hidden).float(), _names(drafter)
    if spacing is not None:
        logits = _off_by_a_rounding(logits, spacing, torch.Generator().manual_seed(seed))
    first = names[logits.argmax(-1)]
    if "vocabulary" in probe.tensors:
        kept = torch.isin(names, _whole(probe, "vocabulary"))
        logits, names = logits[..., kept], names[kept]
    states = {
        ("context", 0): seen.context[0],
        **{("rows", i): rows for i, rows in enumerate(seen.rows)},
        ("final", 0): seen.final[0],
    }
    return _Computed({p: s.float() for p, s in states.items()}, logits.log_softmax(-1), names, first)


class _Seen(NamedTuple):
    """What passed through a network: the fused context, the rows before the layers and after each, the last norm."""

    context: list[Tensor]
    rows: list[Tensor]
    final: list[Tensor]


@contextlib.contextmanager
def _watched(drafter: DFlash) -> Iterator[_Seen]:
    """Notes what passes through a network while the block runs."""
    seen = _Seen([], [], [])

    def entering(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.rows.append(inputs[0])

    def leaving(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen.rows.append(seen.rows.pop() + output)  # a layer gives what enters its MLP, and what the MLP adds

    def into(states: list[Tensor]) -> Callable[..., None]:
        return lambda _module, _inputs, output: states.append(output)

    hooks = [
        drafter.hidden_norm.register_forward_hook(into(seen.context)),
        drafter.stack[0].input_layernorm.register_forward_pre_hook(entering),
        drafter.norm.register_forward_hook(into(seen.final)),
    ]
    for layer in drafter.stack:
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(entering))
        hooks.append(layer.mlp.register_forward_hook(leaving))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _rounded(drafter: DFlash, spacing: float, *, seed: int) -> Iterator[None]:
    """Every matrix and norm gives values that are off by up to one `spacing` while the block runs."""
    generator = torch.Generator().manual_seed(seed)

    def rounded(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return _off_by_a_rounding(output, spacing, generator)

    hooks = [m.register_forward_hook(rounded) for m in drafter.modules() if not list(m.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _off_by_a_rounding(
    values: Float[Tensor, "*shape"], spacing: float, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    way = torch.rand(values.shape, generator=generator) * 2 - 1
    off: Tensor = (values.float() * (1 + spacing * way)).to(values.dtype)
    return off


def _tolerances(
    drafter: DFlash, probe: Probe, ours: _Computed, *, spacing: float
) -> tuple[dict[Place, float], float]:
    """How far rounding may take the states of every place, relative to their size, and the log-probabilities."""
    ids = _whole(probe, "top_ids")
    best = ours.log_probs.gather(2, _columns(ours, ids))
    states, scores = dict.fromkeys(ours.states, spacing), spacing
    for seed in range(_TRIALS):
        trial = _compute(drafter, probe, spacing=spacing, seed=seed)
        for place, exact in ours.states.items():
            states[place] = max(states[place], float(_relative(trial.states[place], exact).max()))
        off = trial.log_probs.gather(2, _columns(trial, ids)) - best
        scores = max(scores, float(off.abs().max()))
    return {place: _MARGIN * off for place, off in states.items()}, _MARGIN * scores


def _gap(
    ours: _Computed, ids: Int[Tensor, "A D K"], theirs: Float[Tensor, "A D K"]
) -> Float[Tensor, "A D K"]:
    """How far our log-probabilities are from the trainer's: of its choices, and of ours at the same places.

    The second tells a token that we put first and the trainer does not list.
    """
    of_its_choices = (ours.log_probs.gather(2, _columns(ours, ids)) - theirs).abs()
    of_ours = (ours.log_probs.topk(ids.shape[2], dim=-1).values - theirs).abs()
    return torch.maximum(of_its_choices, of_ours)


def _choices(
    ours: _Computed, probe: Probe, gap: Float[Tensor, "A D K"], *, tolerance: float
) -> tuple[str, dict[str, Any]]:
    """The two lists of choices side by side: in words, and as numbers."""
    ids = _whole(probe, "top_ids")
    best = ours.names[ours.log_probs.topk(ids.shape[2], dim=-1).indices]
    equal, count = int((best[..., 0] == ids[..., 0]).sum()), ids[..., 0].numel()
    shared = int((best[..., :, None] == ids[..., None, :]).any(-1).sum())
    outside = int((~torch.isin(ours.first, ours.names)).sum())
    apart = float(gap.max())
    values = {
        "choices": count,
        "equal": equal,
        "listed": ids.numel(),
        "shared": shared,
        "outside_vocabulary": outside,
        "largest_log_prob_difference": apart,
        "tolerance": tolerance,
    }
    agreement = f"{equal} of {count} first choices equal"
    if apart > tolerance:
        return f"{agreement}, log-probabilities up to {apart:.2g} apart (tolerance {tolerance:.2g})", values
    if equal < count:
        agreement += ", the others near-ties"
    beyond = (
        f"; over the whole head {outside} first choice(s) are none of the {len(ours.names)} tokens that the trainer "
        "normalises over"
    )
    within = f"log-probabilities within {apart:.2g} (tolerance {tolerance:.2g})"
    return f"{agreement}, {within}{beyond if outside else ''}", values


def _parting(
    drafter: DFlash, probe: Probe, ours: _Computed, tolerances: Mapping[Place, float]
) -> _Parting | None:
    """The first place whose states differ by more than rounding; None where none does."""
    for place, mine in ours.states.items():
        name, index = place
        if name not in probe.tensors:
            continue
        stored = _float(probe, name)
        theirs = stored[index] if name == "rows" else stored
        off = _relative(mine, theirs)
        within = off <= tolerances[place]
        if not bool(within.all()):
            by = f"by {float(off.max()):.2g} of their size (tolerance {tolerances[place]:.2g})"
            length = _longer(mine[~within], theirs[~within], tolerance=tolerances[place])
            where = f"{_where(drafter, place, off, apart=~within)}, {by}{length}"
            return _Parting(where, _advice(drafter, probe, place, apart=~within))
    return None


def _where(
    drafter: DFlash, place: Place, off: Float[Tensor, "*lead"], *, apart: Bool[Tensor, "*lead"]
) -> str:
    """A place in words, with the positions or rows that differ there and the one that differs most."""
    name, index = place
    if name == "context":
        return f"the fused context, at {int(apart.sum())} of {apart.numel()} positions"
    first = drafter.wiring.first_row
    counted = range(off.shape[1]) if name == "rows" else range(first, first + off.shape[1])
    rows = [str(row) for row, some in zip(counted, apart.any(dim=0).tolist(), strict=True) if some]
    most = counted[int(off.amax(dim=0).argmax())]
    which = f"row {most} (depth {most - first + 1})" if most >= first else f"row {most}"
    if len(rows) > 1:
        among = "every row" if len(rows) == len(counted) else f"rows {', '.join(rows)}"
        which = f"{among}, most in {which}"
    part = "the output norm" if name == "final" else f"draft layer {index - 1}"
    part = "the block before the first draft layer" if place == ("rows", 0) else part
    return f"{part}, in {which}"


def _longer(mine: Float[Tensor, "N H"], theirs: Float[Tensor, "N H"], *, tolerance: float) -> str:
    """Words for states that differ in nothing but a common factor."""
    factor = float((mine.norm(dim=-1) / theirs.norm(dim=-1)).median())
    same_way = factor > 0 and bool((_relative(mine / factor, theirs) <= tolerance).all())
    return f"; ours are {factor:.3g} times as long and point the same way" if same_way else ""


def _advice(drafter: DFlash, probe: Probe, place: Place, *, apart: Bool[Tensor, "*lead"]) -> str:
    """Which fields of the wiring act at a place, with the values that they have."""
    w, (name, index) = drafter.wiring, place
    if name == "context":
        return (
            f"fc, hidden_norm (rms_norm_eps {w.rms_norm_eps:g}) and the order of the taps act there: compare them "
            "with the trainer's"
        )
    if name == "final":
        return f"the output norm acts there (rms_norm_eps {w.rms_norm_eps:g}): compare it with the trainer's"
    if index:
        unseen = (
            "" if "context" in probe.tensors else "; so does the fused context, which the probe does not hold"
        )
        return (
            f"RoPE (base {w.rope_theta:g}, {w.rope_dims} of {w.head_dim} dimensions, {w.rope_layout}) and what a row "
            f"may see ({w.attention[index - 1]}) act there{unseen}: compare them with the trainer's, or run "
            "`draftgauge diagnose`"
        )
    if not bool(apart[:, 1:].any()):
        return f"row 0 alone: the embedding of the anchor's token acts there ({w.embedding}'s)"
    if not bool(apart[:, 0].any()):
        used = "a mask embedding of its own" if w.mask_embedding else f"mask_token_id {w.mask_token_id}"
        return f"the mask rows alone, here {used}; the trainer's mask row is {_token_of(drafter, probe)}"
    return f"the embedding ({w.embedding}'s) and embedding_scale ({w.embedding_scale:g}) act there"


def _token_of(drafter: DFlash, probe: Probe) -> str:
    """Which token's embedding the trainer's mask row is."""
    row = _float(probe, "rows")[0, 0, -1]
    table, scale = drafter.ends.embedding, drafter.wiring.embedding_scale
    size = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32) * abs(scale)
    along = (table @ row.to(table.dtype)).float() * scale
    nearest = int((size.square() - 2 * along).argmin())
    off = float(_relative(table[nearest].float() * scale, row))
    return f"the embedding of token {nearest}" if off <= _SPACING["bfloat16"] else "no token's embedding"


def _scores_part(probe: Probe, gap: Float[Tensor, "A D K"], *, tolerance: float) -> _Parting | None:
    """Where the log-probabilities differ by more than rounding; None where they do not."""
    within = gap.amax(dim=2) <= tolerance
    if bool(within.all()):
        return None
    depth = int((~within).any(dim=0).nonzero()[0])
    anchors = _whole(probe, "anchors")[~within[:, depth]].tolist()
    where = f"the scores, first at depth {depth + 1} (anchor {anchors[0]})"
    if "rows" not in probe.tensors:
        return _Parting(
            where,
            "the probe holds no rows, so the layer is not known: let the trainer write them, or run `draftgauge "
            "diagnose`",
        )
    norm = "" if "final" in probe.tensors else "the output norm, "
    return _Parting(
        where,
        f"the states before them agree, so {norm}the head (the target's or its own), logit_scale, logit_softcap and "
        "the vocabulary act there: compare them with the trainer's",
    )


def _relative(mine: Float[Tensor, "*lead H"], theirs: Float[Tensor, "*lead H"]) -> Float[Tensor, "*lead"]:
    """The difference of two states against the size of the trainer's, per state."""
    off: Tensor = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)
    return off


def _names(drafter: DFlash) -> Int[Tensor, " V"]:
    """The target's token of every row of the head, ascending."""
    ids = drafter.ends.target_ids
    return torch.arange(len(drafter.ends.head)) if ids is None else ids


def _columns(computed: _Computed, ids: Int[Tensor, "A D K"]) -> Int[Tensor, "A D K"]:
    """Where each of the tokens stands among the scores; every one of them does, see `_unknown_tokens`."""
    return torch.searchsorted(computed.names, ids)


def _whole(probe: Probe, name: str) -> Int[Tensor, "*shape"]:
    return as_torch(probe.tensors[name]).long()


def _float(probe: Probe, name: str) -> Float[Tensor, "*shape"]:
    return as_torch(probe.tensors[name]).float()


def _dtype(drafter: DFlash) -> str:
    return str(drafter.ends.embedding.dtype).removeprefix("torch.")
