"""A trainer's save of 61 tensors, features of three of ten prompts in loose files, an earlier result: measured.

The proportions are those of a drafter for a 27 B target whose `fc.weight` is 5120 x 25600: five taps, of which a
home-made harness stored four side by side and the fifth, the last layer, in a tensor of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.features import as_stored, as_torch, normed
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target
from draftgauge.tensorfile import read_safetensors, write_safetensors
from tests import tiny

PROMPTS = {
    name: tuple(range(7 + i, 13 + 2 * i))
    for i, name in enumerate(
        [
            "fizzbuzz",
            "binary_search",
            "linked_list_reverse",
            "quicksort",
            "matrix_multiply",
            "lru_cache",
            "json_parser",
            "prime_sieve",
            "tree_traversal",
            "string_compress",
        ]
    )
}
CACHED = ["fizzbuzz", "binary_search", "linked_list_reverse"]
HIDDEN, TAPS, LAST = 64, (0, 1, 2, 3), 5
WIRING = f"""\
taps = {[*TAPS, LAST]}
tap_after_final_norm = true
block_size = 32
mask_token_id = 255
predicts_from_anchor = false
rope_theta = 10000.0
rms_norm_eps = 1e-6
rope_dims = 16
head_dim = 16
layer_types = {json.dumps(["full_attention"] * 5)}
convention = "zlab_2026_04"
num_target_layers = 6
"""


def drafter_state(target: Path) -> dict[str, torch.Tensor]:
    """58 tensors of a DFlash drafter of five layers, and three of its trainer's."""
    generator = torch.Generator().manual_seed(11)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {"fc.weight": weight(HIDDEN, 5 * HIDDEN)}
    state |= {name: torch.ones(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    for layer in range(5):
        shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        made = {f"self_attn.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        made |= {f"self_attn.{name}_norm.weight": torch.ones(16) for name in "qk"}
        shapes = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}
        made |= {f"mlp.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        made |= {f"{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
        state |= {f"layers.{layer}.{name}": tensor for name, tensor in made.items()}
    assert len(state) == 58
    theirs = {
        name: as_torch(tensor) for name, tensor in read_safetensors(target / "model.safetensors")[0].items()
    }
    state["verifier_norm.weight"] = theirs["model.norm.weight"].clone()
    state["embed_tokens.weight"] = theirs["model.embed_tokens.weight"].clone()
    state["lm_head.weight"] = theirs["lm_head.weight"].clone()
    return state


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `runs/step_4000/checkpoint.pt`, `cached/*.pt`, an empty folder, `earlier.json`, the prompts."""
    folder = tmp_path_factory.mktemp("seed")
    target = tiny.target_dir(folder / "target", stops=[tiny.STOP])
    tensors = {
        name: as_torch(t).clone() for name, t in read_safetensors(target / "model.safetensors")[0].items()
    }
    norm = tensors["model.norm.weight"]  # uneven, so that before and after it are not the same up to a factor
    tensors["model.norm.weight"] = torch.rand(norm.shape, generator=torch.Generator().manual_seed(3)) * 3
    write_safetensors(target / "model.safetensors", {n: as_stored(t) for n, t in tensors.items()})
    tiny.trainer_pt(folder / "runs/step_4000/checkpoint.pt", drafter_state(target), global_step=4000)
    prompts = PromptSet("ten", tuple(Prompt(name, prompt_ids=ids) for name, ids in PROMPTS.items()))
    request = Request(taps=(*TAPS, LAST), max_new_tokens=30)
    recorded = record_target(target, prompts, request=request, root=folder / "truth")
    (folder / "cached").mkdir()
    (folder / "other").mkdir()
    for name in CACHED:
        item = recorded.tensors(recorded.item(name))
        aux = torch.cat([as_torch(item.outputs[tap]) for tap in TAPS], dim=-1)
        assert item.final is not None
        norm = as_torch(recorded.end("norm"))
        last = normed(as_torch(item.final).clone(), norm, eps=recorded.target.norm_eps)
        tokens = as_torch(item.tokens).long()
        value = {"aux_hidden": aux[None], "last_hidden": last[None], "input_ids": tokens[None]}
        assert (value["aux_hidden"].shape[-1], value["last_hidden"].shape[-1]) == (4 * HIDDEN, HIDDEN)
        torch.save(value, folder / "cached" / f"{name}.pt")
    rows = [{"id": name, "prompt_ids": list(ids)} for name, ids in PROMPTS.items()]
    (folder / "ten.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiring.toml").write_text(WIRING)
    earlier = {name: {"vanilla": 0.778, "DDTree top-4": 1.111, "DDTree top-8": 1.5} for name in CACHED}
    (folder / "earlier.json").write_text(json.dumps(earlier))
    return folder


def said(shop: Path, *words: object, code: int = 0) -> Any:
    done = tiny.draftgauge(*words, "--json", cwd=shop)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


CHECKPOINT = "runs/step_4000"


@pytest.fixture(scope="module")
def imported(shop: Path) -> str:
    """The path of the recording that the cached features become."""
    words = ["recordings", "import", "cached", "--target", "target", "--checkpoint", CHECKPOINT]
    words += ["--wiring", "wiring.toml", "--prompts", "ten.jsonl", "--portable"]
    words += ["--layers", "aux_hidden=0,1,2,3", "--layers", "last_hidden=5"]
    return str(said(shop, *words)["path"])


def test_what_is_in_the_file_is_said(shop: Path) -> None:
    found = said(shop, "inspect", CHECKPOINT, "--wiring", "wiring.toml")
    assert len(found["key_map"]) == 61
    assert found["tensors"]["fc.weight"]["shape"] == [HIDDEN, 5 * HIDDEN]
    assert found["file"]["state_dict"] == "model_state_dict"
    assert found["file"]["step"] == 4000
    assert any("optimizer_state_dict" in name for name in found["extras"])


def test_the_folder_with_features_is_found_and_the_empty_one_named(shop: Path) -> None:
    words = ["recordings", "pick", "--for", CHECKPOINT, "--wiring", "wiring.toml", "other", "cached"]
    value = said(shop, *words, "--target", "target")
    empty, cached = value["candidates"]
    assert (empty["kind"], cached["kind"]) == ("empty", "features")
    assert (cached["fits"], cached["prompts"]) == (True, 3)
    assert value["take"] == "cached"
    assert value["command"].startswith("draftgauge recordings import cached")


def test_three_of_ten_prompts_are_imported_and_how_the_last_state_is_meant_was_measured(
    shop: Path, imported: str
) -> None:
    facts = json.loads((shop / imported / "recording.json").read_text())
    assert [item["id"] for item in facts["items"]] == CACHED
    assert facts["plan"]["last_layer"] == "after the norm"
    assert facts["produced"]["prompts_asked"] == 10


@pytest.fixture(scope="module")
def run(shop: Path, imported: str) -> dict[str, Any]:
    words = ["eval", CHECKPOINT, "--recording", imported, "--wiring", "wiring.toml", "--block-size", 16]
    words += ["--trainer-step", 5329, "--budgets", "16,64", "--beside", "earlier.json"]
    done = tiny.draftgauge(*words, "--json", cwd=shop)
    assert done.returncode in (0, 4), done.stderr  # random weights read nothing, which a control may notice
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_it_is_measured_with_its_caveats(run: dict[str, Any], shop: Path) -> None:
    assert run["summary"]["prompts"].keys() == set(CACHED)
    policies = {"chain", "ddtree16", "ddtree64", "coverage4", "coverage8"}
    assert run["summary"]["policies"].keys() == policies
    for prompt in run["summary"]["prompts"].values():
        assert policies == prompt["policies"].keys()
        assert all(p["tau"] >= 1 for p in prompt["policies"].values())
    texts = {caveat["slug"]: caveat["text"] for caveat in run["summary"]["caveats"]}
    assert "16" in texts["block-size-differs"]
    assert "32" in texts["block-size-differs"]
    assert "3 of 10" in texts["prompts-incomplete"]
    assert "verifier_norm.weight" in texts["tensors-unused"]
    assert "4000" in texts["step-behind"]
    assert "5329" in texts["step-behind"]


def test_the_earlier_result_stands_beside_it_in_our_words(run: dict[str, Any], shop: Path) -> None:
    text = tiny.draftgauge("show", run["path"], "--beside", "earlier.json", cwd=shop).stdout
    for part in ("coverage@4", "coverage@8", "0.778", "1.111", *CACHED):
        assert part in text


def test_a_later_save_is_compared_on_the_same_prompts(run: dict[str, Any], shop: Path, imported: str) -> None:
    state = drafter_state(shop / "target")
    state["fc.weight"] = state["fc.weight"].flip(0)
    tiny.trainer_pt(shop / "runs/step_5000/checkpoint.pt", state, global_step=5000)
    words = [
        "eval",
        "runs/step_5000",
        "--like",
        run["path"],
        "--wiring",
        "wiring.toml",
        "--recording",
        imported,
    ]
    done = tiny.draftgauge(*words, "--json", cwd=shop)
    assert done.returncode in (0, 4), done.stderr
    compared = said(shop, "compare", json.loads(done.stdout)["path"], run["path"])
    assert compared["prompts"] == 3 or len(compared["prompts"]) == 3
