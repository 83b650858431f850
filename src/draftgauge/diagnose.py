"""Searches the wirings near the given one: is the number low because the drafter is, or because it is wired wrongly?

Every neighbour is tried on the same anchors as the wiring given, in stages; those that are clearly worse are dropped
early. The best change is taken and the search goes on from there. Having tried many is corrected for, and what makes
no difference on this data is called undecidable, never right.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
import torch
from jaxtyping import Int32

from draftgauge.drafters import Drafter, load_drafter
from draftgauge.errors import CheckpointError, RecordingError, WiringError
from draftgauge.features import as_torch, read_item
from draftgauge.neighbours import Candidate, Surroundings, neighbours
from draftgauge.pairing import Pair, open_pair, require_sound
from draftgauge.progress import Progress, silent
from draftgauge.recording import ENDS, verify_items
from draftgauge.stated import Stated
from draftgauge.stats import Change, holm
from draftgauge.store import publish_file
from draftgauge.trials import Trial, choose_anchors, paired_change, streaks_of
from draftgauge.wiring import LayerAttention, Wiring, validate

#: Anchors after each stage. A candidate that is clearly worse, or best beyond doubt, needs no later one.
_STAGES = (128, 512, 2048)
_ROUNDS = 4
#: Of all searches in which nothing nearby is better, at most this share says that something is.
_FAMILY_ALPHA = 0.01
_CLEARLY_WORSE = 1e-4
_BEYOND_DOUBT = 1e-6
#: Worse, in the table, is what is worse with this probability of error over all wirings tried.
_WORSE_ALPHA = 0.05
#: Where no change helps beyond doubt, up to so many that may help are tried together with every other.
_COMBINED, _HOPEFUL = 3, 0.05
#: A streak below this leaves a search nothing to hold on to.
_LEAST_STREAK = 0.05

Outcome = Literal["better", "worse", "undecidable", "impossible", "not tried"]


@dataclass
class _Try:
    """A candidate and what was measured of it so far: its streaks where it was tried, -1 elsewhere."""

    candidate: Candidate
    streak: Int32[np.ndarray, " N"]
    kept: np.ndarray
    change: Change | None = None
    p: float | None = None
    outcome: Outcome = "undecidable"
    reason: str | None = None


@dataclass(frozen=True)
class _Bench:
    """The pair, its trial, and the two ends in the dtype to compute in, shared by every wiring."""

    pair: Pair
    trial: Trial
    dtype: torch.dtype
    ends: Mapping[str, torch.Tensor]

    def streaks(self, wiring: Wiring, part: Trial) -> Int32[np.ndarray, " N"]:
        """The streaks of a wiring on some anchors of the trial."""
        drafter: Drafter = load_drafter(wiring, self.pair.checkpoint.tensors, dtype=self.dtype, **self.ends)
        return streaks_of(
            drafter,
            part,
            read=lambda item: read_item(self.pair.recording, item, wiring=wiring, dtype=self.dtype),
        )


def diagnose_checkpoint(
    checkpoint_path: str | Path,
    recording_path: str | Path,
    *,
    stated: Stated = Stated(),  # noqa: B008
    state_dict: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tries the wirings near the given one and says which is best.

    Example of the result: `{"verdict": "better-found", "answer": "all taps one layer earlier: streak 0.31 -> 5.12
    [4.90, 5.40]; set taps = [1, 10, 19, 27]", "settings": {"taps": [1, 10, 19, 27]}, "changes": [...],
    "candidates": [...], ...}`; the verdict is `given-wins`, `better-found` or `none-works`.

    Raises:
        CheckpointError: The file is damaged, incomplete, or lacks tensors.
        WiringError: The wiring is not known completely, or impossible.
        RecordingError: The recording is damaged or does not hold what the drafter reads.
    """
    started = time.time()
    pair = open_pair(checkpoint_path, recording_path, stated=stated, state_dict=state_dict)
    require_sound(pair.checkpoint, pair.wiring, progress=progress)
    bench = _bench(pair, dtype=dtype, seed=seed)
    wiring = pair.wiring
    base = first = bench.streaks(wiring, bench.trial)
    changes: list[dict[str, Any]] = []
    tries: list[_Try] = []
    for _ in range(_ROUNDS):
        decided = {name for change in changes for name in change["fields"]}
        found = [c for c in neighbours(wiring, _surroundings(pair)) if c.field not in decided]
        tries = _search(bench, base, found, progress=progress)
        best = _best(tries)
        if best is None:
            break
        bench, base = dataclasses.replace(bench, trial=bench.trial.where(best.kept)), base[best.kept]
        wiring = best.candidate.wiring
        after = bench.streaks(wiring, bench.trial)
        changes.append(_taken(bench, best, base, after))
        base = after
    return _result(bench, first, base, changes, tries, seconds=time.time() - started)


