"""Stored results from elsewhere: a JSON of bare numbers, read into our words, to be shown beside a run.

Such numbers say nothing of how they were measured. They are never compared or tested. An earlier harness called
coverage@k "DDTree top-k"; a tree of 4 nodes cannot accept more than 4 tokens, so it was none (docs/how-it-works.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.errors import InputError
from draftgauge.runs import Run

_CHAIN = re.compile(r"(?:vanilla|chain)", re.IGNORECASE)
_TOP = re.compile(r"top[-_ ]?(\d+)", re.IGNORECASE)
_TREE = re.compile(r"(?:ddtree|tree|budget)\D{0,3}(\d+)", re.IGNORECASE)
_COVERAGE = re.compile(r"coverage\D{0,3}(\d+)", re.IGNORECASE)
_TAU = re.compile(r"\btau\b|bonus", re.IGNORECASE)


@dataclass(frozen=True)
class Stored:
    """One stored number: what it was called there, which quantity of ours that is, and of which prompt.

    `quantity` is None where the name means nothing here; `prompt` is None for a number over all of them.
    """

    named: str
    value: float
    policy: Policy | None
    quantity: str | None
    prompt: str | None


def read_stored(path: Path) -> list[Stored]:
    """The numbers in a JSON file: an object of them, or objects of them by prompt.

    Example:
        `{"vanilla": 0.778, "DDTree top-4": 1.111}` gives the chain's streak and coverage@4's.

    Raises:
        InputError: The file is no such JSON, or a value in it is no number.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(f"{path} is not readable JSON: {exc}; give a file of numbers by name") from exc
    if not isinstance(value, dict) or not value:
        raise InputError(f"{path} holds {type(value).__name__}, expected an object of numbers by name")
    return list(_numbers(path, value, prompt=None))


def beside(run: Run, stored: list[Stored], *, path: Path) -> dict[str, Any]:
    """The stored numbers, each with the same quantity of the run where it has one.

    Example of the result: `{"path": "old.json", "rows": [{"label": "coverage@4 streak", "named": "DDTree top-4",
    "stored": 1.111, "run": 1.31, "run_all_anchors": 1.2}], "notes": [...]}`.
    """
    rows = [_row(run, number) for number in stored]
    notes = []
    if any(n.policy is not None and n.policy.kind == "coverage" and _TOP.search(n.named) for n in stored):
        notes.append(
            "what is called top-k there is coverage@k: a tree of k nodes cannot accept more than k tokens; real "
            "DDTree budgets stand in the run's own table"
        )
    unknown = [number.named for number in stored if number.quantity is None]
    if unknown:
        notes.append(f"not one of our quantities: {', '.join(dict.fromkeys(unknown))}")
    return {"path": str(path), "rows": rows, "notes": notes}


def _numbers(path: Path, value: Mapping[str, Any], *, prompt: str | None) -> Iterator[Stored]:
    for name, entry in value.items():
        if isinstance(entry, dict) and prompt is None:
            yield from _numbers(path, entry, prompt=name)
        elif isinstance(entry, bool) or not isinstance(entry, int | float):
            where = f"{prompt}: {name}" if prompt else name
            raise InputError(f"{path}: {where} is {entry!r}, expected a number; take it out of the file")
        else:
            policy, quantity = _meaning(name)
            yield Stored(name, float(entry), policy, quantity, prompt)


def _meaning(name: str) -> tuple[Policy | None, str | None]:
    """Which of our policies and quantities a name there means; tau where it says so, else the streak."""
    quantity = "tau" if _TAU.search(name) else "streak"
    if found := _TOP.search(name) or _COVERAGE.search(name):
        return Policy("coverage", int(found[1])), quantity
    if found := _TREE.search(name):
        return Policy("ddtree", int(found[1])), quantity
    if _CHAIN.search(name) or name.lower() in ("tau", "streak", "tau with bonus"):
        return Policy("chain"), quantity
    return None, None


def _row(run: Run, stored: Stored) -> dict[str, Any]:
    policy, quantity = stored.policy, stored.quantity
    label = stored.named if policy is None else f"{policy.label} {quantity}"
    ours = everywhere = None
    if policy is not None and stored.prompt is None:
        values = run.summary["policies"].get(policy.slug, {})
        ours = values.get(f"{quantity}_response", {}).get("value")
        everywhere = values.get("all_anchor_streak", {}).get("value") if quantity == "streak" else None
    elif policy is not None and stored.prompt in run.summary["prompts"]:
        values = run.summary["prompts"][stored.prompt]["policies"].get(policy.slug, {})
        ours = values.get(quantity)
        everywhere = values.get("all_anchor_streak") if quantity == "streak" else None
    return {
        "label": label if stored.prompt is None else f"{stored.prompt}: {label}",
        "named": stored.named,
        "prompt": stored.prompt,
        "stored": stored.value,
        "run": ours,
        "run_all_anchors": everywhere,
    }
