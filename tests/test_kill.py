"""Killed at any moment: nothing half is listed, the same command completes, and the results are the same."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftgauge.record import Request, record_target
from draftgauge.recording import list_recordings
from draftgauge.runs import list_runs
from tests import tiny

Arguments = tuple[object, ...]


def killed(arguments: Arguments, *, cwd: Path, when: Callable[[], bool]) -> None:
    """Runs the command until `when` says so, and then kills it; fails if it ends before."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(tiny.command(*arguments), cwd=cwd, env=tiny.environment(), **quiet)
    while process.poll() is None and not when():
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the command ended before the moment came"


def completed(arguments: Arguments, *, cwd: Path) -> str:
    done = tiny.draftgauge(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed(command: str, cwd: Path) -> list[object]:
    found: list[object] = json.loads(completed((command, "--json"), cwd=cwd))
    return found


def at_least(count: int, pattern: str, folder: Path) -> Callable[[], bool]:
    return lambda: len(list(folder.glob(pattern))) >= count


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed recording, its prompts generated one by one."""
    root = tmp_path_factory.mktemp("undisturbed")
    request = Request(taps=(1, 3), max_new_tokens=tiny.NEW_TOKENS, batch_size=1)
    record_target(tiny.workshop() / "target", tiny.prompt_set(), request=request, root=root)
    return root


def test_recording(recordings: Path, tmp_path: Path) -> None:
    tiny.prompts_file(tmp_path / "tiny.jsonl")
    asked = (
        "--prompts",
        "tiny.jsonl",
        "--taps",
        "1,3",
        "--max-new-tokens",
        tiny.NEW_TOKENS,
        "--batch-size",
        1,
    )
    arguments = ("record", "--target", tiny.workshop() / "target", *asked)
    root = tmp_path / "recordings"
    moments = [
        at_least(1, "*/.lock", root),  # begun, nothing written
        at_least(2, "*/0000?.safetensors", root),  # between two items
        lambda: at_least(1, "*/.partial-*", root)() or at_least(5, "*/0000?.safetensors", root)(),
    ]
    for when in moments:
        killed(arguments, cwd=tmp_path, when=when)
        assert listed("recordings", tmp_path) == []
        assert list_recordings(root) == []
        for left in root.glob("*/.partial-*"):  # or the next moment would be now
            left.unlink()
    completed(arguments, cwd=tmp_path)
    (ours,), (theirs,) = list_recordings(root), list_recordings(recordings)
    # Categories are not in the file, and with them the prompts are other ones; what was recorded is the same.
    for mine, other in zip(ours.items, theirs.items, strict=True):
        assert (mine.id, mine.length, mine.agreed) == (other.id, other.length, other.agreed)
        for name in ("tokens", "taps", "final"):
            pair = [bytes(getattr(r.tensors(i), name).mapped()) for r, i in ((ours, mine), (theirs, other))]
            assert pair[0] == pair[1]
    assert not list(root.glob("*/.partial-*"))


def test_evaluating(tmp_path: Path) -> None:
    asked = ("--recording", tiny.recording().path, "--budgets", "4,256,1024")
    arguments = ("eval", tiny.workshop() / "drafter", *asked, "--json")
    root = tmp_path / "runs"
    moments = [
        at_least(1, ".partial-*", root),  # begun
        at_least(1, ".partial-*/blocks.parquet", root),  # while blocks are written
    ]
    for when in moments:
        killed(arguments, cwd=tmp_path, when=when)
        assert listed("runs", tmp_path) == []
        assert list_runs(root) == []
        for left in list(root.glob(".partial-*")):
            left.rename(tmp_path / f"left{left.name}")
    for left in list(tmp_path.glob("left*")):
        left.rename(root / left.name.removeprefix("left"))
    first = json.loads(completed(arguments, cwd=tmp_path))
    (run,) = list_runs(root)
    assert run.path.name == Path(first["path"]).name
    undisturbed = json.loads(completed((*arguments, "--runs", "undisturbed"), cwd=tmp_path))
    assert first["summary"] == undisturbed["summary"]
    ours, theirs = (r.blocks() for r in (run, list_runs(tmp_path / "undisturbed")[0]))
    assert ours.equals(theirs)


def test_training(tmp_path: Path) -> None:
    saves = ("--steps", 150, "--save-steps", "50,100", "--mask-token-id", 255, "--block-size", 4)
    arguments = ("train", "--recording", tiny.recording().path, *saves)
    out = tmp_path / "training"

    def logged() -> bool:
        log = out / "train.jsonl"
        return log.exists() and '"step": 100' in log.read_text()

    moments = [
        at_least(1, "train.json", out),  # begun
        at_least(1, "step_50", out),  # just saved
        logged,  # about to save again
    ]
    for when in moments:
        killed((*arguments, "--out", out), cwd=tmp_path, when=when)
        assert not (out / "step_150").exists()
    completed((*arguments, "--out", out), cwd=tmp_path)
    completed((*arguments, "--out", "undisturbed"), cwd=tmp_path)
    for step in (50, 100, 150):
        ours, theirs = (
            torch.load(folder / f"step_{step}" / "checkpoint.pt", weights_only=True)
            for folder in (out, tmp_path / "undisturbed")
        )
        assert ours["step"] == theirs["step"] == step
        for name, tensor in theirs["model_state_dict"].items():
            assert torch.equal(ours["model_state_dict"][name], tensor), f"step {step}: {name}"
        for i, moments_of in theirs["optimizer_state_dict"]["state"].items():
            for name, tensor in moments_of.items():
                assert torch.equal(ours["optimizer_state_dict"]["state"][i][name], tensor)
    steps = [json.loads(line)["step"] for line in (out / "train.jsonl").read_text().splitlines()]
    assert steps == [50, 100, 150]
    assert not list(out.glob(".partial-*"))
