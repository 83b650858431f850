"""Ranks and top lists from rows of logits, ties by entry, in one pass over each row.

A row of the head's vocabulary is read once while it is in the cache: the rank of one entry, the best K
entries, and whether everything is finite. Equal logits are ordered by entry, whatever the hardware, which a
library's top-k routine does not promise. Knows nothing of drafters or tokens.

Letters: R rows, V vocabulary entries, K list length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64
from numba import njit

#: Entries that are compared with the list's last value at a time, before any is looked at alone.
_STRIDE = 64


@dataclass(frozen=True, eq=False)
class Ranking:
    """Per row: `ranks` of the wanted entry, `finite`, and the best entries with their logits, best first."""

    ranks: Int32[np.ndarray, " R"]
    finite: Bool[np.ndarray, " R"]
    top_entries: Int32[np.ndarray, "R K"]
    top_logits: Float32[np.ndarray, "R K"]


def rank_rows(logits: Float32[np.ndarray, "R V"], entries: Int64[np.ndarray, " R"], *, width: int) -> Ranking:
    """Rank one entry of every row, and list the row's best min(width, V) entries.

    The rank is the number of entries with a larger logit, or an equal logit and a smaller number. In a row
    that is not finite only `finite` means anything.

    Example:
        Logits (2, 5, 5, 1), entry 2, width 3: rank 1, best entries (1, 2, 0) with logits (5, 5, 2).
    """
    R, V = logits.shape
    K = min(width, V)
    ranking = Ranking(
        ranks=np.empty(R, np.int32),
        finite=np.empty(R, np.bool_),
        top_entries=np.empty((R, K), np.int32),
        top_logits=np.empty((R, K), np.float32),
    )
    _rank(logits, entries, ranking.ranks, ranking.finite, ranking.top_entries, ranking.top_logits)
    return ranking


_kernel: Any = njit(cache=True, nogil=True)
_inlined: Any = njit(inline="always")


@_inlined
@no_type_check
def _sink(values, entries, value, entry, size):
    """Put a value into the place of a heap's root, which is the worst of the list, and let it sink."""
    hole = 0
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (
            values[other] < values[below]
            or (values[other] == values[below] and entries[other] > entries[below])
        ):
            below = other
        if not (values[below] < value or (values[below] == value and entries[below] > entry)):
            break
        values[hole], entries[hole] = values[below], entries[below]
        hole = below
    values[hole], entries[hole] = value, entry


@_kernel
@no_type_check
def _rank(logits, wanted, ranks, finite, top_entries, top_logits):
    R, V = logits.shape
    K = top_entries.shape[1]
    for r in range(R):
        row, entry = logits[r], wanted[r]
        own = row[entry]
        ahead, unsound = np.int32(0), np.int32(0)
        for j in range(entry):
            ahead += row[j] >= own
        for j in range(entry + 1, V):
            ahead += row[j] > own
        for j in range(V):
            unsound += row[j] - row[j] != 0  # true of infinities and NaN
        ranks[r], finite[r] = ahead, unsound == 0

        values, entries = top_logits[r], top_entries[r]
        for j in range(K):
            values[j], entries[j] = -np.inf, V
        for start in range(0, V, _STRIDE):
            stop = min(start + _STRIDE, V)
            worst = values[0]
            better = np.int32(0)
            for j in range(start, stop):
                better += row[j] > worst
            if better:
                for j in range(start, stop):
                    if row[j] > values[0]:
                        _sink(values, entries, row[j], np.int32(j), K)
        for size in range(K - 1, 0, -1):  # the heap becomes a list, best first
            value, place = values[size], entries[size]
            values[size], entries[size] = values[0], entries[0]
            _sink(values, entries, value, place, size)
