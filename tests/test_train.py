"""The trainer: what a step sees, what it minimises, and what a run leaves on disk."""

import dataclasses
import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.checkpoint import open_checkpoint
from draftgauge.errors import InputError, RecordingError, RunError, TargetError, WiringError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.features import as_torch
from draftgauge.pairing import open_drafter
from draftgauge.probe import PROBE_FILE, Probe, read_probe
from draftgauge.record import Request, record_target
from draftgauge.recording import Recording, open_recording
from draftgauge.stated import wiring_of
from draftgauge.train import (
    TrainPlan,
    block_loss,
    drafter_wiring,
    learning_rate,
    probe_blocks,
    probed_positions,
    sample_batch,
    train,
    trained_vocabulary,
)
from tests import tiny

PLAN = TrainPlan(
    steps=100, save_steps=(40,), mask_token_id=255, block_size=4, sequences=2, anchors_per_sequence=8, seed=3
)


@cache
def trained() -> Path:
    out = tiny.workshop() / "training"
    train(tiny.recording(), PLAN, out=out)
    return out


# --- the objective -----------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_cross_entropy_of_known_references() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 7, generator=generator)
    references = torch.tensor([[0, 1, 2], [6, 6, 6], [3, -1, -1], [4, 5, -1], [2, 2, 2]])
    total = weights = 0.0
    for a in range(5):
        for d in range(3):
            reference = int(references[a, d])
            if reference >= 0:
                scores = logits[a, d].tolist()
                entropy = math.log(sum(math.exp(score) for score in scores)) - scores[reference]
                weight = math.exp(-d / 2.5)
                total, weights = total + weight * entropy, weights + weight
    assert float(block_loss(logits, references, depth_decay=2.5)) == pytest.approx(total / weights, rel=1e-5)


@pytest.mark.parametrize(("decay", "share"), [(1.0, 1 / (1 + math.exp(-1))), (1e9, 0.5)])
def test_deeper_tokens_weigh_less(decay: float, share: float) -> None:
    """Entropies of 2 at depth 1 and 0 at depth 2: the loss is twice the first depth's share."""
    certain = torch.tensor([[0.0, -1000.0]])
    unsure = torch.tensor([[0.0, math.log(math.e**2 - 1)]])  # entropy of the first entry: 2
    logits = torch.cat([unsure, certain])[None]
    loss = block_loss(logits, torch.zeros(1, 2, dtype=torch.long), depth_decay=decay)
    assert float(loss) == pytest.approx(2 * share, rel=1e-4)


def test_what_has_no_reference_has_no_gradient() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    block_loss(logits, torch.tensor([[1, -1]]), depth_decay=4.0).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].abs().sum() > 0
    assert logits.grad[0, 1].abs().sum() == 0


def test_the_learning_rate_rises_and_falls_as_a_cosine() -> None:
    plan = TrainPlan(steps=1000, save_steps=(), learning_rate=2.0, warmup=0.1)
    curve = [learning_rate(plan, step) for step in range(1000)]
    assert curve[0] == pytest.approx(0.02)
    assert curve[49] == pytest.approx(1.0)
    assert curve[100] == pytest.approx(2.0)
    assert curve[550] == pytest.approx(2.0 * (0.01 + 0.99 / 2))
    assert curve[999] == pytest.approx(0.02, rel=1e-3)
    assert curve[:100] == sorted(curve[:100])
    assert curve[100:] == sorted(curve[100:], reverse=True)


# --- what a step sees ----------------------------------------------------------------------------------------


def places(recording: Recording) -> torch.Tensor:
    names = trained_vocabulary(recording)
    table = torch.full((recording.target.vocab_size,), -1)
    table[names] = torch.arange(len(names))
    return table


def test_the_vocabulary_is_that_of_the_completions() -> None:
    recording = tiny.recording()
    seen = {
        int(token)
        for item in recording.items
        for token in as_torch(recording.tensors(item).tokens)[item.prompt_len :]
    }
    assert trained_vocabulary(recording).tolist() == sorted(seen)


@pytest.mark.parametrize("step", range(5))
def test_anchors_lie_in_completions_and_references_end_where_they_do(step: int) -> None:
    recording = tiny.recording()
    batch = sample_batch(recording, recording.items, places(recording), PLAN, step=step)
    names = trained_vocabulary(recording)
    sequences = {low: (low, high) for low, high in batch.bounds}
    known = {item.length: item for item in recording.items}  # every length is another
    for i, (anchor, start) in enumerate(zip(batch.anchors.tolist(), batch.starts.tolist(), strict=True)):
        low, high = sequences[start]
        item = known[high - low + 1]  # the last position has no feature to be read
        tokens = as_torch(recording.tensors(item).tokens).tolist()
        assert item.prompt_len <= anchor <= item.length - 2
        assert int(batch.anchor_tokens[i]) == tokens[anchor]
        expected = [*tokens[anchor + 1 : anchor + 4], -1, -1, -1][:3]
        read = [int(names[r]) if r >= 0 else -1 for r in batch.references[i].tolist()]
        assert read == expected
        taps = as_torch(recording.tensors(item).taps)
        assert torch.equal(batch.features[low:high], taps[:, :-1].permute(1, 0, 2).flatten(1))
    assert len(batch.bounds) == 2
    assert batch.bounds[-1][1] == len(batch.features)


