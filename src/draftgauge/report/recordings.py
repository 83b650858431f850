"""Renders what was found to measure a drafter on: readable at 80 columns, in a log.

Takes plain values; knows nothing of how they were found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import number, wrap


def pick_report(value: Mapping[str, Any]) -> str:
    """Each folder with what it holds, then which to take, why, and with which command."""
    parts = [f"the drafter reads taps {', '.join(map(str, value['taps']))}"]
    parts += [_candidate(candidate) for candidate in value["candidates"]]
    if value["take"] is None:
        parts.append(f"take none: {value['why']}")
    else:
        parts.append(wrap(f"take {value['take']}: {value['why']}", indent="    "))
    if value["command"]:
        parts.append(f"import it first:\n  {value['command']}")
    return "\n\n".join(parts)


def _candidate(candidate: Mapping[str, Any]) -> str:
    kind = candidate["kind"] if candidate["form"] is None else f"features ({candidate['form']})"
    lines = [candidate["path"]]
    if candidate["kind"] in ("empty", "unreadable"):
        lines.append(f"  no: {candidate['lacks']}")
    else:
        verdict = "fits" if candidate["fits"] else "does not fit"
        if candidate["fits"] and candidate["kind"] == "features":
            verdict = "fits by its widths, once imported"
        lines.append(f"  {kind}: {verdict}")
        lines.append(f"  {candidate['prompts']} of {candidate['prompts_asked']} prompt(s), {_age(candidate)}")
        if candidate["kind"] == "recording":
            lines.append(f"  references agree {number(candidate['agreement'])} with the target")
        if candidate["lacks"]:
            lines.append(f"  ! {candidate['lacks']}")
    return "\n".join(wrap(line, indent="    ") for line in lines)


def _age(value: Mapping[str, Any]) -> str:
    """When a candidate was made, and whether its target is newer, in words.

    Example:
        `"2026-11-30 17:04, older than its target's weights"`.
    """
    if value["made"] is None:
        return "age unknown"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(value["made"]))
    compared = {
        True: ", older than its target's weights",
        False: ", newer than its target's weights",
        None: "",
    }
    return made + compared[value["behind_target"]]
