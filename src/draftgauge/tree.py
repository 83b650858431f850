"""DDTree: the best-first expansion of a draft tree, and where the reference tokens stand in it.

The drafter scores each depth independently, so a node of the tree is a path of ranks and its score is the
sum of the path's log-probabilities. Nodes are ordered by score; exact ties go to the lexicographically
smaller path, a prefix first. The order is nested: the tree of budget n is the first n nodes of any larger
one, so one order answers every budget. The root stands for the anchor and is never counted.

Knows nothing about tokens, targets or walks: it sees log-probabilities, sorted within each row, and ranks.

Letters: A anchors, D draft depth, K entries of the drafter's top list per depth, N nodes of the tree.

Source: Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft Trees" (DDTree).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float32, Float64, Int32
from numba import njit

from draftgauge.errors import InputError

#: The position of a reference prefix that is not among the expanded nodes. The same number as
#: `acceptance.NO_REFERENCE`; modules of one floor do not import each other.
NOT_EXPANDED = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Tree:
    """The nodes of one anchor's draft tree in the order of their expansion, best first.

    `ranks` and `depths` (1-based) say which entry of which row a node is, `parents` which node it hangs
    from (0 the root, j + 1 node j), `scores` the summed log-probability of its path.
    """

    ranks: Int32[np.ndarray, " N"]
    depths: Int32[np.ndarray, " N"]
    parents: Int32[np.ndarray, " N"]
    scores: Float64[np.ndarray, " N"]


def expand(log_probs: Float32[np.ndarray, "D K"], *, budget: int) -> Tree:
    """Expand one anchor's draft tree best first, to at most `budget` nodes, each depth at most `budget` wide.

    Rows are log-probabilities, sorted descending; a tree with fewer reachable nodes is complete and smaller.

    Raises:
        InputError: the budget is negative, or a row is not sorted or not of log-probabilities.

    Example:
        Two depths, probabilities (0.6, 0.4) and (0.9, 0.1), budget 3: the nodes are 0, 0-0 and 1, with
        `ranks` [0, 0, 1], `depths` [1, 2, 1] and `parents` [0, 1, 0].
    """
    _check(log_probs, budget)
    return Tree(*_grow(np.ascontiguousarray(log_probs[:, :budget]), budget))


def reference_order(
    log_probs: Float32[np.ndarray, "A D K"], *, ranks: Int32[np.ndarray, "A D"], budget: int
) -> Int32[np.ndarray, "A D"]:
    """Find the 1-based position of the reference prefix of every depth in its anchor's expansion.

    `ranks` are those of the reference tokens; a rank outside the width min(K, budget) ends the prefix. Where
    the prefix is not among the first `budget` nodes the position is `NOT_EXPANDED`. A position p says that
    the prefix is in the tree of budget n exactly when p <= n, for every n up to `budget`. K must therefore
    reach min(budget, the drafter's vocabulary).

    Raises:
        InputError: the budget is negative, or a row is not sorted or not of log-probabilities.

    Example:
        Probabilities (0.6, 0.4) and (0.9, 0.1) with reference ranks (0, 0): positions 1 and 2; with (1, 0):
        3 and 4; with (0, 2): 1 and `NOT_EXPANDED`.
    """
    _check(log_probs, budget)
    order = np.full(ranks.shape, NOT_EXPANDED, dtype=np.int32)
    width = min(log_probs.shape[2], budget)
    _place(np.ascontiguousarray(log_probs), np.ascontiguousarray(ranks), width, budget, order)
    return order


def _check(log_probs: Float32[np.ndarray, "*A D K"], budget: int) -> None:
    if budget < 0:
        raise InputError(f"The budget of a draft tree is {budget}; expected 0 or more nodes, as in ddtree16.")
    # Written so that a NaN fails as well.
    descending = (log_probs[..., 1:] <= log_probs[..., :-1]).all()
    if not (descending and (log_probs[..., :1] <= 0).all()):
        raise InputError(
            "A row of the drafter's top list is not made of log-probabilities from high to low; "
            "expected finite scores after log-softmax, sorted: record the top list anew."
        )


# The kernels. `no_type_check` because a type checker's wrapper around them would not compile.
# A candidate is a number, 0 the root: `score[i]` is its path's score, `steps[i]` = parent, depth, rank.

_PARENT, _DEPTH, _RANK = 0, 1, 2
_kernel: Any = njit(cache=True, nogil=True)
_inlined: Any = njit(inline="always")  # a call would cost more than the comparison that it makes


@_inlined
@no_type_check
def _wins_tie(i, j, steps):
    """Whether the path of candidate i is lexicographically smaller than that of candidate j."""
    a, b = i, j
    while steps[a, _DEPTH] > steps[b, _DEPTH]:
        a = steps[a, _PARENT]
    while steps[b, _DEPTH] > steps[a, _DEPTH]:
        b = steps[b, _PARENT]
    if a == b:
        return steps[i, _DEPTH] < steps[j, _DEPTH]
    while steps[a, _PARENT] != steps[b, _PARENT]:
        a, b = steps[a, _PARENT], steps[b, _PARENT]
    return steps[a, _RANK] < steps[b, _RANK]


@_inlined
@no_type_check
def _precedes(i, j, score, steps):
    """Whether candidate i comes before candidate j in the tree."""
    return score[i] > score[j] or (score[i] == score[j] and _wins_tie(i, j, steps))


@_inlined
@no_type_check
def _push(heap, size, node, score, steps):
    """Let `node` rise from the end of a heap that had `size` entries."""
    hole = size
    while hole > 0:
        above = (hole - 1) // 2
        if not _precedes(node, heap[above], score, steps):
            break
        heap[hole] = heap[above]
        hole = above
    heap[hole] = node


@_inlined
@no_type_check
def _pop(heap, size, score, steps):
    """Take the best of `size` entries and let the last one sink from the top."""
    best, node = heap[0], heap[size - 1]
    hole, below = 0, 1
    while below < size - 1:
        if below + 1 < size - 1 and _precedes(heap[below + 1], heap[below], score, steps):
            below += 1
        if not _precedes(heap[below], node, score, steps):
            break
        heap[hole] = heap[below]
        hole, below = below, 2 * below + 1
    heap[hole] = node
    return best


@_inlined
@no_type_check
def _offer(heap, size, node, above, r, rows, score, steps):
    """Put the entry of rank r below `above` into the heap as `node`, where there is one; return the size."""
    d = steps[above, _DEPTH]
    if d == rows.shape[0] or r >= rows.shape[1]:
        return size
    steps[node, _PARENT], steps[node, _DEPTH], steps[node, _RANK] = above, d + 1, r
    score[node] = score[above] + rows[d, r]
    _push(heap, size, node, score, steps)
    return size + 1


@_kernel
@no_type_check
def _grow(rows, budget):
    """Take the best candidate `budget` times; each one offers its next sibling and its first child."""
    most = 2 * budget + 2
    score, steps = np.zeros(most, np.float64), np.zeros((most, 3), np.int32)
    heap, expanded = np.empty(most, np.int32), np.empty(budget, np.int32)
    place = np.zeros(most, np.int32)  # candidate -> its 1-based place in the tree, 0 the root
    nodes = 0
    size = _offer(heap, 0, 1, 0, 0, rows, score, steps)
    while nodes < budget and size > 0:
        node = _pop(heap, size, score, steps)
        expanded[nodes] = node
        nodes += 1
        place[node] = nodes
        above, sibling = steps[node, _PARENT], steps[node, _RANK] + 1
        size = _offer(heap, size - 1, nodes + size, above, sibling, rows, score, steps)
        size = _offer(heap, size, nodes + size + 1, node, 0, rows, score, steps)
    found = expanded[:nodes]
    chosen = steps[found]
    return chosen[:, _RANK], chosen[:, _DEPTH], place[chosen[:, _PARENT]], score[found]


@_kernel
@no_type_check
def _nodes_before(rows, path, length, width, limit, rank, prefix):
    """Count the nodes that come before the node `path[:length]`, up to `limit`.

    Its position needs no heap: every node that precedes it scores at least as much, scores fall along rows
    and paths, so a depth-first search in lexicographic order visits those nodes and nothing beyond them.
    """
    score_of_path = 0.0
    for d in range(length):
        score_of_path += rows[d, path[d]]
    before, passed, d = 0, False, 0
    rank[0], prefix[0] = 0, 0.0
    while d >= 0:
        score = prefix[d] + rows[d, rank[d]] if rank[d] < width else -np.inf
        if rank[d] >= width or score < score_of_path or (score == score_of_path and passed):
            d -= 1
            rank[d] += 1  # harmless below the root: the search is over then
            continue
        if score == score_of_path and d + 1 == length and np.array_equal(rank[:length], path[:length]):
            passed = True
        else:
            before += 1
            if before == limit:
                return limit
        if d + 1 < rows.shape[0]:
            d += 1
            rank[d], prefix[d] = 0, score
        else:
            rank[d] += 1
    return before


@_kernel
@no_type_check
def _place(log_probs, ranks, width, budget, order):
    """Fill in the position of every reference prefix, shallow to deep, until one is past the budget."""
    A, D = ranks.shape
    rank, prefix = np.empty(D, np.int32), np.empty(D, np.float64)
    for a in range(A):
        for d in range(D):
            if ranks[a, d] >= width:
                break
            before = _nodes_before(log_probs[a], ranks[a], d + 1, width, budget, rank, prefix)
            if before == budget:
                break
            order[a, d] = before + 1