def write_wiring(path: Path, settings: Mapping[str, Any], *, stated: Stated) -> None:
    """Writes what `--wiring` takes: the fields that the user had stated, and those that were found better.

    Raises:
        StoreError: The file exists already, or cannot be written.
    """
    said = {**stated.wiring, **stated.options}
    if stated.block_size is not None:
        said["block_size"] = stated.block_size
    fields = {name: _toml(value) for name, value in {**said, **settings}.items()}
    with publish_file(path) as partial:
        partial.write_text(
            tomli_w.dumps({n: v for n, v in fields.items() if v is not None}), encoding="utf-8"
        )


def _bench(pair: Pair, *, dtype: str, seed: int) -> _Bench:
    items = list(verify_items(pair.recording, pair.items))
    for name in ENDS:
        pair.recording.verify_end(name)
    trial = choose_anchors(items, room=pair.wiring.depth, count=_STAGES[-1], seed=seed)
    compute = getattr(torch, dtype)
    ends = {name: as_torch(pair.recording.end(name)).to(compute) for name in ("embedding", "head")}
    return _Bench(pair, trial, compute, ends)


def _surroundings(pair: Pair) -> Surroundings:
    target = pair.recording.target
    return Surroundings(
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        longest_context=max(item.length for item in pair.items),
        trained_block_size=pair.trained.block_size,
        target_rope_theta=target.rope_theta,
        special_tokens=target.special_tokens,
        stored=frozenset(pair.checkpoint.tensors),
    )


def _search(
    bench: _Bench, base: Int32[np.ndarray, " N"], candidates: Sequence[Candidate], *, progress: Progress
) -> list[_Try]:
    """Tries every candidate, and where none is better, the most promising ones two at a time."""
    tries = [_begin(bench, candidate) for candidate in candidates]
    _in_stages(bench, base, tries, progress=progress)
    _judge(tries)
    if _best(tries) is None:
        pairs = [_begin(bench, candidate) for candidate in _combined(tries)]
        _in_stages(bench, base, pairs, progress=progress)
        tries += pairs
        _judge(tries)
    return tries


def _combined(tries: Sequence[_Try]) -> list[Candidate]:
    """The changes that may help, each together with every change of another field."""
    hopeful = [a for a in tries if a.change and a.change.value > 0 and (a.change.p or 0) < _HOPEFUL]
    hopeful.sort(key=lambda a: a.change.p or 0 if a.change else 1)
    others = [a.candidate for a in tries if a.change is not None]
    found: dict[str, Candidate] = {}
    for one, two in itertools.product([a.candidate for a in hopeful[:_COMBINED]], others):
        if one.field == two.field:
            continue
        try:
            wiring = validate(dataclasses.replace(one.wiring, **two.settings))
        except WiringError:  # no drafter can be wired so
            continue
        label, settings = f"{one.label}, and {two.label}", {**one.settings, **two.settings}
        found.setdefault(wiring.digest, Candidate(f"{one.field} + {two.field}", label, settings, wiring))
    return list(found.values())


def _in_stages(
    bench: _Bench, base: Int32[np.ndarray, " N"], tries: Sequence[_Try], *, progress: Progress
) -> None:
    """Measures candidates on more and more anchors, until each is decided or one is best beyond doubt."""
    alive = [attempt for attempt in tries if attempt.outcome == "undecidable"]
    start = 0
    for stop in _STAGES:
        if start >= len(bench.trial):
            break
        shown = progress(
            alive, label=f"try on {min(stop, len(bench.trial))} anchors", total=len(alive), unit="wiring"
        )
        for attempt in shown:
            _measure(bench, attempt, base, start=start, stop=stop)
        alive = [attempt for attempt in alive if _open(attempt)]
        if any(_beyond_doubt(attempt, len(tries)) for attempt in tries):
            break
        start = stop


