"""Prompt sets: the forms that the field writes, and their digest.

A prompt is a conversation that ends with a user's turn, or token ids; it may bring the completion that is to
be used as reference, and what the user says next: then every turn is answered in turn. Knows nothing of
tokenizers: `rendering` has them handed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from draftgauge.errors import PromptError
from draftgauge.store import sha256_json

#: Prompt sets that ship with the package, named as `builtin:NAME`.
BUILTIN = ("coding10",)

_FORMS = (
    '{"prompt": "..."}, {"turns": ["..."]}, {"messages": [{"role": ..., "content": ...}]}, '
    '{"conversations": [{"from": "human", "value": ...}]}, {"prompt_ids": [...], "completion_ids": [...]} or '
    '{"input_ids": [...], "loss_mask": [...]}'
)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Exactly one of `messages` (role and content, ending with the user) and `prompt_ids` is set;
    `completion_ids` is the reference where the file gives it. `follow_ups` are what the user says next, once the
    target has answered; `conversation` is the id of the conversation that a prompt is one turn of.
    """

    id: str
    category: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    follow_ups: tuple[str, ...] = ()
    conversation: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the file's order, the name to show, and a digest of all that they say."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """Identity by content: ids, categories, turns, token ids."""
        return sha256_json([_identity(prompt) for prompt in self.prompts])

    def first(self, count: int | None) -> PromptSet:
        """The first `count` prompts; all where `count` is None.

        Raises:
            PromptError: `count` is not 1 or more.
        """
        if count is not None and count < 1:
            raise PromptError(f"{count} prompts of {self.name} were asked for; expected 1 or more")
        return self if count is None else PromptSet(self.name, self.prompts[:count])


def _identity(p: Prompt) -> list[Any]:
    """What a prompt says; turns come last and only where there are some, so that older digests stay."""
    said = [p.id, p.category, p.messages, p.prompt_ids, p.completion_ids]
    return [*said, p.follow_ups, p.conversation] if p.follow_ups or p.conversation else said


