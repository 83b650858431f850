"""Distributed checkpoints: written by torch itself, alone and by two ranks, whole and broken in every way."""

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from draftgauge.checkpoint import digest, open_checkpoint, verify
from draftgauge.distcp import located, read_distributed
from draftgauge.errors import CheckpointError, FamilyError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.inspection import inspect_checkpoint
from draftgauge.kept import checkpoint_caveat
from draftgauge.store import cache_folder
from draftgauge.tensorfile import StoredTensor
from draftgauge.torchfile import ChecksumCount
from tests.golden import MODELS
from tests.tiny import drafter_config, recording, weights

WEIGHTS = weights()
GOLDEN = digest(open_checkpoint(MODELS / "draftA8.safetensors"))
TWO_RANKS = Path(__file__).parent / "two_ranks.py"


def save(folder: Path, state: dict[str, Any], **writer: Any) -> Path:
    """Saved by torch in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed here
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **writer), no_dist=True)
    return folder


def trained(**changes: object) -> dict[str, Any]:
    moments = {name: {"exp_avg": torch.zeros_like(weight)} for name, weight in WEIGHTS.items()}
    state = {"model": WEIGHTS, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "step": 40}
    return {key: value for key, value in (state | changes).items() if value is not None}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks save together: every tensor in two chunks, by dimension 0 or 1."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(TWO_RANKS), str(folder), str(MODELS / "draftA8.safetensors")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, rank], env=environment) for rank in ("0", "1")]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    return folder / "step_40"


@pytest.fixture
def copied(sharded: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    folder = tmp_path / "step_40"
    folder.mkdir()
    for file in sharded.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Changes what `.metadata` says; it is our own file, so loading it is safe."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "nested": (trained(), "model"),
    "alone": (dict(WEIGHTS), ""),
    "deep": ({"app": {"state": {"model": WEIGHTS}}, "step": 40}, "app.state.model"),
    "flat": ({f"state.model.{name}": weight for name, weight in WEIGHTS.items()}, "state.model"),
    "flat with moments": (
        {f"module.{name}": w for name, w in WEIGHTS.items()}
        | {f"optim.exp_avg.{name}": torch.zeros_like(w) for name, w in WEIGHTS.items()},
        "module",
    ),
    "at the top beside moments": (
        WEIGHTS | {f"optimizer.state.{name}.exp_avg": torch.zeros_like(w) for name, w in WEIGHTS.items()},
        "",
    ),
    "wrapped": (
        {"model_state_dict": {f"module._orig_mod.{n}": w for n, w in WEIGHTS.items()}},
        "model_state_dict.module._orig_mod",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_weights_anywhere_in_it_are_those_of_any_other_file(tmp_path: Path, name: str) -> None:
    state, where = STATES[name]
    opened = open_checkpoint(save(tmp_path / "step_7", state))
    assert (opened.kind, opened.state_dict) == ("distributed", where)
    assert opened.tensors.keys() == WEIGHTS.keys()
    assert digest(opened) == GOLDEN


def test_a_tensor_of_one_chunk_stays_where_it_is(tmp_path: Path) -> None:
    opened = open_checkpoint(save(tmp_path / "step_7", trained()))
    assert {tensor.path for tensor in opened.tensors.values()} == {opened.path / "__0_0.distcp"}
    fc = opened.tensors["fc.weight"]
    assert fc.name == "model.fc.weight"
    np.testing.assert_array_equal(
        fc.mapped().view(np.float32).reshape(fc.shape), WEIGHTS["fc.weight"].numpy()
    )
    assert opened.files == (opened.path / ".metadata", opened.path / "__0_0.distcp")
    assert verify(opened) == ChecksumCount(checked=2 * len(WEIGHTS), absent=0)
    assert digest(open_checkpoint(opened.path / ".metadata")) == GOLDEN
    assert digest(open_checkpoint(opened.path / "__0_0.distcp")) == GOLDEN


def test_shards_of_two_ranks_are_put_together_once(sharded: Path) -> None:
    opened = open_checkpoint(sharded)
    assert (opened.step, opened.step_source) == (40, "step_40: step")
    assert digest(opened) == GOLDEN
    (file,) = {tensor.path for tensor in opened.tensors.values()}
    assert file.parent == cache_folder() / "assembled"
    assert file.stat().st_size < 1.1 * sum(weight.nbytes for weight in WEIGHTS.values())  # no moments
    assert {path.name for path in opened.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    before = file.stat()
    again = open_checkpoint(sharded)
    assert (file.stat().st_mtime_ns, again.tensors["fc.weight"].path) == (before.st_mtime_ns, file)
    assert verify(opened) == ChecksumCount(checked=4 * len(WEIGHTS), absent=0)
    moments = sum(weight.nbytes for weight in WEIGHTS.values())
    assert opened.extras["optimizer"] == f"{len(WEIGHTS)} tensors, {moments / 1000:.1f} kB, not read"


def test_a_damaged_file_of_the_cache_is_found(copied: Path) -> None:
    opened = open_checkpoint(copied)
    norm = opened.tensors["norm.weight"]
    with norm.path.open("r+b") as file:
        file.seek(norm.offset)
        file.write(b"\x99\x99")
    with pytest.raises(
        CheckpointError, match=r"is not what its 2 chunks in .* Remove that file of the cache"
    ):
        verify(opened)


def test_a_flipped_byte_in_a_chunk_is_found(copied: Path) -> None:
    save_ = read_distributed(copied)
    chunk = save_.chunks["model.norm.weight"][1]
    opened = open_checkpoint(copied)
    with chunk.path.open("r+b") as file:
        file.seek(chunk.start)
        file.seek(chunk.path.read_bytes().index(WEIGHTS["norm.weight"][32:].numpy().tobytes()))
        file.write(b"\x99\x99")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        verify(opened)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged: record data/0 .* has CRC-32"):
        verify(open_checkpoint(copied))


def test_plain_values_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    state = trained(args=argparse.Namespace(lr=1), config=drafter_config(), step=torch.tensor(41))
    opened = open_checkpoint(save(tmp_path / "out", state))
    assert (opened.step, opened.step_source) == (41, "out: step")
    assert opened.config is not None
    assert opened.config["block_size"] == 8
    assert opened.opaque_classes == ("argparse.Namespace",)
    assert open_checkpoint(save(tmp_path / "run-step9", trained(step=None))).step == 9
    value = inspect_checkpoint(opened.path)
    assert (value["file"]["kind"], value["problems"]) == ("distributed", [])


def test_two_sets_of_weights_are_refused_until_one_is_chosen(tmp_path: Path) -> None:
    ema = {name: weight + 1 for name, weight in WEIGHTS.items()}
    path = save(tmp_path / "a", {"model": WEIGHTS, "ema": ema})
    with pytest.raises(CheckpointError, match=r"2 sets of drafter weights: model, ema.*--state-dict model"):
        open_checkpoint(path)
    assert digest(open_checkpoint(path, state_dict="model")) == GOLDEN
    with pytest.raises(CheckpointError, match="no drafter weights at 'optimizer'"):
        open_checkpoint(path, state_dict="optimizer")
    with pytest.raises(FamilyError, match="Medusa"):
        open_checkpoint(save(tmp_path / "b", {"model": {"medusa_head.0.weight": torch.ones(2)}}))


def test_chunks_in_a_file_of_safetensors_are_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"model": WEIGHTS}, serialization_format=SerializationFormat.SAFETENSORS)
    opened = open_checkpoint(path)
    assert digest(opened) == GOLDEN
    assert verify(opened) == ChecksumCount(checked=0, absent=len(WEIGHTS))
    mixed = trained(optimizer=None)
    path = save(tmp_path / "b", mixed, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(CheckpointError, match=r"nothing of torch.save at byte \d+, where model.fc.weight"):
        open_checkpoint(path)


def drop_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.fc.weight"].chunks[1]


def move_chunk(metadata: Metadata, to: int) -> None:
    chunk = metadata.state_dict_metadata["model.norm.weight"].chunks[1]
    info = metadata.storage_data[MetadataIndex("model.norm.weight", chunk.offsets)]
    chunk.offsets = torch.Size([to])
    metadata.storage_data[MetadataIndex("model.norm.weight", chunk.offsets)] = info


def swap_places(metadata: Metadata) -> None:
    names = [MetadataIndex(name, torch.Size([0])) for name in ("model.norm.weight", "step")]
    names[1] = MetadataIndex("step")
    places = [metadata.storage_data[name] for name in names]
    metadata.storage_data |= dict(zip(names, reversed(places), strict=True))


def place_elsewhere(metadata: Metadata) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.fc.weight":
            info.relative_path = f"../{info.relative_path}"


def forget_place(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "model.fc.weight"]:
        del metadata.storage_data[index]


def compress(metadata: Metadata) -> None:
    for index in metadata.storage_data:
        metadata.storage_data[index] = dataclasses.replace(
            metadata.storage_data[index], transform_descriptors=["zstd"]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_chunk, r"fc.weight \[64, 128\] has 8192 elements; its 1 chunks hold 4096: a rank's part is"),
        (lambda m: move_chunk(m, 16), r"chunks that overlap: \[32\] at \[0\] and \[32\] at \[16\]"),
        (lambda m: move_chunk(m, 48), r"chunk \[32\] at \[48\], beyond its end"),
        (swap_places, r"holds a int at byte \d+; .metadata says F32 \[32\] of model.norm.weight"),
        (place_elsewhere, "places model.fc.weight in '../__0_0.distcp', not in a file beside it"),
        (forget_place, r"does not say where the chunk of model.fc.weight at \[0, 0\] is"),
        (compress, "was compressed or changed when it was written"),
        (lambda m: setattr(m, "storage_data", None), "its storage_data is a NoneType; expected a mapping"),
        (lambda m: m.state_dict_metadata.update(x=3), "x is a int; expected a tensor or bytes"),
        (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "a name in it is a int"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    copied: Path, change: Callable[[Metadata], object], message: str
) -> None:
    edit(copied, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copied)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "__1_0.distcp").unlink(), r"__1_0.distcp is missing.* and 1 other \*.distcp files"),
        (
            lambda p: cut(p / "__1_0.distcp", 100_000),
            "__1_0.distcp has 100000 bytes; expected at least .*still being written",
        ),
        (lambda p: (p / ".metadata").unlink(), "hidden files out. Wait until it is saved, or copy it"),
        (lambda p: cut(p / ".metadata", 0), ".metadata has 0 bytes; expected the description"),
        (lambda p: cut(p / ".metadata", 5000), ".metadata: its pickle cannot be read"),
        (
            lambda p: (p / ".metadata").write_bytes(pickle.dumps(Hostile(p / "ran"))),
            "names posix.system, which no distributed checkpoint of torch does; nothing of it was run",
        ),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps({"a": 1})), "it holds a dict"),
        (
            lambda p: (p / "model.safetensors").write_bytes(b""),
            "holds 2 files that may be the drafter",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    copied: Path, change: Callable[[Path], object], message: str
) -> None:
    change(copied)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(copied)
    assert not (copied / "ran").exists()


def test_a_folder_above_names_the_one_that_holds_it(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model_fsdp_0", {"model": WEIGHTS})
    with pytest.raises(CheckpointError, match="Give one of its directories: pytorch_model_fsdp_0"):
        open_checkpoint(tmp_path)


def test_a_tensor_without_elements_is_one(tmp_path: Path) -> None:
    empty = read_distributed(save(tmp_path / "a", {"empty": torch.ones(0, 4), "half": torch.ones(2).half()}))
    assert isinstance(empty.value, dict)
    found, _ = located(empty, empty.value)
    assert isinstance(found["empty"], StoredTensor)
    assert isinstance(found["half"], StoredTensor)
    assert (found["empty"].shape, found["empty"].mapped().size) == ((0, 4), 0)
    assert found["half"].to_float32().tolist() == [1, 1]


def test_a_run_of_one_keeps_what_can_be_measured_again(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_40"
    folder.mkdir()
    for file in sharded.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(drafter_config()))
    run = evaluate_checkpoint(folder, recording().path, Options(num_prompts=1), root=tmp_path / "runs")
    assert run.manifest["checkpoint"]["kind"] == "distributed"
    assert "no-checksums" not in {caveat["slug"] for caveat in run.summary["caveats"]}
    assert digest(open_checkpoint(run.path / "checkpoint")) == GOLDEN
    (folder / "config.json").write_text("{}")
    for name in (".metadata", "__0_0.distcp"):
        os.utime(folder / name)
    assert checkpoint_caveat(run) is not None  # its config was edited, through the hard link
