"""Renders a cross-check: each witness under its own convention, and where they part first.

Takes plain values; knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftgauge.report.text import interval, number, signed, table, wrap

#: Longer listings of rounds or texts end with a count of the rest.
_SHOWN = 4


def crosscheck_report(value: Mapping[str, Any]) -> str:
    """The answer first, then the witnesses one by one."""
    parts = [_answer(value["first_difference"]), _replay(value["replay"])]
    if value["online"] is not None:
        parts.append(_online(value["online"], value["replay"]))
    if value["served"] is not None:
        served = value["served"]
        parts.append(
            _witness(f"served by {served['url']} ({served['kind']})", served) + _texts(served["texts"])
        )
    if value["log"] is not None:
        parts.append(_witness(f"log {value['log']['path']}", value["log"]))
    return "\n\n".join(parts)


def _answer(found: Mapping[str, Any]) -> str:
    if found["where"] is None:
        return f"no difference: {found['why']}"
    lines = [f"first difference: {found['where']}", f"  {found['why']}", f"  do: {found['advice']}"]
    return "\n".join(wrap(line, indent="    ") for line in lines)


def _replay(replay: Mapping[str, Any]) -> str:
    rows = [
        (
            policy["label"],
            str(policy["rounds"]),
            number(policy["tau_pooled"]["value"]),
            interval(policy["tau_pooled"]),
        )
        for policy in replay["policies"].values()
    ]
    trust = replay["trust"]
    lines = [
        f"replay on {replay['prompts']} prompt(s)",
        table(("policy", "rounds", "tau pooled", "95 %"), rows),
    ]
    if not trust["trusted"]:
        lines.append(f"! not trusted: {', '.join(trust['failed'])}")
    return "\n".join(lines)


def _online(online: Mapping[str, Any], replay: Mapping[str, Any]) -> str:
    rows = [
        (
            replay["policies"][slug]["label"],
            str(counts["rounds"]),
            number(counts["committed"] / counts["rounds"] if counts["rounds"] else None),
            f"{counts['same']} of {counts['compared']}",
        )
        for slug, counts in online["policies"].items()
    ]
    real = [d for d in online["divergences"] if not d["near_tie"]]
    ties = len(online["divergences"]) - len(real)
    lines = [
        f"online, with the target in {online['dtype']}",
        table(("policy", "rounds", "tau pooled", "same rounds"), rows),
        f"  {online['lossless']} of {online['prompts']} text(s) are the references, token for token",
    ]
    lines += [f"  {ties} prompt(s) part at a near-tie (gap below {online['near_tie_gap']:g})"] * bool(ties)
    lines += [
        f"  ! {d['prompt']}, {d['policy']}: {d['what']} differ at anchor {d['anchor']} "
        f"(replay {d['replay']}, online {d['online']}, decided by {d['gap']:.3g})"
        for d in real[:_SHOWN]
    ]
    lines += [f"  and {len(real) - _SHOWN} more"] * (len(real) > _SHOWN)
    return "\n".join(line if "\n" in line else wrap(line, indent="    ") for line in lines)


def _witness(title: str, witness: Mapping[str, Any]) -> str:
    theirs, ours = witness["theirs"] or {"value": None}, witness["replay"]
    rows = [
        ("theirs", number(theirs["value"]), interval(theirs) if "low" in theirs else "-"),
        ("replay", number(ours["value"]), interval(ours)),
    ]
    head = (f"{witness['convention']}, {witness['policy']}", "acceptance", "95 %")
    lines = [f"{title}: {witness['source']}", table(head, rows)]
    if witness["difference"] is not None:
        difference = witness["difference"]
        lines.append(
            f"  difference, paired by prompt: {signed(difference['value'])} [{interval(difference)}]"
        )
    if witness["relative"] is not None:
        lines.append(f"  {witness['relative']:+.1%} of the replay's, over {witness['prompts']} prompt(s)")
    if witness["survival"]:
        depths = [
            (str(depth), number(a), number(b))
            for depth, (a, b) in enumerate(
                zip(witness["survival"], witness["replay_survival"], strict=False), start=1
            )
        ]
        lines.append(table(("rounds that get to depth", "theirs", "replay"), depths))
    lines += [f"  ? {doubt}" for doubt in witness["doubts"]]
    return "\n".join(line if "\n" in line else wrap(line, indent="    ") for line in lines)


def _texts(texts: Mapping[str, Any]) -> str:
    if not texts["prompts"]:
        return ""
    lines = [f"\n  {texts['same']} of {texts['prompts']} served text(s) are the references"]
    for parted in texts["parted"][:_SHOWN]:
        gap = "gap unknown" if parted["gap"] is None else f"gap {parted['gap']:.3g}"
        kind = {True: "a near-tie", False: "a real difference", None: "not known which"}[parted["near_tie"]]
        lines.append(f"\n  {parted['prompt']} parts at token {parted['token']} ({gap}: {kind})")
    return "".join(lines)
