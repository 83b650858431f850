"""What every engine's answer must hold to be used."""

from typing import Any

import pytest

from draftgauge.engines.answers import require_counts, require_prompt, token_ids_in
from draftgauge.errors import AnswerError


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ([5, 2], (5, 2)),
        ([], ()),
        (None, None),
        ("5 2", None),
        ([5, "2"], None),
        ([5, 2.0], None),
        ([True], None),
        ([-1], None),
    ],
    ids=str,
)
def test_only_token_ids_are_token_ids(value: Any, ids: Any) -> None:
    assert token_ids_in(value) == ids


@pytest.mark.parametrize(
    ("ids", "said", "text"),
    [
        ((1, 2, 3, 4), 4, "returned 4 tokens where at most 3 were asked for"),
        ((1, 2), 3, "counted 3 completion tokens and returned the ids of 2"),
        ((), 0, "returned no token at all"),
    ],
)
def test_a_wrong_count_is_an_error_of_that_answer(ids: tuple[int, ...], said: int, text: str) -> None:
    with pytest.raises(AnswerError, match=text):
        require_counts(ids, max_new_tokens=3, said=said)


def test_a_right_count_is_none() -> None:
    require_counts((1, 2), max_new_tokens=3, said=None)
    require_counts((1, 2, 3), max_new_tokens=3, said=3)


def test_the_server_must_read_what_was_sent() -> None:
    require_prompt((1, 2), echoed=None, counted=None)
    require_prompt((1, 2), echoed=[1, 2], counted=2)
    with pytest.raises(AnswerError, match="read 3 prompt ids that are not the 2 that were sent"):
        require_prompt((1, 2), echoed=[0, 1, 2], counted=3)
    with pytest.raises(AnswerError, match="counted 3 prompt tokens where 2 ids were sent"):
        require_prompt((1, 2), echoed=None, counted=3)
