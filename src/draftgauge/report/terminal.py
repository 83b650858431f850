"""Renders for the terminal: readable at 80 columns, without colour, in a log.

Takes plain values (`summary.json`, comparisons, wirings) and returns text; rounds only here. Words are those
of the glossary in docs/how-it-works.md. Knows nothing of how a number is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from draftgauge.recording import Recording
from draftgauge.report.categories import tau_by_category
from draftgauge.report.text import (
    ABSENT,
    GAP,
    WIDTH,
    bytes_of,
    interval,
    number,
    plain,
    reach,
    reasons,
    rest,
    share,
    table,
    wrap,
)
from draftgauge.report.trust import trust_lines
from draftgauge.runs import Run

#: Longer listings of prompts end with a count of the rest.
_MOST_PROMPTS = 40
_MOST_RENAMED = 8
#: What a prompt's name may take of a line before it stands on a line of its own.
_NAME_WIDTH = 24
#: How `configs` says that a field is as it is only because nothing says otherwise.
_DEFAULT = "default: nothing says otherwise"


def run_report(run: Run) -> str:
    """One run: headline, policies, why rounds end, curves, prompts, conventions, caveats."""
    summary = run.summary
    parts = [
        f"{run.name}\n{'=' * min(len(run.name), WIDTH)}",
        _source_lines(run),
        trust_lines(summary.get("trust")),
        _headline(next(iter(summary["policies"].values()))),
        _policy_table(summary),
        _ends_table(summary),
        _depth_table(summary),
        _prompt_table(summary),
        _category_table(summary),
        _convention_table(summary),
        caveat_lines(summary["caveats"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _source_lines(run: Run) -> str:
    """Where the numbers come from, one line each."""
    manifest, reference = run.manifest, run.summary["reference"]
    checkpoint, recording = manifest["checkpoint"], manifest["recording"]
    step = checkpoint["step"]
    agreed = reference["agreed"]
    others = 0 if agreed is None else reference["tokens"] - agreed
    lines = {
        "checkpoint": (checkpoint.get("url") or checkpoint["path"])
        + (f" (step {step})" if step is not None else ""),
        "recording": f"{recording['path']} ({recording['prompts']})",
        "references": f"{reference['tokens']} tokens of {len(run.summary['prompts'])} prompt(s), agreement "
        + number(reference["reference_agreement"])
        + (f" ({others} others, {reference['near_ties']} of them near-ties)" if others else ""),
        "measured": f"{manifest['started']} in {manifest['duration_s']:.1f} s by draftgauge "
        f"{run.plan.instrument}",
        "computed": f"{run.plan.dtype}, block size {run.plan.wiring['block_size']}, {run.plan.anchors} anchors",
    }
    return "\n".join(wrap(f"{name:<12}{text}", indent=" " * 12) for name, text in lines.items())


def _headline(policy: Mapping[str, Any]) -> str:
    """One policy's tau, averaged both ways, with intervals or why there are none."""
    kinds = {"by response": policy["tau_response"], "pooled": policy["tau_pooled"]}
    lines = [f"tau of the {policy['label']}: tokens per round, with the bonus"]
    for name, estimate in kinds.items():
        ends = interval(estimate)
        lines.append(f"  {name:<13}{number(estimate['value'])}" + (f"  [{ends}]" if ends != ABSENT else ""))
    lines += [wrap(f"  {reason}", indent="  ") for reason in reasons(kinds.values())]
    if policy["design_effect"] is not None:
        lines.append(f"  design effect {number(policy['design_effect'], 2)} (1: rounds are independent)")
    return "\n".join(lines)


def _policy_table(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            value["label"],
            number(value["tau_response"]["value"]),
            interval(value["tau_response"]),
            number(value["tau_pooled"]["value"]),
            number(value["streak_response"]["value"]),
            number(value.get("all_anchor_streak", {}).get("value")),
        )
        for value in summary["policies"].values()
    ]
    note = (
        "tau, with the bonus, and streak, without it, are means of per-response means over each policy's own "
        "walk; the last column is the mean streak over all uncensored anchors. coverage@k is the ceiling of "
        "any tree k wide, not a policy."
    )
    head = ("policy", "tau", "95 %", "pooled", "streak", "all anchors")
    return f"{table(head, rows)}\n{wrap(note)}"


def _ends_table(summary: Mapping[str, Any]) -> str:
    """Where the tree loses: why the rounds of each policy ended."""
    rows = []
    for value in summary["policies"].values():
        counts = value["counts"]
        ends = [counts[f"ended_{why}"] for why in ("not_covered", "not_selected", "depth", "reference")]
        rows.append((value["label"], str(counts["rounds"]), *[share(end, counts["rounds"]) for end in ends]))
    head = ("rounds end by", "rounds", "not covered", "not selected", "depth", "end of text")
    return table(head, rows)


