"""Writes a drafter as another project reads it, and refuses where that project would compute something else.

A format is a function from a wiring to the config that it has words for. What was written is read again through the
ordinary reader, with the defaults of the code that serves it; each field in which that differs from the drafter's own
wiring is one that the format cannot say. Reads and writes mapped bytes, without torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from draftgauge.checkpoint import Checkpoint, digest, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.configs import OWN_KEY, read_wiring
from draftgauge.errors import WiringError
from draftgauge.progress import Progress, silent
from draftgauge.stated import Stated, used_wiring, wiring_of
from draftgauge.store import publish_directory
from draftgauge.tensorfile import StoredTensor, write_safetensors
from draftgauge.wiring import FIELDS, LayerAttention, Wiring, sliding_layer, tensor_shapes

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_SHIPPED = "model.safetensors"
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
#: Fields that say nothing about the function; a config need not repeat them.
_DESCRIPTIVE = ("vocab_size", "num_target_layers")


@dataclass(frozen=True)
class Format:
    """One project's directory: its config, the tensors it holds beside the layers', and what its code assumes.

    `assumed` are the wiring fields that its code decides and its config does not say; `engines` give the command
    lines that serve it.
    """

    name: str
    description: str
    config: Callable[[Wiring, Shapes], Config]
    holds_ends: bool
    assumed: Callable[[Wiring], Mapping[str, Any]]
    engines: tuple[str, ...]


def export_checkpoint(
    checkpoint_path: str | Path,
    out: Path,
    *,
    to: str,
    stated: Stated = Stated(),  # noqa: B008
    state_dict: str | None = None,
    target: str = "TARGET",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes a drafter as a directory of another project.

    Args:
        checkpoint_path: The drafter, in any form that is read.
        out: The directory to write; it must not exist.
        to: One of `FORMATS`.
        stated: What the checkpoint does not say of its wiring.
        state_dict: Which weights in a `.pt` that holds several.
        target: What the command lines call the target.
        progress: Shows the work.

    Raises:
        CheckpointError: The drafter is damaged or incomplete.
        WiringError: Its wiring is not known completely, or the format cannot say it, so that its code would compute
            another function; each such field is named.
        StoreError: `out` exists, or the disk refuses.

    Example of the result: `{"path": "served", "to": "zlab", "serve": {"vllm": "vllm serve ..."}, "not_said": []}`.
    """
    form = _format(to)
    checkpoint = open_checkpoint(checkpoint_path, state_dict=state_dict, progress=progress)
    wiring = used_wiring(wiring_of(checkpoint, stated), stated)
    require_tensors(checkpoint, tensor_shapes(wiring))
    names = checkpoint.tensors
    require_finite(checkpoint, progress(names, label="check weights", total=len(names), unit="tensor"))
    verify(checkpoint)
    tensors = _tensors(checkpoint, wiring, form)
    shapes = {name: tuple(array.shape) for name, (_, array) in tensors.items()}
    config = form.config(wiring, shapes)
    _require_sayable(wiring, form, config, shapes)
    own = {OWN_KEY: wiring.as_dict()} if form.name != "speculators" else {}
    with publish_directory(out) as folder:
        (folder / "config.json").write_text(json.dumps(config | own, indent=2) + "\n", encoding="utf-8")
        write_safetensors(folder / _SHIPPED, tensors, metadata={"format": "pt"})
    return {
        "path": str(out),
        "to": form.name,
        "digest": digest(open_checkpoint(out)),
        "serve": {engine: _SERVE[engine](str(out), target, wiring) for engine in form.engines},
        "not_said": _not_said(wiring, form),
        "wiring": wiring.as_dict(),
    }


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise WiringError(f"format {name!r} is not written; expected --to {' or '.join(FORMATS)}")
    return FORMATS[name]


# --- tensors --------------------------------------------------------------------------------------------


