"""Prompt sets: the forms that the field writes, and their digest.

A prompt is a conversation that ends with a user's turn, or token ids; it may bring the completion that is to
be used as reference. Knows nothing of tokenizers: rendering belongs to `target`.
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
    `completion_ids` is the reference where the file gives it.
    """

    id: str
    category: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the file's order, the name to show, and a digest of all that they say."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """Identity by content: ids, categories, turns, token ids."""
        rows = [[p.id, p.category, p.messages, p.prompt_ids, p.completion_ids] for p in self.prompts]
        return sha256_json(rows)

    def first(self, count: int | None) -> PromptSet:
        """The first `count` prompts; all where `count` is None.

        Raises:
            PromptError: `count` is not 1 or more.
        """
        if count is not None and count < 1:
            raise PromptError(f"{count} prompts of {self.name} were asked for; expected 1 or more")
        return self if count is None else PromptSet(self.name, self.prompts[:count])


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
        yield _prompt(row, number=number, where=where)


def _prompt(row: Mapping[str, Any], *, number: int, where: str) -> Prompt:
    names = (row.get(key) for key in ("id", "question_id", "task_id"))
    name = next((name for name in names if name is not None), number)
    category = row.get("category")
    prompt = Prompt(id=str(name), category=None if category is None else str(category))
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
        ids, start = _masked(row, where=where)
        return replace(prompt, prompt_ids=ids[:start], completion_ids=ids[start:])
    messages = _messages(row, where=where)
    if messages[-1][0] != "user":
        raise PromptError(
            f"{where}: the last message is by {messages[-1][0]!r}, expected the user's; cut the conversation there"
        )
    return replace(prompt, messages=tuple(messages))


def _messages(row: Mapping[str, Any], *, where: str) -> list[tuple[str, str]]:
    if isinstance(row.get("prompt"), str):
        return [("user", row["prompt"])]
    if isinstance(row.get("turns"), list) and row["turns"]:
        if len(row["turns"]) > 1:
            raise PromptError(
                f"{where}: {len(row['turns'])} turns; conversations are not measured turn by turn yet, give "
                "one prompt a line"
            )
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


def _string(value: Any, *, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where}: {key} holds {str(value)[:80]!r}; expected plain text")
    return value


def _masked(row: Mapping[str, Any], *, where: str) -> tuple[tuple[int, ...], int]:
    """A pretokenised training row: its ids, and where the tail starts on which the loss mask is set."""
    ids = _ids(row["input_ids"], where=where, key="input_ids")
    mask = row["loss_mask"]
    start = mask.index(1) if isinstance(mask, list) and 1 in mask else 0
    if not 0 < start < len(ids) or mask != [0] * start + [1] * (len(ids) - start):
        raise PromptError(
            f"{where}: loss_mask must be 0 on the prompt and 1 on the one completion that ends input_ids; give "
            "prompt_ids and completion_ids instead"
        )
    return ids, start


def _ids(value: Any, *, where: str, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise PromptError(f"{where}: {key} must be a list of token ids, at least one")
    return tuple(value)
