"""Stored results from elsewhere: a JSON of bare numbers, read into our words, to be shown beside a run.

Such numbers say nothing of how they were measured: they are never compared and never tested. An earlier harness
called coverage@k "DDTree top-k"; a tree of 4 nodes cannot accept more than 4 tokens, and its numbers did. Knows
nothing of rendering.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftgauge.acceptance import Policy
from draftgauge.errors import InputError
from draftgauge.runs import Run

#: Whole names only: `top-1 accuracy` or `vanilla_latency_s` is no streak.
_NAME = re.compile(
    r"(?P<policy>vanilla|chain(?:\(?(?P<chain>\d+)\)?)?|(?:ddtree[ _-]*)?top[ _-]*(?P<top>\d+)"
    r"|coverage[ _@-]*(?P<coverage>\d+)|ddtree\(?(?P<ddtree>\d+)\)?)?"
    r"[ _-]*(?P<quantity>(?P<tau>tau(?:[ _-]*with[ _-]*bonus)?|with[ _-]*bonus)|streak)?",
    re.IGNORECASE,
)
#: The fields of a record that may name its prompt.
_PROMPT_FIELDS = ("prompt", "id", "prompt_id", "question_id", "task_id", "name")
_TOP_IS_COVERAGE = (
    "top-k there is coverage@k here: the tokens that a tree k wide at every depth could accept. A tree of k nodes "
    "cannot accept more than k tokens; what DDTree with a budget accepts stands in the run's own table."
)


@dataclass(frozen=True)
class Stored:
    """One stored number: what it was called there, which quantity of ours that is, and of which prompt.

    `policy` and `quantity` are None where the name means nothing here; `prompt` for a number over all of them.
    """

    named: str
    value: float
    policy: Policy | None
    quantity: Literal["tau", "streak"] | None
    prompt: str | None


def read_stored(path: Path) -> list[Stored]:
    """The numbers in a JSON file: an object of them, objects of them by prompt, or a list of records.

    Example:
        `{"vanilla": 0.778, "DDTree top-4": 1.111}` gives the chain's streak and coverage@4's; so do
        `{"fizzbuzz": {"vanilla": 0.778}}` and `[{"prompt": "fizzbuzz", "vanilla": 0.778}]` for one prompt.

    Raises:
        InputError: The file is no such JSON, or a value in it is no number.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"{path} is not readable JSON: {exc}; give a file of numbers by name") from exc
    numbers: list[Stored] = []
    if isinstance(value, list):
        numbers = [
            number for i, record in enumerate(value) for number in _of_record(path, record, f"record {i}")
        ]
    elif isinstance(value, dict):
        by_prompt = {name: entry for name, entry in value.items() if isinstance(entry, dict)}
        overall = {name: entry for name, entry in value.items() if name not in by_prompt}
        numbers = [*_numbers(path, overall, prompt=None)]
        numbers += [
            number for name, entry in by_prompt.items() for number in _numbers(path, entry, prompt=name)
        ]
    if not numbers:
        raise InputError(
            f"{path} holds {value!r:.40}; expected numbers by name, as in "
            '{"vanilla": 0.778, "DDTree top-4": 1.111}'
        )
    return numbers


def beside(run: Run, stored: Sequence[Stored], *, path: Path) -> dict[str, Any]:
    """The stored numbers, each with the same quantity of the run where it has one.

    `run` is the value over the policy's own walk (over all prompts: the mean of the responses' own), and
    `run_all_anchors` the mean over every anchor: which of the two a stored number is, nobody says.

    Example of the result: `{"path": "old.json", "rows": [{"named": "DDTree top-4", "prompt": None, "quantity":
    "coverage@4 streak", "stored": 1.111, "run": 1.31, "run_all_anchors": 1.2}], "notes": [...]}`.
    """
    rows, lacking = [], dict[str, None]()
    for number in stored:
        ours = _of_run(run, number)
        if ours is None and number.policy is not None:
            known = number.prompt is None or number.prompt in run.summary["prompts"]
            lacking[f"policy {number.policy.label}" if known else f"prompt {number.prompt}"] = None
        rows.append(
            {
                "named": number.named,
                "prompt": number.prompt,
                "quantity": None if number.policy is None else f"{number.policy.label} {number.quantity}",
                "stored": number.value,
                "run": None if ours is None else ours[0],
                "run_all_anchors": None if ours is None else ours[1],
            }
        )
    notes = (
        [_TOP_IS_COVERAGE]
        if any(re.search("top", n.named, re.IGNORECASE) and n.policy for n in stored)
        else []
    )
    unknown = dict.fromkeys(number.named for number in stored if number.policy is None)
    notes += [f"no quantity of ours, shown as it is: {', '.join(unknown)}"] if unknown else []
    notes += [f"this run has no {', '.join(lacking)}"] if lacking else []
    return {"path": str(path), "rows": rows, "notes": notes}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names occur once."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return value


def _of_record(path: Path, record: Any, where: str) -> list[Stored]:
    """The numbers of one record, which names its prompt."""
    if not isinstance(record, dict):
        raise InputError(
            f"{path}: {where} is {record!r:.40}; expected an object of numbers with its prompt's name"
        )
    field = next((name for name in _PROMPT_FIELDS if isinstance(record.get(name), str | int)), None)
    if field is None:
        raise InputError(
            f"{path}: {where} names no prompt; expected it under one of {', '.join(_PROMPT_FIELDS)}"
        )
    rest = {name: entry for name, entry in record.items() if name != field}
    return list(_numbers(path, rest, prompt=str(record[field])))


def _numbers(path: Path, value: Mapping[str, Any], *, prompt: str | None) -> Iterator[Stored]:
    for name, entry in value.items():
        try:
            number = (
                math.nan if isinstance(entry, bool) or not isinstance(entry, int | float) else float(entry)
            )
        except OverflowError:
            number = math.nan
        if not math.isfinite(number):
            where = f"{prompt}: {name}" if prompt else name
            raise InputError(f"{path}: {where} is {entry!r:.40}; expected a number: take it out of the file")
        yield Stored(name, number, *_meaning(name), prompt)


def _meaning(name: str) -> tuple[Policy | None, Literal["tau", "streak"] | None]:
    """Which of our policies and quantities a name there means; none where that is not certain."""
    found = _NAME.fullmatch(name.strip())
    if found is None or not (found["policy"] or found["quantity"]):
        return None, None
    numbers = {
        "coverage": found["top"] or found["coverage"],
        "ddtree": found["ddtree"],
        "chain": found["chain"],
    }
    kind, number = next(((kind, int(n)) for kind, n in numbers.items() if n is not None), ("chain", None))
    if number == 0:
        return None, None
    return Policy.parse(f"{kind}{number or ''}"), "tau" if found["tau"] else "streak"


def _of_run(run: Run, stored: Stored) -> tuple[float | None, float | None] | None:
    """The run's value of the same quantity, over the walk and over all anchors; None where it measured none."""
    if stored.policy is None or stored.quantity is None:
        return None
    slug, everywhere = stored.policy.slug, stored.quantity == "streak"
    if stored.prompt is None:
        value = run.summary["policies"].get(slug)
        if value is None:
            return None
        mean = value.get("all_anchor_streak", {}).get("value") if everywhere else None
        return value[f"{stored.quantity}_response"]["value"], mean
    value = run.summary["prompts"].get(stored.prompt, {"policies": {}})["policies"].get(slug)
    return (
        None
        if value is None
        else (value[stored.quantity], value.get("all_anchor_streak") if everywhere else None)
    )