def read_prompts(source: str) -> PromptSet:
    """The prompt set of a JSON-lines file, or one that ships with the package.

    Answers that end a conversation are left out: what the target says there is what is to be measured.

    Args:
        source: A path, or `builtin:coding10`.

    Raises:
        PromptError: The file is missing or empty, a line cannot be understood, or two prompts share an id.
    """
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if name not in BUILTIN:
            raise PromptError(f"there is no built-in prompt set {name!r}; built in: {', '.join(BUILTIN)}")
        text = (resources.files("draftgauge") / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    else:
        path = Path(source)
        if not path.is_file():
            raise PromptError(f"prompt file {source} does not exist; give a path or builtin:{BUILTIN[0]}")
        name, text = path.name, _text(path)
    prompts = tuple(_prompts(text, source=source))
    if not prompts:
        raise PromptError(f"{source} holds no prompts; expected one JSON object a line: {_FORMS}")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"{source}: two prompts have the id {prompt.id!r}; ids must differ")
        seen.add(prompt.id)
    return PromptSet(name, prompts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise PromptError(f"prompt file {path} cannot be read as UTF-8 text: {exc}; convert it") from exc


def _prompts(text: str, *, source: str) -> Iterator[Prompt]:
    # Not splitlines: a string in JSON may hold the other line separators as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as exc:
            raise PromptError(f"{where} is not JSON: {exc}; expected one object a line: {_FORMS}") from exc
        if not isinstance(row, dict):
            raise PromptError(f"{where} is not a JSON object; expected {_FORMS}")
        yield from _read(row, number=number, where=where)


def _read(row: Mapping[str, Any], *, number: int, where: str) -> Iterator[Prompt]:
    """The prompt of a row; of a pretokenised conversation, a prompt for each of its turns."""
    prompt = _prompt(row, number=number, where=where)
    if "input_ids" not in row or "loss_mask" not in row or "prompt_ids" in row:
        yield prompt
        return
    ids = _ids(row["input_ids"], where=where, key="input_ids")
    turns = answers_in(row["loss_mask"], length=len(ids), where=where)
    for turn, (start, end) in enumerate(turns, start=1):
        yield replace(
            prompt,
            id=prompt.id if len(turns) == 1 else f"{prompt.id}/{turn}",
            prompt_ids=ids[:start],
            completion_ids=ids[start:end],
            conversation=prompt.conversation if len(turns) == 1 else prompt.id,
        )


def answers_in(mask: Any, *, length: int, where: str) -> list[tuple[int, int]]:
    """Where the loss mask of a pretokenised conversation is set: the start and end of every answer.

    Raises:
        PromptError: It is no mask of that many tokens, is set nowhere, or on the first token.

    Example:
        `answers_in([0, 0, 1, 1, 0, 1], length=6, where="row 1")` is `[(2, 4), (5, 6)]`.
    """
    if not isinstance(mask, list | tuple) or len(mask) != length or not set(mask) <= {0, 1}:
        raise PromptError(f"{where}: loss_mask must hold 0 or 1 for each of the {length} input_ids")
    edges = [i for i in range(length + 1) if (mask[i] if i < length else 0) != (mask[i - 1] if i else 0)]
    if not edges or edges[0] == 0:
        raise PromptError(
            f"{where}: loss_mask must be 0 on the prompt and 1 on the answers, of which there is at least one; give "
            "prompt_ids and completion_ids instead"
        )
    return list(zip(edges[::2], edges[1::2], strict=True))


def _prompt(row: Mapping[str, Any], *, number: int, where: str) -> Prompt:
    names = (row.get(key) for key in ("id", "question_id", "task_id"))
    name = next((name for name in names if name is not None), number)
    category, conversation = row.get("category"), row.get("conversation")
    prompt = Prompt(
        id=str(name),
        category=None if category is None else str(category),
        conversation=None if conversation is None else str(conversation),
    )
    if "prompt_ids" in row:
        completion = row.get("completion_ids")
        return replace(
            prompt,
            prompt_ids=_ids(row["prompt_ids"], where=where, key="prompt_ids"),
            completion_ids=None
            if completion is None
            else _ids(completion, where=where, key="completion_ids"),
        )
    if "input_ids" in row and "loss_mask" in row:
        return prompt
    messages = _messages(row, where=where)
    if messages[-1][0] != "user":
        raise PromptError(
            f"{where}: the last message is by {messages[-1][0]!r}, expected the user's; cut the conversation there"
        )
    later = tuple(_string(turn, where=where, key="turns") for turn in _turns(row)[1:])
    return replace(prompt, messages=tuple(messages), follow_ups=later)


def _messages(row: Mapping[str, Any], *, where: str) -> list[tuple[str, str]]:
    if isinstance(row.get("prompt"), str):
        return [("user", row["prompt"])]
    if _turns(row):
        return [("user", _string(row["turns"][0], where=where, key="turns"))]
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = row.get(key)
        if isinstance(turns, list) and turns:
            names = {"human": "user", "gpt": "assistant"}
            if not all(isinstance(turn, dict) and {role, content} <= set(turn) for turn in turns):
                raise PromptError(f"{where}: {key} must hold objects with {role!r} and {content!r}")
            authors = [_string(turn[role], where=where, key=role) for turn in turns]
            texts = [_string(turn[content], where=where, key=content) for turn in turns]
            pairs = [(names.get(author, author), text) for author, text in zip(authors, texts, strict=True)]
            while pairs and pairs[-1][0] == "assistant":
                pairs.pop()
            if pairs:
                return pairs
    raise PromptError(f"{where} has none of the known forms; expected {_FORMS}")


def _turns(row: Mapping[str, Any]) -> list[Any]:
    """What the user says turn by turn, where the row is in that form."""
    turns = row.get("turns")
    return turns if isinstance(turns, list) and not isinstance(row.get("prompt"), str) else []


def _string(value: Any, *, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where}: {key} holds {str(value)[:80]!r}; expected plain text")
    return value


def _ids(value: Any, *, where: str, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise PromptError(f"{where}: {key} must be a list of token ids, at least one")
    return tuple(value)
