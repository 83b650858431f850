"""The reference trainer: a DFlash drafter from a recording, in one readable loop.

Each step samples sequences and anchors in their completions, drafts one block per anchor exactly as replay
does, and lowers the cross-entropy of the reference tokens, deeper ones weighing less. The draft layers start
from the target's last layers and the output norm from the target's, since both learn to feed the same head.
Every random choice follows from the seed and the step, so a resumed run takes the same steps. Knows nothing
of how the drafter is measured.

    OUT/train.json              what is trained and on what
    OUT/train.jsonl             one line in 50 steps: step, loss (their mean), learning rate, tokens per second
    OUT/step_N/checkpoint.pt    model_state_dict, optimizer_state_dict, step, config
    OUT/step_N/probe.safetensors    what the trainer saw and computed at a few anchors, for `check`

Source: DFlash (z-lab, 2026) for the objective; AdamW (Loshchilov and Hutter, 2019).

Letters: A anchors, D depth, N entries of the trained vocabulary, V of the target's, T positions, F features,
H hidden size.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from draftgauge.configs import OWN_KEY
from draftgauge.drafters import as_torch
from draftgauge.drafters.dflash import Context, DFlash, Ends
from draftgauge.errors import InputError, RecordingError, RunError, TargetError
from draftgauge.probe import PROBE_FILE, write_probe
from draftgauge.probing import take_probe
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, Recording, TargetRecord
from draftgauge.store import PARTIAL, locked, publish_directory, write_json
from draftgauge.tensorfile import StoredTensor, read_safetensors
from draftgauge.wiring import LayerAttention, Wiring, validate

_LOG = "train.jsonl"
_LOGGED_STEPS = 50
#: A probe is taken at so many anchors of one sequence, and holds at most so many positions and bytes of it.
_PROBED_ANCHORS, _PROBED_POSITIONS, _PROBED_BYTES = 6, 512, 24_000_000


@dataclass(frozen=True)
class TrainPlan:
    """Everything that decides the weights that come out, beside the recording.

    `sequences` are drawn in each step, and up to `anchors_per_sequence` anchors in each; `warmup` is a share of
    the steps; depth d weighs exp(-(d - 1) / `depth_decay`); `autocast` computes in bfloat16.

    Raises:
        InputError: Nothing can be trained with these numbers.
    """

    steps: int
    save_steps: tuple[int, ...]
    num_layers: int = 2
    block_size: int = 8
    mask_token_id: int = 3
    sequences: int = 4
    anchors_per_sequence: int = 16
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    depth_decay: float = 4.0
    max_grad_norm: float = 1.0
    seed: int = 0
    autocast: bool = False

    def __post_init__(self) -> None:
        counts = ("steps", "num_layers", "sequences", "anchors_per_sequence")
        small = [f"{name} {getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        if small:
            raise InputError(f"{', '.join(small)}: expected 1 or more")
        rates = ("learning_rate", "depth_decay", "max_grad_norm")
        wrong = [f"{name} {getattr(self, name):g}" for name in rates if not getattr(self, name) > 0]
        if wrong:
            raise InputError(f"{', '.join(wrong)}: expected more than 0")
        outside = [step for step in self.save_steps if not 1 <= step <= self.steps]
        if outside:
            raise InputError(f"--save-steps {outside} lie outside of the steps 1 to {self.steps}")

    @property
    def dtype(self) -> str:
        """What the drafter is computed in; its weights are float32."""
        return "bfloat16" if self.autocast else "float32"


@dataclass(frozen=True)
class Batch:
    """Sequences joined one after the other, and the anchors drafted in this step.

    `bounds` say where each sequence begins and ends, `starts` where each anchor's does; `anchors` count from
    there. `references` are indices into the trained vocabulary, -1 where there is no reference token.
    """

    features: Float[Tensor, "T F"]
    bounds: tuple[tuple[int, int], ...]
    anchors: Int[Tensor, " A"]
    anchor_tokens: Int[Tensor, " A"]
    starts: Int[Tensor, " A"]
    references: Int[Tensor, "A D"]


def train(recording: Recording, plan: TrainPlan, *, out: Path, progress: Progress = silent) -> Path:
    """Trains a drafter on a recording; repeats of the same call resume after the last saved step.

    Returns:
        The folder of the last checkpoint.

    Raises:
        RunError: `out` holds another run, or the loss is not finite.
        RecordingError: The recording has no anchors to train on, or the target's ends changed since.
        TargetError: The recorded target's config or weights are not at hand.
        WiringError: No drafter has that shape.
    """
    wiring = drafter_wiring(recording, plan)
    items = [item for item in recording.items if item.completion_len >= 2]
    if not items:
        raise RecordingError(f"{recording.path} has no completion of two tokens or more to train on")
    with locked(out):
        _claim(out, recording, plan, wiring)
        drafter = _drafter(recording, wiring, seed=plan.seed)
        optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, betas=(0.9, 0.95)
        )
        first = _resume(out, drafter, optimizer, plan)
        steps = progress(range(first, plan.steps), label="train", total=plan.steps - first, unit="step")
        names = trained_vocabulary(recording)
        head = drafter.ends.head[names]
        places = torch.full((recording.target.vocab_size,), -1)
        places[names] = torch.arange(len(names))
        probed, blocks = probe_blocks(recording, items[0], places, plan)

        def save(step: int) -> None:
            probe = take_probe(
                drafter,
                lambda: _logits(drafter, blocks, head, plan),
                names=names,
                tokens=probed,
                features=blocks.features,
                anchors=blocks.anchors,
                dtype=plan.dtype,
            )
            _save(out / f"step_{step}", drafter, optimizer, probe, step=step, dtype=plan.dtype)

        batches = ((i, sample_batch(recording, items, places, plan, step=i)) for i in steps)
        _log(out, _steps(drafter, optimizer, batches, head, plan), plan, save=save)
    return out / f"step_{plan.steps}"


def drafter_wiring(recording: Recording, plan: TrainPlan) -> Wiring:
    """The wiring of a drafter with the target's own shape, reading the recording's taps.

    Raises:
        TargetError: The target's config.json is not where it was recorded, or does not say a size.
        InputError: The plan asks for a mask token or layers that the target does not have.
        WiringError: No drafter has that shape.
    """
    target = recording.target
    if not 0 <= plan.mask_token_id < target.vocab_size:
        raise InputError(
            f"--mask-token-id {plan.mask_token_id} is outside of the target's {target.vocab_size} tokens"
        )
    if plan.num_layers > target.num_layers:
        raise InputError(
            f"{plan.num_layers} draft layers cannot start from the {target.num_layers} layers of the target; "
            "ask for fewer --layers"
        )
    config = _target_config(target)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or target.hidden_size // heads)
    return validate(
        Wiring(
            taps=recording.plan.taps,
            block_size=plan.block_size,
            hidden_size=target.hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=plan.num_layers,
            num_heads=heads,
            num_kv_heads=int(config["num_key_value_heads"]),
            head_dim=head_dim,
            rms_norm_eps=target.norm_eps,
            rope_theta=float(config["rope_theta"]),
            rope_dims=head_dim,
            attention=(LayerAttention(),) * plan.num_layers,
            mask_token_id=plan.mask_token_id,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            tap_after_final_norm=False,
        )
    )


def trained_vocabulary(recording: Recording) -> Int[Tensor, " N"]:
    """The token ids that occur in the completions: the loss is normalised over these alone."""
    seen = torch.zeros(recording.target.vocab_size, dtype=torch.bool)
    for item in recording.items:
        seen[as_torch(recording.tensors(item).tokens)[item.prompt_len :].long()] = True
    return seen.nonzero()[:, 0]


def learning_rate(plan: TrainPlan, step: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    warm = max(1, round(plan.warmup * plan.steps))
    if step < warm:
        return plan.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, plan.steps - warm)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def block_loss(
    logits: Float[Tensor, "A D N"], references: Int[Tensor, "A D"], *, depth_decay: float
) -> Float[Tensor, ""]:
    """Cross-entropy of the reference tokens, depth d weighing exp(-(d - 1) / depth_decay)."""
    depth = references.shape[1]
    weight = torch.exp(-torch.arange(depth) / depth_decay).expand_as(references)
    weight = weight * (references >= 0)
    entropy = F.cross_entropy(
        logits.float().flatten(0, 1), references.flatten().clamp(min=0), reduction="none"
    )
    return (entropy * weight.flatten()).sum() / weight.sum()


def sample_batch(
    recording: Recording, items: Sequence[Item], places: Int[Tensor, " V"], plan: TrainPlan, *, step: int
) -> Batch:
    """The sequences and anchors of one step; the same for the same seed and step.

    `places` maps a token id to its index in the trained vocabulary, -1 where it is not in it.
    """
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    chosen = torch.randint(len(items), (plan.sequences,), generator=generator).tolist()
    parts, offset = [], 0
    for item in (items[i] for i in chosen):
        choice = torch.randperm(item.completion_len - 1, generator=generator)[: plan.anchors_per_sequence]
        part = _blocks(recording, item, (choice + item.prompt_len).sort().values, places, plan)
        low, high = part.bounds[0]
        parts.append(replace(part, bounds=((low + offset, high + offset),), starts=part.starts + offset))
        offset += high
    joined = ("features", "anchors", "anchor_tokens", "starts", "references")
    return Batch(
        bounds=tuple(bound for part in parts for bound in part.bounds),
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in joined},
    )


def _blocks(
    recording: Recording,
    item: Item,
    anchors: Int[Tensor, " A"],
    places: Int[Tensor, " V"],
    plan: TrainPlan,
) -> Batch:
    """The blocks at some anchors of one sequence."""
    stored = recording.tensors(item)
    tokens = as_torch(stored.tokens).long()
    features = as_torch(stored.taps)[:, :-1].permute(1, 0, 2).flatten(1).float()
    positions = anchors[:, None] + torch.arange(1, plan.block_size)
    references = torch.where(
        positions < item.length, places[tokens[positions.clamp(max=item.length - 1)]], -1
    )
    bounds = ((0, item.length - 1),)
    return Batch(features, bounds, anchors, tokens[anchors], torch.zeros_like(anchors), references)


def probe_blocks(
    recording: Recording, item: Item, places: Int[Tensor, " V"], plan: TrainPlan
) -> tuple[Int[Tensor, " T"], Batch]:
    """What the probe of every save is taken on: a sequence, cut after its last block, and a few blocks of it.

    The anchors lie in the completion, unless a long prompt leaves a probe no room for that.
    """
    stored = recording.tensors(item)
    taps, _, hidden = stored.taps.shape
    last = min(item.length - 2, probed_positions(plan, taps=taps, hidden_size=hidden))
    anchors = torch.linspace(min(item.prompt_len, last // 2), last, _PROBED_ANCHORS).long().unique()
    blocks = _blocks(recording, item, anchors, places, plan)
    blocks = replace(blocks, features=blocks.features[:last], bounds=((0, last),))
    return as_torch(stored.tokens)[: last + plan.block_size].long(), blocks


def probed_positions(plan: TrainPlan, *, taps: int, hidden_size: int) -> int:
    """How many positions a probe may hold, so that it stays small for the largest drafter."""
    state_bytes = hidden_size * getattr(torch, plan.dtype).itemsize
    rows = (plan.num_layers + 1) * plan.block_size + plan.block_size - 1
    left = _PROBED_BYTES - _PROBED_ANCHORS * rows * state_bytes
    return max(16, min(_PROBED_POSITIONS, int(left // (taps * hidden_size * 4 + state_bytes))))


def _steps(
    drafter: DFlash,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[int, Batch]],
    head: Float[Tensor, "N H"],
    plan: TrainPlan,
) -> Iterator[tuple[int, float, int]]:
    """Takes the steps; yields the number of steps done, the loss, and the tokens it was computed over."""
    for step, batch in batches:
        logits = _logits(drafter, batch, head, plan)
        loss = block_loss(logits, batch.references, depth_decay=plan.depth_decay)
        if not bool(loss.isfinite()):
            raise RunError(
                f"the loss is not finite at step {step}; try a lower --learning-rate and another --out"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), plan.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        optimizer.step()
        yield step + 1, float(loss.detach()), int((batch.references >= 0).sum())


def _logits(
    drafter: DFlash, batch: Batch, head: Float[Tensor, "N H"], plan: TrainPlan
) -> Float[Tensor, "A D N"]:
    """What the loss, and a probe, is made of: the scores of the trained vocabulary."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast):
        hidden = drafter.draft(
            _contexts(drafter, batch),
            anchors=batch.anchors,
            anchor_tokens=batch.anchor_tokens,
            starts=batch.starts,
        )
        return F.linear(hidden, head)


