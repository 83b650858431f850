"""Follows a training folder: each checkpoint that is complete and new is measured, and a series grows.

The series is a file of JSON lines in the plan's results, one for each checkpoint that was measured or cannot be; a
watch that is started again reads it and goes on. One checkpoint is measured at a time. Knows nothing of how a
checkpoint is measured.
"""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftgauge.errors import BeingWrittenError, CheckpointError, FleetError, UnfinishedError
from draftgauge.fleet.cargo import describe
from draftgauge.fleet.pipeline import Log, judged_gate, measure
from draftgauge.fleet.places import Spot
from draftgauge.fleet.plans import FleetPlan, WatchTable
from draftgauge.fleet.reach import Reach
from draftgauge.runs import open_run
from draftgauge.store import locked, sha256_json

#: Longest wait between two looks while a machine does not answer.
LONGEST_WAIT_S = 600.0
HOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Candidate:
    """A file or folder of the watched folder that may be a checkpoint, and the identity of all that is in it.

    `newest` is the time of its newest file, in whatever form its place says it.
    """

    spot: Spot
    identity: str
    newest: Any


@dataclass
class Series:
    """What was measured so far, on disk line by line."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0  # how many rows there were when this watch began

    @classmethod
    def read(cls, path: Path) -> Series:
        """The series in a file; a last line that a killed process left unfinished is cut off.

        Raises:
            FleetError: A line in it is no row.
        """
        series = cls(path)
        if not path.exists():
            return series
        text = path.read_text(encoding="utf-8")
        whole, _, _torn = text.rpartition("\n")
        for number, line in enumerate(filter(None, whole.split("\n")), 1):
            try:
                row = json.loads(line)
                row["source"], row["identity"]
            except (ValueError, KeyError, TypeError) as exc:
                raise FleetError(
                    f"{path}, line {number} is no row of a series; remove that line, or choose other `results`"
                ) from exc
            series.rows.append(row)
        if len(whole) + 1 < len(text):
            os.truncate(path, len(whole.encode()) + 1 if whole else 0)
        series.begun = len(series.rows)
        return series

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row, which lasts when this returns."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def knows(self, candidate: Candidate) -> bool:
        """Whether this very state of the checkpoint has a row; what a place refused before is tried again."""
        return any(
            row["source"] == str(candidate.spot) and row["identity"] == candidate.identity
            for at, row in enumerate(self.rows)
            if at >= self.begun or not row.get("refused")
        )

    def require_progress(self) -> None:
        """Two refusals in a row are no matter of a checkpoint any more.

        Raises:
            FleetError: The last one.
        """
        last = self.rows[self.begun :][-2:]
        if len(last) == 2 and all(row["refused"] for row in last):
            raise FleetError(
                f"two checkpoints in a row could not be measured; the last one: {last[-1]['reason']}"
            )


@dataclass(frozen=True)
class Until:
    """When a watch ends: at a step, or when gates pass; with neither it goes on."""

    step: int | None = None
    gates: tuple[str, ...] = ()
    once: bool = False

    @classmethod
    def parse(cls, text: str | None, *, gates: tuple[str, ...] = (), once: bool = False) -> Until:
        """From `step=20000`.

        Raises:
            FleetError: It is no such text.
        """
        if text is None:
            return cls(None, gates, once)
        found = re.fullmatch(r"step=(\d+)", text.strip())
        if found is None:
            raise FleetError(f"--until {text!r} is not understood; expected step=NUMBER, as in step=20000")
        return cls(int(found[1]), gates, once)

    def reached(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the last rows end the watch."""
        steps = [row["saved_step"] for row in rows if row["saved_step"] is not None]
        if self.step is not None and steps and max(steps) >= self.step:
            return True
        return bool(self.gates) and any(row["gates_passed"] for row in rows)


def watch(
    reach: Reach,
    plan: FleetPlan,
    until: Until,
    log: Callable[[], Log],
    *,
    on_row: Callable[[dict[str, Any], dict[str, Any] | None], None],
) -> list[dict[str, Any]]:
    """Watches until it is told to end; returns the rows of the series.

    `log` makes the log of one measurement; `on_row` is told every new row, with the outcome if there is one.

    Raises:
        FleetError: The plan cannot be watched, or places refuse whatever the checkpoint.
        StoreError: Another watch writes to the same results.
    """
    table = plan.table.watch
    if table is None:
        raise FleetError(f"{plan.path} has no [watch]; give it `folder` and `match`")
    folder = plan.results / "watch"
    with locked(folder):
        series = Series.read(folder / "series.jsonl")
        seen: dict[str, str] = {}
        pause = table.every_s
        while not until.reached(series.rows):
            try:
                fresh = _one_round(reach, plan, series, seen, (log, until, on_row))
                series.require_progress()
                pause = table.every_s
            except UnfinishedError as exc:
                log().said(f"waiting: {exc}")
                pause, fresh = min(pause * 2, LONGEST_WAIT_S), False
            if until.once and not fresh:
                break
            if not fresh:
                time.sleep(0.0 if until.once else pause)
        return series.rows


