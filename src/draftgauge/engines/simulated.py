"""Whether a server only simulates acceptance, as SGLang and vLLM can for benchmarks: its tokens and counts are void.

Looks for the switches of both in whatever a server says of itself: objects, lists, or the text of a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from draftgauge.errors import EngineError

#: SGLang's environment variable and arguments, and fields of vLLM's speculative configuration.
_SWITCHES = ("simulate_acc_len", "synthetic_acceptance_length", "synthetic_acceptance_rates")
_METHOD = "rejection_sample_method"
_IN_TEXT = re.compile(
    rf"({'|'.join(_SWITCHES)}|{_METHOD})[\"']?\s*[=:]\s*[\"'\[]?\s*([^,)}}\]\s\"']+)", re.IGNORECASE
)
_OFF = {"", "none", "null", "false", "[]"}


def require_real(said: Any, *, url: str) -> None:
    """Makes sure that nothing in what a server says of itself switches simulated acceptance on.

    Raises:
        EngineError: Something does.
    """
    for name, value in _switches(said):
        if _is_on(name, value):
            raise EngineError(
                f"{url} simulates acceptance ({name} is {value}): its tokens and counts say nothing of a drafter; "
                "start it without that setting"
            )


def _switches(said: Any) -> Iterator[tuple[str, Any]]:
    """Every setting of ours that is named somewhere inside, with its value."""
    match said:
        case dict():
            for name, value in said.items():
                if _METHOD in str(name).lower() or any(switch in str(name).lower() for switch in _SWITCHES):
                    yield str(name), value
                else:
                    yield from _switches(value)
        case list():
            for value in said:
                yield from _switches(value)
        case str():
            yield from ((found[1], found[2]) for found in _IN_TEXT.finditer(said))


def _is_on(name: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if _METHOD in name.lower():
        return text == "synthetic"
    try:
        return float(text) > 0
    except ValueError:
        return text not in _OFF
