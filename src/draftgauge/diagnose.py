"""Searches the wirings near the given one: is the number low because the drafter is, or because it is wired wrongly?

Every neighbour is tried on the same anchors as the wiring given, in stages; those that are clearly worse are dropped
early. The best change is taken and the search goes on from there. Having tried many is corrected for, and what makes
no difference on this data is called undecidable, never right.

What decides is the log-probability of the reference tokens at all depths, which drafters are trained to raise: it
tells a fault that costs a few percent two to three times as surely as the streak does. What a change is worth is told
in streaks.

Letters: N anchors of a trial, D depth.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
import torch
from jaxtyping import Bool, Float32, Int32

from draftgauge.drafters import Drafter, load_drafter
from draftgauge.errors import CheckpointError, RecordingError, WiringError
from draftgauge.features import Recorded, as_torch, read_item
from draftgauge.neighbours import Candidate, Surroundings, neighbours
from draftgauge.pairing import Pair, open_pair, require_sound
from draftgauge.progress import Progress, silent
from draftgauge.recording import ENDS, Item, verify_items
from draftgauge.stated import Stated
from draftgauge.stats import Change, holm
from draftgauge.store import publish_file
from draftgauge.trials import Trial, choose_anchors, log_probs_of, paired_change, streaks_of
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
_COMBINED, _HOPEFUL = 2, 0.05
#: A smaller change of a log-probability is rounding.
_ROUNDING = 1e-6
#: A streak below this leaves a search nothing to hold on to.
_LEAST_STREAK = 0.05

Outcome = Literal["better", "worse", "undecidable", "impossible", "not tried"]


@dataclass
class _Try:
    """A candidate, the anchors where it can be tried, and what was measured of it on those in `done`."""

    candidate: Candidate
    kept: Bool[np.ndarray, " N"]
    done: Bool[np.ndarray, " N"]
    scores: Float32[np.ndarray, "N D"]
    change: Change | None = None
    p: float | None = None
    outcome: Outcome = "undecidable"
    reason: str | None = None


@dataclass(frozen=True)
class _Bench:
    """The pair, its trial, and what every wiring shares: the two ends, and the tokens that the text is made of."""

    pair: Pair
    trial: Trial
    ends: Mapping[str, torch.Tensor]
    among: torch.Tensor

    def scores(self, wiring: Wiring, part: Trial) -> Float32[np.ndarray, "N D"]:
        """The log-probabilities of the references on some anchors of the trial, under a wiring."""
        return log_probs_of(self._drafter(wiring), part, read=self._reader(wiring), among=self.among)

    def streaks(self, wiring: Wiring) -> Int32[np.ndarray, " N"]:
        """The streaks on the whole trial, under a wiring."""
        return streaks_of(self._drafter(wiring), self.trial, read=self._reader(wiring))

    def _drafter(self, wiring: Wiring) -> Drafter:
        dtype = self.ends["head"].dtype
        return load_drafter(wiring, self.pair.checkpoint.tensors, dtype=dtype, **self.ends)

    def _reader(self, wiring: Wiring) -> Callable[[Item], Recorded]:
        dtype = self.ends["head"].dtype
        return lambda item: read_item(self.pair.recording, item, wiring=wiring, dtype=dtype)


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
    wiring, trial = pair.wiring, bench.trial
    base, streak = bench.scores(wiring, trial), bench.streaks(wiring)
    first = streak
    changes: list[dict[str, Any]] = []
    tries: list[_Try] = []
    for _ in range(_ROUNDS):
        settled = {name for change in changes for name in change["fields"]}
        lost = [attempt for attempt in tries if attempt.outcome == "worse"]  # with any other fault, too
        known = {attempt.candidate.label for attempt in lost}
        found = [c for c in neighbours(wiring, _surroundings(pair)) if c.field not in settled]
        open_ones = _search(bench, base, [c for c in found if c.label not in known], progress=progress)
        tries = [*open_ones, *lost]
        for best in _gains(open_ones):
            narrowed = dataclasses.replace(bench, trial=bench.trial.where(best.kept))
            before, after = streak[best.kept], narrowed.streaks(best.candidate.wiring)
            if after.mean() > before.mean():
                break
            best.outcome, best.reason = "undecidable", "more probable, but no more is accepted"
        else:
            break
        bench, wiring, streak = narrowed, best.candidate.wiring, after
        base = bench.scores(wiring, bench.trial)
        changes.append(_taken(bench, best, before, after))
    return _result(bench, (first, streak), changes, tries, seconds=time.time() - started)


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
    ends = {
        name: as_torch(pair.recording.end(name)).to(getattr(torch, dtype)) for name in ("embedding", "head")
    }
    texts = [as_torch(pair.recording.tensors(item).tokens)[item.prompt_len :].long() for item in items]
    return _Bench(pair, trial, ends, torch.cat(texts).unique())


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
    bench: _Bench, base: Float32[np.ndarray, "N D"], candidates: Sequence[Candidate], *, progress: Progress
) -> list[_Try]:
    """Tries every candidate, and where none is better, the most promising ones two at a time."""
    tries = [_begin(bench, candidate) for candidate in candidates]
    _in_stages(bench, base, tries, progress=progress)
    _judge(tries)
    if not _gains(tries):
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
    bench: _Bench, base: Float32[np.ndarray, "N D"], tries: Sequence[_Try], *, progress: Progress
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
    depth = min(candidate.wiring.depth, bench.pair.wiring.depth)
    attempt = _Try(candidate, kept, np.zeros_like(kept), np.zeros((len(kept), depth), dtype=np.float32))
    if not kept.any():
        attempt.outcome = "not tried"
        attempt.reason = "its layers were not recorded; record again with --taps-around"
    return attempt


def _measure(
    bench: _Bench, attempt: _Try, base: Float32[np.ndarray, "N D"], *, start: int, stop: int
) -> None:
    """Adds the turns from `start` to `stop` to what is known of a candidate."""
    turn, depth = bench.trial.turn, attempt.scores.shape[1]
    chosen = attempt.kept & (turn >= start) & (turn < stop)
    if not chosen.any():
        return
    try:
        found = bench.scores(attempt.candidate.wiring, bench.trial.where(chosen))
    except (CheckpointError, RecordingError, WiringError) as exc:
        attempt.outcome, attempt.reason, attempt.change = "impossible", str(exc), None
        return
    attempt.scores[chosen] = found[:, :depth]  # a deeper block must not win by its depth alone
    attempt.done |= chosen
    depth = min(depth, base.shape[1])
    before, after = (scores[attempt.done, :depth].mean(axis=1) for scores in (base, attempt.scores))
    attempt.change = paired_change(bench.trial.where(attempt.done), before, after)


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
        if abs(change.value) < _ROUNDING:
            attempt.reason = "the drafts are the same"
        elif p < _FAMILY_ALPHA and change.value > 0:
            attempt.outcome = "better"
        elif p < _WORSE_ALPHA and change.value < 0:
            attempt.outcome = "worse"


def _gains(tries: Sequence[_Try]) -> list[_Try]:
    """The changes that gain, the largest gain first."""
    better = [a for a in tries if a.outcome == "better"]
    return sorted(better, key=lambda a: -(a.change.value if a.change else 0.0))


def _taken(
    bench: _Bench, attempt: _Try, before: Int32[np.ndarray, " N"], after: Int32[np.ndarray, " N"]
) -> dict[str, Any]:
    """A change that was taken: how sure it is, and what it is worth on all anchors where it can be measured."""
    assert attempt.change is not None
    depth = min(attempt.candidate.wiring.depth, bench.pair.wiring.depth)
    worth = paired_change(bench.trial, before.clip(max=depth), after.clip(max=depth))
    start = float(before.clip(max=depth).mean())
    return {
        "field": attempt.candidate.field,
        "fields": attempt.candidate.field.split(" + "),
        "label": attempt.candidate.label,
        "settings": _plain(attempt.candidate.settings),
        "before": start,
        "after": start + worth.value,
        "low": None if worth.low is None else start + worth.low,
        "high": None if worth.high is None else start + worth.high,
        "log_prob_change": attempt.change.value,
        "p": attempt.p,
        "anchors": len(bench.trial),
        "prompts": len(np.unique(bench.trial.index)),
    }


def _result(
    bench: _Bench,
    streaks: tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " M"]],
    changes: list[dict[str, Any]],
    tries: Sequence[_Try],
    *,
    seconds: float,
) -> dict[str, Any]:
    first, last = streaks
    settings = {name: value for change in changes for name, value in change["settings"].items()}
    verdict = "better-found" if changes else "given-wins" if last.mean() >= _LEAST_STREAK else "none-works"
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
        "streak": float(last.mean()),
        "changes": changes,
        "settings": settings,
        "candidates": [_row(attempt) for attempt in sorted(tries, key=_interest)],
        "undecidable": list(dict.fromkeys(a.candidate.field for a in undecided)),
        "method": "log-probability of the reference tokens at all depths, paired on the same anchors; t intervals "
        "over stretches of 16 tokens, Holm over all wirings tried",
        "seconds": seconds,
    }
    return {"answer": _answer(value, len(tries)), **value}


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
        "anchors": int(attempt.done.sum()),
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
