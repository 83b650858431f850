"""The OpenAI-compatible protocol: `/v1/completions` with token ids in and out, as vLLM serves it.

Hidden states come from vLLM's hidden-state connector, which writes a file on a disk that both machines see.
Knows nothing of prompts or of what the answers are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgauge.engines.answers import Answer, Observed, require_counts, require_prompt, token_ids_in
from draftgauge.engines.calls import Calls
from draftgauge.engines.connector import read_states
from draftgauge.engines.counts import of_vllm
from draftgauge.engines.simulated import require_real
from draftgauge.errors import AnswerError, EngineError

#: Sent with every request. A server would otherwise take some from the model's generation config, where a
#: repetition penalty makes another text of the same argmax.
GREEDY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
}
_ECHOED = ("model", "system_fingerprint", *GREEDY, "top_k", "min_p", "seed", "max_tokens", "sampling_params")
CONNECTOR = (
    'start vLLM with --speculative-config \'{"method": "extract_hidden_states", ...}\' and --kv-transfer-config '
    '\'{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", ...}\''
)
_NO_CACHE = "start vLLM with --no-enable-prefix-caching and --no-enable-chunked-prefill"


@dataclass(frozen=True)
class OpenAI:
    """A server of the OpenAI-compatible protocol and the model that is asked of it."""

    calls: Calls
    model: str
    facts: Mapping[str, Any]

    kind = "openai"
    sampling = GREEDY

    @property
    def url(self) -> str:
        """The address, without credentials."""
        return self.calls.url

    def complete(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Answer:
        """The greedy completion of a prompt; raises as `Engine.complete`."""
        said, choice = self._asked(prompt_ids, max_new_tokens=max_new_tokens)
        usage = said.get("usage") or {}
        ids = token_ids_in(choice.get("token_ids"))
        if ids is None:
            raise EngineError(
                f"{self.url} returned no token ids: it must know `return_token_ids`, as vLLM does from 0.10.2 on. "
                "Text is never tokenised again, since that gives other ids"
            )
        require_prompt(
            prompt_ids,
            echoed=choice.get("prompt_token_ids") or said.get("prompt_token_ids"),
            counted=usage.get("prompt_tokens"),
        )
        require_counts(ids, max_new_tokens=max_new_tokens, said=usage.get("completion_tokens"))
        counted = (said.get("metrics") or choice.get("metrics") or {}).get("speculative_decoding") or {}
        return Answer(
            ids,
            choice.get("finish_reason"),
            echoed={name: said[name] for name in _ECHOED if said.get(name) is not None},
            counts=of_vllm(counted, completion_tokens=len(ids)),
        )

    def observe(self, token_ids: Sequence[int]) -> Observed:
        """The hidden states of a sequence as the connector wrote them; raises as `Engine.observe`.

        Of which layers they are, and in which order, is only in the command that started the server: what
        `eagle_aux_hidden_state_layer_ids` names.
        """
        said, _ = self._asked(token_ids, max_new_tokens=1)
        path = (said.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str):
            raise EngineError(f"{self.url} returned no hidden states; {CONNECTOR}")
        return read_states(Path(path), patience=self.calls.patience, remedy=_NO_CACHE)

    def metrics(self) -> str | None:
        """The Prometheus counters; None where there are none."""
        return self.calls.text("/metrics")

    def _asked(self, ids: Sequence[int], *, max_new_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer and its only choice."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": max_new_tokens, **GREEDY}
        said = self.calls.post("/v1/completions", {**body, "return_token_ids": True, "stream": False})
        choices = said.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise AnswerError(f"{self.url} answered without exactly one choice")
        return said, choices[0]


def open_openai(calls: Calls, model: str | None) -> OpenAI | None:
    """The server as one of this protocol; None where it lists no models.

    Raises:
        EngineError: It does not serve `model`, serves several and none is named, or simulates acceptance.
    """
    listed = calls.find("/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not all(isinstance(entry, dict) and "id" in entry for entry in models):
        return None
    served = {str(entry["id"]): entry for entry in models}
    if model is None and len(served) != 1:
        raise EngineError(f"{calls.url} serves {', '.join(served) or 'no model'}; name one with --model")
    name = next(iter(served)) if model is None else model
    if name not in served:
        raise EngineError(f"{calls.url} does not serve {name!r}; it serves {', '.join(served) or 'no model'}")
    said = calls.find("/server_info?config_format=json")  # vLLM shows it in its development mode only
    require_real([said, served[name]], url=calls.url)
    version = calls.find("/version")
    facts = {
        "model": name,
        "root": served[name].get("root"),
        "max_model_len": served[name].get("max_model_len"),
        "owned_by": served[name].get("owned_by"),
        "version": version.get("version") if isinstance(version, dict) else None,
        "configuration_shown": isinstance(said, dict) and "vllm_config" in said,
    }
    return OpenAI(calls, name, facts)