def _depth_table(summary: Mapping[str, Any]) -> str:
    curves = summary["per_depth"]
    if curves is None:
        return ""
    depths = range(len(curves["marginal"]))
    reaches = curves.get("intervals", {}).get("survival") or [None for _ in depths]
    rows = [
        (
            str(d + 1),
            number(curves["marginal"][d]),
            number(curves["survival"][d]),
            reach(reaches[d]),
            number(curves["conditional"][d]),
            str(curves["anchors_marginal"][d]),
            str(curves["anchors_conditional"][d]),
        )
        for d in depths
    ]
    head = ("depth", "marginal", "survival", "95 %", "conditional", "anchors", "that got there")
    return f"{table(head, rows)}\neal_marginal (what trainers log): {number(curves['eal_marginal'])}"


def _prompt_table(summary: Mapping[str, Any]) -> str:
    longest = max(len(name) for name in ("tau by prompt", *summary["prompts"]))
    policies = _policies_that_fit(summary, taken=min(longest, _NAME_WIDTH) + len("  tokens"))
    rows = [
        (
            name,
            str(prompt["completion_tokens"]),
            *[number(prompt["policies"][slug]["tau"]) for slug in policies],
        )
        for name, prompt in summary["prompts"].items()
    ]
    listed = table(("tau by prompt", "tokens", *policies.values()), rows[:_MOST_PROMPTS])
    return listed + rest(len(rows) - _MOST_PROMPTS, "prompts") + _left_out(summary, policies)


def _category_table(summary: Mapping[str, Any]) -> str:
    """The first policy's tau in every category, the lowest first; nothing where prompts have none."""
    slug, policy = next(iter(summary["policies"].items()))
    rows = [
        (name, number(tau["value"]), interval(tau), str(tau["n"]))
        for name, tau in tau_by_category(summary, slug).items()
    ]
    if not rows:
        return ""
    head = ("tau by category", policy["label"], "95 %", "prompts")
    return table(head, rows[:_MOST_PROMPTS]) + rest(len(rows) - _MOST_PROMPTS, "categories")


def _convention_table(summary: Mapping[str, Any]) -> str:
    names = next(iter(summary["policies"].values()))["conventions"]
    policies = _policies_that_fit(summary, taken=max(map(len, names)))
    rows = [
        (name, *[number(summary["policies"][slug]["conventions"][name]) for slug in policies])
        for name in names
    ]
    return table(("as counted by", *policies.values()), rows) + _left_out(summary, policies)


def _policies_that_fit(summary: Mapping[str, Any], *, taken: int) -> dict[str, str]:
    """The headings of as many policies as fit beside `taken` characters; coverage, no policy, is left out."""
    headings: dict[str, str] = {}
    for slug, value in summary["policies"].items():
        # DDTree(16) stands in two lines, as DDTree and (16).
        heading = value["label"].replace("(", "\n(")
        taken += len(GAP) + max(len(line) for line in (*heading.split("\n"), "1.000"))
        if taken <= WIDTH and not slug.startswith("coverage"):
            headings[slug] = heading
    return headings


def _left_out(summary: Mapping[str, Any], shown: Mapping[str, str]) -> str:
    real = [slug for slug in summary["policies"] if not slug.startswith("coverage")]
    return rest(len(real) - len(shown), "policies")


def caveat_lines(caveats: Sequence[Mapping[str, str]]) -> str:
    """The caveats, one paragraph each, with their slug."""
    if not caveats:
        return "no caveats"
    marks = {"warning": "!", "note": "-"}
    return "\n".join(wrap(f"{marks[c['severity']]} {c['text']} [{c['slug']}]", indent="  ") for c in caveats)


def run_list(runs: Sequence[Run]) -> str:
    """The runs of a folder, one line each."""
    if not runs:
        return "no runs here; `draftgauge eval` makes one"
    rows = []
    for run in runs:
        step = run.manifest["checkpoint"]["step"]
        tau = run.summary["policies"].get("chain", {}).get("tau_response", {})
        rows.append(
            (
                run.name,
                ABSENT if step is None else str(step),
                number(tau.get("value")),
                interval(tau),
                str(len(run.summary["prompts"])),
                str(run.plan.wiring["block_size"]),
                str(sum(caveat["severity"] == "warning" for caveat in run.summary["caveats"])),
            )
        )
    return table(("run", "step", "tau", "95 %", "prompts", "block", "warnings"), rows)


def recording_list(recordings: Sequence[Recording]) -> str:
    """The recordings of a folder, one paragraph each."""
    if not recordings:
        return "no recordings here; `draftgauge record` makes one"
    return "\n".join(recording_report(recording) for recording in recordings)


def recording_report(recording: Recording) -> str:
    """One recording: of what, how much, and what failed."""
    tokens = sum(item.completion_len for item in recording.items)
    target = recording.target.path.rsplit("/", 1)[-1]
    lines = [
        str(recording.path),
        f"  {len(recording.items)} prompt(s) of {recording.produced.get('prompts')}, {tokens} reference tokens, "
        f"agreement {number(recording.agreement)}",
        f"  {target} ({recording.target.architecture}), {recording.plan.dtype}, "
        f"taps {', '.join(map(str, recording.plan.taps))}, template {recording.plan.template}",
    ]
    lines += _origin_lines(recording.produced)
    lines += [f"  ! {name} was not recorded: {reason}" for name, reason in recording.failed.items()]
    return "\n".join(wrap(line, indent="    ") for line in lines)


