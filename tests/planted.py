"""A tiny pair in which every field of the wiring matters, built by hand instead of trained.

The drafter has random, sharp weights, and it writes the references itself: at an anchor it drafts a block from the
features below, some of the block becomes the text, sometimes a random token follows. So the right wiring accepts
much of what it wrote, and a wrong one has no reason to. The features are no model's: a fixed function of the last
few tokens, another in every layer; the final state is made to reproduce the references through norm and head.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftgauge.configs import OWN_KEY
from draftgauge.drafters import load_drafter
from draftgauge.drafters.dflash import DFlash
from draftgauge.recording import Item, Recording, RecordingPlan, TargetRecord, complete_recording
from draftgauge.store import sha256_file, sha256_json
from draftgauge.tensorfile import read_safetensors, write_safetensors
from draftgauge.wiring import LayerAttention, Wiring, tensor_shapes, validate

VOCABULARY, HIDDEN, LAYERS, EPS = 300, 32, 6, 1e-6
PREFIX = (7, 11, 13, 2)  # what a chat template would put before every prompt
WIRING = Wiring(
    taps=(1, 3, 4),
    block_size=6,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=EPS,
    rope_theta=500.0,
    rope_dims=16,
    attention=(LayerAttention(), LayerAttention(window=12, block_causal=True)),
    mask_token_id=290,
    vocab_size=VOCABULARY,
    num_target_layers=LAYERS,
    tap_after_final_norm=False,
)


@dataclass(frozen=True)
class Pair:
    """A drafter's directory, the recording that it wrote the references of, and its right wiring."""

    checkpoint: Path
    recording: Recording
    wiring: Wiring


def pair(
    folder: Path,
    *,
    seed: int = 0,
    items: int = 8,
    tokens: int = 120,
    around: bool = True,
    blind: bool = False,
    **wiring_changes: Any,
) -> Pair:
    """A new pair in `folder`; with `around` every layer is recorded, otherwise the taps alone.

    A `blind` drafter writes its text without its context, from the anchor alone.
    """
    wiring = validate(dataclasses.replace(WIRING, **wiring_changes))
    generator = np.random.default_rng(seed)
    ends = _ends(generator)
    weights = _weights(wiring, generator)
    if blind:
        weights["hidden_norm.weight"] *= 1e-30
    checkpoint = _checkpoint(folder / "drafter", wiring, weights)
    drafter = load_drafter(
        wiring,
        read_safetensors(checkpoint / "model.safetensors")[0],
        embedding=torch.from_numpy(ends["embedding"]),
        head=torch.from_numpy(ends["head"]),
    )
    tables = _tables(generator)
    recorded = tuple(range(-1, LAYERS)) if around else wiring.taps
    rows = wiring.taps + tuple(tap for tap in recorded if tap not in wiring.taps)
    texts = []
    for i in range(items):
        prompt = [*PREFIX, *generator.integers(20, VOCABULARY - 20, 3 + 2 * i).tolist()]
        texts.append((prompt, _text(drafter, prompt, tokens + 5 * (i % 3), tables, ends, wiring, generator)))
    return Pair(checkpoint, _recording(folder / "recording", texts, rows, tables, ends), wiring)


