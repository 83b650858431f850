"""From ranks to numbers: streaks, walks, counts, per-depth rates, and every convention of the field.

Everything here is integer arithmetic on the ranks of the reference tokens, one prompt at a time; counts of
several prompts add, and rates are derived from the sums. Knows nothing about models, tokens or files, and
nothing about uncertainty (`stats`) or how a tree is expanded (`tree`).

Letters: A anchors of one prompt, D draft depth, N consecutive anchors, R rounds of a walk. T is the length
of a sequence and P of its prompt; a round that starts at anchor a has room for T-1-a more tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import total_ordering
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Int, Int32

from draftgauge.errors import InputError

#: The rank where a depth has no reference token: it lies beyond the end of the sequence.
NO_REFERENCE = np.int32(2**31 - 1)
#: The rank of a reference token that the drafter's vocabulary does not contain.
UNREACHABLE = np.int32(2**31 - 2)

_NOT_REPLAYED = -1
_KINDS = ("chain", "ddtree", "coverage")


@total_ordering
@dataclass(frozen=True)
class Policy:
    """What is verified in a round: the chain, its first n tokens, a tree of n nodes, or all of width n.

    Ordered as they are reported: the chain, shorter chains, trees by budget, coverages by width.
    """

    kind: Literal["chain", "ddtree", "coverage"]
    n: int | None = None

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy's slug: `chain`, `chain4`, `ddtree16`, `coverage4`.

        Raises:
            InputError: the text is no such slug, or its number is 0.
        """
        found = re.fullmatch(r"(chain|ddtree|coverage)([1-9]\d*)?", text)
        if found is None or (found[2] is None and found[1] != "chain"):
            raise InputError(
                f"Policy {text!r} is not known; expected chain, chainN, ddtreeN or coverageN with N of at "
                "least 1, as in: chain ddtree16 coverage4"
            )
        kind: Literal["chain", "ddtree", "coverage"] = found[1]  # type: ignore[assignment]
        return cls(kind, None if found[2] is None else int(found[2]))

    @property
    def slug(self) -> str:
        """The name in files and on the command line, as in `ddtree16`."""
        return self.kind if self.n is None else f"{self.kind}{self.n}"

    @property
    def label(self) -> str:
        """The name for readers: chain, chain(4), DDTree(16), coverage@4."""
        if self.n is None:
            return "chain"
        return {"chain": f"chain({self.n})", "ddtree": f"DDTree({self.n})", "coverage": f"coverage@{self.n}"}[
            self.kind
        ]

    def limit(self, depth: int) -> int:
        """The most draft tokens that one round can accept when `depth` are drafted."""
        return min(self.n, depth) if self.kind == "chain" and self.n is not None else depth

    def __lt__(self, other: Policy) -> bool:
        return (_KINDS.index(self.kind), self.n or 0) < (_KINDS.index(other.kind), other.n or 0)


@dataclass(frozen=True, eq=False)
class Blocks:
    """What one prompt's drafted blocks say about its reference tokens: the input of all counting.

    `anchors` are strictly increasing positions, all of P..T-2 or only those that were replayed; `ranks[a, d]`
    is the rank of the reference token at depth d+1, `NO_REFERENCE` beyond the end. `order[a, d]` is the
    1-based position of the reference prefix in the draft tree (`tree.reference_order`), which was expanded
    to `order_budget` nodes. `stopped` says that the reference's last token is a stop token.

    Raises:
        InputError: the arrays do not describe the anchors of one sequence.
    """

    anchors: Int[np.ndarray, " A"]
    ranks: Int32[np.ndarray, "A D"]
    prompt_tokens: int
    length: int
    stopped: bool = False
    order: Int32[np.ndarray, "A D"] | None = None
    order_budget: int = 0

    def __post_init__(self) -> None:
        P, T, anchors = self.prompt_tokens, self.length, self.anchors
        if not 0 < P < T:
            raise InputError(
                f"A sequence of {T} tokens has a prompt of {P}; expected a prompt and a completion of at "
                "least one token each: record it again."
            )
        if not (np.diff(anchors, prepend=P - 1, append=T - 1) > 0).all():
            raise InputError(
                f"The anchors of a sequence with P = {P} and T = {T} are not increasing positions in "
                f"{P}..{T - 2}: replay this prompt again."
            )
        beyond = np.arange(1, self.depth + 1) > self.available[:, None]
        if not np.array_equal(self.ranks == NO_REFERENCE, beyond) or (self.ranks < 0).any():
            raise InputError(
                f"The ranks of a sequence of {T} tokens do not end where its reference tokens do; "
                "expected ranks from 0, and NO_REFERENCE beyond the end: replay this prompt again."
            )

    @property
    def depth(self) -> int:
        """The draft depth D."""
        return int(self.ranks.shape[1])

    @property
    def available(self) -> Int[np.ndarray, " A"]:
        """How many depths of each block have a reference token."""
        return available(self.anchors, length=self.length, depth=self.depth)


