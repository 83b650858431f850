"""Replays a drafter against recorded sequences: ranks and top lists at every anchor and depth.

One pass over the target's recorded features gives what online decoding would have drafted at each anchor.
From then on acceptance is arithmetic. Memory is bounded by slices of anchors and of rows, whatever the
sequence's length and the vocabulary's size. Knows nothing of recordings, prompts or policies' meaning beyond
asking where a policy's walk goes next.

Letters: A anchors, D depth, T positions, F features, K list length, R rows, V vocabulary entries, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32
from torch import Tensor

from draftgauge.acceptance import NO_REFERENCE, UNREACHABLE
from draftgauge.drafters import Context, Drafter
from draftgauge.errors import CheckpointError, RecordingError
from draftgauge.features import Recorded
from draftgauge.ranking import rank_slices
from draftgauge.tree import reference_order

#: How many of the drafter's choices are kept per anchor and depth.
TOP_LIST = 8
#: Bounds on the transient memory of one slice: attention scores of a slice of anchors, logits of some rows.
_SCORE_BYTES = 1 << 27
_LOGIT_BYTES = 1 << 26
#: Rows whose logits are computed together: enough that the head is read at the processor's rate, not the memory's.
_ROWS = 1 << 10


@dataclass(frozen=True)
class Drafted:
    """The drafted blocks of one sequence, in the order of their anchors.

    `length` of the sequence; `ranks` of the reference tokens (`NO_REFERENCE` beyond the end, `UNREACHABLE`
    outside the drafter's vocabulary); `order`, the position of the reference prefix in the draft tree's
    expansion, None where no tree was asked; `log_probs` the drafter gave the reference (NaN where it has
    none); `top_ids` and `top_log_probs`, its first choices.
    """

    length: int
    anchors: Int32[np.ndarray, " A"]
    ranks: Int32[np.ndarray, "A D"]
    order: Int32[np.ndarray, "A D"] | None
    log_probs: Float32[np.ndarray, "A D"]
    top_ids: Int32[np.ndarray, "A D K"]
    top_log_probs: Float32[np.ndarray, "A D K"]


#: Given the blocks of one sequence so far, the anchors that some walk wants next (empty when all ended).
NextAnchors = Callable[[int, Drafted | None], list[int]]


@torch.inference_mode()
def replay(
    drafter: Drafter, recorded: Recorded, *, budget: int, anchors: Int[Tensor, " A"] | None = None
) -> Drafted:
    """Drafts at every anchor of a sequence (or at the given ones) and ranks the reference tokens.

    Args:
        drafter: The drafter, in the dtype to compute in.
        recorded: The sequence.
        budget: Nodes of the largest draft tree that will be asked for; 0 for none.
        anchors: Strictly increasing anchors; all of the sequence when None.

    Raises:
        CheckpointError: The drafter's output is not finite.
        RecordingError: The features are not those that the drafter reads, at every position.
    """
    _require_features(drafter, recorded)
    anchors = recorded.anchors if anchors is None else anchors
    if not len(anchors):
        return _nothing(drafter, recorded, budget=budget)
    context = drafter.context(recorded.features[: int(anchors[-1])])
    parts = []
    for chosen in anchors.split(_anchors_per_slice(drafter, context.length)):
        seen = context.upto(int(chosen[-1]))
        hidden = drafter.draft(seen, anchors=chosen, anchor_tokens=recorded.tokens[chosen])
        references = _references(recorded.tokens, chosen, depth=drafter.wiring.depth)
        length = len(recorded.tokens)
        parts.append(_rank(drafter, hidden, references, anchors=chosen, length=length, budget=budget))
    return joined(parts)


@torch.inference_mode()
def replay_streaks(
    drafter: Drafter, recorded: Recorded, *, anchors: Int[Tensor, " A"]
) -> Int32[np.ndarray, " A"]:
    """The chain's streak at each anchor, and nothing else: the head is applied only as far as a streak goes.

    Equals `acceptance.streaks` of what `replay` ranks at the same anchors, for a fraction of the head's work:
    for controls and searches, which compare many functions on a few anchors.

    Args:
        drafter: As for `replay`.
        recorded: The sequence.
        anchors: Strictly increasing anchors, at least one.

    Raises:
        CheckpointError: As for `replay`.
        RecordingError: As for `replay`.
    """
    _require_features(drafter, recorded)
    context = drafter.context(recorded.features[: int(anchors[-1])])
    parts = []
    for chosen in anchors.split(_anchors_per_slice(drafter, context.length)):
        seen = context.upto(int(chosen[-1]))
        hidden = drafter.draft(seen, anchors=chosen, anchor_tokens=recorded.tokens[chosen])
        references = _references(recorded.tokens, chosen, depth=drafter.wiring.depth)
        streak = torch.zeros(len(chosen), dtype=torch.int32)
        alive = torch.arange(len(chosen))
        for depth in range(drafter.wiring.depth):
            alive = alive[_hits(drafter, hidden[alive, depth], references[alive, depth])]
            streak[alive] += 1
        parts.append(streak.numpy())
    return np.concatenate(parts)


@torch.inference_mode()
def replay_among(
    drafter: Drafter, recorded: Recorded, *, anchors: Int[Tensor, " A"], among: Int[Tensor, " S"]
) -> tuple[Float32[np.ndarray, "A D"], Bool[np.ndarray, "A D"]]:
    """Log-probability of the reference at every anchor and depth, and whether it is first, among a few tokens.

    For searches, which compare many functions: among the tokens of a text the head costs next to nothing. The
    log-probability is what drafters are trained to raise. No token counts for less than a blind guess among
    them would, so that neither a few that were confidently missed nor those outside the drafter's vocabulary
    decide.

    Args:
        drafter: As for `replay`.
        recorded: The sequence.
        anchors: Strictly increasing anchors, at least one, with a reference token at every depth.
        among: Ascending token ids, with every reference token among them.

    Raises:
        CheckpointError: As for `replay`.
        RecordingError: As for `replay`.
    """
    _require_features(drafter, recorded)
    context = drafter.context(recorded.features[: int(anchors[-1])])
    entries, held = _entries(among, drafter.ends.target_ids, vocabulary=len(drafter.ends.head))
    rows, known, blind = entries[held], among[held], -math.log(len(among))
    log_probs, first = [], []
    for chosen in anchors.split(_anchors_per_slice(drafter, context.length)):
        seen = context.upto(int(chosen[-1]))
        hidden = drafter.draft(seen, anchors=chosen, anchor_tokens=recorded.tokens[chosen])
        scores = drafter.logits(hidden, rows=rows).float().log_softmax(-1)
        _require_finite(scores.isfinite().all(-1).flatten().numpy(), hidden.dtype)
        wanted = _references(recorded.tokens, chosen, depth=drafter.wiring.depth)
        place = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
        own = scores.gather(2, place[:, :, None])[:, :, 0].clamp(min=blind)
        log_probs.append(torch.where(known[place] == wanted, own, blind).numpy())
        first.append((known[scores.argmax(-1)] == wanted).numpy())
    return np.concatenate(log_probs), np.concatenate(first)


@torch.inference_mode()
def replay_walks(
    drafter: Drafter, sequences: Sequence[Recorded], *, budget: int, next_anchors: NextAnchors
) -> Iterator[tuple[int, Drafted]]:
    """Drafts only where walks go, the sequences side by side; yields each sequence's blocks as it ends.

    Every pass drafts one block per sequence and wanted anchor, so the drafter's weights are read once for all
    of them: for drafters too large to draft everywhere. The blocks equal those of `replay` at the same
    anchors.

    Args:
        drafter: As for `replay`.
        sequences: The sequences to walk, at least one.
        budget: As for `replay`.
        next_anchors: Called with a sequence's index and its blocks so far; the anchors that it wants must not
            be among them yet.

    Raises:
        CheckpointError: As for `replay`.
        RecordingError: As for `replay`.
    """
    for sequence in sequences:
        _require_features(drafter, sequence)
    contexts = [drafter.context(s.features[: len(s.tokens) - 1]) for s in sequences]
    offsets = [0, *itertools.accumulate(context.length for context in contexts)]
    together = contexts[0].extended(*contexts[1:])
    del contexts
    done: dict[int, Drafted | None] = dict.fromkeys(range(len(sequences)))
    while done:
        wanted = {i: next_anchors(i, blocks) for i, blocks in done.items()}
        for i in [i for i, anchors in wanted.items() if not anchors]:
            blocks = done.pop(i)
            yield i, blocks if blocks is not None else _nothing(drafter, sequences[i], budget=budget)
        pairs = [(i, anchor) for i, anchors in wanted.items() for anchor in sorted(anchors)]
        for start in range(0, len(pairs), _anchors_per_slice(drafter, together.length)):
            chunk = pairs[start : start + _anchors_per_slice(drafter, together.length)]
            for i, blocks in _side_by_side(drafter, together, sequences, chunk, offsets, budget=budget):
                before = done[i]
                done[i] = blocks if before is None else joined([before, blocks])


def _side_by_side(
    drafter: Drafter,
    context: Context,
    sequences: Sequence[Recorded],
    pairs: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    *,
    budget: int,
) -> Iterator[tuple[int, Drafted]]:
    """Blocks at (sequence, anchor) pairs in one pass over the joined context, split by sequence again."""
    anchors = torch.tensor([anchor for _, anchor in pairs])
    starts = torch.tensor([offsets[i] for i, _ in pairs])
    tokens = torch.stack([sequences[i].tokens[anchor] for i, anchor in pairs])
    hidden = drafter.draft(context, anchors=anchors, anchor_tokens=tokens, starts=starts)
    depth = drafter.wiring.depth
    references = torch.cat(
        [_references(sequences[i].tokens, anchors[j : j + 1], depth=depth) for j, (i, _) in enumerate(pairs)]
    )
    drafted = _rank(drafter, hidden, references, anchors=anchors, length=0, budget=budget)
    for i in dict.fromkeys(i for i, _ in pairs):
        mine = [j for j, (other, _) in enumerate(pairs) if other == i]
        parts = {name: value[mine] for name, value in vars(drafted).items() if isinstance(value, np.ndarray)}
        yield i, dataclasses.replace(drafted, length=len(sequences[i].tokens), **parts)


def joined(parts: Sequence[Drafted]) -> Drafted:
    """The blocks of several slices of one sequence, ordered by anchor."""
    anchors = np.concatenate([part.anchors for part in parts])
    by_anchor = np.argsort(anchors, kind="stable")

    def together(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[by_anchor]

    orders = [part.order for part in parts if part.order is not None]
    return Drafted(
        length=parts[0].length,
        anchors=anchors[by_anchor],
        ranks=together([part.ranks for part in parts]),
        order=together(orders) if len(orders) == len(parts) else None,
        log_probs=together([part.log_probs for part in parts]),
        top_ids=together([part.top_ids for part in parts]),
        top_log_probs=together([part.top_log_probs for part in parts]),
    )


def _require_features(drafter: Drafter, recorded: Recorded) -> None:
    """Makes sure that every position has the features of every tap."""
    w = drafter.wiring
    expected = (len(recorded.tokens), len(w.taps) * w.hidden_size)
    if tuple(recorded.features.shape) != expected:
        raise RecordingError(
            f"the features are {list(recorded.features.shape)}, expected {list(expected)} for as many tokens and "
            f"the taps {list(w.taps)} of {w.hidden_size} each; record the taps that the drafter reads"
        )


def _nothing(drafter: Drafter, recorded: Recorded, *, budget: int) -> Drafted:
    """The blocks of a sequence without anchors."""
    depth = drafter.wiring.depth
    empty = np.zeros((0, depth), np.int32)
    lists = np.zeros((0, depth, min(TOP_LIST, len(drafter.ends.head))))
    return Drafted(
        length=len(recorded.tokens),
        anchors=np.zeros(0, np.int32),
        ranks=empty,
        order=empty if budget else None,
        log_probs=empty.astype(np.float32),
        top_ids=lists.astype(np.int32),
        top_log_probs=lists.astype(np.float32),
    )


def _anchors_per_slice(drafter: Drafter, length: int) -> int:
    """As many anchors as keep one layer's attention scores inside the bound."""
    w = drafter.wiring
    return max(1, _SCORE_BYTES // (4 * w.num_heads * w.block_size * (length + w.block_size)))


def _references(tokens: Int[Tensor, " T"], anchors: Int[Tensor, " A"], *, depth: int) -> Int[Tensor, "A D"]:
    """The reference token of every anchor and depth; -1 beyond the end."""
    positions = anchors[:, None] + torch.arange(1, depth + 1)
    inside = positions < len(tokens)
    return torch.where(inside, tokens[positions.clamp(max=len(tokens) - 1)], -1)


def _rank(
    drafter: Drafter,
    hidden: Float[Tensor, "A D H"],
    references: Int[Tensor, "A D"],
    *,
    anchors: Int[Tensor, " A"],
    length: int,
    budget: int,
) -> Drafted:
    """Ranks, log-probabilities, lists and tree positions of drafted blocks, in chunks of rows."""
    count, depth = references.shape
    rows, wanted = hidden.flatten(0, 1), references.flatten()
    parts = [
        _rank_rows(drafter, some, reference, width=max(budget, TOP_LIST))
        for some, reference in zip(rows.split(_ROWS), wanted.split(_ROWS), strict=True)
    ]
    ranks, log_probs, top_ids, best = (np.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    ranks = ranks.reshape(count, depth)
    lists = best.reshape(count, depth, -1)
    order = None
    if budget:
        nodes = np.ascontiguousarray(lists[:, :, :budget])
        order = reference_order(nodes, ranks=ranks, budget=budget)
    return Drafted(
        length=length,
        anchors=anchors.numpy().astype(np.int32),
        ranks=ranks,
        order=order,
        log_probs=log_probs.reshape(count, depth),
        top_ids=top_ids.reshape(count, depth, -1),
        top_log_probs=np.ascontiguousarray(lists[:, :, :TOP_LIST]),
    )


def _rank_rows(
    drafter: Drafter, hidden: Float[Tensor, "R H"], references: Int[Tensor, " R"], *, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rank and log-probability of the reference, ids of the first choices, the best log-probabilities.

    Returns arrays [R], [R], [R, min(TOP_LIST, V)] and [R, min(width, V)].
    """
    ids, vocabulary = drafter.ends.target_ids, len(drafter.ends.head)
    entries, reachable = _entries(references, ids, vocabulary=vocabulary)
    norm = torch.empty(len(hidden), dtype=torch.float64)

    def slices() -> Iterator[np.ndarray]:
        norm.fill_(-torch.inf)
        for logits in _slices(drafter, hidden):
            torch.logaddexp(norm, torch.from_numpy(logits).logsumexp(dim=1).double(), out=norm)
            yield logits

    found = rank_slices(
        slices,
        entries.numpy(),
        guess=_own(drafter, hidden, entries),
        width=width,
        vocabulary=vocabulary,
        threads=torch.get_num_threads(),
    )
    _require_finite(found.finite, hidden.dtype)
    reachable &= references >= 0
    own = torch.from_numpy(found.own)
    ranks = np.where(reachable.numpy(), found.ranks, UNREACHABLE)
    first = torch.from_numpy(found.top_entries[:, :TOP_LIST]).long()
    return (
        np.where(references.numpy() < 0, NO_REFERENCE, ranks).astype(np.int32),
        torch.where(reachable, own - norm, torch.nan).float().numpy(),
        (first if ids is None else ids[first]).numpy().astype(np.int32),
        (found.top_logits - norm.numpy()[:, None]).astype(np.float32),
    )


def _hits(
    drafter: Drafter, hidden: Float[Tensor, "R H"], references: Int[Tensor, " R"]
) -> Bool[Tensor, " R"]:
    """Whether each row's first choice is the reference token, with no list kept."""
    vocabulary = len(drafter.ends.head)
    parts = []
    for some, wanted in zip(hidden.split(_ROWS), references.split(_ROWS), strict=True):
        entries, reachable = _entries(wanted, drafter.ends.target_ids, vocabulary=vocabulary)
        found = rank_slices(
            functools.partial(_slices, drafter, some),
            entries.numpy(),
            guess=_own(drafter, some, entries),
            width=1,
            vocabulary=vocabulary,
            threads=torch.get_num_threads(),
        )
        _require_finite(found.finite, hidden.dtype)
        parts.append(torch.from_numpy(found.ranks == 0) & reachable & (wanted >= 0))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _slices(drafter: Drafter, hidden: Float[Tensor, "R H"]) -> Iterator[Float32[np.ndarray, "R _"]]:
    """The logits of some rows, slice by slice of the vocabulary: the head is read once for all rows."""
    size = _LOGIT_BYTES // (4 * max(len(hidden), 1))
    for start in range(0, len(drafter.ends.head), size):
        yield drafter.logits(hidden, rows=slice(start, start + size)).float().numpy()


def _own(
    drafter: Drafter, hidden: Float[Tensor, "R H"], entries: Int[Tensor, " R"]
) -> Float32[np.ndarray, " R"]:
    """The logit of each row's entry, from a product of its own: as a rule, but not surely, the same bits."""
    rows, place = entries.unique(return_inverse=True)
    logits = drafter.logits(hidden, rows=rows).float()
    return np.asarray(logits.gather(1, place[:, None])[:, 0].numpy())


def _require_finite(finite: Bool[np.ndarray, " R"], dtype: torch.dtype) -> None:
    if not finite.all():
        raise CheckpointError(
            f"the drafter's output is not finite in {int((~finite).sum())} of {len(finite)} rows "
            f"({dtype}); try --dtype float32, then check the checkpoint"
        )


def _entries(references: Int[Tensor, " R"], ids: Tensor | None, *, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Where each reference stands in the head's vocabulary (ids ascend), and whether it does."""
    if ids is None:
        return references.clamp(min=0, max=vocabulary - 1), references < vocabulary
    entries = torch.searchsorted(ids, references).clamp(max=len(ids) - 1)
    return entries, ids[entries] == references