def _one_round(
    reach: Reach,
    plan: FleetPlan,
    series: Series,
    seen: dict[str, str],
    how: tuple[Callable[[], Log], Until, Callable[[dict[str, Any], dict[str, Any] | None], None]],
) -> bool:
    """Looks, and measures one checkpoint that is whole and new; True where there may be more."""
    table = plan.table.watch
    assert table is not None
    make_log, until, on_row = how
    for candidate in _candidates(reach, plan, table):
        if series.knows(candidate):
            continue
        before = seen.get(str(candidate.spot))
        seen[str(candidate.spot)] = candidate.identity
        if before != candidate.identity and not until.once:
            continue  # it may still grow: the next look decides
        log = make_log()
        try:
            row, outcome = _measured(reach, plan, candidate, log, until)
        except BeingWrittenError as exc:
            log.said(f"not yet: {exc}")
            continue
        if row is None:
            continue
        series.add(row)
        on_row(row, outcome)
        _tell_hook(table, row, log)
        return True
    return False


def _candidates(reach: Reach, plan: FleetPlan, table: WatchTable) -> Iterator[Candidate]:
    """What matches in the watched folder, in the order in which it is to be measured.

    Raises:
        FleetError: The folder is no folder.
        UnfinishedError: Its place does not answer.
    """
    folder = plan.spot(table.folder)
    depth = table.match.count("/") + 2
    seen = reach.call(folder.place, "look", path=folder.path, depth=depth)
    if seen["kind"] == "missing":
        raise UnfinishedError(f"{folder} does not exist yet")
    if seen["kind"] != "folder":
        raise FleetError(f"{plan.path}: watch.folder {folder} is not a folder")
    groups: dict[str, list[tuple[str, Any]]] = {}
    parts = table.match.count("/") + 1
    for inner, identity in seen["files"]:
        name = "/".join(inner.split("/")[:parts])
        if inner.count("/") >= parts - 1 and _matches(name, table.match):
            groups.setdefault(name, []).append((inner, identity))
    found = [
        Candidate(folder.below(name), sha256_json(files), max(identity[1] for _, identity in files))
        for name, files in groups.items()
    ]
    return iter(sorted(found, key=_age, reverse=table.order == "newest"))


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that a `*` does not reach into folders."""
    return all(
        fnmatch.fnmatchcase(part, like)
        for part, like in zip(name.split("/"), pattern.split("/"), strict=True)
    )


def _age(candidate: Candidate) -> tuple[Any, ...]:
    """By the numbers in the path, `step_900` before `step_1000`; where there are none, by time."""
    path = candidate.spot.path
    return [int(number) for number in re.findall(r"\d+", path)], candidate.newest, path


def _measured(
    reach: Reach, plan: FleetPlan, candidate: Candidate, log: Log, until: Until
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The row of a checkpoint, and its outcome; no row where it went away meanwhile.

    Raises:
        BeingWrittenError: It is still being written.
        UnfinishedError: A machine does not answer, or has no space.
    """
    row: dict[str, Any] = {
        "source": str(candidate.spot),
        "identity": candidate.identity,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "saved_step": None,
        "trainer": {},
        "tau": None,
        "difference": None,
        "trusted": None,
        "gates_passed": False,
        "run": None,
        "reason": "",
        "refused": False,
    }
    try:
        with log.step("look", candidate.spot.place) as tell:
            cargo = describe(
                reach, candidate.spot, whole=plan.table.whole, state_dict=plan.table.eval.state_dict
            )
            tell(f"{candidate.spot}: {cargo.what}")
        row["saved_step"] = cargo.step
        outcome = measure(reach, plan, cargo, log)
    except CheckpointError as exc:
        return row | {"reason": str(exc)}, None
    except FleetError as exc:
        if reach.call(candidate.spot.place, "look", path=candidate.spot.path)["kind"] == "missing":
            log.said(f"{candidate.spot} was removed before it was measured")
            return None, None
        return row | {"reason": str(exc), "refused": True}, None
    run = open_run(Path(outcome["run"]))
    judged = [judged_gate(plan, gate, run) for gate in until.gates]
    outcome["gates"] = [*outcome["gates"], *judged]
    row |= {
        "trainer": outcome["trainer"],
        "tau": outcome["tau"],
        "difference": _difference(outcome),
        "trusted": outcome["trusted"],
        "gates_passed": bool(judged) and outcome["trusted"] and all(gate["passed"] for gate in judged),
        "run": outcome["run"],
    }
    return row, outcome


def _difference(outcome: Mapping[str, Any]) -> Any:
    comparison = outcome["comparison"]
    return None if comparison is None else comparison["policies"]["chain"]["tau_response"]["difference"]


def _tell_hook(table: WatchTable, row: Mapping[str, Any], log: Log) -> None:
    """Starts the plan's own command with the row on its standard input; its failure stops nothing."""
    if not table.on_result:
        return
    try:
        done = subprocess.run(
            table.on_result,
            input=json.dumps(row).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=HOOK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        log.said(f"watch.on_result {posixpath.basename(table.on_result[0])} failed: {exc}")
        return
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        log.said(f"watch.on_result {table.on_result[0]} ended with exit code {done.returncode}: {said}")