def _tensors(
    checkpoint: Checkpoint, wiring: Wiring, form: Format
) -> dict[str, tuple[str, Shaped[np.ndarray, ...]]]:
    """The drafter's tensors as the format holds them, mapped where they lie."""
    ends = ("embed_tokens.weight", "lm_head.weight", "d2t", "mask_embedding")
    kept = [name for name in tensor_shapes(wiring) if form.holds_ends or name not in ends]
    tensors = {name: _array(checkpoint.tensors[name]) for name in kept}
    if "d2t" in tensors:
        tensors |= _vocabulary(tensors["d2t"][1], wiring)
    return tensors


def _array(stored: StoredTensor) -> tuple[str, Shaped[np.ndarray, ...]]:
    return stored.dtype, stored.mapped().view(_NUMPY[stored.dtype]).reshape(stored.shape)


def _vocabulary(
    d2t: Shaped[np.ndarray, " N"], wiring: Wiring
) -> dict[str, tuple[str, Shaped[np.ndarray, ...]]]:
    """The pruned vocabulary both ways, the first as offsets."""
    rows = np.arange(len(d2t))
    ids = rows + d2t if wiring.vocabulary_map == "offset" else np.asarray(d2t)
    if wiring.vocab_size is None:
        raise WiringError(
            "a pruned vocabulary is written both ways; state vocab_size, the whole one's, with --wiring"
        )
    inside = np.zeros(wiring.vocab_size, dtype=bool)
    inside[ids] = True
    return {"d2t": ("I64", (ids - rows).astype("<i8")), "t2d": ("BOOL", inside)}


# --- what a format can say ------------------------------------------------------------------------------


def _require_sayable(wiring: Wiring, form: Format, config: Config, shapes: Shapes) -> None:
    """Makes sure that what was written, read as the format's code reads it, is the same function.

    Raises:
        WiringError: It is not; every differing field is named.
    """
    read_shapes = {name: shape for name, shape in shapes.items() if name != "t2d"}
    try:
        served = read_wiring(
            config=config,
            config_source=f"the {form.name} config",
            shapes=read_shapes,
            given=form.assumed(wiring),
            given_source=f"the code that serves {form.name}",
        )
    except WiringError as exc:
        raise WiringError(f"{form.name} has no words for this drafter: {exc}") from exc
    ours = wiring if wiring.vocabulary_map == "none" else replace(wiring, vocabulary_map="offset")
    differing = [
        f"  {name}: {getattr(ours, name)}, there {getattr(served, name)}"
        for name in FIELDS
        if name not in _DESCRIPTIVE
        and getattr(ours, name) != getattr(served, name)
        and (name != "tap_after_final_norm" or _taps_last(wiring))
    ]
    if differing:
        raise WiringError(
            f"{form.description} cannot say these fields of the wiring; its code would compute another function:\n"
            + "\n".join(differing)
            + f"\nExport to another format ({', '.join(name for name in FORMATS if name != form.name)}), or train a "
            "drafter without them"
        )


def _taps_last(wiring: Wiring) -> bool:
    """Whether the last layer is tapped, as far as is known: only there a final norm may stand before a tap."""
    layers = wiring.num_target_layers
    return layers is None or layers - 1 in wiring.taps


def _not_said(wiring: Wiring, form: Format) -> list[str]:
    """What the format leaves to its code, and what that does, in words: nothing of it changes this drafter."""
    assumed = {
        "predicts_from_anchor": "row 0 re-reads the anchor",
        "rope_layout": "rotary pairs are halves of a head",
        "rope_dims": "the whole head is rotated",
    }
    said = {"speculators": {"predicts_from_anchor"}}.get(form.name, set())
    lines = [f"{name}: {words}" for name, words in assumed.items() if name not in said]
    if any(layer.window is not None for layer in wiring.attention):
        lines.append(f"attention of sliding layers: as the code of {form.description} computes it")
    if _taps_last(wiring) and wiring.num_target_layers is not None:
        place = "before" if form.name == "speculators" else "after"
        lines.append(f"tap_after_final_norm: the last layer is tapped {place} the final norm")
    return lines


# --- the formats ----------------------------------------------------------------------------------------


