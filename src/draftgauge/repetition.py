"""Loops in a text: how much of a completion only says again what it has just said.

Any drafter predicts a loop, so acceptance measured on one says nothing. Works on token ids alone; knows nothing
of targets or drafters.

Letters: T tokens.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

#: Above this share of tokens in loops, a completion counts as degenerate.
DEGENERATE_SHARE = 0.5
#: A loop goes round at least so often, with so many tokens after the first round. Code says similar lines two or
#: three times in a row (cases, assertions, entries) and goes on.
_ROUNDS = 4
_FEWEST_TOKENS = 32
#: So many of the tokens equal the one a round earlier. Loops count: `'a': 1, 'b': 1, 'c': 1` differs in one of 7.
_EQUAL_SHARE = 0.75
_LONGEST_ROUND = 512


def repetition_share(tokens: Int[np.ndarray, " T"]) -> float:
    """The share of a completion's tokens that lie in loops; 0 for one too short to hold a loop.

    Example:
        One token 60 times over is all loop, `1.0`; 60 different ones are none, `0.0`; both in turn, `0.5`.
    """
    if not len(tokens):
        return 0.0
    inside = np.zeros(len(tokens), dtype=bool)
    for period in range(1, min(_LONGEST_ROUND, len(tokens) // _ROUNDS) + 1):
        inside |= _in_loops(tokens, period)
    return float(inside.mean())


def _in_loops(tokens: Int[np.ndarray, " T"], period: int) -> Bool[np.ndarray, " T"]:
    """Which tokens lie in a loop whose rounds have `period` tokens."""
    length = max((_ROUNDS - 1) * period, _FEWEST_TOKENS)
    covered = np.zeros(len(tokens) + 1, dtype=np.int64)
    equal = np.concatenate([[0], np.cumsum(tokens[period:] == tokens[:-period])])
    starts = np.flatnonzero(equal[length:] - equal[:-length] >= _EQUAL_SHARE * length)
    # Each such stretch covers its first round too: +1 where it starts, -1 behind its end.
    np.add.at(covered, starts, 1)
    np.add.at(covered, starts + period + length, -1)
    return np.cumsum(covered[:-1]) > 0
