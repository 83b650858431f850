"""Loops in a text are told from text that only says similar things now and then."""

import numpy as np
import pytest

from draftgauge.repetition import DEGENERATE_SHARE, repetition_share

COUNT = np.arange(100, 160)
GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([5] * 60, 1.0),
        (COUNT, 0.0),
        ([1, 2, 3] * 20, 1.0),
        ([*COUNT, *[7, 8] * 30], 0.5),
        ([1, 2, 3] * 3, 0.0),  # three rounds of nine tokens are no loop
        (list(range(20)) * 2, 0.0),  # said twice
        (GENERATOR.integers(0, 5, 400), 0.0),  # few words, no order
    ],
    ids=["nothing", "one token", "counting", "three words", "half", "short", "twice", "random"],
)
def test_the_share_of_tokens_in_loops(tokens, share: float) -> None:
    assert repetition_share(np.asarray(tokens, dtype=int)) == pytest.approx(share, abs=0.12)


def test_a_loop_that_counts_is_a_loop() -> None:
    """`'a': 1, 'b': 1, 'c': 1`: one token of seven is another in every round."""
    rounds = [[50, 10 + i, 50, 51, 52, 53, 54] for i in range(20)]
    assert repetition_share(np.concatenate(rounds)) > DEGENERATE_SHARE
