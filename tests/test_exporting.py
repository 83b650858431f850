"""Exporting: what was written is read again as the same function, served as said, or refused by field."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.checkpoint import digest, open_checkpoint
from draftgauge.configs import OWN_KEY
from draftgauge.errors import StoreError, WiringError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.exporting import FORMATS, export_checkpoint
from draftgauge.stated import Stated, wiring_of
from draftgauge.wiring import LayerAttention, Wiring, sliding_layer
from tests import tiny
from tests.golden import wiring_of as golden_wiring
from tests.test_importing import integers

SAVES = Path(__file__).with_name("speculators_saves")
A8 = golden_wiring("draftA8")


def trained(folder: Path, wiring: Wiring = A8, **tensors: torch.Tensor) -> Path:
    """A trainer's file of the tiny drafter, which says its whole wiring."""
    state = tiny.weights() | tensors
    return tiny.trainer_pt(folder / "checkpoint.pt", state, config={OWN_KEY: wiring.as_dict()})


def plain(folder: Path) -> Path:
    """The directory without our own words in its config: what another project reads."""
    config = json.loads((folder / "config.json").read_text())
    config.pop(OWN_KEY, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("to", FORMATS)
def test_what_was_exported_has_the_same_ranks(to: str, tmp_path: Path) -> None:
    source = trained(tmp_path)
    value = export_checkpoint(source, tmp_path / "out", to=to)
    assert value["digest"] == digest(open_checkpoint(source))
    runs = [
        evaluate_checkpoint(path, tiny.recording().path, root=tmp_path / name)
        for name, path in (("ours", source), ("theirs", plain(tmp_path / "out")))
    ]
    assert integers(runs[0]) == integers(runs[1])


@pytest.mark.parametrize("layers", ["zlab_2026_08", "zlab_2026_08_non_causal"])
def test_sliding_layers_are_exported_where_the_code_computes_them_so(layers: str, tmp_path: Path) -> None:
    attention = (sliding_layer(layers, window=8), LayerAttention())[: A8.num_layers]
    wiring = dataclasses.replace(A8, attention=attention * (A8.num_layers // len(attention)))
    source = trained(tmp_path, wiring)
    if layers == "zlab_2026_08_non_causal":
        with pytest.raises(WiringError, match="attention: "):
            export_checkpoint(source, tmp_path / "out", to="zlab")
        return
    value = export_checkpoint(source, tmp_path / "out", to="zlab")
    assert "attention of sliding layers: as the code of z-lab's directory computes it" in value["not_said"]
    assert wiring_of(open_checkpoint(tmp_path / "out")) == wiring
    code = Stated(wiring={"convention": layers})
    assert wiring_of(open_checkpoint(plain(tmp_path / "out")), code).attention == wiring.attention


@pytest.mark.parametrize("kind", ["from_anchor", "non_causal", "pruned"])
def test_a_drafter_of_speculators_goes_there_and_back(kind: str, tmp_path: Path) -> None:
    value = export_checkpoint(SAVES / kind, tmp_path / "out", to="speculators")
    ours, theirs = (open_checkpoint(path) for path in (SAVES / kind, tmp_path / "out"))
    assert digest(ours) == digest(theirs)
    assert wiring_of(theirs) == wiring_of(ours)
    assert value["serve"].keys() == {"vllm"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = json.loads((SAVES / kind / "config.json").read_text())
    for key in (
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "sample_from_anchor",
    ):
        assert config[key] == said[key]
    names = {use.stored for use in theirs.key_map}
    assert ("t2d" in names) == (kind == "pruned")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "row 0 predicts": ({"predicts_from_anchor": True}, "zlab", "predicts_from_anchor: True, there False"),
    "interleaved rotary": ({"rope_layout": "interleaved"}, "zlab", "rope_layout: interleaved, there half"),
    "a part is rotated": ({"rope_dims": 8}, "speculators", "rope_dims: 8, there 16"),
    "a scale": ({"embedding_scale": 2.0}, "sglang", "embedding_scale: 2.0, there 1.0"),
    "a softcap": ({"logit_softcap": 30.0}, "speculators", "logit_softcap: 30.0, there None"),
    "a window": (
        {"attention": (sliding_layer("specforge", window=8),) * A8.num_layers},
        "zlab",
        "attention: ",
    ),
    "a window for SGLang": (
        {"attention": (sliding_layer("zlab_2026_08", window=8),) * A8.num_layers},
        "sglang",
        "what SGLang makes of that is not established",
    ),
    "a last layer before the norm": (
        {"taps": (1, 5), "tap_after_final_norm": False, "num_target_layers": 6},
        "zlab",
        "tap_after_final_norm: False, there True",
    ),
    "a last layer after the norm": (
        {"taps": (1, 5), "tap_after_final_norm": True, "num_target_layers": 6},
        "speculators",
        "tap_after_final_norm: True, there False",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_served_as_another_function_is_refused_by_field(what: str, tmp_path: Path) -> None:
    changes, to, message = REFUSED[what]
    source = trained(tmp_path, dataclasses.replace(A8, **changes))
    with pytest.raises(WiringError) as caught:
        export_checkpoint(source, tmp_path / "out", to=to)
    assert message in " ".join(str(caught.value).split())
    assert not (tmp_path / "out").exists()


def test_a_head_of_its_own_goes_where_one_can_be_held(tmp_path: Path) -> None:
    wiring = dataclasses.replace(A8, head="own", vocab_size=256, num_target_layers=6)
    head = torch.randn(256, A8.hidden_size, generator=torch.Generator().manual_seed(1))
    source = trained(tmp_path, wiring, **{"lm_head.weight": head})
    with pytest.raises(WiringError, match="head: own, there target"):
        export_checkpoint(source, tmp_path / "out", to="zlab")
    export_checkpoint(source, tmp_path / "out", to="speculators")
    assert wiring_of(open_checkpoint(tmp_path / "out")).head == "own"


def test_the_command_lines_name_the_block_as_each_engine_counts_it(tmp_path: Path) -> None:
    value = export_checkpoint(trained(tmp_path), tmp_path / "out dir", to="zlab", target="Qwen/Qwen3-8B")
    sglang, vllm = (shlex.split(value["serve"][engine]) for engine in ("sglang", "vllm"))
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "8"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(tmp_path / "out dir")
    said = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert said == {"method": "dflash", "model": str(tmp_path / "out dir"), "num_speculative_tokens": 7}


def test_rotary_scaling_and_the_used_block_size_are_written(tmp_path: Path) -> None:
    config = tiny.drafter_config() | {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    }
    config["rope_parameters"]["rope_theta"] = config["rope_theta"]
    source = tiny.drafter_dir(tmp_path / "source", **config)
    export_checkpoint(source, tmp_path / "out", to="zlab", stated=Stated(block_size=4))
    read = wiring_of(open_checkpoint(plain(tmp_path / "out")))
    assert (read.block_size, read.rope_scaling) == (4, wiring_of(open_checkpoint(source)).rope_scaling)


def test_nothing_is_overwritten_and_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError, match="exists already and is never overwritten"):
        export_checkpoint(trained(tmp_path), tmp_path / "out", to="zlab")
    with pytest.raises(
        WiringError, match="'gguf' is not written; expected --to zlab or speculators or sglang"
    ):
        export_checkpoint(trained(tmp_path), tmp_path / "other", to="gguf")


def test_the_command(tmp_path: Path) -> None:
    tiny.drafter_dir(tmp_path / "mine")
    done = tiny.draftgauge("export", "mine", "served", "--to", "sglang", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote served (sglang)" in done.stdout
    assert "serve it with sglang:\n  python -m sglang.launch_server --model-path TARGET" in done.stdout
    run = evaluate_checkpoint(tmp_path / "served", tiny.recording().path, Options(), root=tmp_path / "runs")
    assert run.summary["policies"]["chain"]["counts"]["rounds"]
