"""Finds out which prompt a stored sequence is of, and where its completion begins and ends.

By the tokens themselves: a prompt belongs to a sequence that begins with it. Where the template is not said, the one
is taken under which the sequences begin with their prompts. Knows nothing of states or of how they are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftgauge.errors import PromptError, RecordingError
from draftgauge.prompts import Prompt, PromptSet, answers_in
from draftgauge.rendering import TEMPLATES, render, require_template, turn_id, turns_of

#: What a recording says where nobody said how its prompts became token ids, and nothing shows it.
UNKNOWN_TEMPLATE = "unknown"


@dataclass(frozen=True)
class Reference:
    """One reference in a stored sequence: `tokens` up to its end, of which those from `start` on are the completion.

    `rows` counts the tokens of the whole sequence, `path` and `sequence` say where its states are, and `has_last`
    whether the last layer's is among them.
    """

    id: str
    category: str | None
    conversation: str | None
    tokens: tuple[int, ...]
    start: int
    rows: int
    path: Path = Path()
    sequence: str = ""
    has_last: bool = False


class References:
    """The prompts that sequences may be of, and the template that fits them, as sequences are found."""

    def __init__(self, prompts: PromptSet | None, tokenizer: Any, *, template: str | None) -> None:
        if template is not None:
            require_template(template)
        self.tokenizer = tokenizer
        self._prompts = () if prompts is None else prompts.prompts
        self.digest = None if prompts is None else prompts.digest
        self._given = template
        self._matched: Counter[str] = Counter()
        self._rendered = self._render(TEMPLATES if template is None else (template,))

    def _render(self, templates: Iterable[str]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Token ids of every prompt's first turn, by template; those that are ids already, under the first."""
        rendered: dict[str, dict[str, tuple[int, ...]]] = {}
        for template in templates:
            rendered[template] = {}
            for prompt in self._prompts:
                try:
                    rendered[template][prompt.id] = tuple(render(prompt, self.tokenizer, template=template))
                except PromptError:  # it cannot be rendered so: then no sequence was
                    continue
        return rendered

    @property
    def template(self) -> str:
        """The template under which the sequences were found; `UNKNOWN_TEMPLATE` where nothing shows it.

        Raises:
            RecordingError: They were found under several.
        """
        if len(self._matched) > 1:
            told = ", ".join(f"{count} with {name}" for name, count in self._matched.items())
            raise RecordingError(
                f"the sequences were rendered with several templates: {told}; import them apart"
            )
        return next(iter(self._matched), self._given or UNKNOWN_TEMPLATE)

    @property
    def how(self) -> str:
        """How the template is known."""
        if self._matched:
            return f"measured: {sum(self._matched.values())} sequence(s) begin with their prompts under it"
        return "stated" if self._given else "nothing shows it"

    def find(
        self,
        name: str,
        tokens: Sequence[int] | None,
        *,
        mask: Sequence[int] | None,
        rows: int,
        stops: Sequence[int],
    ) -> list[Reference]:
        """The references in a sequence, one for each answer.

        Args:
            name: What the sequence is called where it is stored.
            tokens: Its token ids; None where only the prompts say them.
            mask: 1 on answers, 0 elsewhere; None where it is not stored.
            rows: How many positions its states have.
            stops: The target's stop tokens: a completion ends with its first.

        Raises:
            RecordingError: Nothing says what it is of, or where its prompt ends; or what says so contradicts it.
            PromptError: The mask is none.
        """
        prompt = self._prompt_of(name, tokens)
        if tokens is None:
            if prompt is None or prompt.prompt_ids is None or prompt.completion_ids is None:
                raise RecordingError(
                    f"{name} holds no token ids; give them with --prompts, as "
                    f'{{"id": "{name}", "prompt_ids": [...], "completion_ids": [...]}}'
                )
            tokens = (*prompt.prompt_ids, *prompt.completion_ids)
        spans = self._spans(name, tokens, mask, prompt)
        several = len(spans) > 1
        base = Reference(
            id=name if prompt is None else prompt.id,
            category=None if prompt is None else prompt.category,
            conversation=None if prompt is None else prompt.conversation,
            tokens=(),
            start=0,
            rows=len(tokens),
        )
        found = []
        for turn, (start, end) in enumerate(spans, start=1):
            answer = _until_stop(tokens[start:end], stops)
            if len(answer) < 2:
                raise RecordingError(
                    f"an answer in {name} has {len(answer)} token(s); a round needs at least 2"
                )
            found.append(
                replace(
                    base,
                    id=f"{base.id}/{turn}" if several else base.id,
                    conversation=base.id if several else base.conversation,
                    tokens=(*tokens[:start], *answer),
                    start=start,
                )
            )
        return found

    def _prompt_of(self, name: str, tokens: Sequence[int] | None) -> Prompt | None:
        """The prompt that the sequence begins with, its namesake before others, the longest before shorter.

        Raises:
            RecordingError: There are prompts, and the sequence is of none.
        """
        if not self._prompts:
            return None
        short = Path(name).name
        if tokens is None:
            return next((p for p in self._prompts if p.id in (name, short)), None)
        begins = [
            (i not in (name, short), -len(ids), order, i)
            for order, rendered in enumerate(self._rendered.values())
            for i, ids in rendered.items()
            if ids and ids == tuple(tokens[: len(ids)])
        ]
        if begins:
            # The longest, also among templates: one that rules thinking out only adds to the one that does not.
            _, _, order, best = min(begins)
            prompt = next(p for p in self._prompts if p.id == best)
            if prompt.prompt_ids is None:
                self._matched[list(self._rendered)[order]] += 1
            return prompt
        tried = ", ".join(self._rendered)
        raise RecordingError(
            f"{name} begins with none of the {len(self._prompts)} prompts (templates tried: {tried}); give the "
            "prompts that it is of, and the target whose tokenizer made it"
        )

    def _spans(
        self, name: str, tokens: Sequence[int], mask: Sequence[int] | None, prompt: Prompt | None
    ) -> list[tuple[int, int]]:
        """Where the answers are: as the mask says for several, else from the prompt's end on."""
        masked = [] if mask is None else answers_in(list(mask), length=len(tokens), where=name)
        if prompt is None:
            if not masked:
                raise RecordingError(
                    f"{name} does not say where its prompt ends, having no loss_mask; give the prompts with --prompts"
                )
            return masked
        if len(masked) > 1:
            return masked
        rendered = [ids[prompt.id] for ids in self._rendered.values() if prompt.id in ids]
        start = max(len(ids) for ids in rendered if ids == tuple(tokens[: len(ids)]))
        given = prompt.completion_ids
        if given is not None and tuple(tokens[start : start + len(given)]) != given:
            raise RecordingError(
                f"{name} begins with the prompt {prompt.id}, and goes on with another completion than --prompts "
                "gives; give the completions that the features are of"
            )
        end = len(tokens) if given is None else start + len(given)
        return [(start, min(end, masked[0][1]) if masked else end)]

    def sorted(self, found: Sequence[Reference]) -> list[Reference]:
        """In the prompts' order, or by name where there are none."""
        order = {prompt.id: i for i, prompt in enumerate(self._prompts)}
        last = len(order)
        return sorted(found, key=lambda r: (order.get(r.id, order.get(r.conversation or "", last)), r.id))

    def without_features(self, found: Iterable[str]) -> dict[str, str]:
        """The prompts that nothing was found of, and that this is so."""
        there = set(found)
        missing: dict[str, str] = {}
        for prompt in self._prompts:
            turns = [turn_id(prompt, turn) for turn in range(1, turns_of(prompt) + 1)]
            missing |= {turn: "no features of it are in the source" for turn in turns if turn not in there}
        return missing

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text; empty without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(tokens)))

    def switches(self, names: Sequence[str]) -> list[str]:
        """Which of the template variables the chat template knows."""
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        return [name for name in names if name in template]


def _until_stop(tokens: Sequence[int], stops: Sequence[int]) -> Sequence[int]:
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens
