"""SGLang's own protocol: `/generate` with `input_ids`, and what it says of itself in `/server_info`.

Knows nothing of prompts or of what the answers are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from draftgauge.engines.answers import Answer, Observed, require_counts, require_prompt, token_ids_in
from draftgauge.engines.calls import Calls
from draftgauge.engines.counts import of_sglang
from draftgauge.engines.simulated import require_real
from draftgauge.errors import AnswerError, EngineError

#: Sent with every request, so that no default of the model's generation config changes the text.
GREEDY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_ECHOED = ("sampling_params", *GREEDY, "max_new_tokens", "weight_version")
#: What can change a token or a count. The rest stays unread: the server's own keys are among it.
_FACTS = (
    *("model_path", "served_model_name", "tokenizer_path", "revision", "version", "dtype", "quantization"),
    *("kv_cache_dtype", "context_length", "tp_size", "dp_size", "pp_size", "attention_backend"),
    *("disable_radix_cache", "chunked_prefill_size", "enable_return_hidden_states", "random_seed"),
    *("enable_deterministic_inference", "sampling_defaults", "preferred_sampling_params"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"),
    *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_accept_threshold_single"),
    *("speculative_accept_threshold_acc", "speculative_token_map"),
)
_FLAG = "start SGLang with --enable-return-hidden-states"
_NO_CACHE = "start SGLang with --disable-radix-cache"


@dataclass(frozen=True)
class SGLang:
    """A server of SGLang's own protocol."""

    calls: Calls
    facts: Mapping[str, Any]

    kind = "sglang"
    sampling = GREEDY

    @property
    def url(self) -> str:
        """The address, without credentials."""
        return self.calls.url

    def complete(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Answer:
        """The greedy completion of a prompt; raises as `Engine.complete`.

        Versions that return the ids only with their log-probabilities are asked for these.
        """
        said, meta = self._asked(prompt_ids, max_new_tokens=max_new_tokens)
        ids = _completion(said, meta)
        if ids is None:
            said, meta = self._asked(prompt_ids, max_new_tokens=max_new_tokens, return_logprob=True)
            ids = _completion(said, meta)
        if ids is None:
            raise EngineError(
                f"{self.url} returned no token ids, neither output_ids nor output_token_logprobs; update SGLang. "
                "Text is never tokenised again, since that gives other ids"
            )
        reason = meta.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        if reason == "abort":
            raise AnswerError(f"the server ended the request itself: {str(meta['finish_reason'])[:300]}")
        require_prompt(prompt_ids, echoed=said.get("prompt_token_ids"), counted=meta.get("prompt_tokens"))
        require_counts(ids, max_new_tokens=max_new_tokens, said=meta.get("completion_tokens"))
        echoed = {name: meta[name] for name in _ECHOED if meta.get(name) is not None}
        return Answer(ids, reason, echoed=echoed, counts=of_sglang(meta))

    def observe(self, token_ids: Sequence[int]) -> Observed:
        """The hidden states of a sequence, S = 1; raises as `Engine.observe`.

        Of which layer they are is not said: the last one's, after the final norm, unless the server captures several
        for a drafter; these then stand side by side in one row.
        """
        if self.facts.get("enable_return_hidden_states") is False:
            raise EngineError(f"{self.url} does not return hidden states; {_FLAG}")
        said, meta = self._asked(token_ids, max_new_tokens=1, return_hidden_states=True)
        if not meta.get("hidden_states"):
            raise EngineError(f"{self.url} returned no hidden states; {_FLAG}")
        require_prompt(token_ids, echoed=said.get("prompt_token_ids"), counted=meta.get("prompt_tokens"))
        rows = _rows(meta["hidden_states"])
        return Observed(rows[:, None], "F32", None, remedy=_NO_CACHE)

    def metrics(self) -> str | None:
        """The Prometheus counters; None where there are none."""
        return self.calls.text("/metrics")

    def _asked(
        self, ids: Sequence[int], *, max_new_tokens: int, **flags: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer and its `meta_info`."""
        sampling = {**GREEDY, "max_new_tokens": max_new_tokens}
        said = self.calls.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **flags})
        meta = said.get("meta_info")
        if not isinstance(meta, dict):
            raise AnswerError(f"{self.url} answered without meta_info: {str(said)[:200]}")
        return said, meta


def _completion(said: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ids of the completion, where the answer has them in one of its two places."""
    if said.get("output_ids") is not None:
        return token_ids_in(said["output_ids"])
    rows = meta.get("output_token_logprobs")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
        return None
    return token_ids_in([row[1] for row in rows])


def _rows(nested: Any) -> Float32[np.ndarray, "T H"]:
    """The states one row a token, however they are nested: by step, or by chunk of the prefill.

    Raises:
        AnswerError: They are no rows of one width.
    """
    rows = list(_leaves(nested))
    if not rows or len({len(row) for row in rows}) != 1:
        raise AnswerError(
            "the hidden states are not rows of one width; expected a list of numbers for each token"
        )
    return np.asarray(rows, np.float32)


def _leaves(nested: Any) -> Iterator[list[float]]:
    """The innermost lists of numbers."""
    if not isinstance(nested, list) or not nested:
        return
    if all(isinstance(item, int | float) for item in nested):
        yield nested
        return
    for item in nested:
        yield from _leaves(item)


def open_sglang(calls: Calls, model: str | None) -> SGLang | None:
    """The server as SGLang; None where it is not one.

    Raises:
        EngineError: It does not serve `model`, or simulates acceptance.
    """
    for path in ("/server_info", "/get_server_info"):
        said = calls.find(path)
        # vLLM has /server_info as well, in its development mode, and says other things there.
        if isinstance(said, dict) and {"model_path", "tokenizer_path"} <= said.keys():
            break
    else:
        return None
    require_real(said, url=calls.url)
    names = (said["model_path"], said.get("served_model_name"))
    if model is not None and model not in names:
        raise EngineError(f"{calls.url} does not serve {model!r}; it serves {said['model_path']}")
    return SGLang(calls, {name: said[name] for name in _FACTS if name in said})
