"""Series of checkpoints: the one that a watch writes, line by line, and the one that runs of a training make.

Reads what a watch has written so far and leaves a torn last line alone: its writer may be in the middle of it. Knows
nothing of how a series is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from draftgauge.errors import FleetError
from draftgauge.viewer.rows import Estimate, RunRow

SERIES = "series.jsonl"
#: A curve needs so many checkpoints.
_FEWEST = 2


class WatchRow(msgspec.Struct, frozen=True):
    """A row of a watch's series, as docs/formats.md has it: one checkpoint that was seen."""

    source: str
    identity: str
    when: str = ""
    saved_step: int | None = None
    tau: Estimate | None = None
    difference: Estimate | None = None
    trusted: bool | None = None
    gates_passed: bool | None = None
    run: str | None = None
    reason: str = ""
    trainer: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the checkpoint's path."""
        return PurePosixPath(self.source).name

    @property
    def verdict(self) -> str:
        """What became of it: `trusted`, `not trusted`, `measured`, or `no number`."""
        if self.tau is None:
            return "no number"
        return {True: "trusted", False: "not trusted", None: "measured"}[self.trusted]


@dataclass(frozen=True)
class Watched:
    """The series of a watch so far. `unread` counts lines that are no rows."""

    key: str
    rows: tuple[WatchRow, ...]
    unread: int = 0

    @property
    def name(self) -> str:
        """The folder of the results that it belongs to: a watch writes into `watch/` there."""
        path = PurePosixPath(self.key)
        return str(path.parent) if path.name == "watch" and len(path.parts) > 1 else str(path)

    @property
    def points(self) -> list[Point]:
        """The checkpoints that have a number and a step, by step; of one step, the last that was measured."""
        last = {row.saved_step: row for row in self.rows if row.tau is not None}
        return _in_order(
            Point(step, row.tau, row.trusted is not False, row.name)
            for step, row in last.items()
            if step is not None and row.tau is not None and row.tau.value is not None
        )


@dataclass(frozen=True)
class Point:
    """One checkpoint of a curve: its step, its tau, whether that is trusted, and what it is called."""

    step: int
    tau: Estimate
    trusted: bool
    name: str

    @property
    def value(self) -> float:
        """The tau itself."""
        assert self.tau.value is not None, "a point is one that has a number"
        return self.tau.value


@dataclass(frozen=True)
class Family:
    """Runs of one training's checkpoints, measured in the same way, by step; of one step, the newest run."""

    place: str
    recording: str
    rows: tuple[RunRow, ...]
    points: tuple[Point, ...] = field(default=())


_ROWS = msgspec.json.Decoder(WatchRow)


def read_series(folder: Path, *, key: str) -> Watched:
    """The series in a watch's folder, as far as it is written.

    Raises:
        FleetError: None of its lines is a row.
        OSError: It cannot be read.
    """
    whole, _, _torn = (folder / SERIES).read_bytes().rpartition(b"\n")
    rows, unread = list[WatchRow](), 0
    for line in filter(None, whole.split(b"\n")):
        try:
            rows.append(_ROWS.decode(line))
        except (msgspec.MsgspecError, RecursionError):
            unread += 1
    if unread and not rows:
        raise FleetError(f"{key}/{SERIES} holds no row of a series")
    return Watched(key, tuple(rows), unread)


def families(runs: Sequence[RunRow]) -> dict[str, Family]:
    """The runs that are checkpoints of one training, by the name of the newest; those of fewer steps are left out.

    `runs` come newest first.
    """
    groups: dict[tuple[str, ...], dict[int, RunRow]] = {}
    for row in runs:
        if row.step is not None and row.tau.value is not None and row.checkpoint:
            groups.setdefault(row.family, {}).setdefault(row.step, row)
    found = {}
    for family, steps in groups.items():
        if len(steps) < _FEWEST:
            continue
        rows = tuple(steps[step] for step in sorted(steps))
        points = (Point(step, row.tau, row.trusted is not False, row.name) for step, row in steps.items())
        newest = max(rows, key=lambda row: row.started)
        found[newest.key] = Family(family[0], newest.recording, rows, tuple(_in_order(points)))
    return found


def run_key(row: WatchRow, runs: Mapping[str, RunRow], *, watched: str) -> str | None:
    """Where the run of a row lies here: in the results that the series belongs to, or the only one of its name."""
    if row.run is None:
        return None
    name = PurePosixPath(row.run).name
    beside = str(PurePosixPath(watched).parent / "runs" / name)
    if beside in runs:
        return beside
    named = [key for key, run in runs.items() if run.name == name]
    return named[0] if len(named) == 1 else None


def _in_order(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.step)