def _begin(bench: _Bench, candidate: Candidate) -> _Try:
    """A candidate with the anchors on which its taps were recorded."""
    recording, items = bench.pair.recording, bench.trial.items
    held = [set(candidate.wiring.taps) <= set(recording.recorded_taps(item)) for item in items]
    kept = np.array(held)[bench.trial.index]
    attempt = _Try(candidate, np.full(len(bench.trial), -1, dtype=np.int32), kept)
    if not kept.any():
        attempt.outcome = "not tried"
        attempt.reason = "its layers were not recorded; record again with --taps-around"
    return attempt


def _measure(bench: _Bench, attempt: _Try, base: Int32[np.ndarray, " N"], *, start: int, stop: int) -> None:
    """Adds the turns from `start` to `stop` to what is known of a candidate."""
    turn = bench.trial.turn
    chosen = attempt.kept & (turn >= start) & (turn < stop)
    wiring = attempt.candidate.wiring
    try:
        if chosen.any():
            attempt.streak[chosen] = bench.streaks(wiring, bench.trial.where(chosen))
    except (CheckpointError, RecordingError, WiringError) as exc:
        attempt.outcome, attempt.reason, attempt.change = "impossible", str(exc), None
        return
    done = attempt.kept & (turn < stop)
    depth = min(wiring.depth, bench.pair.wiring.depth)  # a deeper block must not win by its depth alone
    before, after = (streak[done].clip(max=depth) for streak in (base, attempt.streak))
    if done.any():
        attempt.change = paired_change(bench.trial.where(done), before, after)


def _open(attempt: _Try) -> bool:
    """Whether more anchors could still change what is thought of a candidate."""
    if attempt.outcome != "undecidable" or attempt.change is None or attempt.change.p is None:
        return attempt.outcome == "undecidable"
    return attempt.change.value > 0 or attempt.change.p > _CLEARLY_WORSE


def _beyond_doubt(attempt: _Try, count: int) -> bool:
    change = attempt.change
    return (
        change is not None and change.p is not None and change.value > 0 and change.p * count < _BEYOND_DOUBT
    )


def _judge(tries: Sequence[_Try]) -> None:
    """Says which candidates are better or worse, corrected for how many were tried."""
    measured = [(a, a.change, a.change.p) for a in tries if a.change is not None and a.change.p is not None]
    adjusted = holm([p for _, _, p in measured])
    for (attempt, change, _), p in zip(measured, adjusted, strict=True):
        attempt.p, attempt.outcome = float(p), "undecidable"
        if p < _FAMILY_ALPHA and change.value > 0:
            attempt.outcome = "better"
        elif p < _WORSE_ALPHA and change.value < 0:
            attempt.outcome = "worse"
        elif change.low == change.high == 0:
            attempt.reason = "every block is accepted as far as with the wiring given"


def _best(tries: Sequence[_Try]) -> _Try | None:
    """The change that gains most, among those that gain."""
    better = [a for a in tries if a.outcome == "better"]
    return max(better, key=lambda a: a.change.value if a.change else 0.0, default=None)


def _taken(
    bench: _Bench, attempt: _Try, base: Int32[np.ndarray, " N"], streak: Int32[np.ndarray, " N"]
) -> dict[str, Any]:
    """A change that was taken, with what it gains on all anchors where it can be measured."""
    depth = min(attempt.candidate.wiring.depth, bench.pair.wiring.depth)
    change = paired_change(bench.trial, base.clip(max=depth), streak.clip(max=depth))
    before = float(base.clip(max=depth).mean())
    return {
        "field": attempt.candidate.field,
        "fields": attempt.candidate.field.split(" + "),
        "label": attempt.candidate.label,
        "settings": _plain(attempt.candidate.settings),
        "before": before,
        "after": before + change.value,
        "low": None if change.low is None else before + change.low,
        "high": None if change.high is None else before + change.high,
        "p": attempt.p,
        "anchors": len(bench.trial),
        "prompts": len(np.unique(bench.trial.index)),
    }


