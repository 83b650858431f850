"""Which files make a target what it is, and that their joint digest sees each of them."""

import hashlib
import json
from pathlib import Path

import pytest

from draftgauge.errors import TargetError
from draftgauge.targetfiles import (
    config_files,
    function_digests,
    joint_digest,
    tokenizer_digests,
    tokenizer_files,
    weight_files,
)


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(name)
    return folder


def test_files_are_told_apart_by_what_they_decide(tmp_path: Path) -> None:
    names = (
        "b.safetensors",
        "a.bin",
        "config.json",
        "adapter_config.json",
        "vocab.json",
        "merges.txt",
        "README.md",
    )
    filled(tmp_path, *names)
    assert [path.name for path in weight_files(tmp_path)] == ["a.bin", "b.safetensors"]
    assert [path.name for path in config_files(tmp_path)] == ["config.json", "adapter_config.json"]
    assert [path.name for path in tokenizer_files(tmp_path)] == ["merges.txt", "vocab.json"]


def test_a_digest_for_every_file(tmp_path: Path) -> None:
    filled(tmp_path, "model.safetensors", "config.json", "tokenizer.json", "README.md")
    sha = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("model.safetensors", "config.json")}
    assert function_digests(tmp_path) == sha
    assert list(tokenizer_digests(tmp_path)) == ["tokenizer.json"]


def test_a_folder_without_weights_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="holds no weights"):
        function_digests(filled(tmp_path, "config.json"))
    assert tokenizer_digests(tmp_path) == {}


def test_the_joint_digest_is_that_of_the_pairs_in_their_order() -> None:
    text = json.dumps([["b", "1"], ["a", "2"]])
    assert joint_digest({"b": "1", "a": "2"}) == hashlib.sha256(text.encode()).hexdigest()
    others = [{"a": "2", "b": "1"}, {"b": "1"}, {"b": "1", "a": "3"}, {"b": "1", "c": "2"}]
    assert len({joint_digest(value) for value in others} | {joint_digest({"b": "1", "a": "2"})}) == 5