def test_anchors_of_a_sequence_differ_and_stand_in_order() -> None:
    recording = tiny.recording()
    batch = sample_batch(recording, recording.items[:1], places(recording), PLAN, step=0)
    for start in batch.starts.unique():
        anchors = batch.anchors[batch.starts == start].tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 8


def test_a_step_is_the_same_for_the_same_seed_alone() -> None:
    recording = tiny.recording()

    def anchors(step: int, **changes: Any) -> list[int]:
        plan = dataclasses.replace(PLAN, **changes)
        return sample_batch(recording, recording.items, places(recording), plan, step=step).anchors.tolist()

    assert anchors(1) == anchors(1)
    assert anchors(1) != anchors(2)
    assert anchors(1) != anchors(1, seed=4)


# --- what a run leaves ---------------------------------------------------------------------------------------


def test_training_lowers_the_loss() -> None:
    lines = [json.loads(line) for line in (trained() / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [50, 100]
    assert lines[1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[1]["learning_rate"] == pytest.approx(learning_rate(PLAN, 99))
    assert all(line["tokens_per_second"] > 0 for line in lines)


def test_a_run_is_a_folder_of_checkpoints_a_plan_and_a_log() -> None:
    assert sorted(path.name for path in trained().iterdir() if path.name != ".lock") == [
        "step_100",
        "step_40",
        "train.json",
        "train.jsonl",
    ]
    claim = json.loads((trained() / "train.json").read_text())
    assert claim["plan"]["seed"] == 3
    assert claim["recording"] == tiny.recording().digest


@pytest.mark.parametrize("step", [40, 100])
def test_a_checkpoint_is_a_trainers_own_file(step: int) -> None:
    path = trained() / f"step_{step}" / "checkpoint.pt"
    value = torch.load(path, weights_only=True)
    assert value.keys() == {"model_state_dict", "optimizer_state_dict", "step", "config"}
    assert value["step"] == step
    assert value["optimizer_state_dict"]["state"]
    assert value["config"]["draftgauge_wiring"]["taps"] == (1, 3, 5)
    opened = open_checkpoint(path.parent)
    assert (opened.step, opened.dtypes) == (step, {"F32": 25})
    assert wiring_of(opened) == drafter_wiring(tiny.recording(), PLAN)
    assert all("draftgauge_wiring" in where for where in wiring_of(opened).provenance.values())


def test_what_was_trained_can_be_measured_and_has_learned() -> None:
    early, late = (
        evaluate_checkpoint(
            trained() / f"step_{step}",
            tiny.recording().path,
            Options(dtype="float32"),
            root=tiny.workshop() / "training runs",
        )
        for step in (40, 100)
    )
    assert (early.name[:7], late.name[:8]) == ("step_40", "step_100")
    rates = [run.summary["per_depth"]["marginal"][0] for run in (early, late)]
    assert rates[0] < rates[1]
    assert rates[1] > 0.3


def test_a_drafter_starts_from_the_targets_last_layers(tmp_path: Path) -> None:
    """After one step of next to no learning rate the weights are still those it started from."""
    plan = dataclasses.replace(PLAN, steps=1, save_steps=(), learning_rate=1e-12, weight_decay=0.0)
    out = train(tiny.recording(), plan, out=tmp_path)
    state = torch.load(out / "checkpoint.pt", weights_only=True)["model_state_dict"]
    target = tiny.weights("targetA")
    for ours, theirs in (("layers.0", "model.layers.4"), ("layers.1", "model.layers.5")):
        for name in ("self_attn.q_proj", "self_attn.k_norm", "mlp.down_proj", "input_layernorm"):
            torch.testing.assert_close(state[f"{ours}.{name}.weight"], target[f"{theirs}.{name}.weight"])
    torch.testing.assert_close(state["norm.weight"], target["model.norm.weight"])
    assert 0.01 < float(state["fc.weight"].std()) < 0.03


def test_training_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, steps=1, save_steps=())
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    train(tiny.recording(), plan, out=tmp_path)
    assert torch.equal(torch.rand(4), expected)


def states(out: Path, step: int) -> dict[str, torch.Tensor]:
    value = torch.load(out / f"step_{step}" / "checkpoint.pt", weights_only=True)
    moments = {
        f"{i} {name}": tensor
        for i, entry in value["optimizer_state_dict"]["state"].items()
        for name, tensor in entry.items()
    }
    return {**value["model_state_dict"], **moments}


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    out = shutil.copytree(trained(), tmp_path / "copy")
    shutil.rmtree(out / "step_100")
    log = (out / "train.jsonl").read_text().splitlines(keepends=True)
    (out / "train.jsonl").write_text(
        log[0] + '{"step": 60, "loss": 1.0}\n' + log[1][:20]
    )  # killed while writing
    (out / ".partial-9-step_100").mkdir()
    train(tiny.recording(), PLAN, out=out)
    ours, theirs = states(out, 100), states(trained(), 100)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert probe_of(100, out).path.read_bytes() == probe_of(100).path.read_bytes()
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [50, 100]  # nothing twice, nothing half
    assert not list(out.glob(".partial-*"))


def test_a_complete_run_is_left_as_it_is(tmp_path: Path) -> None:
    out = shutil.copytree(trained(), tmp_path / "copy")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert train(tiny.recording(), PLAN, out=out) == out / "step_100"
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


# --- the probe -----------------------------------------------------------------------------------------------


def probe_of(step: int, out: Path | None = None) -> Probe:
    return read_probe((out or trained()) / f"step_{step}" / PROBE_FILE)


@pytest.mark.parametrize("step", [40, 100])
def test_every_save_has_a_probe_of_the_same_blocks(step: int) -> None:
    probe, item = probe_of(step), tiny.recording().items[0]
    assert (probe.step, probe.dtype, probe.depth) == (step, "float32", 3)
    tokens = as_torch(tiny.recording().tensors(item).tokens)
    anchors = as_torch(probe.tensors["anchors"]).tolist()
    assert anchors == sorted(set(anchors))
    assert len(anchors) == 6
    assert (anchors[0], anchors[-1]) == (item.prompt_len, item.length - 2)
    assert torch.equal(as_torch(probe.tensors["tokens"]), tokens[: anchors[-1] + 4])
    taps = as_torch(tiny.recording().tensors(item).taps)[:, : anchors[-1]]
    assert torch.equal(as_torch(probe.tensors["features"]), taps.permute(1, 0, 2).flatten(1))
    same = ("tokens", "features", "anchors", "vocabulary")
    other = probe_of(140 - step)
    assert all(probe.tensors[n].sha256() == other.tensors[n].sha256() for n in same)
    assert probe.tensors["top_log_probs"].sha256() != other.tensors["top_log_probs"].sha256()


def test_a_probe_holds_the_scores_that_the_loss_is_made_of() -> None:
    """Drafted again block by block with the saved weights, and scored with the rows of the trained tokens alone."""
    probe, checkpoint = probe_of(100), open_checkpoint(trained() / "step_100")
    drafter = open_drafter(checkpoint, wiring_of(checkpoint), recording=tiny.recording(), dtype="float32")
    names = trained_vocabulary(tiny.recording())
    assert torch.equal(as_torch(probe.tensors["vocabulary"]).long(), names)
    tokens = as_torch(probe.tensors["tokens"]).long()
    for i, anchor in enumerate(as_torch(probe.tensors["anchors"]).tolist()):
        at = torch.tensor([anchor])
        context = drafter.context(as_torch(probe.tensors["features"])[:anchor])
        hidden = drafter.draft(context, anchors=at, anchor_tokens=tokens[at])
        best = (hidden[0] @ drafter.ends.head[names].T).log_softmax(-1).topk(8)
        assert torch.equal(as_torch(probe.tensors["top_ids"])[i], names[best.indices].int())
        torch.testing.assert_close(as_torch(probe.tensors["top_log_probs"])[i], best.values)
        torch.testing.assert_close(as_torch(probe.tensors["final"])[i], hidden[0])


def test_what_is_computed_in_bfloat16_is_kept_in_it(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, steps=1, save_steps=(), autocast=True)
    train(tiny.recording(), plan, out=tmp_path)
    probe = probe_of(1, tmp_path)
    assert probe.dtype == "bfloat16"
    kept = {name: stored.dtype for name, stored in probe.tensors.items()}
    assert [kept[name] for name in ("context", "rows", "final")] == ["BF16"] * 3
    assert kept["features"] == "F32"  # the recording is float32: halved, they would not be what was fed


def test_a_save_on_the_way_does_not_change_what_is_trained(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, steps=4, save_steps=())
    train(tiny.recording(), plan, out=tmp_path / "quiet")
    train(tiny.recording(), dataclasses.replace(plan, save_steps=(1, 2, 3)), out=tmp_path / "saving")
    ours, theirs = states(tmp_path / "saving", 4), states(tmp_path / "quiet", 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("taps", "hidden_size", "num_layers", "block_size"), [(5, 5120, 8, 16), (6, 8192, 6, 16)]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_probe_stays_small(
    taps: int, hidden_size: int, num_layers: int, block_size: int, autocast: bool
) -> None:
    plan = TrainPlan(steps=1, save_steps=(), num_layers=num_layers, block_size=block_size, autocast=autocast)
    positions = probed_positions(plan, taps=taps, hidden_size=hidden_size)
    state = hidden_size * (2 if autocast else 4)
    features, context = positions * taps * hidden_size * 4, positions * state
    rows, final = (num_layers + 1) * 6 * block_size * state, 6 * (block_size - 1) * state
    assert positions >= 16
    assert features + context + rows + final < 30e6


def test_a_probe_is_cut_where_it_would_grow_large() -> None:
    """The rows of so many layers leave room for 21 positions: the prompt alone is longer."""
    recording = tiny.recording()
    item = recording.item("long")
    plan = dataclasses.replace(PLAN, num_layers=3901)
    assert probed_positions(plan, taps=3, hidden_size=64) == 21
    tokens, blocks = probe_blocks(recording, item, places(recording), plan)
    assert blocks.anchors.tolist() == [10, 12, 14, 16, 18, 21]
    assert blocks.features.shape == (21, 192)
    assert len(tokens) == 21 + 4


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 1e-4}, "learning_rate is 0.001, not 0.0001"),
        ({"seed": 4}, "seed is 3, not 4"),
        ({"steps": 200}, "steps is 100, not 200"),
        ({"block_size": 8}, "block_size is 4, not 8"),
    ],
    ids=str,
)
def test_another_plan_needs_another_folder(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(
        RunError, match=rf"holds another training run \(.*{words}.*; repeat its command, or choose"
    ):
        train(tiny.recording(), dataclasses.replace(PLAN, **changes), out=trained())


def test_another_recording_needs_another_folder(tmp_path: Path) -> None:
    other = record_target(
        tiny.workshop() / "target",
        tiny.prompt_set(["one"]),
        request=Request(taps=(1, 3, 5), max_new_tokens=8),
        root=tmp_path,
    )
    with pytest.raises(RunError, match="recording is"):
        train(other, PLAN, out=trained())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps 0: expected 1 or more"),
        ({"sequences": 0, "num_layers": -1}, "num_layers -1, sequences 0: expected 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate 0: expected more than 0"),
        ({"save_steps": (40, 101)}, r"--save-steps \[101\] lie outside of the steps 1 to 100"),
        ({"save_steps": (0,)}, r"--save-steps \[0\] lie outside"),
    ],
    ids=str,
)
def test_a_plan_that_trains_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask_token_id": 256}, InputError, "--mask-token-id 256 is outside of the target's 256 tokens"),
        ({"mask_token_id": -1}, InputError, "--mask-token-id -1 is outside"),
        ({"num_layers": 7}, InputError, "7 draft layers cannot start from the 6 layers of the target"),
        ({"block_size": 1}, WiringError, "block_size 1 drafts nothing"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_the_target_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        train(tiny.recording(), dataclasses.replace(PLAN, **changes), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def own_target(tmp_path: Path) -> tuple[Recording, Path]:
    return tiny.own_target(tmp_path)


def test_a_target_that_does_not_say_its_shape_is_refused(own_target: tuple[Recording, Path]) -> None:
    recording, target = own_target
    config = json.loads((target / "config.json").read_text())
    del config["rope_theta"], config["num_key_value_heads"]
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"config.json does not say num_key_value_heads, rope_theta; add"):
        drafter_wiring(recording, PLAN)
    (target / "config.json").write_text("{")
    with pytest.raises(TargetError, match="not readable"):
        drafter_wiring(recording, PLAN)


def test_a_rotary_base_is_read_where_transformers_5_keeps_it(own_target: tuple[Recording, Path]) -> None:
    recording, target = own_target
    config = json.loads((target / "config.json").read_text())
    del config["rope_theta"]
    (target / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 5e5}}))
    assert drafter_wiring(recording, PLAN).rope_theta == 5e5


def test_a_target_that_changed_since_is_refused(own_target: tuple[Recording, Path], tmp_path: Path) -> None:
    recording, target = own_target
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")  # its last tensor, the final norm
    with pytest.raises(RecordingError, match="changed since"):
        train(recording, PLAN, out=tmp_path / "out")


def test_a_recording_without_anchors_is_refused(tmp_path: Path) -> None:
    recording = tiny.copied_recording(tmp_path / "copy")
    manifest = json.loads((recording.path / "recording.json").read_text())
    for item in manifest["items"]:
        item["prompt_len"] = item["length"] - 1
    (recording.path / "recording.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordingError, match="no completion of two tokens or more"):
        train(open_recording(recording.path), PLAN, out=tmp_path / "out")
