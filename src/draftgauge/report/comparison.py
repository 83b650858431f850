"""Renders the comparison of two runs, and stored numbers from elsewhere beside a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import interval, number, reasons, rest, short, signed, table, wrap

#: Longer listings of prompts end with a count of the rest.
_MOST_PROMPTS = 40


def comparison_report(value: Mapping[str, Any]) -> str:
    """A comparison of two runs."""
    policies = value["policies"]
    rows = [
        (
            policy["label"],
            number(policy["tau_response"]["baseline"]),
            number(policy["tau_response"]["run"]),
            signed(policy["tau_response"]["difference"]["value"]),
            interval(policy["tau_response"]["difference"]),
            number(policy["tau_response"]["resolvable"]),
        )
        for policy in policies.values()
    ]
    rows_table = table(("tau by response", "baseline", "run", "difference", "95 %", "resolvable"), rows)
    notes = reasons(policy["tau_response"]["difference"] for policy in policies.values())
    notes.append("resolvable: the smallest difference that this many prompts would show in 4 of 5 cases.")
    parts = [
        f"run       {value['run']}\nbaseline  {value['baseline']}\n"
        f"paired on {len(value['prompts'])} prompt(s)",
        "\n".join([rows_table, *map(wrap, notes)]),
        _pair_table(next(iter(policies.values()))),
        "\n".join(wrap(line, indent="  ") for line in _sameness(value)),
    ]
    return "\n\n".join(parts)


def _pair_table(policy: Mapping[str, Any]) -> str:
    """One policy's tau on every prompt, of both runs."""
    rows = [
        (name, number(pair["baseline"]), number(pair["run"]), signed(pair["run"] - pair["baseline"]))
        for name, pair in policy["prompts"].items()
    ]
    listed = table((f"tau of the {policy['label']}", "baseline", "run", "difference"), rows[:_MOST_PROMPTS])
    return listed + rest(len(rows) - _MOST_PROMPTS, "prompts")


def _sameness(value: Mapping[str, Any]) -> list[str]:
    """What the two runs share, in what they differ, and what was left out and why."""
    lines = [f"the same: {', '.join(value['same'])}"]
    lines += [
        f"different: {name}: {short(pair['baseline'])} (baseline), {short(pair['run'])} (run)"
        for name, pair in value["different"].items()
    ]
    lines += [f"! left out: prompt {name}: {reason}" for name, reason in value["dropped"].items()]
    if value["dropped_policies"]:
        names = ", ".join(value["dropped_policies"])
        lines.append(f"! policies left out, since only one run has them: {names}")
    lines += [
        f"! {name} is NOT TRUSTED: {', '.join(failed)} failed" for name, failed in value["untrusted"].items()
    ]
    return lines


def stored_report(value: Mapping[str, Any]) -> str:
    """Stored numbers from elsewhere beside a run's: shown, and neither compared nor tested."""
    rows = [
        (
            row["label"],
            row["named"],
            number(row["stored"]),
            number(row["run"]),
            number(row["run_all_anchors"]),
        )
        for row in value["rows"]
    ]
    head = ("quantity", "named there", "stored", "this run", "all anchors")
    notes = [
        f"beside {value['path']}, which does not say how it was measured: without provenance nothing is compared "
        "or tested"
    ]
    notes += value["notes"]
    return "\n".join(
        [wrap(notes[0]), "", table(head, rows), *(wrap(f"- {note}", indent="  ") for note in notes[1:])]
    )
