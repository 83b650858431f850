"""Turns prompts into token ids through a target's chat template, turn by turn.

Knows templates and thinking switches; knows nothing of models, and gets the tokenizer handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from draftgauge.errors import PromptError
from draftgauge.prompts import Prompt

TEMPLATES = ("chat", "chat-thinking", "chat-no-thinking", "raw")
#: Variables of a chat template that change what it renders, and that `TEMPLATES` set.
TEMPLATE_SWITCHES = ("enable_thinking",)


def require_template(template: str) -> None:
    """Makes sure that prompts can be rendered so.

    Raises:
        PromptError: The template is not one of `TEMPLATES`.
    """
    if template not in TEMPLATES:
        raise PromptError(f"template {template!r} is unknown; expected one of {', '.join(TEMPLATES)}")


def turns_of(prompt: Prompt) -> int:
    """How many completions a prompt asks for: its own, and one for each follow-up."""
    return 1 + len(prompt.follow_ups)


def turn_id(prompt: Prompt, turn: int) -> str:
    """The id of one turn, counted from 1; that of a prompt of one turn is the prompt's.

    Example:
        `"81/2"`, the second turn of the conversation 81.
    """
    return prompt.id if turns_of(prompt) == 1 else f"{prompt.id}/{turn}"


def render(prompt: Prompt, tokenizer: Any, *, template: str, answers: Sequence[str] = ()) -> list[int]:
    """Token ids of a prompt, or of a later turn of it once the answers to the earlier ones are known.

    Args:
        prompt: The prompt.
        tokenizer: A Hugging Face tokenizer; None serves prompts that are token ids.
        template: One of `TEMPLATES`; the thinking mode is set where the template says so, else left alone.
        answers: What was answered to the turns before: the turn that follows is rendered.

    Raises:
        PromptError: There is no tokenizer or chat template for it, or the template refuses.
    """
    if prompt.prompt_ids is not None:
        return list(prompt.prompt_ids)
    assert prompt.messages is not None
    if tokenizer is None:
        raise PromptError("the target has no tokenizer; give prompt_ids")
    if template == "raw":
        if len(prompt.messages) > 1 or prompt.follow_ups:
            count = len(prompt.messages) + len(prompt.follow_ups)
            raise PromptError(f"--template raw takes one message, the prompt has {count}")
        return list(tokenizer(prompt.messages[0][1])["input_ids"])
    if tokenizer.chat_template is None:
        raise PromptError("the tokenizer has no chat template; use --template raw or give prompt_ids")
    messages = list(prompt.messages)
    for answer, follow_up in zip(answers, prompt.follow_ups, strict=False):
        messages += [("assistant", answer), ("user", follow_up)]
    thinking = {"chat-thinking": True, "chat-no-thinking": False}.get(template)
    extra = {} if thinking is None else {"enable_thinking": thinking}
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **extra)
    except TemplateError as exc:
        raise PromptError(f"the chat template refuses the conversation: {exc}") from exc
    return list(ids)