def available(anchors: Int[np.ndarray, " A"], *, length: int, depth: int) -> Int[np.ndarray, " A"]:
    """Count the depths that have a reference token, n(a) = min(D, T-1-a).

    Example:
        A sequence of 10 tokens, depth 4: anchors (3, 6, 8) have 4, 3 and 1.
    """
    return np.asarray(np.minimum(depth, length - 1 - anchors))


def streaks(ranks: Int32[np.ndarray, "A D"], *, width: int = 1) -> Int32[np.ndarray, " A"]:
    """Count the leading depths whose reference token is among the drafter's first `width` choices.

    Example:
        Ranks (0, 0, 2, 0): 2 at width 1, 4 at width 3.
    """
    return _leading(ranks < width)


def tree_streaks(order: Int32[np.ndarray, "A D"], *, budget: int) -> Int32[np.ndarray, " A"]:
    """Count the leading depths whose reference prefix is among the first `budget` nodes of the draft tree.

    `order` holds the prefixes' 1-based positions (`tree.reference_order`), `NO_REFERENCE` where there is none.

    Example:
        Positions (1, 2, 9): 2 at budget 8, 3 at budget 16.
    """
    return _leading(order <= budget)


def _leading(accepted: Bool[np.ndarray, "A D"]) -> Int32[np.ndarray, " A"]:
    return np.asarray(np.cumprod(accepted, axis=1).sum(axis=1, dtype=np.int32))


def policy_streaks(
    policy: Policy, *, ranks: Int32[np.ndarray, "A D"], order: Int32[np.ndarray, "A D"] | None = None
) -> Int32[np.ndarray, " A"]:
    """Count the draft tokens that a round at each anchor would accept under `policy`.

    Raises:
        InputError: a tree policy without the order of a tree.
    """
    if policy.kind == "coverage":
        return streaks(ranks, width=policy.n or 0)
    if policy.kind == "chain":
        return np.asarray(np.minimum(streaks(ranks), np.int32(policy.limit(ranks.shape[1]))))
    if order is None:
        raise InputError(
            f"{policy.label} needs the position of each reference prefix in the draft tree, and these blocks "
            f"have none; expected an expansion to {policy.n} nodes: evaluate again with {policy.slug}."
        )
    return tree_streaks(order, budget=policy.n or 0)


