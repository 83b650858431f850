"""Which protocol a server speaks: it is asked, never guessed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from draftgauge.engines.answers import Engine
from draftgauge.engines.calls import Calls, Patience
from draftgauge.engines.openai import open_openai
from draftgauge.engines.sglang import open_sglang
from draftgauge.errors import EngineError

#: Every protocol and what recognises it; SGLang comes first because it also serves the other one.
KINDS: Mapping[str, Callable[[Calls, str | None], Engine | None]] = {
    "sglang": open_sglang,
    "openai": open_openai,
}


@contextlib.contextmanager
def connected(
    url: str, *, key: str | None = None, model: str | None = None, patience: Patience | None = None
) -> Iterator[Engine]:
    """The engine at an address, for as long as the block runs.

    Args:
        url: The server's address, with or without `/v1`; what it holds of credentials is sent and never shown.
        key: The API key, if the server wants one.
        model: The name of the model, where several are served.
        patience: How often and how long the server is tried.

    Raises:
        EngineError: The server speaks no known protocol, does not serve the model, or simulates acceptance.
        ConnectionLostError: It does not answer.
    """
    with Calls(url, key=key, patience=patience) as calls:
        for recognise in KINDS.values():
            engine = recognise(calls, model)
            if engine is not None:
                yield engine
                return
        raise EngineError(
            f"{calls.url} is no engine known here: it answers neither /server_info nor /get_server_info as SGLang "
            "does, nor /v1/models; give the address of an SGLang, vLLM or other OpenAI-compatible server"
        )
