"""What the benches measure: every ratio with its rival or limit, and the record that a bench makes of one.

Knows nothing of how anything is measured, and nothing of torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ratio:
    """A ratio that a bench measures: of `what`, `against` a rival or a limit of the same run.

    `better` says which way is good; `aim` is what it should reach, where that is stated.
    """

    name: str
    what: str
    against: str
    better: Literal["higher", "lower"]
    aim: float | None = None


@dataclass(frozen=True)
class Record:
    """A ratio's value in one run, and the numbers that it was made of."""

    ratio: Ratio
    value: float
    raw: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """A record as it stands in the history: readable without this table."""
        said = self.ratio
        return {
            "name": said.name,
            "value": self.value,
            "against": said.against,
            "aim": said.aim,
            "better": said.better,
            "raw": dict(self.raw),
        }


def _true_scale(dtype: str, anchors: str) -> tuple[Ratio, Ratio]:
    what = f"a drafter of 1.7 billion parameters, {dtype}, --anchors {anchors}"
    return (
        Ratio(
            f"true-scale-memory-{dtype}-{anchors}",
            f"peak memory of evaluating {what}",
            "the bytes of drafter and head in that dtype",
            "lower",
        ),
        Ratio(
            f"true-scale-time-{dtype}-{anchors}",
            f"seconds a block, start and opening included: {what}",
            "the machine's best matrix product at these shapes",
            "lower",
        ),
    )


RATIOS: Mapping[str, Ratio] = {
    ratio.name: ratio
    for ratio in (
        Ratio(
            "replay",
            "evaluating the demo's checkpoint: all anchors, chain and DDTree 4 to 64",
            "decoding the same prompts online under the same six policies",
            "higher",
            20,
        ),
        Ratio("replay-chain", "the same", "one online chain decode of the same prompts", "higher"),
        Ratio(
            "tree", "a whole draft tree of 1024 nodes, depth 15, per anchor", "a plain Python heap", "higher"
        ),
        Ratio(
            "tree-position",
            "where the reference stands in such a tree, per anchor",
            "the same heap",
            "higher",
            50,
        ),
        Ratio(
            "open",
            "peak memory of opening a training checkpoint of about 3 GB and reading its model, torch included",
            "the bytes of the model",
            "lower",
            1.2,
        ),
        Ratio("help", "`draftgauge --help`", "`python -c pass`", "lower"),
        Ratio("start-help", "the slowest command's `--help`", "`python -c pass`", "lower"),
        Ratio(
            "start-read",
            "the slowest of `runs`, `show`, `formats` and `inspect` on something tiny",
            "`python -c pass`",
            "lower",
        ),
        Ratio(
            "record",
            "tokens per second of `record` with given completions: pass, taps, agreement, file",
            "a bare forward pass of the target over the same tokens, in the same batches and dtype",
            "higher",
            0.95,
        ),
        Ratio(
            "read",
            "bytes per second of a recording's taps joined to features, as stored",
            "the file's bytes read into memory from the page cache",
            "higher",
        ),
        Ratio("read-bfloat16", "the same, converted to bfloat16", "the same", "higher"),
        Ratio(
            "curve-prompts",
            "seconds a prompt of `eval`, tiny model, with the most prompts",
            "with the number of prompts that is cheapest",
            "lower",
            1.5,
        ),
        Ratio(
            "curve-record",
            "seconds a prompt of `record`, tiny model, with the most prompts",
            "with the number of prompts that is cheapest",
            "lower",
        ),
        Ratio(
            "curve-runs",
            "seconds a run of `draftgauge runs --json`, with the most runs",
            "with the number of runs that is cheapest",
            "lower",
        ),
        Ratio(
            "curve-length-all",
            "growth of the seconds an anchor over the last doubling of the context, tiny model, all anchors",
            "the doubling: 1 is a straight line, 2 a parabola",
            "lower",
        ),
        Ratio("curve-length-walk", "the same, with `--anchors walk`", "the same", "lower"),
        Ratio(
            "stages",
            "time of an `eval` of the demo's drafter in its own arithmetic: context, blocks, head",
            "the whole time of the command",
            "higher",
        ),
        Ratio("page", "seconds of a report of 100,000 anchors", "a report of the demo's own run", "lower"),
        *(
            Ratio(
                f"stage-{way}{at}", f"throughput of staging 1 GB, {hops}{links}", f"`{rival}`", "higher", 0.9
            )
            for at, links in (("", ""), ("-1gbit", ", links of 1 Gbit/s"))
            for way, hops, rival in (
                ("hop", "one hop", "ssh cat"),
                ("relay", "two hops", "ssh cat | ssh cat"),
            )
        ),
        Ratio(
            "stage-again", "bytes moved twice after a kill at 90 %", "the bytes of the file", "lower", 0.01
        ),
        *(
            ratio
            for dtype in ("bfloat16", "float32")
            for anchors in ("walk", "all")
            for ratio in _true_scale(dtype, anchors)
        ),
    )
}


def found(name: str, value: float, **raw: Any) -> Record:
    """The record of a ratio of the table."""
    return Record(RATIOS[name], float(value), raw)


def seconds_of(work: Callable[[], object]) -> float:
    """How long something takes, once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def python_seconds(*words: object, cwd: Path | None = None, rounds: int = 5) -> float:
    """The median time of a Python process with these arguments.

    Raises:
        subprocess.CalledProcessError: It fails.
    """
    command = [sys.executable, *map(str, words)]
    return statistics.median(
        seconds_of(lambda: subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, check=True))
        for _ in range(rounds)
    )