def walk(streak: Int32[np.ndarray, " N"], *, first: int) -> Int32[np.ndarray, " R"]:
    """List the anchors that decoding visits: from `first` on, each round moves by its streak + 1.

    `streak[i]` belongs to anchor first + i, up to the last anchor T-2; -1 says that it was not replayed.

    Raises:
        InputError: the walk reaches an anchor that was not replayed.

    Example:
        Streaks (1, 0, 2, 0, 0, 0) from anchor 5 on visit anchors 5, 7 and 10.
    """
    visited, step, streak_of = [], 0, streak.tolist()
    while step < len(streak_of):
        if streak_of[step] == _NOT_REPLAYED:
            raise InputError(
                f"The walk reaches anchor {first + step}, which was not replayed; expected every anchor of "
                "the prompt, or at least those that this policy visits: replay all anchors of this prompt."
            )
        visited.append(first + step)
        step += streak_of[step] + 1
    return np.array(visited, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Walk:
    """The rounds of one response under one policy, in order.

    `room` is the number of reference tokens after the anchor, T-1-a. `missed_rank` is the rank of the
    reference token at the first depth that was not accepted, `NO_REFERENCE` where there is none.
    """

    policy: Policy
    depth: int
    anchors: Int32[np.ndarray, " R"]
    streak: Int32[np.ndarray, " R"]
    room: Int32[np.ndarray, " R"]
    missed_rank: Int32[np.ndarray, " R"]
    completion_tokens: int
    stopped: bool

    @property
    def committed(self) -> Int32[np.ndarray, " R"]:
        """The reference tokens that each round commits, min(streak + 1, room)."""
        return np.asarray(np.minimum(self.streak + 1, self.room))


def walk_blocks(policy: Policy, blocks: Blocks) -> Walk:
    """Walk one response under `policy`, on that policy's own path.

    Raises:
        InputError: a needed anchor or tree is missing, or the tree was expanded to too few nodes.
    """
    P, T = blocks.prompt_tokens, blocks.length
    streak = _streaks_of(policy, blocks)
    everywhere = np.full(T - 1 - P, _NOT_REPLAYED, dtype=np.int32)
    everywhere[blocks.anchors - P] = streak
    visited = walk(everywhere, first=P)
    rows = np.searchsorted(blocks.anchors, visited)
    streak = streak[rows]
    ranks = np.pad(blocks.ranks[rows], ((0, 0), (0, 1)), constant_values=NO_REFERENCE)
    return Walk(
        policy=policy,
        depth=blocks.depth,
        anchors=visited,
        streak=streak,
        room=np.int32(T - 1) - visited,
        missed_rank=ranks[np.arange(len(visited)), streak],
        completion_tokens=T - P,
        stopped=blocks.stopped,
    )


def _streaks_of(policy: Policy, blocks: Blocks) -> Int32[np.ndarray, " A"]:
    if policy.kind == "ddtree" and blocks.order is not None and blocks.order_budget < (policy.n or 0):
        raise InputError(
            f"{policy.label} was asked of trees that were expanded to {blocks.order_budget} nodes; expected "
            f"at least {policy.n}: evaluate again with {policy.slug}."
        )
    return policy_streaks(policy, ranks=blocks.ranks, order=blocks.order)


@dataclass(frozen=True)
class Counts:
    """What happened in the rounds of one or more responses under one policy; counts of prompts add.

    `accepted` draft tokens and `committed` reference tokens; `accepted_histogram[i]` rounds accepted i. The
    `ended_*` say why rounds ended and sum to `rounds`: the reference token was outside the width
    (not_covered), or inside it but outside the tree (not_selected), the whole verified block was accepted
    (depth), or the reference text ended first (reference: the streak is censored).
    """

    prompts: int
    rounds: int
    accepted: int
    committed: int
    completion_tokens: int
    accepted_histogram: tuple[int, ...]
    ended_not_covered: int
    ended_not_selected: int
    ended_depth: int
    ended_reference: int

    def __add__(self, other: Counts) -> Counts:
        return _added(self, other)


def counts_of(walk: Walk) -> Counts:
    """Count the rounds of one response.

    Example:
        Streaks (0, 2, 1) of depth 2 with room 6: 3 rounds, 3 accepted, 6 committed, histogram (1, 1, 1).
    """
    at_depth = walk.streak == walk.policy.limit(walk.depth)
    at_end = ~at_depth & (walk.missed_rank == NO_REFERENCE)
    missed = ~at_depth & ~at_end
    width = (walk.policy.n or 1) if walk.policy.kind != "chain" else 1
    not_covered = missed & (walk.missed_rank >= width)
    return Counts(
        prompts=1,
        rounds=len(walk.anchors),
        accepted=int(walk.streak.sum()),
        committed=int(walk.committed.sum()),
        completion_tokens=walk.completion_tokens,
        accepted_histogram=tuple(np.bincount(walk.streak, minlength=walk.depth + 1).tolist()),
        ended_not_covered=int(not_covered.sum()),
        ended_not_selected=int((missed & ~not_covered).sum()),
        ended_depth=int(at_depth.sum()),
        ended_reference=int(at_end.sum()),
    )


@dataclass(frozen=True)
class PerDepth:
    """How often the drafter is right at each depth, over anchors; counts of prompts add.

    Index d-1 is depth d. Anchors whose reference ends before a depth are left out of that depth:
    `anchors_marginal` have a reference token there and `hits` of them are the drafter's first choice;
    `anchors_conditional` of them have all shallower depths right and `survived` this one too.
    """

    anchors_marginal: tuple[int, ...]
    hits: tuple[int, ...]
    anchors_conditional: tuple[int, ...]
    survived: tuple[int, ...]

    def __add__(self, other: PerDepth) -> PerDepth:
        return _added(self, other)

    def marginal(self) -> list[float | None]:
        """m(d) = P(r(d) = 0); None where no anchor has that depth."""
        return _rates(self.hits, self.anchors_marginal)

    def survival(self) -> list[float | None]:
        """s(d) = P(streak >= d); None where no anchor has that depth."""
        return _rates(self.survived, self.anchors_marginal)

    def conditional(self) -> list[float | None]:
        """c(d) = P(r(d) = 0 | streak >= d-1); None where no anchor gets that far."""
        return _rates(self.survived, self.anchors_conditional)

    def eal_marginal(self) -> float | None:
        """Sum over d of m(1)..m(d) multiplied: what trainers log, an approximation without the bonus.

        None where some depth has no anchor. Source: speculators before 0.9.0, SpecForge's EAGLE-3 eval.
        """
        rates = [rate for rate in self.marginal() if rate is not None]
        return float(np.cumprod(rates).sum()) if len(rates) == len(self.hits) else None


def per_depth(blocks: Blocks) -> PerDepth:
    """Count hits and survivors at each depth over the anchors of one prompt.

    Example:
        Ranks (0, 0), (3, 0): hits (1, 2) of (2, 2) anchors; survivors (1, 1) of (2, 1).
    """
    known = blocks.ranks != NO_REFERENCE
    right = blocks.ranks == 0
    alive = np.cumprod(right, axis=1).astype(bool)
    entered = np.pad(alive[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def count(what: np.ndarray) -> tuple[int, ...]:
        return tuple((what & known).sum(axis=0).tolist())

    return PerDepth(
        anchors_marginal=count(known),
        hits=count(right),
        anchors_conditional=count(entered),
        survived=count(alive),
    )


def all_anchor_counts(policy: Policy, blocks: Blocks) -> tuple[int, int]:
    """Sum the streaks of every uncensored anchor, and count those anchors.

    Censored is an anchor whose streak was ended by the reference text: streak = available < limit.

    Raises:
        InputError: as `walk_blocks`.

    Example:
        Streaks (2, 0, 1) of depth 2 with (2, 2, 1) available: the last is censored, so (2, 2).
    """
    streak = _streaks_of(policy, blocks)
    uncensored = (streak < blocks.available) | (streak == policy.limit(blocks.depth))
    return int(streak[uncensored].sum()), int(uncensored.sum())


@dataclass(frozen=True)
class Convention:
    """One peer's acceptance length: the tokens it counts per response over the verifications, averaged.

    `averaged` says over what: the mean of the responses' own ratios, or one ratio pooled over all rounds.
    """

    description: str
    averaged: Literal["response mean", "pooled"]
    tokens: Callable[[Walk], int]

    def value(self, walks: Sequence[Walk]) -> float | None:
        """The number that this peer would print for these responses; None where there is no round."""
        rounds = [len(walk.anchors) for walk in walks]
        if not sum(rounds):
            return None
        tokens = [self.tokens(walk) for walk in walks]
        if self.averaged == "pooled":
            return sum(tokens) / sum(rounds)
        return fmean(t / r for t, r in zip(tokens, rounds, strict=True) if r)


def _overshooting(walk: Walk) -> int:
    return int((walk.streak + 1).sum())


def _cut_at_end(walk: Walk) -> int:
    return int(walk.committed.sum())


def _cut_at_stop(walk: Walk) -> int:
    # A stop token among the accepted drafts ends the round without a bonus; as the bonus itself, it counts.
    return _cut_at_end(walk) if walk.stopped else _overshooting(walk)


def _with_prefill(walk: Walk) -> int:
    return walk.completion_tokens


#: Every convention that is arithmetic on rounds; `PerDepth.eal_marginal` is the one that is not. A cut at the
#: first stop token is a cut at the end here, because a recording ends with its stop token.
CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        "zlab_2026_04": Convention(
            "z-lab April 2026: streak + 1 per round, mean of response means", "response mean", _overshooting
        ),
        "ddtree": Convention(
            "DDTree's own code: streak + 1 per round, mean of response means", "response mean", _overshooting
        ),
        "zlab_2026_08": Convention(
            "z-lab August 2026: the last round is cut at the end or stop token, mean of response means",
            "response mean",
            _cut_at_end,
        ),
        "pooled": Convention(
            "vLLM, speculators evaluate, Spec-Bench: 1 + accepted, pooled over rounds",
            "pooled",
            _overshooting,
        ),
        "deepspec": Convention(
            "DeepSpec: as pooled, but a round that ends on an accepted stop token has no bonus",
            "pooled",
            _cut_at_stop,
        ),
        "sglang_request": Convention(
            "SGLang: completion tokens, prefill's included, per verification; mean over requests",
            "response mean",
            _with_prefill,
        ),
        "specforge_bench": Convention(
            "SpecForge benchmark: all completion tokens, prefill's included, per verification",
            "pooled",
            _with_prefill,
        ),
    }
)

_Addable = TypeVar("_Addable", Counts, PerDepth)


def _added(a: _Addable, b: _Addable) -> _Addable:
    return type(a)(**{f.name: _sum(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, int):
        return a + b
    if len(a) != len(b):
        raise InputError(
            f"Counts per depth of {len(a)} and {len(b)} entries do not add; expected counts of one drafter "
            "under one plan: compare the two runs instead."
        )
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _rates(parts: tuple[int, ...], wholes: tuple[int, ...]) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]
