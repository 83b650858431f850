r"""The plan file: which checkpoint to measure on which recording, how, against what, and where results go.

Reads and checks; touches no machine. Paths without a place are local and relative to the plan file.

Example of a plan file:
    fleet = "fleet.toml"
    checkpoint = "ct200:/root/train/out/checkpoint.pt"
    recording = "eval1:recordings/1f2e3d4c5b6a7980"

    [eval]
    block_size = 16
    wiring = "drafter.toml"

    [baseline]
    run = "results/runs/step_2000-5e6f7a8b"
    stored = "earlier.json"
    gates = ["not worse than results/runs/step_2000-5e6f7a8b by 0.05"]

    [trainer]
    log = "ct200:/root/train/train.log"
    pattern = 'step (?P<step>\d+).* (?P<ktok_per_s>[\d.]+) Ktok/s'

    [watch]
    folder = "ct200:/root/train/out"
    match = "step_*/checkpoint.pt"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from draftgauge.errors import FleetError
from draftgauge.fleet.places import WORKSTATION, Fleet, Spot, read_fleet, read_toml
from draftgauge.store import sha256_json

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Layers = Annotated[list[Annotated[int, msgspec.Meta(ge=-1)]], msgspec.Meta(min_length=1)]


class EvalTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: the options of `draftgauge eval`, with underscores; `wiring` is a local file."""

    wiring: _Text | None = None
    state_dict: _Text | None = None
    taps: _Layers | None = None
    mask_token_id: int | None = None
    block_size: _Count | None = None
    budgets: list[_Count] | None = None
    chain_lengths: list[_Count] | None = None
    coverage: list[_Count] | None = None
    anchors: Literal["all", "walk"] | None = None
    num_prompts: _Count | None = None
    max_blocks: _Count | None = None
    dtype: Literal["float32", "bfloat16"] | None = None


class BaselineTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[baseline]`: a local run to compare with, stored numbers to show beside, gates to judge by."""

    run: _Text | None = None
    stored: _Text | None = None
    gates: list[_Text] = []


class CompleteTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[complete]`: records anew, where the recording is, what prompts the given recording lacks."""

    target: _Text
    prompts: _Text
    max_new_tokens: _Count = 256
    template: _Text = "chat"


class TrainerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[trainer]`: a log, and a pattern with the named group `step` and any others worth showing."""

    log: _Text
    pattern: _Text


class WatchTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[watch]`: where new checkpoints appear, and which first."""

    folder: _Text
    match: _Text
    order: Literal["newest", "oldest"] = "newest"
    every_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    on_result: list[_Text] = []


class PlanTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    recording: _Text
    fleet: _Text | None = None
    checkpoint: _Text | None = None
    whole: bool = False
    results: _Text | None = None
    check: bool = True
    eval: EvalTable = EvalTable()
    baseline: BaselineTable = BaselineTable()
    complete: CompleteTable | None = None
    trainer: TrainerTable | None = None
    watch: WatchTable | None = None


@dataclass(frozen=True)
class FleetPlan:
    """A plan that was read: its file, its fleet, its tables, and the spots that they name."""

    path: Path
    fleet: Fleet
    table: PlanTable
    results: Path
    wiring: str | None

    @property
    def folder(self) -> Path:
        """What relative local paths start from."""
        return self.path.parent

    @property
    def recording(self) -> Spot:
        """The recording to measure on; where it is, the evaluation runs."""
        return self.spot(self.table.recording)

    @property
    def digest(self) -> str:
        """What makes the results of two plans differ: the recording, the options, the text of the wiring."""
        options = msgspec.to_builtins(self.table.eval)
        complete = msgspec.to_builtins(self.table.complete)
        return sha256_json([str(self.recording), options, self.wiring, complete])

    def local(self, text: str) -> Path:
        """A local path of the file."""
        return (self.folder / Path(text).expanduser()).absolute()

    def spot(self, text: str) -> Spot:
        """A path at a place; without a place it is local and relative to the plan file."""
        if ":" in text and text[:1] not in ("/", ".", "~"):
            return self.fleet.spot(text)
        return Spot(self.fleet.places[WORKSTATION], str(self.local(text)))


def read_plan(path: Path) -> FleetPlan:
    """Reads a plan file and the fleet file that it names.

    Raises:
        FleetError: A file cannot be read, or a key is unknown, missing or impossible; both are named.
    """
    raw = read_toml(path)
    try:
        table = msgspec.convert(raw, PlanTable)
    except msgspec.ValidationError as exc:
        raise FleetError(f"{path}: {exc}") from exc
    folder = path.parent
    fleet = read_fleet(None if table.fleet is None else folder / table.fleet)
    wiring = None
    if table.eval.wiring is not None:
        wiring = _text(path, "eval.wiring", folder / table.eval.wiring)
    if table.trainer is not None:
        _pattern(path, table.trainer)
    for key, name in (("run", table.baseline.run), ("stored", table.baseline.stored)):
        if name is not None and not (folder / name).exists():
            raise FleetError(f"{path}: baseline.{key} names {folder / name}, which does not exist")
    results = folder / table.results if table.results else path.with_suffix("")
    plan = FleetPlan(path, fleet, table, results.absolute(), wiring)
    watched = None if table.watch is None else table.watch.folder
    for text in filter(None, (table.recording, table.checkpoint, watched)):
        plan.spot(text)  # an unknown place is said now, not after the staging
    return plan


def eval_words(table: EvalTable) -> tuple[str, ...]:
    """The options of `draftgauge eval` that a table states, but the wiring file, which lies elsewhere.

    Example:
        `block_size = 16`, `coverage = [4, 8]` give `("--block-size", "16", "--coverage", "4,8")`.
    """
    words: list[str] = []
    for name, value in msgspec.to_builtins(table).items():
        if value is None or name == "wiring":
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return tuple(words)


CHECK_OPTIONS = ("state_dict", "taps", "mask_token_id", "block_size", "dtype")
RECORD_OPTIONS = ("state_dict", "taps", "mask_token_id")


def wiring_words(table: EvalTable, kept: tuple[str, ...] = CHECK_OPTIONS) -> tuple[str, ...]:
    """Those of them that say what the drafter is, and that other commands take as well."""
    stated = {name: value for name, value in msgspec.to_builtins(table).items() if name in kept}
    return eval_words(msgspec.convert(stated, EvalTable))


def trainer_state(plan: FleetPlan, text: str) -> dict[str, Any]:
    """What the last matching line of a trainer's log says; empty where none matches.

    Example:
        `{"step": 5329, "ktok_per_s": 19.5}`
    """
    assert plan.table.trainer is not None
    found = None
    for line in text.splitlines():
        found = re.search(plan.table.trainer.pattern, line) or found
    if found is None:
        return {}
    state: dict[str, Any] = {}
    for name, value in found.groupdict().items():
        if value is not None:
            state[name] = _number(value)
    return state


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text.replace(",", ""))
        except ValueError:
            continue
    return text


def _pattern(path: Path, table: TrainerTable) -> None:
    try:
        pattern = re.compile(table.pattern)
    except re.error as exc:
        raise FleetError(f"{path}: trainer.pattern is no regular expression: {exc}") from exc
    if "step" not in pattern.groupindex:
        raise FleetError(f"{path}: trainer.pattern has no group named step; write (?P<step>\\d+) in it")


def _text(path: Path, key: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise FleetError(f"{path}: {key} names {file}, which cannot be read: {exc}") from exc
