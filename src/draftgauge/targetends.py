"""What a target's files say of it without loading it: sizes, stop tokens, and where its two ends and norm lie.

A target of hundreds of gigabytes is described in a moment, on a machine that could not hold it; of its weights only
the files that hold embedding, head and final norm need to be there. Knows nothing of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgauge.errors import CheckpointError, TargetError
from draftgauge.tensorfile import StoredTensor, read_safetensors

#: Names of the tensors, before which a multimodal target may have words of its own (never a layer's, or a tower's).
_WRAP = r"(?:(?:model|language_model|text_model|transformer)\.)*"
_NAMES = {
    "embedding": re.compile(_WRAP + r"(?:embed_tokens|wte)\.weight"),
    "head": re.compile(_WRAP + r"lm_head\.weight"),
    "norm": re.compile(_WRAP + r"(?:norm|final_layernorm|ln_f)\.weight"),
}


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target from its files. `ends` holds embedding [V, H], head [V, H] and norm [H]."""

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    norm_eps: float
    rope_theta: float | None
    stop_token_ids: tuple[int, ...]
    ends: Mapping[str, StoredTensor]

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.ends["head"].shape[0]


def describe_target(folder: Path) -> TargetFacts:
    """Reads a local Hugging Face directory's configs and the headers of its weights.

    Raises:
        TargetError: A file is missing or damaged, the config does not say a size, or an end is not among the
            weights.
    """
    config = _json(folder / "config.json")
    inner = config.get("text_config")
    text: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    sizes = ("num_hidden_layers", "hidden_size", "rms_norm_eps")
    unsaid = [name for name in sizes if not isinstance(text.get(name), int | float)]
    if unsaid:
        raise TargetError(
            f"{folder / 'config.json'} does not say {', '.join(unsaid)}; give the target's Hugging Face directory"
        )
    architectures = config.get("architectures")
    return TargetFacts(
        path=folder,
        architecture=str(architectures[0] if architectures else config.get("model_type")),
        num_layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        norm_eps=float(text["rms_norm_eps"]),
        rope_theta=_rope_theta(text),
        stop_token_ids=_stops(folder, config, text),
        ends=_ends(folder, tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))),
    )


def _ends(folder: Path, *, tied: bool) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            stored |= read_safetensors(path)[0]
        except CheckpointError as exc:
            raise TargetError(f"target {folder} cannot be read: {exc}") from exc
    ends: dict[str, StoredTensor] = {}
    for end, pattern in _NAMES.items():
        found = [tensor for name, tensor in stored.items() if pattern.fullmatch(name)]
        if len(found) > 1:
            names = ", ".join(tensor.name for tensor in found)
            raise TargetError(f"target {folder} holds {names}; expected one {end}")
        if found:
            ends[end] = found[0]
    if "head" not in ends and tied and "embedding" in ends:
        ends["head"] = ends["embedding"]
    missing = [end for end in _NAMES if end not in ends]
    if missing:
        raise TargetError(
            f"target {folder} holds no {' and no '.join(missing)} in its {len(files)} safetensors file(s); copy the "
            "shards that hold embedding, head and final norm (model.safetensors.index.json says which)"
        )
    return ends


def _stops(folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    said = _json(generation).get("eos_token_id") if generation.is_file() else None
    for other in (text.get("eos_token_id"), config.get("eos_token_id")):
        said = other if said is None else said
    stops = [] if said is None else said if isinstance(said, list) else [said]
    if not all(type(stop) is int for stop in stops):
        raise TargetError(f"target {folder} says eos_token_id {said!r}; expected token ids")
    return tuple(stops)


def _rope_theta(text: Mapping[str, Any]) -> float | None:
    """The base of the rotary embedding; None where layers differ in it, or nothing says it."""
    said = text.get("rope_parameters") or {}
    sections = [said, *(section for section in said.values() if isinstance(section, Mapping))]
    bases = {section["rope_theta"] for section in sections if "rope_theta" in section}
    if not bases and text.get("rope_theta") is not None:
        bases = {text["rope_theta"]}
    return float(bases.pop()) if len(bases) == 1 else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise TargetError(f"there is no {path}; give the target's Hugging Face directory") from exc
    except (OSError, ValueError) as exc:
        raise TargetError(f"{path} cannot be read: {exc}; copy the target again") from exc
    if not isinstance(value, dict):
        raise TargetError(f"{path} holds no JSON object; copy the target again")
    return value
