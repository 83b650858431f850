"""What `inspect` says of a drafter file before anything is computed with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.errors import CheckpointError, FamilyError
from draftgauge.inspection import inspect_checkpoint
from draftgauge.stated import Stated
from draftgauge.wiring import FIELDS
from tests import tiny
from tests.test_stated import UNSAID


def test_a_directory_is_told_in_full() -> None:
    value = inspect_checkpoint(tiny.workshop() / "drafter")
    file = value["file"]
    assert file["kind"] == "hf-directory"
    assert file["parameters"] == 82368
    assert file["bytes_model"] == 4 * 82368 < file["bytes_file"]
    assert file["dtypes"] == {"F32": 25}
    assert file["step"] is None
    assert file["checksums"] == {"checked": 0, "absent": 1}
    assert value["problems"] == []
    assert value["wiring_problem"] is None
    assert value["opaque_classes"] == []
    assert {use["status"] for use in value["key_map"]} == {"loaded"}
    assert value["tensors"]["fc.weight"] == {"dtype": "F32", "shape": [64, 128]}


def test_every_field_of_the_wiring_has_a_value_and_a_source() -> None:
    wiring = inspect_checkpoint(tiny.workshop() / "drafter")["wiring"]
    assert tuple(wiring) == FIELDS
    assert all(field["source"] for field in wiring.values())
    assert wiring["taps"] == {"value": (1, 3), "source": "config.json: dflash_config.target_layer_ids"}
    assert wiring["attention"]["value"] == ["full, bidirectional in the block"] * 2
    assert wiring["rope_layout"] == {"value": "half", "source": "default: nothing says otherwise"}


def test_the_result_is_plain_json() -> None:
    value = inspect_checkpoint(tiny.workshop() / "drafter")
    assert json.loads(json.dumps(value))["wiring"]["taps"]["value"] == [1, 3]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    state = tiny.weights() | {"verifier_norm.weight": torch.ones(64)}
    state = {f"module.{name}": tensor for name, tensor in state.items()}
    return tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", state, step=7, note="a run")


def test_a_file_without_a_config_asks_for_every_line_that_it_needs(bare: Path) -> None:
    value = inspect_checkpoint(bare)
    assert value["wiring"] is None
    for field in sorted(set(UNSAID) - {"num_target_layers"}):
        assert f"\n  {field} = " in value["wiring_problem"]
    # Only of interest once the taps are known.
    assert "num_target_layers" in inspect_checkpoint(bare, Stated({"taps": [1, 3]}))["wiring_problem"]
    assert value["problems"] == []  # the weights themselves are sound


def test_once_it_is_stated_nothing_is_missing(bare: Path) -> None:
    value = inspect_checkpoint(bare, Stated(UNSAID, "--wiring mine.toml"))
    assert value["wiring"]["rope_theta"] == {"value": 1e4, "source": "--wiring mine.toml: rope_theta"}
    assert (
        value["wiring"]["num_heads"]["source"] == "shape of layers.0.self_attn.q_proj.weight over head_dim 16"
    )
    assert (value["file"]["step"], value["file"]["state_dict"]) == (7, "model_state_dict")
    assert value["file"]["checksums"]["checked"] >= 25
    assert value["extras"]["note"] == "'a run'"
    assert "optimizer_state_dict" in value["extras"]


def test_a_block_size_to_use_stands_beside_the_trained_one() -> None:
    value = inspect_checkpoint(tiny.workshop() / "drafter", Stated(block_size=4))
    assert value["wiring"]["block_size"] == {"value": 4, "source": "--block-size (trained: 8)"}


def uses(value: dict[str, Any], status: str) -> dict[str, Any]:
    return {use["stored"]: use for use in value["key_map"] if use["status"] == status}


def test_every_stored_name_is_accounted_for(bare: Path) -> None:
    value = inspect_checkpoint(bare, Stated(UNSAID))
    renamed = uses(value, "renamed")
    assert renamed["module.fc.weight"]["canonical"] == "fc.weight"
    assert len(renamed) == 25
    (unused,) = uses(value, "unused").values()
    assert unused["stored"] == "module.verifier_norm.weight"
    assert unused["reason"] == "not part of the drafter's function: the verifier's own"


def test_what_the_wiring_does_not_read_is_unused_and_what_it_lacks_is_missing(tmp_path: Path) -> None:
    state = tiny.weights() | {"embed_tokens.weight": torch.ones(256, 64)}
    del state["layers.1.mlp.up_proj.weight"]
    pt = tiny.trainer_pt(tmp_path / "c.pt", state)
    value = inspect_checkpoint(pt, Stated({**UNSAID, "embedding": "target"}))
    assert uses(value, "unused")["embed_tokens.weight"]["reason"] == "the wiring does not read it"
    (missing,) = uses(value, "missing").values()
    assert missing["canonical"] == "layers.1.mlp.up_proj.weight"
    (problem,) = value["problems"]
    assert "layers.1.mlp.up_proj.weight is missing" in problem


def test_every_reason_not_to_evaluate_is_told(tmp_path: Path) -> None:
    state = tiny.weights()
    state["norm.weight"][3] = torch.inf
    state["fc.weight"] = torch.ones(64, 64)
    pt = tiny.trainer_pt(tmp_path / "c.pt", state)
    infinite, shape = inspect_checkpoint(pt, Stated(UNSAID))["problems"]
    assert "norm.weight: 1 of 64 values are NaN or infinite" in infinite
    assert "fc.weight has shape [64, 64]; expected [64, 128]" in shape


def test_damage_and_other_families_are_errors(tmp_path: Path) -> None:
    damaged = tiny.trainer_pt(tmp_path / "damaged.pt")
    content = bytearray(damaged.read_bytes())
    place = content.find(tiny.weights()["fc.weight"].numpy().tobytes()[:64])
    content[place] ^= 1
    damaged.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"fc.weight\) has CRC-32"):
        inspect_checkpoint(damaged)
    dspark = tiny.trainer_pt(tmp_path / "d.pt", tiny.weights() | {"markov_head.w1.weight": torch.ones(2, 2)})
    with pytest.raises(FamilyError, match="DSpark"):
        inspect_checkpoint(dspark)
    with pytest.raises(CheckpointError, match=r"nowhere"):
        inspect_checkpoint(tmp_path / "nowhere")
