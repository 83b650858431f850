"""Tries wirings on the same anchors as a base wiring, and says which are better, worse, or cannot be told apart.

In stages: what is clearly worse needs no further anchors. Two tests witness for a change. The log-probability of the
reference tokens at all depths, which drafters are trained to raise, tells a fault that costs a few percent two to
three times as surely as the streak does; the streak is what counts in the end, and tells where probabilities are
not calibrated. Both are taken among the tokens of the recorded text, where the head costs next to nothing. Having
two tests and having tried many is corrected for.

Knows nothing of what a wiring means, nor how an answer is worded.

Letters: N anchors of a trial.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int32

from draftgauge.drafters import Drafter, load_drafter
from draftgauge.errors import CheckpointError, RecordingError, WiringError
from draftgauge.features import Recorded, as_torch, read_item
from draftgauge.neighbours import Candidate
from draftgauge.pairing import Pair
from draftgauge.progress import Progress
from draftgauge.recording import Item, verify_items
from draftgauge.stats import Change, holm
from draftgauge.trials import Scores, Trial, choose_anchors, paired_change, scores_of, streaks_of
from draftgauge.wiring import Wiring, validate

#: Anchors after each stage. A candidate that is clearly worse, or best beyond doubt, needs no later one.
STAGES = (128, 512, 2048)
#: Of all searches in which nothing nearby is better, at most this share says that something is.
FAMILY_ALPHA = 0.01
#: Worse, in the table, is what is worse with this probability of error over all wirings tried.
_WORSE_ALPHA = 0.05
_CLEARLY_WORSE, _BEYOND_DOUBT = 1e-4, 1e-6
#: Where no change helps beyond doubt, up to so many that may help are tried together with every other.
_COMBINED, _HOPEFUL = 2, 0.05
#: Two tests that point in opposite directions, each this sure, decide nothing.
_CONTRADICTS = 0.01
#: A smaller change is rounding.
_ROUNDING = 1e-6

Outcome = Literal["better", "worse", "undecidable", "impossible", "not tried"]


@dataclass(frozen=True)
class Evidence:
    """How a candidate differs from the base on the same anchors: per reference token, and per block."""

    log_prob: Change
    streak: Change

    @property
    def p(self) -> float | None:
        """The probability of such a difference by chance, for the surer of the two tests; None where too few."""
        if self.log_prob.p is None or self.streak.p is None:
            return None
        return min(1.0, 2 * min(self.log_prob.p, self.streak.p))

    @property
    def direction(self) -> int:
        """1 where the candidate is better by the surer test, -1 where it is worse, 0 where nothing says."""
        if self.log_prob.p is None or self.streak.p is None:
            return 0
        weak, sure = sorted((self.log_prob, self.streak), key=lambda c: -(c.p if c.p is not None else 1.0))
        if abs(sure.value) < _ROUNDING:
            return 0
        if weak.p is not None and weak.p < _CONTRADICTS and weak.value * sure.value < 0:
            return 0
        return 1 if sure.value > 0 else -1


@dataclass
class Attempt:
    """A candidate, the anchors where it can be tried, and what was found on those in `done`."""

    candidate: Candidate
    kept: Bool[np.ndarray, " N"]
    done: Bool[np.ndarray, " N"]
    scores: Scores
    evidence: Evidence | None = None
    p: float | None = None
    outcome: Outcome = "undecidable"
    reason: str | None = None


@dataclass(frozen=True)
class Bench:
    """A pair, its trial, and what every wiring shares: the two ends, and the tokens that the text is made of."""

    pair: Pair
    trial: Trial
    ends: Mapping[str, torch.Tensor]
    among: torch.Tensor

    def where(self, kept: Bool[np.ndarray, " N"]) -> Bench:
        """The bench on those anchors alone."""
        return dataclasses.replace(self, trial=self.trial.where(kept))

    def scores(self, wiring: Wiring, part: Trial) -> Scores:
        """The scores on some anchors of the trial, under a wiring."""
        return scores_of(self._drafter(wiring), part, read=self._reader(wiring), among=self.among)

    def streaks(self, wiring: Wiring) -> Int32[np.ndarray, " N"]:
        """The streaks on the whole trial over the whole vocabulary, under a wiring."""
        return streaks_of(self._drafter(wiring), self.trial, read=self._reader(wiring))

    def _drafter(self, wiring: Wiring) -> Drafter:
        dtype = self.ends["head"].dtype
        return load_drafter(wiring, self.pair.checkpoint.tensors, dtype=dtype, **self.ends)

    def _reader(self, wiring: Wiring) -> Callable[[Item], Recorded]:
        dtype = self.ends["head"].dtype
        return lambda item: read_item(self.pair.recording, item, wiring=wiring, dtype=dtype)


def open_bench(pair: Pair, *, dtype: str, seed: int) -> Bench:
    """The bench of a pair, once the recording's bytes are known to be those that were recorded.

    Raises:
        RecordingError: They are not, or no completion is as long as a block.
    """
    items = list(verify_items(pair.recording, pair.items))
    pair.recording.verify_ends()
    trial = choose_anchors(items, room=pair.wiring.depth, count=STAGES[-1], seed=seed)
    compute = getattr(torch, dtype)
    stored = {name: pair.recording.end(name) for name in ("embedding", "head")}
    ends = {name: as_torch(end).to(compute) for name, end in stored.items()}
    if stored["embedding"] == stored["head"]:  # held once
        ends["head"] = ends["embedding"]
    texts = [as_torch(pair.recording.tensors(item).tokens)[item.prompt_len :].long() for item in items]
    return Bench(pair, trial, ends, torch.cat(texts).unique())


def search(
    bench: Bench, base: Scores, *, candidates: Sequence[Candidate], progress: Progress
) -> list[Attempt]:
    """Tries every candidate, and where none is better, those that may help together with every other."""
    attempts = [_begin(bench, candidate) for candidate in candidates]
    _in_stages(bench, base, attempts, progress=progress)
    _judge(attempts)
    if not gains(attempts):
        pairs = [_begin(bench, candidate) for candidate in _combined(attempts)]
        _in_stages(bench, base, pairs, progress=progress)
        attempts += pairs
        _judge(attempts)
    return attempts


def gains(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The candidates that are better, the largest gain in accepted tokens first."""

    def gain(attempt: Attempt) -> float:
        return attempt.evidence.streak.value if attempt.evidence else 0.0

    return sorted((a for a in attempts if a.outcome == "better"), key=lambda a: -gain(a))


