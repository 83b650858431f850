"""Renders a diagnosis: the answer first, then every wiring that was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import ABSENT, rest, signed, table, wrap

_MOST_ROWS = 30


def diagnosis_report(value: Mapping[str, Any]) -> str:
    """What `diagnose` found."""
    base = value["base"]
    parts = [
        wrap(f"checkpoint  {value['checkpoint']}", indent=" " * 12),
        wrap(f"recording   {value['recording']}", indent=" " * 12),
        wrap(
            f"wiring      as given: streak {base['streak']:.3f} on {base['anchors']} anchors of {base['prompts']} "
            "prompt(s)",
            indent=" " * 12,
        ),
        "",
        wrap(value["answer"]),
        "",
        _tried(value),
    ]
    notes = _notes(value)
    return "\n".join([*parts, *(["", *notes] if notes else [])])


def _tried(value: Mapping[str, Any]) -> str:
    rows = []
    for row in value["candidates"]:
        if row["log_prob_change"] is None:
            continue
        change, streak = row["log_prob_change"], row["streak_change"]
        interval = ABSENT if change["low"] is None else f"{change['low']:+.3f}, {change['high']:+.3f}"
        cells = (signed(change["value"]), interval, signed(streak["value"]), str(row["anchors"]))
        rows.append((row["label"], row["outcome"], *cells))
    head = (
        "nearby, after that" if value["changes"] else "nearby",
        "verdict",
        "log-prob",
        "95 %",
        "streak",
        "anchors",
    )
    return table(head, rows[:_MOST_ROWS]) + rest(len(rows) - _MOST_ROWS, "wirings")


def _notes(value: Mapping[str, Any]) -> list[str]:
    """What the table does not say: what cannot be decided, what was not tried, and how it was judged."""
    counts = Counter(row["outcome"] for row in value["candidates"])
    notes = []
    if value["undecidable"]:
        notes.append(
            f"undecidable on this data, for some of their values: {', '.join(value['undecidable'])}. That they make "
            "no difference here does not say that they are right."
        )
    if counts["not tried"]:
        notes.append(
            f"{counts['not tried']} not tried: their layers were not recorded; `draftgauge record --taps-around` "
            "keeps the layers beside each tap."
        )
    if counts["impossible"]:
        reasons = dict.fromkeys(r["reason"] for r in value["candidates"] if r["outcome"] == "impossible")
        notes.append(f"{counts['impossible']} impossible: {'; '.join(map(str, reasons))}")
    notes.append(f"{value['method']}; {value['seconds']:.0f} s")
    return [wrap(f"- {note}", indent="  ") for note in notes]
