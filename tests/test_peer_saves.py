"""Drafters that other projects saved themselves: read as they lie, and their logits are the projects' own.

tests/peer_saves/make.py says how the folders came about; tests/test_speculators.py does the same for speculators.
Each is DFlash as the project itself writes and computes it: z-lab's `dflash` 0.1.0, SpecForge 0.2.0, DeepSpec and
transformers 5.19.0. What a test states of a wiring is only what the file truly cannot say.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftgauge.checkpoint import digest, open_checkpoint, require_finite, require_tensors, verify
from draftgauge.drafters import load_drafter
from draftgauge.errors import FamilyError, WiringError
from draftgauge.inspection import inspect_checkpoint
from draftgauge.stated import Stated, overridden, wiring_of
from draftgauge.wiring import LayerAttention, Wiring, sliding_layer, tensor_shapes

SAVES = Path(__file__).with_name("peer_saves")
FULL = LayerAttention()
NOTHING: dict[str, Any] = {}

#: A z-lab config that says nothing of `is_causal` reads the same whichever of three codes trained the drafter:
#: z-lab's of April 2026, z-lab's of August, or SpecForge's, whose export has z-lab's form.
ZLAB_APRIL, ZLAB_AUGUST, SPECFORGE = (
    {"convention": name} for name in ("zlab_2026_04", "zlab_2026_08", "specforge")
)
#: SpecForge's own state holds the weights and what its loss was made of, and nothing else of the draft's config.
_STATE = {"rope_theta": 5000.0, "rms_norm_eps": 1e-6, "num_target_layers": 6}
STATE_FULL = _STATE | {"layer_types": ["full_attention", "full_attention"]}
STATE_SLIDING = _STATE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

#: What is opened, the folder of its `blocks.npz`, which logits there, and what is stated.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "zlab full": ("zlab/full", "zlab/full", "logits", NOTHING),
    "zlab causal": ("zlab/causal", "zlab/causal", "logits", NOTHING),
    "zlab sliding, August": ("zlab/sliding", "zlab/sliding", "logits", ZLAB_AUGUST),
    "zlab sliding, April": ("zlab/sliding", "zlab/sliding", "logits_april", ZLAB_APRIL),
    "zlab not causal": ("zlab/non_causal", "zlab/non_causal", "logits", NOTHING),
    "zlab weights alone": (
        "zlab/sliding/model.safetensors",
        "zlab/sliding",
        "logits",
        ZLAB_AUGUST,
    ),
    "specforge export": ("specforge/full/export", "specforge/full", "logits", NOTHING),
    "specforge sliding export": ("specforge/sliding/export", "specforge/sliding", "logits", SPECFORGE),
    "specforge step": ("specforge/full/run-step2", "specforge/full", "logits", STATE_FULL),
    "specforge latest": ("specforge/full/run-latest", "specforge/full", "logits", STATE_FULL),
    "specforge sliding state": (
        "specforge/sliding/run-step2/training_state.pt",
        "specforge/sliding",
        "logits",
        STATE_SLIDING,
    ),
    "deepspec step": ("deepspec/step_40", "deepspec", "logits", NOTHING),
    "deepspec latest": ("deepspec/step_latest", "deepspec", "logits", NOTHING),
    "transformers full": ("transformers/full", "transformers/full", "logits", NOTHING),
    "transformers sliding": ("transformers/sliding", "transformers/sliding", "logits", NOTHING),
}


def wiring(path: str | Path, stated: Mapping[str, Any] = NOTHING) -> Wiring:
    return wiring_of(open_checkpoint(SAVES / path), Stated(wiring=stated))


def logits_of(
    path: str, blocks: Mapping[str, np.ndarray], stated: Mapping[str, Any]
) -> tuple[np.ndarray, Wiring]:
    """Draft logits of the checkpoint at the blocks' anchors, opened and checked as `eval` does it."""
    checkpoint = open_checkpoint(SAVES / path)
    read = wiring_of(checkpoint, Stated(wiring=stated))
    require_tensors(checkpoint, tensor_shapes(read))
    require_finite(checkpoint)
    verify(checkpoint)
    ends = {name: torch.from_numpy(blocks[name]) for name in ("embedding", "head")}
    drafter = load_drafter(read, checkpoint.tensors, **ends)
    anchors, tokens = (torch.from_numpy(blocks[name]) for name in ("anchors", "anchor_tokens"))
    hidden = drafter.draft(
        drafter.context(torch.from_numpy(blocks["features"])), anchors=anchors, anchor_tokens=tokens
    )
    return drafter.logits(hidden).numpy(), read


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_the_projects_own(case: str) -> None:
    path, folder, which, stated = CASES[case]
    blocks = np.load(SAVES / folder / "blocks.npz")
    ours, read = logits_of(path, blocks, stated)
    theirs = blocks[which][:, read.first_row :]
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(
    ("path", "folder", "stated"),
    [
        ("zlab/sliding", "zlab/sliding", ZLAB_APRIL),
        ("zlab/sliding", "zlab/sliding", SPECFORGE),
        ("specforge/sliding/export", "specforge/sliding", {"convention": "modelopt"}),
        ("transformers/sliding", "transformers/sliding", {"convention": "zlab_2026_08_non_causal"}),
        ("zlab/causal", "zlab/causal", {"layer_types": ["full_attention"] * 2, "convention": "zlab_2026_08"}),
    ],
)
def test_another_projects_layers_are_told_apart(path: str, folder: str, stated: dict[str, Any]) -> None:
    blocks = np.load(SAVES / folder / "blocks.npz")
    ours, read = logits_of(path, blocks, stated)
    assert np.abs(ours - blocks["logits"][:, read.first_row :]).max() > 1e-3