def _begin(bench: Bench, candidate: Candidate) -> Attempt:
    """A candidate with the anchors on which its taps were recorded."""
    recording, items = bench.pair.recording, bench.trial.items
    held = [set(candidate.wiring.taps) <= set(recording.recorded_taps(item)) for item in items]
    kept = np.array(held)[bench.trial.index]
    # A deeper block must not win by its depth alone.
    shape = (len(kept), min(candidate.wiring.depth, bench.pair.wiring.depth))
    scores = Scores(np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool))
    attempt = Attempt(candidate, kept, np.zeros_like(kept), scores)
    if not kept.any():
        attempt.outcome = "not tried"
        attempt.reason = "its layers were not recorded; record again with --taps-around"
    return attempt


def _in_stages(bench: Bench, base: Scores, attempts: Sequence[Attempt], *, progress: Progress) -> None:
    """Measures candidates on more and more anchors, until each is decided or one is best beyond doubt."""
    alive = [attempt for attempt in attempts if attempt.outcome == "undecidable"]
    start = 0
    for stop in STAGES:
        if start >= len(bench.trial) or not alive:
            break
        label = f"try on {min(stop, len(bench.trial))} anchors"
        for attempt in progress(alive, label=label, total=len(alive), unit="wiring"):
            _measure(bench, base, attempt, start=start, stop=stop)
        if any(_sure(attempt, 1, at=_BEYOND_DOUBT / len(attempts)) for attempt in attempts):
            break
        alive = [a for a in alive if a.outcome == "undecidable" and not _sure(a, -1, at=_CLEARLY_WORSE)]
        start = stop


def _measure(bench: Bench, base: Scores, attempt: Attempt, *, start: int, stop: int) -> None:
    """Adds the turns from `start` to `stop` to what is known of a candidate."""
    turn, scores = bench.trial.turn, attempt.scores
    chosen = attempt.kept & (turn >= start) & (turn < stop)
    if not chosen.any():
        return
    try:
        found = bench.scores(attempt.candidate.wiring, bench.trial.where(chosen))
    except (CheckpointError, RecordingError, WiringError) as exc:
        attempt.outcome, attempt.reason, attempt.evidence = "impossible", str(exc), None
        return
    depth = scores.first.shape[1]
    scores.log_probs[chosen], scores.first[chosen] = found.log_probs[:, :depth], found.first[:, :depth]
    attempt.done |= chosen
    depth = min(depth, base.first.shape[1])
    trial = bench.trial.where(attempt.done)
    before, after = base.where(attempt.done), scores.where(attempt.done)
    attempt.evidence = Evidence(
        log_prob=paired_change(trial, before.mean_log_prob(depth), after.mean_log_prob(depth)),
        streak=paired_change(trial, before.streaks(depth), after.streaks(depth)),
    )


def _sure(attempt: Attempt, direction: int, *, at: float) -> bool:
    """Whether a candidate is better (1) or worse (-1) with at most that probability of error, uncorrected."""
    evidence = attempt.evidence
    return (
        evidence is not None
        and evidence.p is not None
        and evidence.direction == direction
        and evidence.p < at
    )


def _judge(attempts: Sequence[Attempt]) -> None:
    """Says which candidates are better or worse, corrected for how many were tried."""
    known = [(a, a.evidence, a.evidence.p) for a in attempts if a.evidence and a.evidence.p is not None]
    adjusted = holm([p for _, _, p in known])
    for (attempt, evidence, _), p in zip(known, adjusted, strict=True):
        attempt.p, attempt.outcome = float(p), "undecidable"
        if max(abs(evidence.log_prob.value), abs(evidence.streak.value)) < _ROUNDING:
            attempt.reason = "the drafts are the same"
        elif p < FAMILY_ALPHA and evidence.direction > 0:
            attempt.outcome = "better"
        elif p < _WORSE_ALPHA and evidence.direction < 0:
            attempt.outcome = "worse"
        elif p < FAMILY_ALPHA:
            attempt.reason = "more probable, but less is accepted, or the reverse"


def _combined(attempts: Sequence[Attempt]) -> list[Candidate]:
    """The changes that may help, each together with every change of another field."""
    hopeful = [a for a in attempts if _sure(a, 1, at=_HOPEFUL)]
    hopeful.sort(key=lambda a: a.p if a.p is not None else 1.0)
    others = [a.candidate for a in attempts if a.evidence is not None]
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