def _result(
    bench: _Bench,
    first: Int32[np.ndarray, " N"],
    last: Int32[np.ndarray, " N"],
    changes: list[dict[str, Any]],
    tries: Sequence[_Try],
    *,
    seconds: float,
) -> dict[str, Any]:
    settings = {name: value for change in changes for name, value in change["settings"].items()}
    streak = float(last.mean())
    verdict = "better-found" if changes else "given-wins" if streak >= _LEAST_STREAK else "none-works"
    undecided = [a for a in tries if a.outcome == "undecidable"]
    value = {
        "verdict": verdict,
        "checkpoint": str(bench.pair.checkpoint.path),
        "recording": str(bench.pair.recording.path),
        "base": {
            "streak": float(first.mean()),
            "anchors": len(first),
            "prompts": len(bench.trial.items),
        },
        "streak": streak,
        "changes": changes,
        "settings": settings,
        "candidates": [_row(attempt) for attempt in sorted(tries, key=_interest)],
        "undecidable": list(dict.fromkeys(a.candidate.field for a in undecided)),
        "method": "paired on the same anchors, t intervals over stretches of 16 tokens, Holm over all wirings tried",
        "seconds": seconds,
    }
    return {"verdict": verdict, "answer": _answer(value, len(tries)), **value}


def _interest(attempt: _Try) -> tuple[int, float]:
    order: Mapping[Outcome, int] = {
        "better": 0,
        "undecidable": 1,
        "worse": 2,
        "not tried": 3,
        "impossible": 4,
    }
    return order[attempt.outcome], -(attempt.change.value if attempt.change else 0.0)


def _row(attempt: _Try) -> dict[str, Any]:
    change = attempt.change
    return {
        "field": attempt.candidate.field,
        "label": attempt.candidate.label,
        "settings": _plain(attempt.candidate.settings),
        "outcome": attempt.outcome,
        "change": None if change is None else change.value,
        "low": None if change is None else change.low,
        "high": None if change is None else change.high,
        "p": attempt.p,
        "anchors": int((attempt.streak >= 0).sum()),
        "reason": attempt.reason,
    }


def _answer(value: Mapping[str, Any], tried: int) -> str:
    """The result in one sentence."""
    base = value["base"]
    sample = f"on {base['anchors']} anchors of {base['prompts']} prompt(s)"
    if value["verdict"] == "none-works":
        return (
            f"the streak is {base['streak']:.3f} {sample}, and none of {tried} wirings nearby is better: the "
            "weights, the recording, or several fields at once are wrong; run `draftgauge check`"
        )
    if value["verdict"] == "given-wins":
        return (
            f"the wiring given wins: streak {base['streak']:.3f} {sample}, none of {tried} nearby is better"
        )
    parts = []
    for change in value["changes"]:
        interval = "" if change["low"] is None else f" [{change['low']:.2f}, {change['high']:.2f}]"
        stated = ", ".join(f"{name} = {_written(v)}" for name, v in change["settings"].items())
        parts.append(
            f"{change['label']}: streak {change['before']:.2f} -> {change['after']:.2f}{interval}; set {stated}"
        )
    return "; then ".join(parts)


def _written(value: Any) -> str:
    """A value as it would stand in TOML, in one line."""
    if isinstance(value, list):
        return f"[{', '.join(_written(part) for part in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_written(part)}' for name, part in value.items())} }}"
    return "none" if value is None else json.dumps(value)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _toml(value) for name, value in settings.items()}


def _toml(value: Any) -> Any:
    """A wiring's value in types that TOML and JSON have; None, which TOML lacks, is left out of tables."""
    if isinstance(value, LayerAttention):
        return {name: part for name, part in dataclasses.asdict(value).items() if part is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: part for name, part in dataclasses.asdict(value).items() if part is not None}
    return [_toml(part) for part in value] if isinstance(value, (list, tuple)) else value
