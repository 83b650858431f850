"""`ranking` against a slow sort, ties included."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from draftgauge.ranking import Ranking, rank_slices


def rank_rows(logits: np.ndarray, entries: np.ndarray, *, width: int, cuts: Sequence[int] = ()) -> Ranking:
    """The rows in slices that are cut at some entries, with the right guesses."""
    return rank_slices(
        lambda: np.split(logits, cuts, axis=1),
        entries,
        guess=logits[np.arange(len(entries)), entries],
        width=width,
        vocabulary=logits.shape[1],
    )


def slow(row, entry, width):
    by_logit = sorted(range(len(row)), key=lambda j: (-row[j], j))
    return by_logit.index(entry), by_logit[:width]


def test_ties_go_to_the_smaller_entry():
    logits = np.array([[2, 5, 5, 1]], np.float32)
    ranking = rank_rows(logits, np.array([2]), width=3)
    assert ranking.ranks.tolist() == [1]
    assert ranking.top_entries.tolist() == [[1, 2, 0]]
    assert ranking.top_logits.tolist() == [[5, 5, 2]]
    assert ranking.finite.tolist() == [True]


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(np.float32, (3, 150), elements=st.integers(-4, 4).map(float)),
    st.lists(st.integers(0, 149), min_size=3, max_size=3),
    st.sampled_from([1, 2, 7, 64, 150, 400]),
    st.lists(st.integers(0, 150), max_size=4).map(sorted),
)
def test_equals_a_sort_of_rows_full_of_ties(logits, entries, width, cuts):
    ranking = rank_rows(logits, np.array(entries), width=width, cuts=cuts)
    for r, entry in enumerate(entries):
        rank, best = slow(logits[r].tolist(), entry, width)
        assert ranking.ranks[r] == rank
        assert ranking.top_entries[r].tolist() == best
        np.testing.assert_array_equal(ranking.top_logits[r], logits[r, best])


def test_equals_a_sort_of_a_large_vocabulary():
    logits = np.random.default_rng(0).standard_normal((5, 5000)).astype(np.float32)
    entries = np.array([0, 4999, 17, 2500, 3])
    ranking = rank_rows(logits, entries, width=1024)
    for r, entry in enumerate(entries):
        rank, best = slow(logits[r].tolist(), entry, 1024)
        assert (ranking.ranks[r], ranking.top_entries[r].tolist()) == (rank, best)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_apart(value):
    logits = np.zeros((2, 70), np.float32)
    logits[1, 69] = value
    assert rank_rows(logits, np.array([0, 0]), width=4).finite.tolist() == [True, False]


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(np.float32, (2, 40), elements=st.integers(-3, 3).map(float)),
    st.tuples(st.integers(0, 39), st.integers(0, 39)),
    arrays.arrays(np.float32, 2, elements=st.integers(-4, 4).map(float)),
)
def test_a_wrong_guess_costs_a_second_reading_and_no_rank(logits, entries, guess):
    reads = []

    def slices():
        reads.append(1)
        return np.split(logits, (13, 26), axis=1)

    own = logits[[0, 1], entries]
    found = rank_slices(slices, np.array(entries), guess=guess, width=5, vocabulary=40)
    assert len(reads) == (1 if (own == guess).all() else 2)
    for r, entry in enumerate(entries):
        rank, best = slow(logits[r].tolist(), entry, 5)
        assert (found.ranks[r], found.top_entries[r].tolist()) == (rank, best)
    np.testing.assert_array_equal(found.own, own)


def test_logits_that_change_from_reading_to_reading_are_no_ranking():
    rng = np.random.default_rng(0)
    with pytest.raises(ArithmeticError, match="gave other bits"):
        rank_slices(
            lambda: [rng.standard_normal((1, 9)).astype(np.float32)],
            np.array([4]),
            guess=np.zeros(1, np.float32),
            width=3,
            vocabulary=9,
        )
