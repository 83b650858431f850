"""Renders the comparison of two runs, and stored numbers from elsewhere beside a run.

Takes the plain values of `compare` and `beside`. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import interval, number, reasons, rest, short, signed, table, wrap

#: Longer listings of prompts end with a count of the rest.
_MOST_PROMPTS = 40


def comparison_report(value: Mapping[str, Any]) -> str:
    """A comparison of two runs: the answer, every policy, every prompt, and what was compared."""
    first = next(iter(value["policies"].values()))
    parts = [
        _head(value),
        wrap(answer(first, prompts=len(value["prompts"]))),
        _policy_table(value["policies"]),
        _pair_table(first),
        "\n".join(wrap(line, indent="  ") for line in sameness(value)),
    ]
    return "\n\n".join(parts)


def _head(value: Mapping[str, Any]) -> str:
    lines = [
        f"run       {value['run']}",
        f"baseline  {value['baseline']}",
        wrap(
            f"paired on {len(value['prompts'])} prompt(s), whose references are the same token for token",
            indent="  ",
        ),
    ]
    for side, trust in value["trust"].items():
        if trust["failed"]:
            lines.append(
                wrap(
                    f"! {value[side]} is NOT TRUSTED: {', '.join(trust['failed'])} failed; do not use the "
                    "differences before that is explained",
                    indent="  ",
                )
            )
        elif trust["trusted"] is None:
            lines.append(
                wrap(
                    f"- {value[side]} was made before controls were: whether to trust it is not known",
                    indent="  ",
                )
            )
    return "\n".join(lines)


def answer(policy: Mapping[str, Any], *, prompts: int) -> str:
    """What the comparison says of one policy, in a sentence."""
    tau, what = policy["tau_response"], f"tau of the {policy['label']}"
    difference = tau["difference"]
    measured = f"{signed(difference['value'])} [{interval(difference)}]"
    if tau["verdict"] == "equal":
        return f"The {what} is the same on each of {prompts} prompt(s)."
    if tau["verdict"] == "undecided":
        return f"The {what} cannot be told apart: {difference['reason']}."
    if tau["verdict"] == "not resolved":
        return f"No difference in the {what} shows on {prompts} prompts: {measured}."
    return f"The {what} is {tau['verdict']}: {measured} on {prompts} prompts."


def _policy_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
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
    notes = reasons(policy["tau_response"]["difference"] for policy in policies.values())
    notes.append("resolvable: the smallest difference that this many prompts would show in 4 of 5 cases.")
    head = ("tau by response", "baseline", "run", "difference", "95 %", "resolvable")
    return "\n".join([table(head, rows), *map(wrap, notes)])


def _pair_table(policy: Mapping[str, Any]) -> str:
    """One policy's tau on every prompt, of both runs."""
    rows = [
        (name, number(pair["baseline"]), number(pair["run"]), signed(pair["run"] - pair["baseline"]))
        for name, pair in policy["prompts"].items()
    ]
    listed = table((f"tau of the {policy['label']}", "baseline", "run", "difference"), rows[:_MOST_PROMPTS])
    return listed + rest(len(rows) - _MOST_PROMPTS, "prompts")


def sameness(value: Mapping[str, Any]) -> list[str]:
    """What the two runs share, in what they differ, and what was left out and why."""
    lines = [f"the same: {', '.join(_said(name, said) for name, said in value['same'].items())}"]
    lines += [
        f"different: {name}: {short(pair['baseline'])} (baseline), {short(pair['run'])} (run)"
        for name, pair in value["different"].items()
    ]
    lines += [f"! left out: prompt {name}: {reason}" for name, reason in value["dropped"].items()]
    lines += [f"! left out: policy {name}: {reason}" for name, reason in value["dropped_policies"].items()]
    return lines


def _said(name: str, value: Any) -> str:
    """What is the same, with its value where that tells a reader something."""
    return name if len(str(value)) == 64 else f"{name} ({short(value)})"


def stored_report(value: Mapping[str, Any]) -> str:
    """Stored numbers from elsewhere beside a run's: shown, and neither compared nor tested."""
    rows = [
        (_called(row), number(row["stored"]), number(row["run"]), number(row["run_all_anchors"]))
        for row in value["rows"]
    ]
    title = f"beside the stored result {value['path']}, which has no provenance: not compared, not tested"
    listed = table(("named there (here)", "stored", "this run", "all anchors"), rows[:_MOST_PROMPTS])
    notes = [wrap(f"- {note}", indent="  ") for note in value["notes"]]
    return "\n".join([wrap(title), "", listed + rest(len(rows) - _MOST_PROMPTS, "values"), *notes])


def _called(row: Mapping[str, Any]) -> str:
    """A stored number's name there, and what it is here."""
    prompt = "" if row["prompt"] is None else f"{row['prompt']}: "
    here = "" if row["quantity"] is None else f" ({row['quantity']})"
    return f"{prompt}{row['named']}{here}"
