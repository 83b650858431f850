"""A sweep: every checkpoint on every recording with every block size, each combination a run of its own.

Example of a sweep's plan:
    checkpoints = ["out/step_*"]
    recordings = ["recordings/1f2e3d4c5b6a7980"]
    block_sizes = [8, 16, 32]

    [eval]
    budgets = [16, 64]
    wiring = "drafter.toml"

Paths are relative to the plan. A combination that was measured before is its run, so the same sweep goes on where it
was stopped, and grows with its plan.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from draftgauge.acceptance import Policy
from draftgauge.errors import DraftgaugeError, FleetError, InputError, RecordingError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.fleet.places import read_toml
from draftgauge.fleet.plans import EvalTable
from draftgauge.measure import DEFAULT_POLICIES
from draftgauge.progress import Progress, silent
from draftgauge.recording import open_recording
from draftgauge.runs import Run
from draftgauge.stated import Stated
from draftgauge.workers import Workers

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
#: What `[eval]` states of the policies, and of the wiring; the rest are options of `evaluate`.
_POLICIES = ("budgets", "chain_lengths", "coverage")
_STATED = ("wiring", "taps", "mask_token_id", "block_size")


class SweepTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; without `block_sizes` every checkpoint keeps its own."""

    checkpoints: list[_Text]
    recordings: list[_Text]
    block_sizes: list[_Count] = []
    eval: EvalTable = EvalTable()


@dataclass(frozen=True)
class Combination:
    """One measurement of a sweep; `block_size` None is the checkpoint's own."""

    checkpoint: str
    recording: Path
    block_size: int | None