def _layers(w: Wiring) -> Config:
    """A Qwen3-style config of the draft layers."""
    windows = {layer.window for layer in w.attention if layer.window is not None}
    config: Config = {
        "model_type": "qwen3",
        "num_hidden_layers": w.num_layers,
        "hidden_size": w.hidden_size,
        "intermediate_size": w.intermediate_size,
        "num_attention_heads": w.num_heads,
        "num_key_value_heads": w.num_kv_heads,
        "head_dim": w.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": w.rms_norm_eps,
        "rope_theta": w.rope_theta,
        "rope_parameters": {"rope_theta": w.rope_theta, **_scaling(w)},
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "layer_types": ["full_attention" if a.window is None else "sliding_attention" for a in w.attention],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "tie_word_embeddings": False,
    }
    return config if w.vocab_size is None else config | {"vocab_size": w.vocab_size}


def _scaling(w: Wiring) -> Config:
    scaling = w.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    said = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "attention_factor": scaling.attention_factor,
    }
    if scaling.kind == "yarn":
        said |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return {"rope_type": scaling.kind} | {key: value for key, value in said.items() if value is not None}


def _zlab(w: Wiring, _: Shapes) -> Config:
    config = {"architectures": ["DFlashDraftModel"], **_layers(w), "block_size": w.block_size}
    config["dflash_config"] = {"target_layer_ids": list(w.taps), "mask_token_id": w.mask_token_id}
    if w.num_target_layers is not None:
        config["num_target_layers"] = w.num_target_layers
    if all(a.window is None and a.block_causal for a in w.attention):
        config["is_causal"] = True
    words = {
        "input_embedding_scale": (w.embedding_scale, 1.0),
        "output_multiplier": (w.logit_scale, 1.0),
        "final_logit_softcapping": (w.logit_softcap, None),
    }
    return config | {key: value for key, (value, default) in words.items() if value != default}


def _sglang(w: Wiring, shapes: Shapes) -> Config:
    """As z-lab's, but for what SGLang's own parser does not read."""
    config = _zlab(w, shapes)
    unread = ("is_causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    return {key: value for key, value in config.items() if key not in unread}


def _zlab_code(w: Wiring) -> Mapping[str, Any]:
    return {} if all(a.window is None for a in w.attention) else {"convention": "zlab_2026_08"}


def _sglang_code(w: Wiring) -> Mapping[str, Any]:
    """How SGLang's sliding draft layers attend was not established: only full layers are exported to it."""
    full = LayerAttention()
    if any(a != full for a in w.attention):
        raise WiringError(
            "the sglang format is written for full attention, bidirectional in the block; "
            f"this drafter has {'; '.join(sorted({str(a) for a in w.attention if a != full}))}, and what SGLang "
            "makes of that is not established. Export to zlab"
        )
    return {}


def _speculators(w: Wiring, shapes: Shapes) -> Config:
    window = next((a.window for a in w.attention if a.window is not None), None)
    non_causal = window is not None and sliding_layer("speculators_non_causal", window=window) in w.attention
    layers = {key: value for key, value in _layers(w).items() if key != "rope_theta"}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in w.taps],
        "block_size": w.block_size,
        "mask_token_id": w.mask_token_id,
        "draft_vocab_size": shapes.get("d2t", (w.vocab_size,))[0],
        "sample_from_anchor": w.predicts_from_anchor,
        "sliding_window_non_causal": non_causal,
        "tie_word_embeddings": False,
    }


def _nothing(_: Wiring) -> Mapping[str, Any]:
    return {}


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format("zlab", "z-lab's directory", _zlab, False, _zlab_code, ("sglang", "vllm")),
        Format("speculators", "speculators' directory", _speculators, True, _nothing, ("vllm",)),
        Format("sglang", "SGLang's draft directory", _sglang, False, _sglang_code, ("sglang",)),
    )
}


def _serve_sglang(path: str, target: str, w: Wiring) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-draft-tokens {w.block_size}"
    )


def _serve_vllm(path: str, target: str, w: Wiring) -> str:
    said = json.dumps({"method": "dflash", "model": path, "num_speculative_tokens": w.depth})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(said)}"


_SERVE: Mapping[str, Callable[[str, str, Wiring], str]] = {"sglang": _serve_sglang, "vllm": _serve_vllm}
