"""One policy's tau by category of prompt, from a run's summary; turns of one conversation are one unit.

Takes plain values and returns plain values. Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.stats import mean
from draftgauge.summary import units_of

#: Prompts that no category was stated for.
UNNAMED = "(none)"


def tau_by_category(summary: Mapping[str, Any], slug: str) -> dict[str, dict[str, Any]]:
    """The mean of per-response tau in each category, the lowest first; none where no prompt has a category.

    Categories without a round are left out.

    Example of the result: `{"math": {"value": 2.31, "low": 2.1, "high": 2.6, "n": 20, ...}}`.
    """
    if all(prompt["category"] is None for prompt in summary["prompts"].values()):
        return {}
    prompts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, prompt in summary["prompts"].items():
        prompts.setdefault(prompt["category"] or UNNAMED, {})[name] = prompt
    found = {category: _tau(members, slug) for category, members in prompts.items()}
    measured = {category: tau for category, tau in found.items() if tau["value"] is not None}
    return dict(sorted(measured.items(), key=lambda of: (of[1]["value"], of[0])))


def _tau(prompts: Mapping[str, Mapping[str, Any]], slug: str) -> dict[str, Any]:
    """The tau of these prompts, as `summary` counts it: turns of one conversation are one response."""
    values = []
    for unit in units_of({name: prompt.get("conversation") for name, prompt in prompts.items()}):
        counts = [prompts[name]["policies"][slug] for name in unit]
        if rounds := sum(count["rounds"] for count in counts):
            values.append(sum(count["committed"] for count in counts) / rounds)
    return mean(values).as_dict()
