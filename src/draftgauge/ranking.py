"""Ranks and top lists from rows of logits that come in slices, ties by entry, in one pass over each row.

The logits of a whole vocabulary need not exist at one time: a slice is read once while it is in the cache, for the
rank of one entry, the best K entries, and whether everything is finite. Equal logits are ordered by entry, whatever
the hardware, which a library's top-k routine does not promise. Knows nothing of drafters or tokens.

Letters: R rows, V vocabulary entries, S entries of a slice, K list length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64
from numba import njit

#: Entries that are compared with the list's last value at a time, before any is looked at alone.
_STRIDE = 64
#: How often slices are read: again where the logit of a wanted entry was guessed wrongly.
_READS = 2


@dataclass(frozen=True, eq=False)
class Ranking:
    """Per row: `ranks` of the wanted entry and its `own` logit, `finite`, and the best entries, best first."""

    ranks: Int32[np.ndarray, " R"]
    own: Float32[np.ndarray, " R"]
    finite: Bool[np.ndarray, " R"]
    top_entries: Int32[np.ndarray, "R K"]
    top_logits: Float32[np.ndarray, "R K"]

    def part(self, rows: slice) -> tuple[np.ndarray, ...]:
        """The arrays of some rows, to be written to."""
        arrays = (self.ranks, self.own, self.finite, self.top_entries, self.top_logits)
        return tuple(array[rows] for array in arrays)


def rank_slices(
    slices: Callable[[], Iterable[Float32[np.ndarray, "R _"]]],
    entries: Int64[np.ndarray, " R"],
    *,
    guess: Float32[np.ndarray, " R"],
    width: int,
    vocabulary: int,
    threads: int = 1,
) -> Ranking:
    """Rank one entry of every row, and list the row's best min(width, V) entries.

    The rank is the number of entries with a larger logit, or an equal logit and a smaller number. In a row
    that is not finite only `finite` means anything.

    Args:
        slices: Gives the logits of slices that adjoin, from entry 0 to the last. Called a second time, and has to
            give the same bits, where a guess was wrong: so ranks are exact whatever was guessed.
        entries: The entry to rank of each row.
        guess: What its logit is thought to be, before its slice is seen.
        width: Entries to list.
        vocabulary: V.
        threads: How many threads read rows; each row is read by one.

    Example:
        Logits (2, 5, 5, 1), entry 2, width 3: rank 1, best entries (1, 2, 0) with logits (5, 5, 2).
    """
    share = -(-max(len(entries), 1) // threads)
    parts = [slice(first, first + share) for first in range(0, len(entries), share)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_READS):
            found = _started(len(entries), width=min(width, vocabulary), vocabulary=vocabulary)
            start = 0
            for logits in slices():
                reading = [
                    pool.submit(_read, logits[rows], start, entries[rows], guess[rows], found.part(rows))
                    for rows in parts
                ]
                for part in reading:
                    part.result()
                start += logits.shape[1]
            if np.array_equal(found.own, guess, equal_nan=True):
                _sort(found.top_entries, found.top_logits)
                return found
            guess = found.own
    raise ArithmeticError("the same product of the same numbers gave other bits")


def _started(rows: int, *, width: int, vocabulary: int) -> Ranking:
    """The ranking of so many rows before anything was read."""
    return Ranking(
        ranks=np.zeros(rows, np.int32),
        own=np.empty(rows, np.float32),
        finite=np.ones(rows, np.bool_),
        top_entries=np.full((rows, width), vocabulary, np.int32),
        top_logits=np.full((rows, width), -np.inf, np.float32),
    )


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
def _read(logits, start, wanted, guess, counted):
    ahead, own, finite, top_entries, top_logits = counted
    R, S = logits.shape
    K = top_entries.shape[1]
    for r in range(R):
        row, value = logits[r], guess[r]
        place = wanted[r] - start  # of the wanted entry in this slice, or before it, or behind
        before, after = min(max(place, 0), S), min(max(place + 1, 0), S)
        count, unsound = np.int32(0), np.int32(0)
        for j in range(before):
            count += row[j] >= value
        for j in range(after, S):
            count += row[j] > value
        for j in range(S):
            unsound += row[j] - row[j] != 0  # true of infinities and NaN
        ahead[r] += count
        finite[r] &= unsound == 0
        if after > before:
            own[r] = row[place]

        values, entries = top_logits[r], top_entries[r]
        for first in range(0, S, _STRIDE):
            stop = min(first + _STRIDE, S)
            worst = values[0]
            better = np.int32(0)
            for j in range(first, stop):
                better += row[j] > worst
            if better:
                for j in range(first, stop):
                    if row[j] > values[0]:
                        _sink(values, entries, row[j], np.int32(start + j), K)


@_kernel
@no_type_check
def _sort(top_entries, top_logits):
    R, K = top_entries.shape
    for r in range(R):
        values, entries = top_logits[r], top_entries[r]
        for size in range(K - 1, 0, -1):  # the heap becomes a list, best first
            value, place = values[size], entries[size]
            values[size], entries[size] = values[0], entries[0]
            _sink(values, entries, value, place, size)