@dataclass(frozen=True)
class Sweep:
    """A plan that was read: its combinations, series by series and by step within one, and the options of all."""

    path: Path
    combinations: tuple[Combination, ...]
    table: EvalTable
    wiring: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a combination: its run, or why there is none."""

    combination: Combination
    run: Run | None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: tau by response of every policy beside what it was measured with."""
        asked = self.combination
        value: dict[str, Any] = {
            "checkpoint": asked.checkpoint,
            "recording": str(asked.recording),
            "block_size": asked.block_size,
            "reason": self.reason,
        }
        if self.run is None:
            return value | {"run": None, "path": None, "step": None, "trusted": None, "tau": {}}
        policies = self.run.summary["policies"]
        return value | {
            "block_size": self.run.plan.wiring["block_size"],
            "run": self.run.name,
            "path": str(self.run.path),
            "step": self.run.manifest["checkpoint"]["step"],
            "trusted": self.run.manifest["status"] == "complete" and not self.run.failed_controls,
            "tau": {
                slug: policy["tau_response"] for slug, policy in policies.items() if "tau_response" in policy
            },
        }


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep's plan, and finds its checkpoints.

    Raises:
        FleetError: The file cannot be read, a key is unknown, missing or impossible, a pattern finds nothing, or a
            recording is none or named twice.
    """
    try:
        table = msgspec.convert(read_toml(path), SweepTable)
    except msgspec.ValidationError as exc:
        raise FleetError(f"{path}: {exc}") from exc
    if table.block_sizes and table.eval.block_size is not None:
        raise FleetError(f"{path}: block_sizes and eval.block_size both say the block size; leave out one")
    checkpoints = _found(path, "checkpoints", table.checkpoints)
    recordings = [Path(name) for name in _found(path, "recordings", table.recordings)]
    combinations = tuple(
        Combination(checkpoint, recording, size)
        for recording in recordings
        for size in _distinct(path, "block_sizes", table.block_sizes) or [table.eval.block_size]
        for checkpoint in checkpoints
    )
    wiring: dict[str, Any] = {}
    if table.eval.wiring is not None:
        try:
            wiring = read_toml(path.parent / table.eval.wiring)
        except FleetError as exc:
            raise FleetError(f"{path}: eval.wiring: {exc}") from exc
    sweep = Sweep(path, combinations, table.eval, wiring)
    try:  # what would fail in every combination is said once, before the work
        _options(sweep, combinations[0])
        digests = [open_recording(recording).digest for recording in recordings]
    except InputError as exc:
        key = "recordings" if isinstance(exc, RecordingError) else "eval"
        raise FleetError(f"{path}: {key}: {exc}") from exc
    for i, digest in enumerate(digests):  # two paths may lead to one recording, or to copies of it
        if digest in digests[:i]:
            first = recordings[digests.index(digest)]
            raise FleetError(f"{path}: recordings: {recordings[i]} is the same as {first}; take one out")
    return sweep


def run_sweep(
    sweep: Sweep,
    *,
    root: Path = Path("runs"),
    workers: Workers = Workers(),  # noqa: B008
    progress: Progress = silent,
) -> Iterator[Outcome]:
    """Measures every combination, and yields what came of each as it is done.

    One that cannot be measured is an outcome with a reason, and the others go on.

    Args:
        sweep: The plan.
        root: The folder that holds runs.
        workers: As for `evaluate_checkpoint`.
        progress: Shows the work of each combination.
    """
    for combination in sweep.combinations:
        try:
            options = _options(sweep, combination)
            run = evaluate_checkpoint(
                combination.checkpoint,
                combination.recording,
                options,
                root=root,
                workers=workers,
                progress=progress,
            )
        except DraftgaugeError as exc:
            yield Outcome(combination, None, str(exc))
        else:
            yield Outcome(combination, run)


def _options(sweep: Sweep, combination: Combination) -> Options:
    """The options of `evaluate` that the plan states for a combination."""
    said = {name: value for name, value in msgspec.to_builtins(sweep.table).items() if value is not None}
    trees = [Policy("ddtree", n) for n in said.get("budgets", ())]
    policies = (
        *([Policy("chain"), *trees] if "budgets" in said else DEFAULT_POLICIES),
        *(Policy("chain", n) for n in said.get("chain_lengths", ())),
        *(Policy("coverage", n) for n in said.get("coverage", ())),
    )
    options = {name: said[name] for name in ("taps", "mask_token_id") if name in said}
    stated = Stated(
        wiring=sweep.wiring,
        source=f"{sweep.path.name}" if "wiring" not in said else f"eval.wiring {said['wiring']}",
        options={name: tuple(value) if name == "taps" else value for name, value in options.items()},
        block_size=combination.block_size,
    )
    rest = {name: value for name, value in said.items() if name not in (*_POLICIES, *_STATED)}
    return Options(stated=stated, policies=policies, **rest)


def _found(path: Path, key: str, texts: Sequence[str]) -> list[str]:
    """The paths and addresses that some patterns find, in the order of the numbers in their names."""
    if not texts:
        raise FleetError(f"{path}: {key} is empty; name at least one")
    found: list[str] = []
    for text in _distinct(path, key, texts):
        if "://" in text:
            found.append(text)
            continue
        paths = sorted(_matches(path.parent, str(Path(text).expanduser())), key=_natural)
        if not paths:
            raise FleetError(
                f"{path}: {key} names {text!r}, and nothing is found there; correct it or take it out"
            )
        found += [name for name in paths if name not in found]
    return found


def _matches(folder: Path, text: str) -> list[str]:
    """What has this name, even one that reads as a pattern; else what the pattern finds."""
    if os.path.exists(folder / text):  # noqa: PTH110 - also what cannot be looked up is not there
        return [str(folder / text)]
    # As a shell does it, without what is hidden: so are folders that are not finished.
    names = glob.glob(text, root_dir=folder, recursive=True)  # noqa: PTH207
    return [str(folder / name) for name in names]


def _distinct(path: Path, key: str, values: Sequence[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        twice = next(value for i, value in enumerate(values) if value in values[:i])
        raise FleetError(f"{path}: {key} names {twice!r} twice; take one out")
    return list(values)


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts step_900 before step_4000."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]
