"""Renders what the fleet did: who reaches whom, a staging's plan, a measurement's steps, a watch's series.

Takes plain values. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftgauge.report.comparison import comparison_report, stored_report
from draftgauge.report.text import bytes_of, interval, number, signed, table, wrap


def fleet_report(value: Mapping[str, Any]) -> str:
    """Every place and what it offers, then who reaches whom."""
    rows = []
    for name, place in value["places"].items():
        if place["problem"]:
            rows.append((name, "-", "-", "-", "-"))
            continue
        work = place["space"]
        free = (
            "-"
            if work is None
            else bytes_of(work["free_bytes"]) + ("" if work["writable"] else ", read-only")
        )
        rows.append((name, place["host"], place["python"] or "none", place["draftgauge"] or "none", free))
    parts = [table(("place", "calls itself", "python", "draftgauge", "free in work"), rows)]
    problems = [f"! {name}: {p['problem']}" for name, p in value["places"].items() if p["problem"]]
    ways = [
        f"{way['from']} reaches {way['to']}"
        if not way["refusal"]
        else f"! {way['from']} cannot reach {way['to']}: {way['refusal']}"
        for way in value["ways"]
    ]
    routes = [f"{route['text']}" for route in value["routes"]]
    parts += ["\n".join(map(wrap, lines)) for lines in (problems, ways, routes) if lines]
    return "\n\n".join(parts)


def staging_report(value: Mapping[str, Any]) -> str:
    """What a staging will do."""
    lines = [
        f"from     {value['source']}",
        f"to       {value['target']}",
        f"what     {value['what']}" + ("" if value["step"] is None else f", step {value['step']}"),
        f"size     {bytes_of(value['bytes'])}, of which {bytes_of(value['held_bytes'])} are there",
        f"space    {bytes_of(value['free_bytes'])} free at the target",
        f"route    {' -> '.join(value['route'])}",
    ]
    if value["route_why"]:
        lines.append(wrap(f"because {value['route_why']}", indent="         "))
    if value["already_there"]:
        lines.append("nothing to move: it is there already, byte for byte")
    return "\n".join(lines)


def training_line(outcome: Mapping[str, Any]) -> str:
    """Where training was when this checkpoint was measured; empty where nothing says it.

    Example:
        `saved step 4000; training is at 5329, ktok_per_s 19.5`
    """
    trainer = dict(outcome["trainer"])
    step = trainer.pop("step", None)
    if step is None:
        return ""
    more = "".join(f", {name} {value}" for name, value in trainer.items())
    saved = "of no stated step" if outcome["saved_step"] is None else f"step {outcome['saved_step']}"
    return f"saved {saved}; training is at {step}{more}"


def outcome_report(outcome: Mapping[str, Any], run_text: str) -> str:
    """A measurement of a plan: the run, the comparison, stored numbers, gates, and what ran where."""
    parts = [run_text]
    if line := training_line(outcome):
        parts.append(wrap(line))
    if outcome["failed"]:
        parts.append(
            wrap(f"! NOT TRUSTED: {', '.join(outcome['failed'])} failed; do not use the numbers yet")
        )
    if outcome["comparison"] is not None:
        parts.append(comparison_report(outcome["comparison"]))
    if outcome["comparison_reason"]:
        parts.append(wrap(f"! not compared: {outcome['comparison_reason']}"))
    if outcome["beside"] is not None:
        parts.append(stored_report(outcome["beside"]))
    parts += [wrap(gate_line(gate)) for gate in outcome["gates"]]
    rows = [
        (step["step"], step["place"], "skipped" if step["skipped"] else f"{step['seconds']:.1f} s")
        for step in outcome["steps"]
    ]
    parts.append(table(("what ran", "where", "time"), rows))
    parts.append("\n".join(wrap(f"{step['step']}: {step['text']}") for step in outcome["steps"]))
    return "\n\n".join(parts)


def gate_line(gate: Mapping[str, Any]) -> str:
    """A judged gate in a line."""
    verdict = {True: "passed", False: "FAILED", None: "NOT DECIDED"}[gate["passed"]]
    return f"gate {verdict}: {gate['gate']}: {gate['text']}"


def series_report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tau over steps, in order of steps, with what is not there and why."""
    shown = sorted(rows, key=lambda row: (row["saved_step"] is None, row["saved_step"] or 0))
    lines = [
        (
            "-" if row["saved_step"] is None else str(row["saved_step"]),
            number(row["tau"]["value"]) if row["tau"] else "-",
            interval(row["tau"]) if row["tau"] else "-",
            signed(row["difference"]["value"]) if row["difference"] else "-",
            "yes" if row["trusted"] else "NO" if row["trusted"] is not None else "-",
            "-" if not row["trainer"].get("step") else str(row["trainer"]["step"]),
        )
        for row in shown
    ]
    head = ("step", "tau", "95 %", "against baseline", "trusted", "training at")
    parts = [table(head, lines)]
    left = [f"! {row['source']}: {row['reason']}" for row in shown if row["reason"]]
    if left:
        parts.append("\n".join(wrap(line) for line in left))
    return "\n\n".join(parts)
