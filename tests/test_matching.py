"""Which prompt a sequence is of, and where its answers are: by its tokens, by its mask, by its name."""

import pytest

from draftgauge.errors import PromptError, RecordingError
from draftgauge.matching import UNKNOWN_TEMPLATE, References
from draftgauge.prompts import Prompt, PromptSet

SHORT = Prompt("short", category="c", prompt_ids=(1, 2))
LONG = Prompt("long", prompt_ids=(1, 2, 3))
GIVEN = Prompt("given", prompt_ids=(7,), completion_ids=(8, 9, 10))


def references(*prompts: Prompt) -> References:
    return References(PromptSet("p", prompts) if prompts else None, None, template=None)


def found(
    made: References,
    name: str,
    tokens: list[int] | None,
    mask: list[int] | None = None,
    stops: tuple[int, ...] = (),
) -> list[tuple[str, tuple[int, ...], int]]:
    rows = 0 if tokens is None else len(tokens)
    return [(r.id, r.tokens, r.start) for r in made.find(name, tokens, mask=mask, rows=rows, stops=stops)]


def test_the_longest_prompt_that_a_sequence_begins_with_is_its_own() -> None:
    assert found(references(SHORT, LONG), "x", [1, 2, 3, 4, 5]) == [("long", (1, 2, 3, 4, 5), 3)]
    assert found(references(SHORT, LONG), "x", [1, 2, 4, 5]) == [("short", (1, 2, 4, 5), 2)]


def test_its_namesake_comes_before_longer_ones() -> None:
    assert found(references(SHORT, LONG), "rows_0/short", [1, 2, 3, 4, 5])[0][0] == "short"


def test_a_completion_ends_with_its_first_stop_token() -> None:
    assert found(references(SHORT), "x", [1, 2, 4, 9, 5, 9], stops=(9,)) == [("short", (1, 2, 4, 9), 2)]


def test_tokens_that_only_the_prompts_say_are_found_by_name() -> None:
    assert found(references(GIVEN), "given", None) == [("given", (7, 8, 9, 10), 1)]
    with pytest.raises(
        RecordingError, match=r'holds no token ids; give them with --prompts, as \{"id": "other", '
    ):
        found(references(GIVEN), "other", None)


def test_a_mask_says_where_answers_are() -> None:
    mask = [0, 1, 1, 0, 1, 1]
    assert found(references(), "x", [5, 6, 7, 8, 9, 4], mask) == [
        ("x/1", (5, 6, 7), 1),
        ("x/2", (5, 6, 7, 8, 9, 4), 4),
    ]
    (only,) = references(SHORT).find("x", [1, 2, 7, 8, 9, 4], mask=[0, 0, 1, 1, 0, 0], rows=6, stops=())
    assert (only.id, only.tokens, only.conversation) == ("short", (1, 2, 7, 8), None)


def test_what_is_of_no_prompt_or_of_another_completion_is_refused() -> None:
    with pytest.raises(
        RecordingError, match=r"x begins with none of the 1 prompts \(templates tried: chat, "
    ):
        found(references(SHORT), "x", [5, 6, 7])
    with pytest.raises(
        RecordingError, match="begins with the prompt given, and goes on with another completion"
    ):
        found(references(GIVEN), "x", [7, 8, 9, 11])
    with pytest.raises(RecordingError, match="does not say where its prompt ends, having no loss_mask"):
        found(references(), "x", [5, 6, 7])
    with pytest.raises(RecordingError, match=r"an answer in x has 1 token\(s\); a round needs at least 2"):
        found(references(SHORT), "x", [1, 2, 5])
    with pytest.raises(PromptError, match="loss_mask must hold 0 or 1 for each of the 3"):
        found(references(), "x", [5, 6, 7], [0, 1])


def test_prompts_that_nothing_was_found_of() -> None:
    made = references(SHORT, Prompt("talk", messages=(("user", "hi"),), follow_ups=("more",)))
    assert made.without_features(["short"]).keys() == {"talk/1", "talk/2"}


def test_what_nothing_shows_is_not_guessed() -> None:
    made = references(SHORT)
    found(made, "x", [1, 2, 3, 4])
    assert (made.template, made.how) == (UNKNOWN_TEMPLATE, "nothing shows it")
    stated = References(PromptSet("p", (SHORT,)), None, template="raw")
    assert (stated.template, stated.how) == ("raw", "stated")
    with pytest.raises(PromptError, match="template 'chatml' is unknown"):
        References(None, None, template="chatml")
