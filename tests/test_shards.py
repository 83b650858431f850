"""A measurement in shards: the same bytes whoever measures them, in one process or several, at once or later."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftgauge.cli.options import print_run
from draftgauge.errors import CheckpointError, IncompleteError, InputError, RecordingError, UnfinishedError
from draftgauge.evaluate import Options, evaluate_checkpoint, evaluate_share
from draftgauge.runs import BLOCKS, Run, list_runs
from draftgauge.shards import Shard, Task, measure_shard, shards_of
from draftgauge.stated import Stated
from draftgauge.workers import Workers
from tests import batch, tiny

DRAFTER = tiny.workshop() / "drafter"
EVERY = {anchors: Options(anchors=anchors) for anchors in ("all", "walk")}


@cache
def alone(anchors: str = "all") -> Run:
    """The run that one process makes in one go."""
    root = tiny.workshop() / "alone"
    return evaluate_checkpoint(DRAFTER, tiny.wide_recording().path, EVERY[anchors], root=root)


def same(run: Run, other: Run) -> bool:
    """Whether two runs hold the same bytes of blocks and the same numbers."""
    blocks = [(r.path / BLOCKS).read_bytes() for r in (run, other)]
    return blocks[0] == blocks[1] and run.summary == other.summary and run.plan == other.plan


def left(root: Path) -> list[str]:
    return [path.name for path in root.glob(".*")]


def task(run: Run, **changed: Any) -> Task:
    return Task(DRAFTER, changed.get("recording", tiny.wide_recording().path), Stated(), None, run.plan)


def test_a_shard_is_worth_a_file_and_no_prompt_is_forgotten() -> None:
    items, plan = tiny.wide_recording().items, alone().plan
    shards = shards_of(items, plan)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert [prompt for shard in shards for prompt in shard.prompts] == [item.id for item in items]
    anchors = {item.id: item.completion_len for item in items}
    sizes = [sum(anchors[prompt] for prompt in shard.prompts) for shard in shards]
    assert len(shards) > 3
    assert all(256 <= size < 256 + tiny.NEW_TOKENS for size in sizes[:-1])


def test_walkers_are_divided_by_eights_wherever_they_stop() -> None:
    shards = shards_of(tiny.wide_recording().items, alone("walk").plan)
    assert [len(shard.prompts) for shard in shards] == [8] * 6
    assert shards_of((), alone().plan) == []


@pytest.mark.parametrize("anchors", ["all", "walk"])
def test_processes_give_the_bytes_of_one(anchors: str, tmp_path: Path) -> None:
    how: Any = {"root": tmp_path, "workers": Workers(2)}
    run = evaluate_checkpoint(DRAFTER, tiny.wide_recording().path, EVERY[anchors], **how)
    assert same(run, alone(anchors))
    assert left(tmp_path) == []


@pytest.mark.parametrize("anchors", ["all", "walk"])
def test_shares_give_the_bytes_of_one(anchors: str, tmp_path: Path) -> None:
    """In any order; who comes last puts the run together, and who comes late finds it."""
    found = [
        evaluate_share(DRAFTER, tiny.wide_recording().path, EVERY[anchors], share=(number, 3), root=tmp_path)
        for number in (2, 3, 1, 2)
    ]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2] == found[3]
    assert same(found[2], alone(anchors))
    assert left(tmp_path) == []
    assert len(list_runs(tmp_path)) == 1


@pytest.mark.skipif(bool(batch.missing()), reason=f"a batch system needs {', '.join(batch.missing())}")
def test_an_array_of_a_batch_system_gives_the_bytes_of_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "out").mkdir()
    words = map(str, tiny.command("eval", DRAFTER, "--recording", tiny.wide_recording().path))
    with batch.one_node(folder) as environment:
        array = ("--array=1-3", "--wait", f"--output={folder}/out/%a.txt", f"--chdir={folder}")
        wrapped = f"{shlex.join(words)} --shard $SLURM_ARRAY_TASK_ID/3"
        batch.told(["sbatch", *array, "--wrap", wrapped], environment)
    said = {path.stem: path.read_text() for path in (folder / "out").iterdir()}
    assert said.keys() == {"1", "2", "3"}
    (run,) = list_runs(folder / "runs")
    assert same(run, alone()), said
    assert left(folder / "runs") == []
    assert sum(f"kept in {Path('runs') / run.name}" in text for text in said.values()) >= 1


def test_a_dtype_that_every_machine_chooses_for_itself_is_no_share(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="state --dtype float32 or bfloat16, not auto"):
        evaluate_share(DRAFTER, tiny.recording().path, Options(dtype="auto"), share=(1, 2), root=tmp_path)


def test_a_dtype_that_was_chosen_by_measurement_is_the_plans_and_its_rates_are_kept(tmp_path: Path) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in tiny.weights().items()}
    path = tiny.trainer_pt(tmp_path / "narrow.pt", narrow, config=tiny.drafter_config())
    how: Any = {"root": tmp_path / "runs"}
    run = evaluate_checkpoint(path, tiny.recording().path, Options(dtype="auto", num_prompts=1), **how)
    rates = run.manifest["dtype_rates"]
    assert run.plan.dtype == max(rates, key=rates.__getitem__)
    stated = evaluate_checkpoint(
        path, tiny.recording().path, Options(dtype=run.plan.dtype, num_prompts=1), **how
    )
    assert stated == run
    assert "dtype_rates" not in alone().manifest


@pytest.mark.parametrize("share", [(0, 3), (4, 3), (1, 0)])
def test_a_share_that_does_not_exist_is_refused(share: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; shares are counted from 1"):
        evaluate_share(DRAFTER, tiny.wide_recording().path, share=share, root=tmp_path)


def test_what_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked = []

    def stopping(items: Iterable[Any], *, label: str, **_: Any) -> Iterator[Any]:
        for count, item in enumerate(items):
            if label == "evaluate":
                asked.append(item)
                if count == 20:
                    raise KeyboardInterrupt
            yield item

    def counting(items: Iterable[Any], *, label: str, **_: Any) -> Iterator[Any]:
        for item in items:
            if label == "evaluate":
                asked.append(item)
            yield item

    recording = tiny.wide_recording()
    with pytest.raises(KeyboardInterrupt):
        evaluate_checkpoint(DRAFTER, recording.path, root=tmp_path, progress=stopping)
    assert len(left(tmp_path)) == 1
    assert list_runs(tmp_path) == []
    before = len(asked)
    asked.clear()
    run = evaluate_checkpoint(DRAFTER, recording.path, root=tmp_path, progress=counting)
    assert before == 21
    assert 0 < len(asked) < len(recording.items), "the shards that were done were not measured again"
    assert same(run, alone())
    assert left(tmp_path) == []


def test_a_driver_that_was_killed_with_its_workers_goes_on(tmp_path: Path) -> None:
    command = tiny.command(
        "eval", DRAFTER, "--recording", tiny.wide_recording().path, "--workers", "2", "--json"
    )
    driver = subprocess.Popen(
        command, cwd=tmp_path, env=tiny.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/.unfinished-*/*.parquet")) and driver.poll() is None:
        assert time.monotonic() < deadline, "no shard was measured"
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    again = tiny.draftgauge(*command[3:], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert same(run, alone())
    assert left(tmp_path / "runs") == []


#: Python runs a module of this name when it starts: here, one that kills the process which opens a file of a name.
KILLER = """
import os, signal, sys
def look(event, arguments):
    if event == "open" and str(arguments[0]).endswith(os.environ["DEADLY"]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(look)
"""


@pytest.mark.parametrize("name", [None, "mine"])
def test_prompts_that_workers_die_of_are_left_out_and_measured_by_the_next_command(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = tiny.wide_recording()
    deadly = recording.item("p20")
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    how: Any = {"root": tmp_path / "runs", "name": name, "workers": Workers(2)}
    with monkeypatch.context() as context:
        context.setenv("PYTHONPATH", str(tmp_path))
        context.setenv("DEADLY", deadly.file)
        run = evaluate_checkpoint(DRAFTER, recording.path, **how)
    (shard,) = (s for s in shards_of(recording.items, alone().plan) if deadly.id in s.prompts)
    others = tuple(item.id for item in recording.items if item.id not in shard.prompts)
    assert run.manifest["status"] == "incomplete"
    assert run.manifest["lost"].keys() == set(shard.prompts)
    assert run.plan.prompts == tuple(run.summary["prompts"]) == others
    assert {prompt: run.summary["prompts"][prompt] for prompt in others} == {
        prompt: alone().summary["prompts"][prompt] for prompt in others
    }
    (caveat,) = (c for c in run.summary["caveats"] if c["slug"] == "prompts-lost")
    assert f"{len(shard.prompts)} prompt(s) were lost with their workers" in caveat["text"]
    assert run.name == ("mine-incomplete" if name else f"drafter-{run.plan.digest[:8]}")
    with pytest.raises(IncompleteError, match=r"prompt\(s\) were lost with their workers"):
        print_run(run, gates=(), beside=None, as_json=True)

    again = evaluate_checkpoint(DRAFTER, recording.path, **how)
    assert again.manifest["status"] == "complete"
    assert same(again, alone())
    assert left(tmp_path / "runs") == []


def test_where_every_prompt_is_lost_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = tiny.wide_recording()
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DEADLY", ".safetensors")
    how: Any = {"root": tmp_path / "runs", "workers": Workers(2)}
    with pytest.raises(UnfinishedError, match="every prompt was lost with its workers: ProcessExpired"):
        evaluate_checkpoint(DRAFTER, recording.path, Options(num_prompts=2), **how)
    assert list((tmp_path / "runs").iterdir()) == []


def test_threads_do_not_change_a_bit() -> None:
    """A product over many features: without the library's strict mode its last bits depend on the threads."""
    code = (
        "import sys, torch, hashlib, draftgauge.drafters\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "g = torch.Generator().manual_seed(0)\n"
        "a, b = torch.randn(97, 2880, generator=g), torch.randn(576, 2880, generator=g)\n"
        "print(hashlib.sha256(torch.nn.functional.linear(a, b).numpy().tobytes()).hexdigest())\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_CBWR")}
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(threads)], env=env, check=True, capture_output=True
        ).stdout
        for threads in (1, 2)
    }
    assert len(digests) == 1


def test_a_worker_measures_what_was_planned_and_nothing_else(tmp_path: Path) -> None:
    run = alone()
    shard = Shard(0, run.plan.prompts[:1])
    assert measure_shard(task(run), shard)
    state = tiny.weights()
    state["fc.weight"][0, 0] += 1
    other = tiny.trainer_pt(tmp_path / "other.pt", state, config=tiny.drafter_config())
    wrong = Task(other, tiny.wide_recording().path, Stated(), None, run.plan)
    with pytest.raises(CheckpointError, match="is not the checkpoint that was planned with"):
        measure_shard(wrong, shard)
    with pytest.raises(RecordingError, match="is not the recording that was planned with"):
        measure_shard(task(run, recording=tiny.recording().path), shard)
