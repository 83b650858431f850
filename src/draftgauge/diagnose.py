"""Searches the wirings near the given one: is the number low because the drafter is, or because it is wired wrongly?

Every neighbour is tried on the same anchors as the wiring given (`search`). The best change is taken, where it wins
tokens over the whole vocabulary, and the search goes on from there. What makes no difference on this data is called
undecidable, never right.

Letters: N, M anchors of a trial before and after it was narrowed to what can be compared.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from jaxtyping import Int32

from draftgauge.neighbours import Surroundings, neighbours
from draftgauge.pairing import Pair, open_pair, require_sound
from draftgauge.progress import Progress, silent
from draftgauge.search import Attempt, Bench, Evidence, gains, open_bench, search
from draftgauge.stated import Stated
from draftgauge.stats import Change
from draftgauge.store import publish_file
from draftgauge.trials import paired_change
from draftgauge.wiring import LayerAttention

_ROUNDS = 4
#: A streak below this leaves a search nothing to hold on to.
_LEAST_STREAK = 0.05


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
    pair = open_pair(checkpoint_path, recording_path, stated=stated, state_dict=state_dict, progress=progress)
    require_sound(pair.checkpoint, pair.wiring, progress=progress)
    bench, wiring = open_bench(pair, dtype=dtype, seed=seed), pair.wiring
    first = streak = bench.streaks(wiring)
    changes: list[dict[str, Any]] = []
    attempts: list[Attempt] = []
    for _ in range(_ROUNDS):
        settled = {name for change in changes for name in change["fields"]}
        lost = [attempt for attempt in attempts if attempt.outcome == "worse"]  # with any other fault, too
        known = {attempt.candidate.label for attempt in lost}
        found = [c for c in neighbours(wiring, _surroundings(pair)) if c.field not in settled]
        found = [candidate for candidate in found if candidate.label not in known]
        tried = search(bench, bench.scores(wiring, bench.trial), candidates=found, progress=progress)
        attempts = [*tried, *lost]
        for best in gains(tried):
            narrowed = bench.where(best.kept)
            before, after = streak[best.kept], narrowed.streaks(best.candidate.wiring)
            if after.mean() > before.mean():
                break
            best.outcome, best.reason = "undecidable", "no more is accepted over the whole vocabulary"
        else:
            break
        bench, wiring, streak = narrowed, best.candidate.wiring, after
        changes.append(_taken(bench, best, before, after))
    if streak.mean() < _LEAST_STREAK:  # some noise is a little less bad than the other: that is no wiring
        changes, streak = [], first
    return _result(bench, (first, streak), changes, attempts, seconds=time.time() - started)


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


def _taken(
    bench: Bench, attempt: Attempt, before: Int32[np.ndarray, " N"], after: Int32[np.ndarray, " N"]
) -> dict[str, Any]:
    """A change that was taken: how sure it is, and what it is worth on all anchors where it can be measured."""
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
        **_evidence(attempt.evidence),
        "p": attempt.p,
        "anchors": len(bench.trial),
        "prompts": len(np.unique(bench.trial.index)),
    }


def _result(
    bench: Bench,
    streaks: tuple[Int32[np.ndarray, " N"], Int32[np.ndarray, " M"]],
    changes: list[dict[str, Any]],
    attempts: Sequence[Attempt],
    *,
    seconds: float,
) -> dict[str, Any]:
    first, last = streaks
    settings = {name: value for change in changes for name, value in change["settings"].items()}
    verdict = "better-found" if changes else "given-wins" if last.mean() >= _LEAST_STREAK else "none-works"
    undecided = [a for a in attempts if a.outcome == "undecidable"]
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
        "candidates": [_row(attempt) for attempt in sorted(attempts, key=_interest)],
        "undecidable": list(dict.fromkeys(a.candidate.field for a in undecided)),
        "method": "log-probability and streak of the reference tokens among those of the text, paired on the same "
        "anchors; t intervals over stretches of 16 tokens; two tests, and Holm over all wirings tried",
        "seconds": seconds,
    }
    return {"answer": _answer(value, len(attempts)), **value}


def _interest(attempt: Attempt) -> tuple[int, float]:
    order = ("better", "undecidable", "worse", "not tried", "impossible")
    return order.index(attempt.outcome), -(attempt.evidence.log_prob.value if attempt.evidence else 0.0)


def _row(attempt: Attempt) -> dict[str, Any]:
    return {
        "field": attempt.candidate.field,
        "label": attempt.candidate.label,
        "settings": _plain(attempt.candidate.settings),
        "outcome": attempt.outcome,
        **_evidence(attempt.evidence),
        "p": attempt.p,
        "anchors": int(attempt.done.sum()),
        "reason": attempt.reason,
    }


def _evidence(evidence: Evidence | None) -> dict[str, Any]:
    """Both changes with their intervals, among the tokens of the text."""

    def told(change: Change) -> dict[str, float | None]:
        return {"value": change.value, "low": change.low, "high": change.high}

    if evidence is None:
        return {"log_prob_change": None, "streak_change": None}
    return {"log_prob_change": told(evidence.log_prob), "streak_change": told(evidence.streak)}


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