def _contexts(drafter: DFlash, batch: Batch) -> Context:
    """The joined context, every sequence's positions counted from its own start."""
    parts = [drafter.context(batch.features[low:high]) for low, high in batch.bounds]
    return Context(
        tuple(torch.cat(keys, dim=1) for keys in zip(*(part.keys for part in parts), strict=True)),
        tuple(torch.cat(values, dim=1) for values in zip(*(part.values for part in parts), strict=True)),
    )


def _log(
    out: Path, steps: Iterator[tuple[int, float, int]], plan: TrainPlan, *, save: Callable[[int], None]
) -> None:
    """Writes the log, and a checkpoint at every step that is to be saved."""
    window: list[float] = []
    tokens, since = 0, time.perf_counter()
    with (out / _LOG).open("a", encoding="utf-8") as log:
        for done, loss, count in steps:
            window.append(loss)
            tokens += count
            if done % _LOGGED_STEPS == 0 or done == plan.steps:
                seconds = time.perf_counter() - since
                line = {
                    "step": done,
                    "loss": sum(window) / len(window),
                    "learning_rate": learning_rate(plan, done - 1),
                    "tokens_per_second": tokens / seconds,
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                window, tokens, since = [], 0, time.perf_counter()
            if done in plan.save_steps or done == plan.steps:
                save(done)


def _save(
    folder: Path,
    drafter: DFlash,
    optimizer: torch.optim.Optimizer,
    probe: Mapping[str, Any],
    *,
    step: int,
    dtype: str,
) -> None:
    """Publishes a checkpoint and its probe together."""
    value = {
        "model_state_dict": drafter.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "step": step,
        "config": {OWN_KEY: drafter.wiring.as_dict()},
    }
    with publish_directory(folder) as partial:
        torch.save(value, partial / "checkpoint.pt")
        write_probe(partial / PROBE_FILE, probe, dtype=dtype, step=step)


def _claim(out: Path, recording: Recording, plan: TrainPlan, wiring: Wiring) -> None:
    """Makes `out` this run's folder, or makes sure that it is."""
    asked = {
        "plan": dataclasses.asdict(plan),
        "recording": recording.digest,
        "wiring": wiring.as_dict(),
    }
    mine: dict[str, Any] = json.loads(json.dumps(asked))
    claim = out / "train.json"
    if not claim.exists():
        write_json(claim, mine)
        return
    theirs = json.loads(claim.read_text(encoding="utf-8"))
    if theirs != mine:
        ours, others = _flat(mine), _flat(theirs)
        names = [name for name in ours | others if ours.get(name) != others.get(name)]
        differing = [f"{name} is {others.get(name)}, not {ours.get(name)}" for name in names]
        raise RunError(
            f"{out} holds another training run ({'; '.join(differing)}); repeat its command, or choose another "
            "--out"
        )


def _flat(claim: Mapping[str, Any]) -> dict[str, Any]:
    """A claim's fields by dotted name."""
    plan, wiring = claim["plan"], claim["wiring"]
    return {"recording": claim["recording"], **plan, **{f"wiring.{name}": wiring[name] for name in wiring}}


def _resume(out: Path, drafter: DFlash, optimizer: torch.optim.Optimizer, plan: TrainPlan) -> int:
    """Loads the last checkpoint that this run saved, and cuts the log there; returns the steps done."""
    saved = [step for step in (*plan.save_steps, plan.steps) if (out / f"step_{step}").exists()]
    first = max(saved, default=0)
    if first:
        value = torch.load(out / f"step_{first}" / "checkpoint.pt", weights_only=True)
        drafter.load_state_dict(value["model_state_dict"])
        optimizer.load_state_dict(value["optimizer_state_dict"])
    log = out / _LOG
    if log.exists():
        # A process that was killed logged steps that are taken again now, and perhaps half a line.
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first]
        partial = out / f"{PARTIAL}{_LOG}"
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(log)
    return first


