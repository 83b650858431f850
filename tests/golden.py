"""The independent vectors in `tests/golden_*`: tiny drafters, their targets, and what other code computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftgauge.configs import read_wiring
from draftgauge.drafters import as_torch, load_drafter
from draftgauge.drafters.dflash import DFlash
from draftgauge.tensorfile import StoredTensor, read_safetensors
from draftgauge.wiring import Wiring

HERE = Path(__file__).parent
MODELS = HERE / "golden_models"
BLOCKS = HERE / "golden_blocks"
DRAFTERS = ("draftA8", "draftA16", "draftB8", "draftC4")


def config_of(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def tensors_of(name: str) -> dict[str, StoredTensor]:
    return read_safetensors(MODELS / f"{name}.safetensors")[0]


def wiring_of(name: str, **given: Any) -> Wiring:
    config = {"rope_theta": 10000.0, **config_of(name)["config"]}
    shapes = {key: stored.shape for key, stored in tensors_of(name).items()}
    return read_wiring(config=config, config_source="config.json", shapes=shapes, given=given)


def drafter_of(name: str, **given: Any) -> DFlash:
    target = tensors_of(config_of(name)["target"])
    embedding = as_torch(target["model.embed_tokens.weight"])
    head = as_torch(target.get("lm_head.weight", target["model.embed_tokens.weight"]))
    return load_drafter(wiring_of(name, **given), tensors_of(name), embedding=embedding, head=head)


def blocks_of(name: str) -> dict[str, np.ndarray]:
    with np.load(BLOCKS / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def logits_of(drafter: DFlash, blocks: dict[str, np.ndarray]) -> torch.Tensor:
    """Draft logits [anchors, depth, vocabulary] at the vectors' anchors, all in one pass."""
    tokens = torch.from_numpy(blocks["token_ids"]).long()
    anchors = torch.from_numpy(blocks["anchors"]).long()
    context = drafter.context(torch.from_numpy(blocks["context_feature"]))
    hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens[anchors])
    return drafter.logits(hidden)
