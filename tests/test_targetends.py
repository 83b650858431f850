"""A target described from its files alone: what its config says, and where its ends lie."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import TargetError
from draftgauge.features import as_stored, as_torch
from draftgauge.target import load_target, rope_theta
from draftgauge.targetends import describe_target
from draftgauge.tensorfile import read_safetensors, write_safetensors
from tests import tiny


@pytest.mark.parametrize("name", ["targetA", "targetB", "targetC"])
def test_it_is_what_the_loaded_model_says(name: str, tmp_path: Path) -> None:
    folder = tiny.target_dir(tmp_path / "target", name, stops=[5, 23])
    facts, target = describe_target(folder), load_target(folder)
    assert facts.num_layers == len(target.decoder.layers)
    assert facts.vocab_size == target.model.get_output_embeddings().weight.shape[0]
    assert facts.hidden_size == target.decoder.norm.weight.shape[0]
    assert facts.norm_eps == target.model.config.rms_norm_eps
    assert facts.rope_theta == rope_theta(target)
    assert facts.stop_token_ids == (5, 23)
    assert facts.architecture == type(target.model).__name__
    assert as_torch(facts.ends["embedding"]).equal(target.model.get_input_embeddings().weight)
    assert as_torch(facts.ends["head"]).equal(target.model.get_output_embeddings().weight)
    assert as_torch(facts.ends["norm"]).equal(target.decoder.norm.weight)


def renamed(folder: Path, prefix: str, **config: Any) -> Path:
    """The target with its tensors under another name, and its sizes in an inner config, as multimodal ones do."""
    stored = read_safetensors(folder / "model.safetensors")[0]
    tensors = {}
    for name, tensor in stored.items():
        other = name if name.startswith("lm_head") else f"{prefix}{name.removeprefix('model.')}"
        tensors[other] = as_stored(as_torch(tensor).clone())
    write_safetensors(folder / "model.safetensors", tensors)
    inner = json.loads((folder / "config.json").read_text())
    said = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": inner} | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_multimodal_target_is_found(prefix: str, tmp_path: Path) -> None:
    plain = tiny.target_dir(tmp_path / "plain", stops=[23])
    facts = describe_target(renamed(tiny.target_dir(tmp_path / "target", stops=[23]), prefix))
    assert facts.num_layers == 6
    assert facts.ends["norm"].name == f"{prefix}norm.weight"
    assert facts.ends["norm"].sha256() == describe_target(plain).ends["norm"].sha256()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny.target_dir(tmp_path / "target")
    stored = read_safetensors(folder / "model.safetensors")[0]
    kept = {n: as_stored(as_torch(t).clone()) for n, t in stored.items() if n != "model.norm.weight"}
    write_safetensors(folder / "model.safetensors", kept)
    with pytest.raises(
        TargetError, match=r"holds no norm in its 1 safetensors file\(s\); copy the shards that hold"
    ):
        describe_target(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="does not say num_hidden_layers; give the target's Hugging Face"):
        describe_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match=r"config.json cannot be read: .*; copy the target again"):
        describe_target(folder)
    with pytest.raises(TargetError, match=r"there is no .*nowhere/config.json"):
        describe_target(tmp_path / "nowhere")
