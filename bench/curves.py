"""What a unit of work costs at every size, on tiny random models: prompts, runs in a folder, tokens of context."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import Record, found, python_seconds, seconds_of

PROMPTS = (1, 10, 100, 1000)
RUNS = (10, 100, 1000)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Anchors of a long sequence that are measured.
ANCHORS = 64
_COMPLETION = 24


def bench_curves(
    *, prompts: Sequence[int] = PROMPTS, runs: Sequence[int] = RUNS, lengths: Sequence[int] = LENGTHS
) -> Iterator[Record]:
    """All curves; the sizes of each ascend."""
    with tempfile.TemporaryDirectory() as folder:
        yield from over_prompts(Path(folder, "prompts"), prompts)
        yield over_runs(Path(folder, "runs"), runs)
        yield from over_lengths(Path(folder, "lengths"), lengths)


def over_prompts(folder: Path, sizes: Sequence[int]) -> Iterator[Record]:
    """Recording and evaluating so many prompts, each with a completion of 24 tokens that it brings."""
    from draftgauge.evaluate import evaluate_checkpoint
    from draftgauge.record import Request, record_target
    from tests import tiny

    target, drafter = tiny.target_dir(folder / "target"), tiny.drafter_dir(folder / "drafter")
    recording_s, evaluating_s = {}, {}
    for size in (1, *sizes):  # the first time of all is what libraries load and compile
        made = folder / f"{time.monotonic_ns()}"
        started = time.perf_counter()
        recording = record_target(target, _prompts(size), request=Request(taps=(1, 3)), root=made)
        recording_s[size] = (time.perf_counter() - started) / size
        evaluating_s[size] = (
            seconds_of(
                lambda at=recording.path, root=made: evaluate_checkpoint(drafter, at, root=root / "runs")
            )
            / size
        )
    yield _growth("curve-prompts", {size: evaluating_s[size] for size in sizes})
    yield _growth("curve-record", {size: recording_s[size] for size in sizes})


def _prompts(count: int, *, length: int = 8, completion: int = _COMPLETION) -> Any:
    """So many prompts of random tokens, with completions, the same every time."""
    from draftgauge.prompts import Prompt, PromptSet

    drawn = np.random.default_rng(0).integers(1, 250, (count, length + completion)).tolist()
    return PromptSet(
        "random",
        tuple(
            Prompt(f"p{i}", prompt_ids=tuple(row[:length]), completion_ids=tuple(row[length:]))
            for i, row in enumerate(drawn)
        ),
    )


def over_runs(folder: Path, sizes: Sequence[int]) -> Record:
    """Listing so many runs in a folder: copies of a tiny one."""
    from draftgauge.evaluate import Options, evaluate_checkpoint
    from tests import tiny

    drafter = tiny.drafter_dir(folder / "drafter")
    options = Options(num_prompts=1)
    run = evaluate_checkpoint(drafter, tiny.recording().path, options, root=folder / "one")
    seconds = {}
    for size in sizes:
        root = folder / f"{size}"
        for i in range(size):
            shutil.copytree(run.path, root / f"run-{i:04d}")
        seconds[size] = python_seconds("-m", "draftgauge", "runs", "--json", "--runs", root, rounds=3) / size
        shutil.rmtree(root)
    return _growth("curve-runs", seconds)


def over_lengths(folder: Path, sizes: Sequence[int]) -> Iterator[Record]:
    """Measuring 64 anchors at the end of contexts of so many tokens."""
    from draftgauge.acceptance import Policy
    from draftgauge.measure import DEFAULT_POLICIES, measure
    from draftgauge.pairing import open_drafter, open_pair
    from draftgauge.record import Request, record_target
    from draftgauge.stated import Stated
    from tests import tiny

    most = {"max_position_embeddings": 2 * sizes[-1]}
    target = tiny.target_dir(folder / "target", **most)
    drafter_path = tiny.drafter_dir(folder / "drafter", **most)
    seconds: dict[str, dict[int, float]] = {"all": {}, "walk": {}}
    for size in sizes:
        prompts = _prompts(1, length=size - ANCHORS - 1, completion=ANCHORS + 1)
        recording = record_target(target, prompts, request=Request(taps=(1, 3)), root=folder / "recordings")
        pair = open_pair(drafter_path, recording.path, stated=Stated())
        drafter = open_drafter(pair.checkpoint, pair.wiring, recording=recording, dtype="float32")
        for anchors, policies in (("all", DEFAULT_POLICIES), ("walk", (Policy("chain"),))):
            work = functools.partial(
                measure, drafter, recording, items=recording.items, policies=policies, anchors=anchors
            )
            ((_, drafted),) = work()
            took = min(seconds_of(lambda work=work: list(work())) for _ in range(3))
            seconds[anchors][size] = took / len(drafted.anchors)
    for anchors, found_s in seconds.items():
        yield _straight(f"curve-length-{anchors}", found_s)


def _growth(name: str, seconds: Mapping[int, float]) -> Record:
    """The cost of a unit at the largest size against that at the cheapest: against the smallest it is lower."""
    smallest, largest = min(seconds), max(seconds)
    return found(
        name,
        seconds[largest] / min(seconds.values()),
        seconds_per_unit={str(size): value for size, value in seconds.items()},
        against_smallest=seconds[largest] / seconds[smallest],
    )


def _straight(name: str, seconds: Mapping[int, float]) -> Record:
    """How much more the last growth of the length costs than the length grew; fixed costs make it less than 1."""
    *_, before, largest = sorted(seconds)
    return found(
        name,
        (seconds[largest] / seconds[before]) / (largest / before),
        seconds_per_unit={str(size): value for size, value in seconds.items()},
        against_smallest=seconds[largest] / seconds[min(seconds)],
    )
