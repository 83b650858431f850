"""What every engine answers, whatever its protocol: completions and hidden states, token ids in and out.

An engine is a small frozen object that knows one protocol; `kinds` finds the one that a server speaks.

Letters: T tokens of a sequence, S places whose state the server returns, H width of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, Shaped

from draftgauge.engines.counts import RequestCounts
from draftgauge.errors import AnswerError


@dataclass(frozen=True)
class Answer:
    """A completion: its token ids, why it ended, what the server said of the sampling, and what it counted.

    Example:
        `Answer((5, 2), "stop", echoed={"model": "Qwen3-8B"})`
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None
    echoed: Mapping[str, Any] = field(default_factory=dict)
    counts: RequestCounts = field(default_factory=RequestCounts)


@dataclass(frozen=True)
class Observed:
    """Hidden states [T, S, H] as the server gave them, and the ids [T] that it says they are of, if it does.

    `dtype` is the safetensors name of the type; bfloat16 lies in `states` as uint16.
    """

    states: Shaped[np.ndarray, "T S H"]
    dtype: str
    token_ids: Integer[np.ndarray, " I"] | None
    remedy: str


@runtime_checkable  # for the tests, which check every annotation at every call
class Engine(Protocol):
    """A server that completes token ids.

    `facts` is what it says of itself, `sampling` what is sent with every request, both without any secret.
    """

    @property
    def kind(self) -> str:
        """The name of its protocol in `kinds.KINDS`."""

    @property
    def url(self) -> str:
        """Its address, without credentials."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the server says of itself, as far as it can change a token."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters as sent, without the number of tokens."""

    def complete(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Answer:
        """The greedy completion of a prompt.

        Raises:
            AnswerError: The answer cannot be used; those to other prompts can.
            EngineError: The server cannot be used.
            ConnectionLostError: It does not answer.
        """

    def observe(self, token_ids: Sequence[int]) -> Observed:
        """The hidden states of a sequence, computed in one pass.

        Raises:
            EngineError: The server was not started so that it returns them.
            AnswerError: They cannot be used.
            ConnectionLostError: It does not answer.
        """

    def metrics(self) -> str | None:
        """The server's Prometheus counters; None where it shows none."""


def token_ids_in(value: Any) -> tuple[int, ...] | None:
    """The token ids that a JSON value holds; None where it holds something else.

    Example:
        `token_ids_in([5, 2])` is `(5, 2)`.
    """
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def require_counts(ids: Sequence[int], *, max_new_tokens: int, said: Any) -> None:
    """Makes sure that a completion is as long as the server says, and not longer than was asked.

    Raises:
        AnswerError: It is not, or holds no token.
    """
    if len(ids) > max_new_tokens:
        raise AnswerError(
            f"the server returned {len(ids)} tokens where at most {max_new_tokens} were asked for"
        )
    if said is not None and said != len(ids):
        raise AnswerError(f"the server counted {said} completion tokens and returned the ids of {len(ids)}")
    if not ids:
        raise AnswerError("the server returned no token at all")


def require_prompt(sent: Sequence[int], *, echoed: Any, counted: Any) -> None:
    """Makes sure that the server read the prompt that was sent.

    Raises:
        AnswerError: It read other ids, or another number of them.
    """
    read = token_ids_in(echoed)
    if read is not None and read != tuple(sent):
        raise AnswerError(
            f"the server read {len(read)} prompt ids that are not the {len(sent)} that were sent; it must take token "
            "ids as they are"
        )
    if counted is not None and counted != len(sent):
        raise AnswerError(f"the server counted {counted} prompt tokens where {len(sent)} ids were sent")