def _origin_lines(produced: Mapping[str, Any]) -> list[str]:
    """Where a recording is from that was not made by asking the target for all of it."""
    lines = [f"  completes {produced['completes']}"] if "completes" in produced else []
    imported = produced.get("imported")
    if imported is None:
        return lines
    lines.append(f"  imported from {imported['source']} ({', '.join(imported['forms'])})")
    last = imported["last_state"]
    if last is None:
        lines.append("  last state: none in the files, so the references are not verified")
    else:
        norm = ", of a norm that scales by one more" if last["norm_plus_one"] else ""
        lines.append(f"  last state: {last['read']}{norm}, measured through norm and head")
    return [*lines, f"  template: {imported['template']}"]


def export_report(value: Mapping[str, Any]) -> str:
    """What was written, what its format leaves unsaid, and how it is served."""
    lines = [f"wrote {value['path']} ({value['to']})"]
    lines += [f"  not said, and so computed: {line}" for line in value["not_said"]]
    parts = ["\n".join(wrap(line, indent="    ") for line in lines)]
    parts += [f"serve it with {engine}:\n  {command}" for engine, command in value["serve"].items()]
    return "\n\n".join(parts)


def checkpoint_report(value: Mapping[str, Any]) -> str:
    """What `inspect` found: the file, the wiring with provenance, the key map, what else it holds."""
    parts = [_file_lines(value["file"])]
    if value["wiring"] is None:
        parts.append(wrap(f"! {value['wiring_problem']}", indent="    "))
    else:
        parts.append(_wiring_lines(value["wiring"]))
    parts.append("\n".join(wrap(line, indent="    ") for line in _key_lines(value)))
    return "\n\n".join(parts)


def _file_lines(file: Mapping[str, Any]) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in file["dtypes"].items())
    step = "step unknown" if file["step"] is None else f"step {file['step']} ({file['step_source']})"
    checked, absent = file["checksums"]["checked"], file["checksums"]["absent"]
    checksums = [f"{checked} verified"] * bool(checked) + [f"{absent} file(s) or record(s) have none"] * bool(
        absent
    )
    lines = [
        f"{file['path']} ({file['kind']}, {bytes_of(file['bytes_file'])})",
        f"weights    {file['parameters']:,} parameters, {bytes_of(file['bytes_model'])}, tensors: {dtypes}"
        + (f", under {file['state_dict']}" if file["state_dict"] else ""),
        *([f"address    {file['url']}, which meant {file['revision']}"] if file["url"] else []),
        f"training   {step}",
        f"checksums  {', '.join(checksums)}",
    ]
    return "\n".join(wrap(line, indent=" " * 11) for line in lines)


def _wiring_lines(wiring: Mapping[str, Mapping[str, Any]]) -> str:
    """Each field with value and source; those that are only defaults in one paragraph behind."""
    stated = {
        name: (plain(field["value"]), field["source"].removesuffix(f": {name}"))
        for name, field in wiring.items()
        if field["source"] != _DEFAULT
    }
    names = max(map(len, stated), default=0)
    values = max((len(value) for value, _ in stated.values() if len(value) <= 16), default=0)
    column = names + values + 2 * len(GAP)
    lines = [
        f"{'wiring':<{names}}{GAP}{'value':<{values}}{GAP}from (under the same name unless said)",
        "-" * WIDTH,
    ]
    for name, (value, source) in stated.items():
        start = f"{name:<{names}}{GAP}{value:<{values}}{GAP}"
        if len(start) > column:
            lines.append(wrap(start.rstrip(), indent=" " * (names + len(GAP))))
            start = " " * column
        lines.append(wrap(start + source, indent=" " * column))
    defaults = [f"{n} {plain(f['value'])}" for n, f in wiring.items() if f["source"] == _DEFAULT]
    if defaults:
        lines.append(wrap(f"by default, as nothing says otherwise: {', '.join(defaults)}", indent="    "))
    return "\n".join(lines)


def _key_lines(value: Mapping[str, Any]) -> list[str]:
    """What became of every tensor, what is wrong, and what else the file holds."""
    keys = value["key_map"]
    counts = Counter(use["status"] for use in keys)
    lines = ["tensors: " + ", ".join(f"{count} {status}" for status, count in counts.items())]
    renamed = [f"  renamed {u['stored']} -> {u['canonical']}" for u in keys if u["status"] == "renamed"]
    lines += renamed[:_MOST_RENAMED]
    if len(renamed) > _MOST_RENAMED:
        lines.append(f"  and {len(renamed) - _MOST_RENAMED} more renamed (--json)")
    lines += [f"  unused {use['stored']}: {use['reason']}" for use in keys if use["status"] == "unused"]
    lines += [f"! {problem}" for problem in value["problems"]]
    lines += [f"also in the file: {name}: {what}" for name, what in value["extras"].items()]
    if value["opaque_classes"]:
        lines.append("values of classes that are never loaded: " + ", ".join(value["opaque_classes"]))
    return lines