@pytest.mark.parametrize("case", [name for name, (*_, stated) in CASES.items() if not stated])
def test_nothing_has_to_be_stated(case: str) -> None:
    path, *_ = CASES[case]
    seen = inspect_checkpoint(SAVES / path)
    assert seen["wiring_problem"] is None
    assert seen["problems"] == []


# --- what each project's file says -----------------------------------------------------------------------


def test_zlab_says_its_block_size_in_either_place() -> None:
    at_top, inside = wiring("zlab/full"), wiring("zlab/non_causal")
    assert (at_top.block_size, inside.block_size) == (6, 6)
    assert at_top.provenance["block_size"] == "config.json: block_size"
    assert inside.provenance["block_size"] == "config.json: dflash_config.block_size"
    assert at_top.rope_theta == 5000.0
    assert at_top.provenance["rope_theta"] == "config.json: rope_parameters.rope_theta"
    assert inside.attention == (sliding_layer("zlab_2026_08_non_causal", window=5), FULL)
    assert wiring("zlab/causal").attention == (LayerAttention(block_causal=True),) * 2


def test_a_sliding_config_of_zlab_does_not_say_whose_code_it_is() -> None:
    with pytest.raises(WiringError, match=r"convention = one of zlab_2026_04, zlab_2026_08") as caught:
        wiring("zlab/sliding")
    assert str(caught.value).count("\n") == 2, "nothing else is asked for"


def test_specforge_says_the_step_and_its_own_layers_but_not_the_rest() -> None:
    step = SAVES / "specforge" / "sliding" / "run-step2"
    with pytest.raises(WiringError) as caught:
        wiring(step)
    asked = [line.split(" = ")[0].strip() for line in str(caught.value).splitlines()[2:]]
    assert asked == ["rms_norm_eps", "rope_theta", "layer_types", "num_target_layers"]
    read = wiring(step, STATE_SLIDING)
    assert read.attention == (sliding_layer("specforge", window=5), FULL)
    assert (read.taps, read.block_size, read.mask_token_id) == ((1, 4), 6, 63)
    assert not read.predicts_from_anchor
    assert "SpecForge" in read.provenance["attention"]
    checkpoint = open_checkpoint(step)
    assert (checkpoint.step, checkpoint.step_source) == (2, "training_state.pt: global_step")
    assert (checkpoint.state_dict, checkpoint.kind) == ("draft_state_dict", "trainer-pt")
    assert checkpoint.extras["training_state_rank0.pt"].endswith("not read")
    assert checkpoint.extras["strategy"] == "'dflash'"
    assert overridden(checkpoint, Stated(wiring=STATE_SLIDING), wiring=read) == {}


