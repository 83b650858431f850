"""Prompts as token ids: turns, their names, and what cannot be rendered. Templates: test_record_prompts."""

import pytest

from draftgauge.errors import PromptError
from draftgauge.prompts import Prompt
from draftgauge.rendering import TEMPLATES, render, require_template, turn_id, turns_of


class Words:
    """A tokenizer of a few words; its template wraps every message in 100 and 101."""

    chat_template = "wrapped"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, turns: list[dict[str, str]], **how: bool) -> list[int]:
        assert how == {"add_generation_prompt": True, "return_dict": False}
        return [t for turn in turns for t in (100, *self(turn["content"])["input_ids"], 101)]


TALK = Prompt("81", messages=(("user", "5 7"),), follow_ups=("9", "11"))


@pytest.mark.parametrize(
    ("answers", "ids"),
    [
        ((), [100, 5, 7, 101]),
        (("6",), [100, 5, 7, 101, 100, 6, 101, 100, 9, 101]),
        (("6", "8 8"), [100, 5, 7, 101, 100, 6, 101, 100, 9, 101, 100, 8, 8, 101, 100, 11, 101]),
    ],
)
def test_the_turn_after_the_answers_is_rendered(answers: tuple[str, ...], ids: list[int]) -> None:
    assert render(TALK, Words(), template="chat", answers=answers) == ids


def test_turns_have_names() -> None:
    assert turns_of(TALK) == 3
    assert [turn_id(TALK, turn) for turn in (1, 2, 3)] == ["81/1", "81/2", "81/3"]
    assert turn_id(Prompt("lru", messages=(("user", "5"),)), 1) == "lru"


def test_raw_text_has_no_turns() -> None:
    with pytest.raises(PromptError, match="--template raw takes one message, the prompt has 3"):
        render(TALK, Words(), template="raw")


def test_templates_are_known_by_name() -> None:
    for template in TEMPLATES:
        require_template(template)
    with pytest.raises(
        PromptError, match="template 'chatml' is unknown; expected one of chat, chat-thinking"
    ):
        require_template("chatml")
