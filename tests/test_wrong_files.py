"""Drafter files that are wrong: each is refused by a message that names it, says what was expected, and helps.

The way is that of `inspect` and `eval`: open, verify, read the wiring, check the tensors, build the network.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftgauge.checkpoint import open_checkpoint, require_finite, require_tensors, verify
from draftgauge.drafters import DFlash, load_drafter
from draftgauge.errors import DraftgaugeError
from draftgauge.stated import Stated, wiring_of
from draftgauge.wiring import tensor_shapes
from tests.golden import DRAFTERS, MODELS
from tests.tiny import drafter_config, drafter_dir

assert "draftA8" in DRAFTERS
WEIGHTS = load_file(MODELS / "draftA8.safetensors")
HIDDEN = WEIGHTS["norm.weight"].shape[0]
VOCABULARY = 256
PRUNED = Path(__file__).with_name("speculators_saves") / "pruned"
State = dict[str, torch.Tensor]


def opened(path: Path, *, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> DFlash:
    """The drafter at `path`, as the commands come to it."""
    checkpoint = open_checkpoint(path)
    wiring = wiring_of(checkpoint, Stated())
    require_tensors(checkpoint, tensor_shapes(wiring))
    require_finite(checkpoint)
    verify(checkpoint)
    end = torch.zeros(vocabulary, hidden)
    return load_drafter(wiring, checkpoint.tensors, embedding=end, head=end)


def directory(folder: Path, change: Callable[[State], State] = dict, **config: object) -> Path:
    path = drafter_dir(folder / "drafter", **config)
    save_file(change(WEIGHTS), path / "model.safetensors")
    return path


def trainer_file(folder: Path, **changed: object) -> Path:
    path = folder / "checkpoint.pt"
    torch.save({"model_state_dict": WEIGHTS | changed, "config": drafter_config()}, path)
    return path


def cut(path: Path, to: float = 0.5) -> Path:
    os.truncate(path, int(path.stat().st_size * to))
    return path


def shards(folder: Path) -> Path:
    path = drafter_dir(folder / "drafter")
    (path / "model.safetensors").unlink()
    names = sorted(WEIGHTS)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: WEIGHTS[name] for name in names if weight_map[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def without_a_shard(folder: Path) -> Path:
    path = shards(folder)
    (path / "model-00002-of-00002.safetensors").unlink()
    return path


def with_an_index_of_more(folder: Path) -> Path:
    index = shards(folder) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["norm.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(content))
    return index.parent


def typed(dtype: torch.dtype, *names: str) -> Callable[[State], State]:
    return lambda weights: {n: w.to(dtype) if n in names or not names else w for n, w in weights.items()}


def pruned(folder: Path, change: Callable[[State], State]) -> Path:
    path = Path(shutil.copytree(PRUNED, folder / "drafter"))
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path


def half_a_config(folder: Path) -> Path:
    path = directory(folder)
    cut(path / "config.json")
    return path


def empty(folder: Path) -> Path:
    (folder / "step_10").mkdir()
    return folder / "step_10"


@dataclass(frozen=True)
class Runs:
    """What pickle would run, were it asked to."""

    marker: Path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@dataclass(frozen=True)
class Case:
    """A wrong file, and what its message must hold: a name, what was expected, and at the end what helps."""

    make: Callable[[Path], Path]
    names: str
    expected: str
    helps: str


def fc(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda weights: weights | {"fc.weight": change(weights["fc.weight"]).contiguous()}


WAIT = "Wait for the writer to finish, or copy the file again"
WIRING = "Compare the wiring (--wiring) with the config that the drafter was trained with"
UNQUANTISED = "Save the unquantised weights, and d2t as whole numbers"
FLOATS = "expected one of BF16, F16, F32, F64"
TWO_TAPS = f"expected [{HIDDEN}, {2 * HIDDEN}]"
CASES = {
    "safetensors cut short": Case(
        lambda f: cut(directory(f) / "model.safetensors"),
        "model.safetensors has 165916 bytes",
        "expected 331832 (8 + header + data)",
        WAIT,
    ),
    "safetensors with nothing in it": Case(
        lambda f: cut(directory(f) / "model.safetensors", 0),
        "model.safetensors has 0 bytes",
        "expected 8",
        WAIT,
    ),
    "pt cut short": Case(
        lambda f: cut(trainer_file(f)),
        "checkpoint.pt (169",
        "does not end with a zip directory: truncated or still being written",
        "Wait for the trainer to finish saving, or copy the file again",
    ),
    "pt with nothing in it": Case(
        lambda f: cut(trainer_file(f), 0),
        "checkpoint.pt (0 bytes)",
        "does not end with a zip directory",
        "Wait for the trainer to finish saving, or copy the file again",
    ),
    "a shard is missing": Case(
        without_a_shard,
        "missing: model-00002-of-00002.safetensors",
        "model.safetensors.index.json names 2 shards",
        "Copy them beside the index",
    ),
    "the index names another file": Case(
        with_an_index_of_more,
        "missing: model-00003-of-00003.safetensors",
        "model.safetensors.index.json names 3 shards",
        "Copy them beside the index",
    ),
    "a program in place of a weight": Case(
        lambda f: trainer_file(f, **{"norm.weight": Runs(f / "marker")}),
        "checkpoint.pt: norm.weight is a posix.system",
        "not a plain tensor",
        "Save full tensors (full_state_dict=True, or DTensor.full_tensor())",
    ),
    "all weights are whole numbers": Case(
        lambda f: directory(f, typed(torch.int32)), "fc.weight has type I32", FLOATS, UNQUANTISED
    ),
    "one weight is of whole numbers": Case(
        lambda f: directory(f, typed(torch.int8, "norm.weight")),
        "norm.weight has type I8",
        FLOATS,
        UNQUANTISED,
    ),
    "weights are float8": Case(
        lambda f: directory(f, typed(torch.float8_e4m3fn)), "fc.weight has type F8_E4M3", FLOATS, UNQUANTISED
    ),
    "weights of a .pt are float8": Case(
        lambda f: trainer_file(f, **{"norm.weight": WEIGHTS["norm.weight"].to(torch.float8_e5m2)}),
        "norm.weight has type F8_E5M2",
        FLOATS,
        UNQUANTISED,
    ),
    "one tap too few": Case(
        lambda f: directory(f, fc(lambda w: w[:, :HIDDEN])),
        f"fc.weight has shape [{HIDDEN}, {HIDDEN}]",
        TWO_TAPS,
        WIRING,
    ),
    "fc is transposed": Case(
        lambda f: directory(f, fc(lambda w: w.T)),
        f"fc.weight has shape [{2 * HIDDEN}, {HIDDEN}]",
        TWO_TAPS,
        WIRING,
    ),
    "d2t names no token of the target": Case(
        lambda f: pruned(f, lambda w: w | {"d2t": w["d2t"] + 1000}),
        "d2t read as offset names token 1127 (least 1007)",
        "the target has 128",
        "state vocabulary_map = 'offset' or 'absolute' with --wiring",
    ),
    "d2t is of fractions": Case(
        lambda f: pruned(f, typed(torch.float32, "d2t")),
        "d2t has type F32",
        "expected one of I64, I32",
        UNQUANTISED,
    ),
    "the mask token is outside the embedding": Case(
        lambda f: directory(f, dflash_config=drafter_config()["dflash_config"] | {"mask_token_id": 999}),
        "mask_token_id 999",
        f"outside the embedding of {VOCABULARY} rows",
        "state another with --mask-token-id",
    ),
    "the config has more layers": Case(
        lambda f: directory(f, num_hidden_layers=3),
        "num_layers: 3 (config.json: num_hidden_layers)",
        "contradicts 2 (number of layers.* in the file)",
        "give the config that was saved with these weights",
    ),
    "the config has fewer layers": Case(
        lambda f: directory(f, num_hidden_layers=1),
        "num_layers: 1 (config.json: num_hidden_layers)",
        "contradicts 2 (number of layers.* in the file)",
        "give the config that was saved with these weights",
    ),
    "a layer's tensor is missing": Case(
        lambda f: directory(
            f, lambda w: {n: t for n, t in w.items() if n != "layers.1.self_attn.q_norm.weight"}
        ),
        "layers.1.self_attn.q_norm.weight is missing",
        "its wiring needs",
        WIRING,
    ),
    "the directory is empty": Case(
        empty, "step_10 holds no weights", "expected model.safetensors or checkpoint.pt", "Copy it again"
    ),
    "half a config": Case(half_a_config, "config.json", "is not JSON", "still being written? Copy it again"),
}
#: What the target of a pruned drafter has, which is another one.
ENDS_OF_PRUNED = {"vocabulary": 128, "hidden": 32}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_file_is_refused_with_what_was_expected_and_what_helps(case: str, tmp_path: Path) -> None:
    path = CASES[case].make(tmp_path)
    with pytest.raises(DraftgaugeError) as caught:
        opened(path, **(ENDS_OF_PRUNED if case.startswith("d2t") else {}))
    said = str(caught.value)
    assert CASES[case].names in said
    assert CASES[case].expected in said
    assert said.endswith(CASES[case].helps)
    assert not (tmp_path / "marker").exists()


def test_the_same_files_are_read_when_nothing_is_wrong_with_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert opened(directory(tmp_path / "a")).wiring.num_layers == 2
    assert opened(trainer_file(tmp_path)).wiring.num_layers == 2
    assert opened(shards(tmp_path / "b")).wiring.num_layers == 2
    assert opened(pruned(tmp_path, dict), **ENDS_OF_PRUNED).wiring.vocabulary_map == "offset"


def test_a_program_beside_the_weights_is_named_and_never_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "checkpoint.pt", tmp_path / "marker"
    torch.save({"model_state_dict": WEIGHTS, "config": drafter_config(), "callback": Runs(marker)}, path)
    assert opened(path).wiring.num_layers == 2
    assert open_checkpoint(path).opaque_classes == ("posix.system",)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file does run it when pickle reads it"