def test_the_users_word_comes_before_what_a_format_means() -> None:
    stated = STATE_SLIDING | {"convention": "modelopt", "predicts_from_anchor": True}
    read = wiring("specforge/sliding/run-step2", stated)
    assert read.attention == (sliding_layer("modelopt", window=5), FULL)
    assert read.predicts_from_anchor
    assert not wiring("deepspec/step_40", {"predicts_from_anchor": False}).predicts_from_anchor


def test_specforge_exports_what_it_saved() -> None:
    for run in ("full", "sliding"):
        state, export = (
            open_checkpoint(SAVES / "specforge" / run / name) for name in ("run-latest", "export")
        )
        assert digest(state) == digest(export)


def test_deepspec_predicts_from_the_anchor_row_and_has_its_own_ends() -> None:
    read = wiring("deepspec/step_latest")
    assert (read.predicts_from_anchor, read.first_row, read.depth) == (True, 0, 6)
    assert (read.embedding, read.head, read.vocabulary_map) == ("own", "own", "none")
    assert read.tap_after_final_norm is False
    assert "DeepSpec" in read.provenance["predicts_from_anchor"]
    checkpoint = open_checkpoint(SAVES / "deepspec" / "step_latest")
    assert (checkpoint.step, checkpoint.step_source) == (40, "the name step_40")
    assert {"train_config.py", "training_state.rank0.pt"} <= checkpoint.extras.keys()


def test_transformers_own_dflash_says_everything() -> None:
    read = wiring("transformers/sliding")
    assert read.attention == (sliding_layer("transformers", window=5), FULL)
    assert read.taps == (1, 4), "counted from 0: its generator asks the target for outputs of layers"
    renamed = {use.stored: use.canonical for use in open_checkpoint(SAVES / "transformers/full").key_map}
    assert renamed["encoder.fc.weight"] == "fc.weight"
    assert renamed["encoder.output_norm_enc.weight"] == "hidden_norm.weight"


def test_a_gemma_drafter_of_deepspecs_is_refused_by_name(tmp_path: Path) -> None:
    """Its layers have norms behind attention and MLP, and another activation: not what is computed here."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(SAVES / "deepspec" / "step_40", tmp_path / "step_40"))
    weights = load_file(folder / "model.safetensors")
    more = {f"layers.0.{name}_feedforward_layernorm.weight": torch.ones(16) for name in ("pre", "post")}
    save_file(weights | more, folder / "model.safetensors")
    with pytest.raises(FamilyError, match=r"_feedforward_layernorm.weight, which makes it DFlash with Gemma"):
        open_checkpoint(folder)


def test_heads_of_dspark_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(SAVES / "deepspec" / "step_40", tmp_path / "step_40"))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"markov_head.markov_w1.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    with pytest.raises(FamilyError, match="DSpark"):
        open_checkpoint(folder)


def test_every_layer_of_transformers_slides_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAVES / "transformers" / "sliding", tmp_path / "save"))
    said = json.loads((folder / "config.json").read_text())
    del said["layer_types"], said["sliding_window"]
    (folder / "config.json").write_text(json.dumps(said))
    assert wiring(folder).attention == (sliding_layer("transformers", window=2048),) * 2


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size"])
def test_what_transformers_config_lacks_is_asked_for(key: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAVES / "transformers" / "full", tmp_path / "save"))
    said = json.loads((folder / "config.json").read_text())
    del said[key]
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(WiringError, match="taps = " if key == "target_layer_ids" else f"{key} = "):
        wiring(folder)
