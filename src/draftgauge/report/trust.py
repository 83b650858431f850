"""Renders controls: whether a measurement can be trusted, and what each control expected and found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import wrap

_MARKS: Mapping[str, str] = {
    "failed": "FAILED",
    "caution": "caution",
    "undecided": "undecided",
    "passed": "passed",
    "skipped": "skipped",
}
_COLUMN = 11


def check_report(value: Mapping[str, Any]) -> str:
    """What `check` found: the verdict on all, then every control, the worst first."""
    step = "" if value["step"] is None else f" (step {value['step']})"
    parts = [
        wrap(f"checkpoint  {value['checkpoint']}{step}", indent=" " * 12),
        wrap(f"recording   {value['recording']}", indent=" " * 12),
        verdict_line(value),
        "",
        *(control_lines(control) for control in value["controls"]),
        "",
        wrap(
            f"checked in {value['seconds']:.1f} s, in {value['dtype']}; docs/messages.md has a paragraph for each"
        ),
    ]
    return "\n".join(parts)


def control_lines(control: Mapping[str, Any]) -> str:
    """One control: verdict and name, what was expected, what was measured, and what to do about it."""
    indent = " " * _COLUMN
    lines = [f"{_MARKS[control['verdict']]:<{_COLUMN}}{control['slug']}: {control['expectation']}"]
    lines.append(f"{indent}{control['measured']}")
    if control["advice"] is not None and control["verdict"] != "passed":
        lines.append(f"{indent}-> {control['advice']}")
    return "\n".join(wrap(line, indent=indent) for line in lines)


def verdict_line(trust: Mapping[str, Any]) -> str:
    """The verdict on all controls in one sentence."""
    counts = Counter(control["verdict"] for control in trust["controls"])
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _MARKS if counts[verdict])
    if trust["trusted"]:
        return wrap(f"controls    trusted: {counted}", indent=" " * 12)
    return wrap(f"controls    NOT TRUSTED: {', '.join(trust['failed'])} failed ({counted})", indent=" " * 12)


def trust_lines(trust: Mapping[str, Any] | None) -> str:
    """What a run's report says of its controls: the verdict, and those that failed."""
    if trust is None:
        return "controls    not run: an earlier draftgauge made this run"
    telling = [control for control in trust["controls"] if control["verdict"] == "failed"]
    return "\n".join([verdict_line(trust), *(control_lines(control) for control in telling)])