def _drafter(recording: Recording, wiring: Wiring, *, seed: int) -> DFlash:
    """A fresh drafter: layers from the target's last layers, output norm from the target's."""
    recording.verify_ends()
    ends = Ends(as_torch(recording.end("embedding")).float(), as_torch(recording.end("head")).float())
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        drafter = DFlash(wiring, ends)
        torch.nn.init.normal_(drafter.fc.weight, std=0.02)
    state = drafter.state_dict()
    state["norm.weight"] = as_torch(recording.end("norm")).float()
    stored = _target_tensors(recording.target)
    for i in range(wiring.num_layers):
        source = f"model.layers.{recording.target.num_layers - wiring.num_layers + i}."
        if f"{source}mlp.gate_proj.weight" not in stored:
            raise TargetError(
                f"the draft layers start from the target's last layers, but no safetensors file in "
                f"{recording.target.path} holds {source}mlp.gate_proj.weight; such a target is not trained for yet"
            )
        for name in [key for key in state if key.startswith(f"layers.{i}.")]:
            tensor = stored.get(source + name.split(".", 2)[2])
            # A target without query and key norms leaves them at one.
            if tensor is not None and tensor.shape == tuple(state[name].shape):
                state[name] = as_torch(tensor).float()
    drafter.load_state_dict(state)
    return drafter


def _target_tensors(target: TargetRecord) -> dict[str, StoredTensor]:
    """The target's stored tensors by name."""
    stored: dict[str, StoredTensor] = {}
    for path in sorted(Path(target.path).glob("*.safetensors")):
        stored |= read_safetensors(path)[0]
    return stored


def _target_config(target: TargetRecord) -> dict[str, Any]:
    """The sizes that the target's config.json says, `rope_theta` at the top wherever it stood."""
    path = Path(target.path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise TargetError(
            f"training needs the recorded target's {path}, which is not readable: {exc}"
        ) from exc
    config = {**config, **(config.get("rope_parameters") or {})}
    needed = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "rope_theta")
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise TargetError(
            f"{path} does not say {', '.join(missing)}; add what the target was trained with, since a drafter in "
            "its shape needs that"
        )
    return config