@cache
def shared_pair(seed: int = 0, **wiring_changes: Any) -> Pair:
    """A pair that every test reads and none writes to."""
    folder = Path(tempfile.mkdtemp(prefix="draftgauge-planted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pair(folder, seed=seed, **wiring_changes)


def layer_outputs(
    tokens: Sequence[int], tables: np.ndarray, ends: Mapping[str, np.ndarray], *, following: Sequence[int]
) -> np.ndarray:
    """Outputs [L+1, T, H] of the embedding and every layer; the last is the state that gives `following`."""
    ids = np.asarray(tokens)
    past = [np.concatenate([np.zeros(back, dtype=int), ids])[: len(ids)] for back in range(3)]
    shares = (1.0, 0.7, 0.5)
    outputs = [ends["embedding"][ids]]
    outputs += [
        sum(share * tables[layer, back][past[back]] for back, share in enumerate(shares))
        for layer in range(LAYERS - 1)
    ]
    outputs.append(_final(ids, following, tables, ends))
    return np.stack(outputs).astype(np.float32)


def _final(
    ids: np.ndarray, following: Sequence[int], tables: np.ndarray, ends: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The last layer's output: after the final norm it points at the head's row of the next token."""
    wanted = ends["head"][np.asarray(following)] + 0.1 * tables[LAYERS - 1, 0][ids]
    return 3.0 * wanted / ends["norm"]


def _following(tokens: Sequence[int], prompt_len: int) -> list[int]:
    """What the final state is to give: the next token in the completion, before it nothing that is not known yet."""
    return [*tokens[: prompt_len - 1], *tokens[prompt_len:], 0]


def _ends(generator: np.random.Generator) -> dict[str, np.ndarray]:
    head = generator.normal(size=(VOCABULARY, HIDDEN))
    return {
        "embedding": generator.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32),
        "head": (head / np.linalg.norm(head, axis=1, keepdims=True)).astype(np.float32),
        "norm": np.exp(generator.normal(size=HIDDEN)).astype(np.float32),
    }


def _tables(generator: np.random.Generator) -> np.ndarray:
    """[layer, how far back, token, H]: what a token adds to a layer's output there and at the next positions."""
    return generator.normal(size=(LAYERS, 3, VOCABULARY, HIDDEN)).astype(np.float32)


def _weights(wiring: Wiring, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights, sharp enough that attention picks few positions and outweighs the block's own rows."""
    loud = {"o_proj": 3.0, "down_proj": 2.0}
    kept = VOCABULARY - 60  # entries of a pruned vocabulary
    weights: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(wiring).items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            rows = kept if name == "lm_head.weight" and wiring.vocabulary_map != "none" else VOCABULARY
            weights[name] = generator.normal(size=(rows, HIDDEN)).astype(np.float32)
        elif name == "d2t":
            ids = np.sort(generator.permutation(VOCABULARY)[:kept])
            weights[name] = (ids - np.arange(kept) if wiring.vocabulary_map == "offset" else ids).astype(
                np.int64
            )
        elif len(shape) == 1:
            scale = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
            weights[name] = (scale * np.exp(0.3 * generator.normal(size=shape))).astype(np.float32)
        else:
            gain = next((gain for part, gain in loud.items() if part in name), 1.0)
            spread = gain / np.sqrt(shape[1])
            weights[name] = generator.normal(0, spread, size=shape).astype(np.float32)
    return weights


def _checkpoint(folder: Path, wiring: Wiring, weights: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps({OWN_KEY: wiring.as_dict()}))
    return folder


@torch.inference_mode()
def _text(
    drafter: DFlash,
    prompt: Sequence[int],
    length: int,
    tables: np.ndarray,
    ends: Mapping[str, np.ndarray],
    wiring: Wiring,
    generator: np.random.Generator,
) -> list[int]:
    """A completion of `length` tokens that the drafter wrote, with a random token here and there."""
    text = [*prompt, int(generator.integers(20, VOCABULARY - 20))]
    ids = drafter.ends.target_ids
    while len(text) < len(prompt) + length:
        anchor = len(text) - 1
        outputs = layer_outputs(text[:-1], tables, ends, following=_following(text, len(prompt))[:-1])
        taps = np.stack([outputs[tap + 1] for tap in wiring.taps])
        if wiring.taps[-1] == LAYERS - 1 and wiring.tap_after_final_norm:
            taps[-1] = _normed(taps[-1], ends["norm"])
        features = torch.from_numpy(taps.transpose(1, 0, 2).reshape(anchor, -1))
        hidden = drafter.draft(
            drafter.context(features),
            anchors=torch.tensor([anchor]),
            anchor_tokens=torch.tensor([text[-1]]),
        )
        first = drafter.logits(hidden)[0].argmax(-1)
        drafted = (first if ids is None else ids[first]).tolist()
        text += drafted[: int(generator.integers(2, wiring.depth + 1))]
        if generator.random() < 0.5:
            text.append(int(generator.integers(20, VOCABULARY - 20)))
    return text[len(prompt) : len(prompt) + length]


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _recording(
    folder: Path,
    texts: Sequence[tuple[list[int], list[int]]],
    rows: Sequence[int],
    tables: np.ndarray,
    ends: Mapping[str, np.ndarray],
) -> Recording:
    folder.mkdir(parents=True)
    write_safetensors(folder / "ends.safetensors", ends)
    stored = read_safetensors(folder / "ends.safetensors")[0]
    items = []
    for i, (prompt, completion) in enumerate(texts):
        tokens = prompt + completion
        outputs = layer_outputs(tokens, tables, ends, following=_following(tokens, len(prompt)))
        path = folder / f"{i:05d}.safetensors"
        facts = {
            "id": f"prompt{i}",
            "category": ("short", "long")[i % 2],
            "prompt_len": len(prompt),
            "length": len(tokens),
            "stopped": False,
            "agreed": len(completion),
            "near_ties": 0,
            "worst_gap": 0.0,
            "text": "",
        }
        tensors = {
            "tokens": np.array(tokens, dtype=np.int32),
            "taps": outputs[[row + 1 for row in rows]],
            "final": outputs[-1],
        }
        write_safetensors(path, tensors, metadata={"item": json.dumps(facts)})
        items.append(Item(file=path.name, sha256=sha256_file(path), **facts))
    places = {
        name: {"file": "ends.safetensors", "name": name, "sha256": stored[name].sha256()} for name in ends
    }
    said = sha256_json([[p, c] for p, c in texts])
    return complete_recording(
        folder,
        plan=RecordingPlan(
            target_digest=said,
            tokenizer_digest="none",
            template="raw",
            prompts_digest=said,
            rendered_digest=said,
            taps=tuple(rows),
            dtype="float32",
            max_new_tokens=len(texts[0][1]),
        ),
        target=TargetRecord(
            path="no-target",
            digest=said,
            architecture="Planted",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            norm_eps=EPS,
            stop_token_ids=(2,),
            ends=places,
            rope_theta=WIRING.rope_theta,
            special_tokens={"<stop>": 2, "<mask>": 290},
        ),
        items=items,
        failed={},
        produced={"prompts": "planted.jsonl", "prompts_asked": len(items)},
    )
