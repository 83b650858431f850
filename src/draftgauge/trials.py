"""A small, fixed set of anchors on which functions are compared, and what each wins there.

Controls change what the drafter reads, a diagnosis changes how it is wired; both compare on the same anchors,
so that a difference of a few percent shows. Knows nothing of what is changed, or what a difference means.

Letters: N anchors of a trial, D depth, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int, Int32, Int64, Shaped

from draftgauge.drafters import Drafter
from draftgauge.errors import RecordingError
from draftgauge.features import Recorded
from draftgauge.recording import Item
from draftgauge.replay import replay_among, replay_streaks
from draftgauge.stats import Change, change

#: Anchors of one prompt that lie within so many tokens count as one: they are drafted from the same text.
UNIT_TOKENS = 16
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Trial:
    """Anchors spread over the completions of `items`, by item and then ascending.

    Anchor n lies in `items[index[n]]`. `turn[n]` is its place in the order of trying: the first so many turns
    are spread as evenly as all of them.
    """

    items: tuple[Item, ...]
    index: Int64[np.ndarray, " N"]
    anchors: Int64[np.ndarray, " N"]
    turn: Int64[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def units(self) -> Int64[np.ndarray, " N"]:
        """Which anchors belong together: those of one prompt within `UNIT_TOKENS` tokens share a number."""
        first = np.array([item.prompt_len for item in self.items])
        segment = (self.anchors - first[self.index]) // UNIT_TOKENS
        return np.asarray(self.index * (1 + int(segment.max(initial=0))) + segment)

    def where(self, kept: Bool[np.ndarray, " N"]) -> Trial:
        """The trial on those anchors alone."""
        return Trial(self.items, self.index[kept], self.anchors[kept], self.turn[kept])

    def turns(self, start: int, stop: int) -> Trial:
        """The anchors that are tried from turn `start` on and before turn `stop`."""
        return self.where((self.turn >= start) & (self.turn < stop))


def choose_anchors(items: Sequence[Item], *, room: int, count: int | None = None, seed: int = 0) -> Trial:
    """Up to `count` anchors (all, when None), spread evenly over the completions.

    Args:
        items: The recorded prompts to take anchors from.
        room: Reference tokens that must stand after an anchor, so that no streak is cut by the end of the text:
            the largest draft depth that will be compared.
        count: How many anchors.
        seed: Where the even spread begins.

    Raises:
        RecordingError: No completion is long enough.
    """
    pairs = [(i, a) for i, item in enumerate(items) for a in range(item.prompt_len, item.length - room)]
    if not pairs:
        raise RecordingError(
            f"none of {len(items)} completion(s) has {room + 1} tokens, which a block of that depth needs; record "
            "longer completions (--max-new-tokens)"
        )
    index, anchors = np.array(pairs).T
    # Multiples of the golden ratio, modulo 1, spread evenly however many are taken.
    start = float(np.random.default_rng(seed).random())
    turn = np.argsort(np.argsort((np.arange(len(pairs)) * _GOLDEN + start) % 1.0, kind="stable"))
    trial = Trial(tuple(items), index, anchors, turn)
    return trial if count is None else trial.turns(0, count)


def streaks_of(
    drafter: Drafter, trial: Trial, *, read: Callable[[Item], Recorded]
) -> Int32[np.ndarray, " N"]:
    """The chain's streak at every anchor of the trial; `read` gives each item as the drafter is to see it.

    Raises:
        CheckpointError: The drafter's output is not finite.
        RecordingError: The features are not those that the drafter reads.
    """
    streak = np.zeros(len(trial), dtype=np.int32)
    for i in np.unique(trial.index):
        mine = trial.index == i
        anchors = torch.from_numpy(trial.anchors[mine])
        streak[mine] = replay_streaks(drafter, read(trial.items[i]), anchors=anchors)
    return streak


@dataclass(frozen=True, eq=False)
class Scores:
    """What a function makes of the reference tokens at every anchor of a trial, among the tokens of its text.

    `log_probs` of the references, and whether each is the `first` choice.
    """

    log_probs: Float32[np.ndarray, "N D"]
    first: Bool[np.ndarray, "N D"]

    def where(self, kept: Bool[np.ndarray, " N"]) -> Scores:
        """The scores on those anchors alone."""
        return Scores(self.log_probs[kept], self.first[kept])

    def mean_log_prob(self, depth: int) -> Float32[np.ndarray, " N"]:
        """The mean log-probability of the references to that depth."""
        return np.asarray(self.log_probs[:, :depth].mean(axis=1))

    def streaks(self, depth: int) -> Int64[np.ndarray, " N"]:
        """The leading depths that would be accepted if the vocabulary were the text's."""
        return np.asarray(self.first[:, :depth].cumprod(axis=1).sum(axis=1))


def scores_of(
    drafter: Drafter, trial: Trial, *, read: Callable[[Item], Recorded], among: Int[torch.Tensor, " S"]
) -> Scores:
    """The scores of a drafter at every anchor of the trial, among the tokens `among`.

    Raises:
        CheckpointError: As `streaks_of`.
        RecordingError: As `streaks_of`.
    """
    shape = (len(trial), drafter.wiring.depth)
    log_probs, first = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
    for i in np.unique(trial.index):
        mine = trial.index == i
        anchors = torch.from_numpy(trial.anchors[mine])
        log_probs[mine], first[mine] = replay_among(
            drafter, read(trial.items[i]), anchors=anchors, among=among
        )
    return Scores(log_probs, first)


def paired_change(trial: Trial, before: Shaped[np.ndarray, " N"], after: Shaped[np.ndarray, " N"]) -> Change:
    """The mean change per anchor from `before` to `after`, and how sure it is.

    Example:
        Streaks that fall by one at every anchor: `Change(value=-1.0, ...)`.
    """
    _, unit = np.unique(trial.units, return_inverse=True)
    return change(np.bincount(unit, (after - before).astype(float)), np.bincount(unit))
