import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgauge.checkpoint import (
    Checkpoint,
    KeyUse,
    digest,
    open_checkpoint,
    require_finite,
    require_tensors,
    verify,
)
from draftgauge.errors import CheckpointError, FamilyError
from draftgauge.probe import PROBE_FILE
from draftgauge.torchfile import ChecksumCount

GOLDEN = Path(__file__).parent / "golden_models"
WEIGHTS = load_file(GOLDEN / "draftA8.safetensors")
CONFIG = json.loads((GOLDEN / "draftA8.json").read_text())["config"]
State = dict[str, torch.Tensor]


@dataclasses.dataclass
class Node:
    """Spelled as omegaconf spells its values."""

    _val: object


@dataclasses.dataclass
class Tree:
    """Spelled as omegaconf spells its containers."""

    _content: dict[str, Node]
    _metadata: str = "noise"


def save_directory(path: Path, weights: State = WEIGHTS, config: object = CONFIG) -> Path:
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_shards(path: Path) -> Path:
    path.mkdir()
    names = sorted(WEIGHTS)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: WEIGHTS[name] for name in names if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def trained(weights: State = WEIGHTS) -> dict[str, object]:
    """What a trainer saves: weights, moments, step and config."""
    moments = {
        i: {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
        for i, w in enumerate(weights.values())
    }
    return {
        "model_state_dict": weights,
        "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 1e-4}]},
        "global_step": 1200,
        "config": CONFIG,
        "args": argparse.Namespace(lr=1e-4, out=Path("runs")),
    }


def save_trained(path: Path, **changes: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({key: value for key, value in (trained() | changes).items() if value is not None}, path)
    return path


CONTAINERS: dict[str, Callable[[Path], Path]] = {
    "a directory": lambda folder: save_directory(folder / "hf"),
    "shards": lambda folder: save_shards(folder / "hf"),
    "a bare file": lambda folder: save_directory(folder / "hf") / "model.safetensors",
    "a trainer's file": lambda folder: save_trained(folder / "t.pt"),
    "a step directory": lambda folder: save_trained(folder / "step_1200" / "checkpoint.pt").parent,
    "a state dict alone": lambda folder: (torch.save(WEIGHTS, folder / "w.bin"), folder / "w.bin")[1],
    "deep and wrapped": lambda folder: save_trained(
        folder / "t.pth",
        model_state_dict=None,
        module={"net": [{"draft": {f"module._orig_mod.draft_model.{k}": v for k, v in WEIGHTS.items()}}]},
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_same_weights_in_any_container_are_the_same(tmp_path: Path, container: str) -> None:
    opened = open_checkpoint(CONTAINERS[container](tmp_path))
    assert opened.tensors.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        np.testing.assert_array_equal(opened.tensors[name].to_float32(), weight.numpy())
    assert opened.bytes_model == sum(weight.nbytes for weight in WEIGHTS.values())
    assert opened.dtypes == {"F32": len(WEIGHTS)}
    assert digest(opened) == digest(open_checkpoint(GOLDEN / "draftA8.safetensors"))
    assert len(digest(opened)) == 64


@pytest.mark.parametrize("change", ["value", "name", "type"])
def test_other_weights_have_another_digest(tmp_path: Path, change: str) -> None:
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    if change == "value":
        weights["norm.weight"][0] += 1
    elif change == "name":
        weights["norm.weight"], weights["hidden_norm.weight"] = (
            weights["hidden_norm.weight"],
            weights["norm.weight"],
        )
    else:
        weights["norm.weight"] = weights["norm.weight"].view(torch.int32)
    changed = open_checkpoint(save_directory(tmp_path / "hf", weights))
    assert digest(changed) != digest(open_checkpoint(GOLDEN / "draftA8.safetensors"))


def test_a_directory_says_what_it_is(tmp_path: Path) -> None:
    path = save_directory(tmp_path / "epoch1_step30")
    (path / "optimizer.pt").write_bytes(bytes(2000))
    opened = open_checkpoint(path)
    assert (opened.kind, opened.state_dict, opened.opaque_classes) == ("hf-directory", "", ())
    assert (opened.config, opened.config_source) == (CONFIG, "config.json")
    assert (opened.step, opened.step_source) == (30, "the name epoch1_step30")
    assert opened.extras == {"optimizer.pt": "2.0 kB, not read"}
    assert opened.files == (path / "model.safetensors", path / "config.json")
    assert opened.bytes_file == (path / "model.safetensors").stat().st_size
    assert {use.status for use in opened.key_map} == {"loaded"}
    assert verify(opened) == ChecksumCount(checked=0, absent=1)


def test_a_trainers_probe_is_not_taken_for_weights(tmp_path: Path) -> None:
    (tmp_path / "step_5").mkdir()
    folders = (save_directory(tmp_path / "hf"), save_trained(tmp_path / "step_5" / "checkpoint.pt").parent)
    for path in folders:
        (path / PROBE_FILE).write_bytes(bytes(1500))
        opened = open_checkpoint(path)
        assert opened.tensors.keys() == WEIGHTS.keys()
        assert opened.extras[PROBE_FILE] == "1.5 kB, the trainer's probe, which `draftgauge check` replays"


def test_a_trainers_file_says_what_it_is(tmp_path: Path) -> None:
    opened = open_checkpoint(save_trained(tmp_path / "t.pt"))
    moments = 2 * sum(weight.nbytes for weight in WEIGHTS.values())
    assert (opened.kind, opened.state_dict) == ("trainer-pt", "model_state_dict")
    assert (opened.config, opened.config_source) == (CONFIG, "t.pt: config")
    assert (opened.step, opened.step_source) == (1200, "t.pt: global_step")
    assert opened.extras == {
        "optimizer_state_dict": f"{2 * len(WEIGHTS)} tensors, {moments / 1000:.1f} kB, not read",
        "global_step": "1200",
        "config": f"dict of {len(CONFIG)}",
        "args": "argparse.Namespace",
    }
    assert opened.opaque_classes == ("argparse.Namespace", f"pathlib.{type(Path()).__name__}")
    assert opened.tensors["fc.weight"].name == "model_state_dict.fc.weight"
    assert verify(opened) == ChecksumCount(checked=len(WEIGHTS) + 1, absent=0)


def test_every_stored_key_is_accounted_for(tmp_path: Path) -> None:
    ones = torch.ones(64)
    weights = {f"module.{name}": weight for name, weight in WEIGHTS.items()}
    weights["norm.weight"] = weights.pop("module.norm.weight")
    extra = {"verifier_norm.weight": ones, "rotary_emb.inv_freq": ones, "layers.0.gain": ones, "note": "text"}
    opened = open_checkpoint(save_trained(tmp_path / "t.pt", model_state_dict=weights | extra))
    uses = {use.stored: use for use in opened.key_map}
    assert uses.keys() == weights.keys() | extra.keys()
    assert uses["norm.weight"] == KeyUse("norm.weight", "norm.weight", "loaded", "")
    assert uses["module.fc.weight"] == KeyUse("module.fc.weight", "fc.weight", "renamed", "another spelling")
    assert {name: (uses[name].canonical, uses[name].status, uses[name].reason) for name in extra} == {
        "verifier_norm.weight": (None, "unused", "not part of the drafter's function: the verifier's own"),
        "rotary_emb.inv_freq": (None, "unused", "computed from the wiring"),
        "layers.0.gain": (None, "unused", "not a tensor of a DFlash drafter"),
        "note": (None, "unused", "not a tensor of a DFlash drafter"),
    }


# --- config and step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "config", "source"),
    [
        ({}, CONFIG, "t.pt: config"),
        (
            {"config": argparse.Namespace(block_size=8)},
            {"block_size": 8},
            "t.pt: config (argparse.Namespace)",
        ),
        ({"config": {"lr": 1}, "draft_config": {"block_size": 8}}, {"block_size": 8}, "t.pt: draft_config"),
        ({"config": Tree({"block_size": Node(8)})}, {"block_size": 8}, f"t.pt: config ({__name__}.Tree)"),
        ({"draft_config": CONFIG}, None, "several configs (config, draft_config)"),
        ({"config": None, "args": None}, None, "no config in t.pt"),
        (
            {"config": None, "args": None, "dflash_block_size": 8, "dflash_mask_token_id": 255},
            {"dflash_block_size": 8, "dflash_mask_token_id": 255},
            "t.pt: dflash_*",
        ),
    ],
)
def test_the_config_is_the_one_that_speaks_of_the_drafter(
    tmp_path: Path, changes: dict[str, object], config: object, source: str
) -> None:
    opened = open_checkpoint(save_trained(tmp_path / "t.pt", **changes))
    assert opened.config == config
    assert source in opened.config_source


def test_a_config_beside_the_file_goes_first(tmp_path: Path) -> None:
    path = save_trained(tmp_path / "step_3" / "checkpoint.pt")
    (path.parent / "config.json").write_text('{"block_size": 16}')
    opened = open_checkpoint(path)
    assert (opened.config, opened.config_source) == ({"block_size": 16}, "config.json")
    (path.parent / "config.json").write_text('{"block_size"')
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "changes", "step", "source"),
    [
        ("t.pt", {"step": 1200}, 1200, "t.pt: step"),
        ("t.pt", {"step": 3}, None, "contradicts itself: {'step': 3, 'global_step': 1200}"),
        ("t.pt", {"global_step": torch.tensor(40)}, 40, "t.pt: global_step"),
        ("t.pt", {"global_step": np.int64(41)}, 41, "t.pt: global_step"),
        ("t.pt", {"global_step": None}, None, "stated neither in the file nor in its name"),
        ("ckpt_70.pt", {"global_step": None}, 70, "the name ckpt_70.pt"),
        ("run-step9/checkpoint.pt", {"global_step": None}, 9, "the name run-step9"),
        ("t.pt", {"global_step": True}, None, "stated neither in the file nor in its name"),
    ],
)
def test_the_step_is_stated_or_absent(
    tmp_path: Path, name: str, changes: dict[str, object], step: int | None, source: str
) -> None:
    opened = open_checkpoint(save_trained(tmp_path / "x" / name, **changes))
    assert opened.step == step
    assert source in opened.step_source


# --- nothing is guessed --------------------------------------------------------------------------------


def test_two_sets_of_weights_are_refused_until_one_is_chosen(tmp_path: Path) -> None:
    ema = {name: weight + 1 for name, weight in WEIGHTS.items()}
    path = save_trained(tmp_path / "t.pt", ema={"shadow": ema})
    with pytest.raises(
        CheckpointError, match=r"2 sets of drafter weights: model_state_dict, ema.shadow.*--state-dict"
    ):
        open_checkpoint(path)
    opened = open_checkpoint(path, state_dict="ema.shadow")
    np.testing.assert_array_equal(opened.tensors["norm.weight"].to_float32(), ema["norm.weight"].numpy())
    assert opened.extras["model_state_dict"].startswith(f"{len(WEIGHTS)} tensors")
    with pytest.raises(
        CheckpointError, match=r"no drafter weights at 'ema'; expected one of model_state_dict, ema.shadow"
    ):
        open_checkpoint(path, state_dict="ema")
    with pytest.raises(CheckpointError, match="Leave it out"):
        open_checkpoint(GOLDEN / "draftA8.safetensors", state_dict="ema")


def test_moments_under_the_weights_names_are_not_weights(tmp_path: Path) -> None:
    path = save_trained(
        tmp_path / "t.pt", optimizer={"exp_avg": WEIGHTS}, optim_state={"state": {"fc.weight": {}}}
    )
    assert open_checkpoint(path).state_dict == "model_state_dict"


def test_two_files_are_refused(tmp_path: Path) -> None:
    path = save_directory(tmp_path / "step_5")
    save_trained(path / "checkpoint.pt")
    with pytest.raises(
        CheckpointError, match=r"2 files that may be the drafter(.|\n)*checkpoint.pt\n.*model.safetensors"
    ):
        open_checkpoint(path)
    for rank in (0, 1):
        save_trained(path / f"training_state.rank{rank}.pt")
    (path / "checkpoint.pt").unlink()
    assert open_checkpoint(path).kind == "hf-directory"


def test_a_directory_without_weights_says_what_is_there(tmp_path: Path) -> None:
    for step in (100, 200):
        save_trained(tmp_path / "run" / f"step_{step}" / "checkpoint.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("")
    cases = {
        "run": "one of its directories: step_100, step_200",
        "dcp": "distributed checkpoint whose .metadata is missing",
        "text": "holds notes.txt",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / name)


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {
        "none": "does not exist",
        "loop": "does not exist or cannot be reached",
        "notes.txt": "ends in .txt",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / name)


def test_a_link_to_the_latest_step_is_followed_once(tmp_path: Path) -> None:
    path = save_trained(tmp_path / "run-step7" / "training_state.pt", global_step=None)
    (tmp_path / "run-latest").symlink_to(path.parent)
    opened = open_checkpoint(tmp_path / "run-latest")
    (tmp_path / "run-latest").unlink()
    assert opened.path == path.parent
    assert opened.step == 7
    assert len(digest(opened)) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: (p / "model-00002-of-00002.safetensors").unlink(),
            "2 shards; missing: model-00002-of-00002",
        ),
        (
            lambda p: (p / "model.safetensors.index.json").unlink(),
            "2 files that may be.*\n.*\n.*\nGive .*index.json",
        ),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (
            lambda p: rewrite_index(p, "fc.weight", "../x.safetensors"),
            "expected the name of a file beside it",
        ),
        (lambda p: rewrite_index(p, "fc.weight", "model-00002-of-00002.safetensors"), "not of the same save"),
        (
            lambda p: rewrite_index(p, "more.weight", "model-00002-of-00002.safetensors"),
            "names more.weight and 0 more",
        ),
    ],
)
def test_shards_that_do_not_fit_their_index_are_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    path = save_shards(tmp_path / "hf")
    change(path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def rewrite_index(path: Path, name: str, shard: str) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = shard
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"markov_head.w.weight": torch.ones(2)}, FamilyError, "markov_head.w.weight, which makes it DSpark"),
        ({"layers.0.mlp.up_proj.bias": torch.ones(2)}, FamilyError, "DFlash with biases"),
        (
            {"module.fc.weight": torch.ones(2)},
            CheckpointError,
            "fc.weight and module.fc.weight are both fc.weight",
        ),
        ({"t2d": torch.ones(2, dtype=torch.bool)}, CheckpointError, "holds t2d but not d2t"),
        (
            {"norm.weight": argparse.Namespace()},
            CheckpointError,
            "norm.weight is a argparse.Namespace, not a plain",
        ),
    ],
)
def test_weights_that_are_not_a_plain_dflash_drafters_are_refused(
    tmp_path: Path, extra: dict[str, object], error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(save_trained(tmp_path / "t.pt", model_state_dict=WEIGHTS | extra))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"medusa_head.0.weight": torch.ones(2)}, FamilyError, "Medusa"),
        (
            {"net.weight": torch.ones(2)},
            CheckpointError,
            "no mapping .* fc.weight in it; it holds model_state_dict",
        ),
        (None, CheckpointError, "it holds optimizer_state_dict, "),
    ],
)
def test_files_without_such_weights_are_refused(
    tmp_path: Path, model: object, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(save_trained(tmp_path / "t.pt", model_state_dict=model))


# --- what the weights must be --------------------------------------------------------------------------


@pytest.fixture
def opened() -> Checkpoint:
    return open_checkpoint(GOLDEN / "draftA8.safetensors")


def test_missing_and_misshaped_tensors_are_all_listed(opened: Checkpoint) -> None:
    shapes = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    require_tensors(opened, shapes | {"fc.weight": (64, -1)})
    wrong = shapes | {
        "fc.weight": (64, 192),
        "norm.weight": (64, 1),
        "layers.2.mlp.up_proj.weight": (1, 1),
        "d2t": (9,),
    }
    with pytest.raises(CheckpointError) as caught:
        require_tensors(opened, wrong)
    assert str(caught.value).splitlines()[1:-1] == [
        "  fc.weight has shape [64, 128]; expected [64, 192]",
        "  norm.weight has shape [64]; expected [64, 1]",
        "  layers.2.mlp.up_proj.weight is missing; the nearest stored name is layers.1.mlp.up_proj.weight",
        "  d2t is missing",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_no_trained_drafter_has_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in WEIGHTS.items()}
    weights["d2t"] = torch.zeros(4, dtype=torch.int64)
    require_finite(open_checkpoint(save_directory(tmp_path / "good", weights)))
    weights["fc.weight"] = weights["fc.weight"].clone()
    weights["fc.weight"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    weights["norm.weight"] = torch.zeros_like(weights["norm.weight"])  # a norm may be zero: some add one
    weights["layers.0.mlp.up_proj.weight"] = -torch.zeros_like(weights["layers.0.mlp.up_proj.weight"])
    bad = open_checkpoint(save_directory(tmp_path / "bad", weights))
    with pytest.raises(CheckpointError) as caught:
        require_finite(bad)
    assert sorted(str(caught.value).splitlines()[1:-1]) == [
        "  fc.weight: 3 of 8192 values are NaN or infinite",
        "  layers.0.mlp.up_proj.weight: all 8192 values are zero, as before any training",
    ]
    require_finite(bad, ["hidden_norm.weight"])


@pytest.mark.parametrize("container", ["a directory", "a trainer's file"])
def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path, container: str) -> None:
    checkpoint = open_checkpoint(CONTAINERS[container](tmp_path))
    file = checkpoint.tensors["fc.weight"].path
    os.utime(file, ns=(1, 1))
    for use in (verify, digest):
        with pytest.raises(CheckpointError, match="changed while it was read"):
            use(checkpoint)


def test_a_flipped_byte_in_a_trainers_file_is_found(tmp_path: Path) -> None:
    path = save_trained(tmp_path / "t.pt")
    fc = open_checkpoint(path).tensors["fc.weight"]
    with path.open("r+b") as file:
        file.seek(fc.offset + 1000)
        file.write(b"\x99")
    with pytest.raises(
        CheckpointError, match=r"t.pt is damaged: record data/\d+ \(model_state_dict.fc.weight\)"
    ):
        verify(open_checkpoint(path))
