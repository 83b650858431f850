"""What is moved of a checkpoint: as much as an evaluation needs, and nothing that would be read otherwise there."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.checkpoint import digest, open_checkpoint
from draftgauge.errors import CheckpointError, FleetError, UnfinishedError
from draftgauge.fleet.cargo import describe
from draftgauge.fleet.reach import Reach, reaching
from draftgauge.fleet.stage import plan_staging, stage
from draftgauge.inspection import inspect_checkpoint
from draftgauge.runs import ELSEWHERE, changed_files, open_run
from draftgauge.stated import Stated
from draftgauge.tensorfile import read_safetensors
from tests import tiny, transports
from tests.transports import moved


@pytest.fixture(scope="module")
def reach() -> Iterator[Reach]:
    with reaching(transports.fleet()) as opened:
        yield opened


def move(reach: Reach, source: Path, target: Path, *, place: str = "inside", **how: Any) -> Any:
    cargo = describe(reach, reach.fleet.spot(f"{place}:{source}"), **how)
    stage(reach, plan_staging(reach, cargo, reach.fleet.spot(str(target))), moved=moved)
    return cargo


def checkpoint(folder: Path, **beside: Any) -> Path:
    path = folder / "step_40" / "checkpoint.pt"
    said = {"config": tiny.drafter_config(), "step": 4000, "args": {"lr": 0.1}, **beside}
    return tiny.trainer_pt(path, **said)


def test_a_checkpoint_becomes_a_safetensors_file_that_says_the_same(reach: Reach, tmp_path: Path) -> None:
    source, target = checkpoint(tmp_path), tmp_path / "there" / "slim.safetensors"
    cargo = move(reach, source, target)
    before, after = open_checkpoint(source), open_checkpoint(target)
    assert digest(after) == digest(before)
    assert (
        (after.step, after.step_source) == (before.step, before.step_source) == (4000, "checkpoint.pt: step")
    )
    assert (after.config, after.config_source) == (before.config, before.config_source)
    assert after.extras == before.extras
    assert after.key_map == before.key_map
    assert cargo.step == 4000
    assert cargo.name == "checkpoint.safetensors"
    assert target.stat().st_size < source.stat().st_size
    before_said, after_said = (inspect_checkpoint(path, Stated()) for path in (source, target))
    for key in ("wiring", "key_map", "problems"):
        assert after_said[key] == before_said[key]


def test_the_optimizer_never_moves(reach: Reach, tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(500_000)}}}
    source = checkpoint(tmp_path, optimizer_state_dict=moments)
    cargo = describe(reach, reach.fleet.spot(f"inside:{source}"))
    assert cargo.nbytes < 500_000 < source.stat().st_size
    assert "optimizer_state_dict" in open_checkpoint(source).extras


def test_unused_tensors_move_so_that_the_report_names_them(reach: Reach, tmp_path: Path) -> None:
    state = tiny.weights() | {"verifier_norm.weight": torch.ones(64)}
    source = tiny.trainer_pt(tmp_path / "c.pt", state, config=tiny.drafter_config())
    move(reach, source, tmp_path / "slim.safetensors")
    unused = [
        use.stored for use in open_checkpoint(tmp_path / "slim.safetensors").key_map if use.status == "unused"
    ]
    assert unused == ["verifier_norm.weight"]


def test_tensors_that_share_their_bytes_move_as_two(reach: Reach, tmp_path: Path) -> None:
    state = tiny.weights()
    state["lm_head.weight"] = state["embed_tokens.weight"] = torch.randn(64, 16)
    state["half"] = state["lm_head.weight"][32:]
    source = tiny.trainer_pt(tmp_path / "c.pt", state, config=tiny.drafter_config())
    move(reach, source, tmp_path / "slim.safetensors")
    tensors = read_safetensors(tmp_path / "slim.safetensors")[0]
    assert tensors["lm_head.weight"].sha256() == tensors["embed_tokens.weight"].sha256()
    assert tensors["half"].to_float32().tolist() == state["half"].tolist()


def test_whole_moves_every_byte(reach: Reach, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    move(reach, source, tmp_path / "copy.pt", whole=True)
    assert (tmp_path / "copy.pt").read_bytes() == source.read_bytes()


def test_without_python_the_whole_file_moves(reach: Reach, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    cargo = move(reach, source, tmp_path / "copy.pt", place="bare")
    assert "no python3" in cargo.what
    assert (tmp_path / "copy.pt").read_bytes() == source.read_bytes()


def test_a_trainers_folder_keeps_its_name_and_what_is_read_beside(reach: Reach, tmp_path: Path) -> None:
    source = checkpoint(tmp_path).parent
    (source / "config.json").write_text(json.dumps(tiny.drafter_config()))
    (source / "probe.safetensors").write_bytes(b"probe")
    (source / "optimizer.pt").write_bytes(b"x" * 1000)
    (source / "log.txt").write_text("much")
    cargo = move(reach, source, tmp_path / "there")
    assert cargo.name == "step_40"
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == [
        "config.json",
        "model.safetensors",
        "probe.safetensors",
    ]
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "there")
    assert (digest(after), after.config, after.step) == (digest(before), before.config, before.step)


def test_a_drafters_folder_moves_what_is_read(reach: Reach, tmp_path: Path) -> None:
    source = tiny.drafter_dir(tmp_path / "drafter")
    (source / "README.md").write_text("words")
    (source / "optimizer.pt").write_bytes(b"x" * 1000)
    move(reach, source, tmp_path / "there")
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["config.json", "model.safetensors"]
    assert digest(open_checkpoint(tmp_path / "there")) == digest(open_checkpoint(source))


def test_a_recording_moves_whole(reach: Reach, tmp_path: Path) -> None:
    source = tiny.recording().path
    move(reach, source, tmp_path / "there")
    assert {p.name: p.read_bytes() for p in source.iterdir() if p.name != ".lock"} == {
        p.name: p.read_bytes() for p in (tmp_path / "there").iterdir() if p.name != ".lock"
    }


def test_a_run_moves_without_the_checkpoint_that_it_keeps(reach: Reach, tmp_path: Path) -> None:
    done = tiny.draftgauge(
        *("eval", tiny.workshop() / "drafter", "--recording", tiny.recording().path, "--budgets", "4"),
        *("--runs", tmp_path / "runs", "--name", "one", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode in (0, 4), done.stderr
    move(reach, tmp_path / "runs" / "one", tmp_path / "here")
    run = open_run(tmp_path / "here")
    assert run.summary == open_run(tmp_path / "runs" / "one").summary
    assert not (tmp_path / "here" / "checkpoint").exists()
    assert (tmp_path / "here" / ELSEWHERE).read_text() == f"inside:{tmp_path}/runs/one/checkpoint\n"
    assert changed_files(run) == []


def test_several_sets_of_weights_are_asked_about(reach: Reach, tmp_path: Path) -> None:
    source = checkpoint(tmp_path, ema_state_dict={k: v + 1 for k, v in tiny.weights().items()})
    with pytest.raises(CheckpointError, match=r"holds 2 sets.*--state-dict") as raised:
        describe(reach, reach.fleet.spot(f"inside:{source}"))
    assert f"inside:{source}" in str(raised.value), "it speaks of the source, not of a stand-in"
    move(reach, source, tmp_path / "ema.safetensors", state_dict="ema_state_dict")
    assert digest(open_checkpoint(tmp_path / "ema.safetensors")) == digest(
        open_checkpoint(source, state_dict="ema_state_dict")
    )


def test_a_damaged_record_is_found_at_the_source(reach: Reach, tmp_path: Path) -> None:
    """A flipped byte loads silently in torch."""
    source = checkpoint(tmp_path)
    tensor = open_checkpoint(source).tensors["fc.weight"]
    data = bytearray(source.read_bytes())
    data[tensor.offset + 5] ^= 1
    source.write_bytes(data)
    for how in ({}, {"whole": True}):
        with pytest.raises(FleetError, match="is damaged"):
            move(reach, source, tmp_path / "target.safetensors", **how)
    assert not (tmp_path / "target.safetensors").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "damage", [cut, zeros, lambda path: path.write_bytes(b"")], ids=["cut", "zeros", "empty"]
)
@pytest.mark.parametrize("how", [{}, {"whole": True}], ids=["slim", "whole"])
def test_a_checkpoint_that_is_still_written_is_waited_for(
    damage: Callable[[Path], None], how: dict[str, Any], reach: Reach, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path)
    damage(source)
    if how and damage is not cut:
        return  # no zip at all: with --whole it moves as what it is
    with pytest.raises(UnfinishedError, match="still being written"):
        describe(reach, reach.fleet.spot(f"inside:{source}"), **how)


def test_a_safetensors_file_that_is_still_written_is_waited_for(reach: Reach, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    shutil.copy(tiny.workshop() / "drafter" / "model.safetensors", source)
    cut(source)
    with pytest.raises((UnfinishedError, CheckpointError), match=r"truncated|still being written"):
        describe(reach, reach.fleet.spot(f"inside:{source}"))


def test_a_view_that_is_not_in_order_is_refused_or_moved_whole(reach: Reach, tmp_path: Path) -> None:
    state = tiny.weights() | {"extra.weight": torch.randn(4, 6).t()}
    source = tiny.trainer_pt(tmp_path / "c.pt", state, config=tiny.drafter_config())
    with pytest.raises(CheckpointError, match="--whole"):
        describe(reach, reach.fleet.spot(f"inside:{source}"))
    move(reach, source, tmp_path / "copy.pt", whole=True)


def test_many_records_are_described_with_few_bytes(reach: Reach, tmp_path: Path) -> None:
    """A directory longer than what is fetched at first."""
    state = tiny.weights() | {f"extra.{n}.{'long' * 40}": torch.zeros(1) for n in range(6000)}
    source = tiny.trainer_pt(tmp_path / "c.pt", state, config=tiny.drafter_config())
    cargo = describe(reach, reach.fleet.spot(f"inside:{source}"))
    assert cargo.nbytes < source.stat().st_size


def test_the_fingerprint_follows_the_source(reach: Reach, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    spot = reach.fleet.spot(f"inside:{source}")
    first = describe(reach, spot).fingerprint
    assert describe(reach, spot).fingerprint == first
    assert describe(reach, spot, whole=True).fingerprint != first
    source.write_bytes(source.read_bytes())
    assert describe(reach, spot).fingerprint != first


def test_nothing_of_a_hostile_pickle_runs(reach: Reach, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "pwned"), "w"))

    source = checkpoint(tmp_path, extra=Hostile())
    move(reach, source, tmp_path / "slim.safetensors")
    assert not (tmp_path / "pwned").exists()
    assert open_checkpoint(tmp_path / "slim.safetensors").opaque_classes
