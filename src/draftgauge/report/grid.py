"""Renders what came of a sweep: a table for each series, one line for each checkpoint.

Takes plain values. Knows nothing of how a sweep is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.report.text import ABSENT, interval, number, table, visible, wrap


def grid_report(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """The series of a sweep, then what could not be measured and why."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        if outcome["run"] is not None:  # which checkpoints have which size of their own is known only now
            series.setdefault((outcome["recording"], outcome["block_size"]), []).append(outcome)
    parts = [
        f"{visible(recording)}, block size {size}\n\n{_series(measured)}"
        for (recording, size), measured in series.items()
    ]
    parts += [_failure(outcome) for outcome in outcomes if outcome["run"] is None]
    return "\n\n".join(parts)


def _failure(outcome: Mapping[str, Any]) -> str:
    size = outcome["block_size"] or "its own"
    what = f"{outcome['checkpoint']} on {outcome['recording']}, block size {size}"
    return wrap(f"! {what}: {outcome['reason']}", indent="  ")


def _series(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """One line for each checkpoint: tau of the chain and of the largest tree."""
    slugs = ["chain", *_largest_tree(outcomes[0]["tau"])]
    head = ["run", "step"]
    for slug in slugs:
        head += [f"tau\n{Policy.parse(slug).label}", "95 %"]
    rows = []
    for outcome in outcomes:
        step = outcome["step"]
        row = [outcome["run"], ABSENT if step is None else str(step)]
        for slug in slugs:
            row += [number(outcome["tau"][slug]["value"]), interval(outcome["tau"][slug])]
        rows.append([*row, "yes" if outcome["trusted"] else "NO"])
    return table([*head, "trust"], rows)


def _largest_tree(tau: Mapping[str, Any]) -> list[str]:
    """The slug of the tree with the most nodes, if one was asked."""
    trees = [policy for policy in map(Policy.parse, tau) if policy.kind == "ddtree"]
    return [max(trees, key=lambda policy: policy.n or 0).slug] if trees else []
