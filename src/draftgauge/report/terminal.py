"""Renders for the terminal: readable at 80 columns, without colour, in a log.

Takes plain values (`summary.json`, comparisons, wirings) and returns text; rounds only here. Words are those
of the glossary in docs/how-it-works.md. Knows nothing of how a number is computed.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftgauge.recording import Recording
from draftgauge.runs import Run

WIDTH = 80
_ABSENT = "-"
_GAP = "  "
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
        _headline(next(iter(summary["policies"].values()))),
        _policy_table(summary),
        _ends_table(summary),
        _depth_table(summary),
        _prompt_table(summary),
        _convention_table(summary),
        caveat_lines(summary["caveats"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _source_lines(run: Run) -> str:
    """Where the numbers come from, one line each."""
    manifest, reference = run.manifest, run.summary["reference"]
    checkpoint, recording = manifest["checkpoint"], manifest["recording"]
    step = checkpoint["step"]
    others = reference["tokens"] - reference["agreed"]
    lines = {
        "checkpoint": checkpoint["path"] + (f" (step {step})" if step is not None else ""),
        "recording": f"{recording['path']} ({recording['prompts']})",
        "references": f"{reference['tokens']} tokens of {len(run.summary['prompts'])} prompt(s), agreement "
        + _number(reference["reference_agreement"])
        + (f" ({others} others, {reference['near_ties']} of them near-ties)" if others else ""),
        "measured": f"{manifest['started']} in {manifest['duration_s']:.1f} s by draftgauge "
        f"{run.plan.instrument}",
        "computed": f"{run.plan.dtype}, block size {run.plan.wiring['block_size']}, {run.plan.anchors} anchors",
    }
    return "\n".join(_wrap(f"{name:<12}{text}", indent=" " * 12) for name, text in lines.items())


def _headline(policy: Mapping[str, Any]) -> str:
    """One policy's tau, averaged both ways, with intervals or why there are none."""
    kinds = {"by response": policy["tau_response"], "pooled": policy["tau_pooled"]}
    lines = [f"tau of the {policy['label']}: tokens per round, with the bonus"]
    for name, estimate in kinds.items():
        interval = _interval(estimate)
        lines.append(
            f"  {name:<13}{_number(estimate['value'])}" + (f"  [{interval}]" if interval != _ABSENT else "")
        )
    lines += [_wrap(f"  {reason}", indent="  ") for reason in _reasons(kinds.values())]
    if policy["design_effect"] is not None:
        lines.append(f"  design effect {_number(policy['design_effect'], 2)} (1: rounds are independent)")
    return "\n".join(lines)


def _reasons(estimates: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why values or intervals are absent, each reason once."""
    return list(dict.fromkeys(e["reason"] for e in estimates if e["reason"] is not None))


def _policy_table(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            value["label"],
            _number(value["tau_response"]["value"]),
            _interval(value["tau_response"]),
            _number(value["tau_pooled"]["value"]),
            _number(value["streak_response"]["value"]),
            _number(value.get("all_anchor_streak", {}).get("value")),
        )
        for value in summary["policies"].values()
    ]
    note = (
        "tau, with the bonus, and streak, without it, are means of per-response means over each policy's own "
        "walk; the last column is the mean streak over all uncensored anchors. coverage@k is the ceiling of "
        "any tree k wide, not a policy."
    )
    head = ("policy", "tau", "95 %", "pooled", "streak", "all anchors")
    return f"{_table(head, rows)}\n{_wrap(note)}"


def _ends_table(summary: Mapping[str, Any]) -> str:
    """Where the tree loses: why the rounds of each policy ended."""
    rows = []
    for value in summary["policies"].values():
        counts = value["counts"]
        ends = [counts[f"ended_{why}"] for why in ("not_covered", "not_selected", "depth", "reference")]
        rows.append((value["label"], str(counts["rounds"]), *[_share(end, counts["rounds"]) for end in ends]))
    head = ("rounds end by", "rounds", "not covered", "not selected", "depth", "end of text")
    return _table(head, rows)


def _depth_table(summary: Mapping[str, Any]) -> str:
    curves = summary["per_depth"]
    if curves is None:
        return ""
    names = ("marginal", "survival", "conditional")
    rows = [
        (
            str(i + 1),
            *[_number(curves[name][i]) for name in names],
            str(curves["anchors_marginal"][i]),
            str(curves["anchors_conditional"][i]),
        )
        for i in range(len(curves["marginal"]))
    ]
    head = ("depth", *names, "anchors", "that got there")
    return f"{_table(head, rows)}\neal_marginal (what trainers log): {_number(curves['eal_marginal'])}"


def _prompt_table(summary: Mapping[str, Any]) -> str:
    longest = max(len(name) for name in ("tau by prompt", *summary["prompts"]))
    policies = _policies_that_fit(summary, taken=min(longest, _NAME_WIDTH) + len("  tokens"))
    rows = [
        (
            name,
            str(prompt["completion_tokens"]),
            *[_number(prompt["policies"][slug]["tau"]) for slug in policies],
        )
        for name, prompt in summary["prompts"].items()
    ]
    table = _table(("tau by prompt", "tokens", *policies.values()), rows[:_MOST_PROMPTS])
    return table + _rest(len(rows) - _MOST_PROMPTS, "prompts") + _left_out(summary, policies)


def _convention_table(summary: Mapping[str, Any]) -> str:
    names = next(iter(summary["policies"].values()))["conventions"]
    policies = _policies_that_fit(summary, taken=max(map(len, names)))
    rows = [
        (name, *[_number(summary["policies"][slug]["conventions"][name]) for slug in policies])
        for name in names
    ]
    return _table(("as counted by", *policies.values()), rows) + _left_out(summary, policies)


def _policies_that_fit(summary: Mapping[str, Any], *, taken: int) -> dict[str, str]:
    """The headings of as many policies as fit beside `taken` characters; coverage, no policy, is left out."""
    headings: dict[str, str] = {}
    for slug, value in summary["policies"].items():
        # DDTree(16) stands in two lines, as DDTree and (16).
        heading = value["label"].replace("(", "\n(")
        taken += len(_GAP) + max(len(line) for line in (*heading.split("\n"), "1.000"))
        if taken <= WIDTH and not slug.startswith("coverage"):
            headings[slug] = heading
    return headings


def _left_out(summary: Mapping[str, Any], shown: Mapping[str, str]) -> str:
    real = [slug for slug in summary["policies"] if not slug.startswith("coverage")]
    return _rest(len(real) - len(shown), "policies")


def _rest(count: int, what: str) -> str:
    return f"\n(more {what} in --json: {count})" if count > 0 else ""


def caveat_lines(caveats: Sequence[Mapping[str, str]]) -> str:
    """The caveats, one paragraph each, with their slug."""
    if not caveats:
        return "no caveats"
    marks = {"warning": "!", "note": "-"}
    return "\n".join(_wrap(f"{marks[c['severity']]} {c['text']} [{c['slug']}]", indent="  ") for c in caveats)


def comparison_report(value: Mapping[str, Any]) -> str:
    """A comparison of two runs."""
    policies = value["policies"]
    rows = [
        (
            policy["label"],
            _number(policy["tau_response"]["baseline"]),
            _number(policy["tau_response"]["run"]),
            _signed(policy["tau_response"]["difference"]["value"]),
            _interval(policy["tau_response"]["difference"]),
            _number(policy["tau_response"]["resolvable"]),
        )
        for policy in policies.values()
    ]
    table = _table(("tau by response", "baseline", "run", "difference", "95 %", "resolvable"), rows)
    notes = _reasons(policy["tau_response"]["difference"] for policy in policies.values())
    notes.append("resolvable: the smallest difference that this many prompts would show in 4 of 5 cases.")
    parts = [
        f"run       {value['run']}\nbaseline  {value['baseline']}\n"
        f"paired on {len(value['prompts'])} prompt(s)",
        "\n".join([table, *map(_wrap, notes)]),
        _pair_table(next(iter(policies.values()))),
        "\n".join(_wrap(line, indent="  ") for line in _sameness(value)),
    ]
    return "\n\n".join(parts)


def _pair_table(policy: Mapping[str, Any]) -> str:
    """One policy's tau on every prompt, of both runs."""
    rows = [
        (name, _number(pair["baseline"]), _number(pair["run"]), _signed(pair["run"] - pair["baseline"]))
        for name, pair in policy["prompts"].items()
    ]
    table = _table((f"tau of the {policy['label']}", "baseline", "run", "difference"), rows[:_MOST_PROMPTS])
    return table + _rest(len(rows) - _MOST_PROMPTS, "prompts")


def _sameness(value: Mapping[str, Any]) -> list[str]:
    """What the two runs share, in what they differ, and what only one of them has."""
    lines = [f"the same: {', '.join(value['same'])}"]
    lines += [
        f"different: {name}: {_short(pair['baseline'])} (baseline), {_short(pair['run'])} (run)"
        for name, pair in value["different"].items()
    ]
    for what, names in (("prompts", value["dropped"]), ("policies", value["dropped_policies"])):
        if names:
            lines.append(f"! {what} left out, since only one run has them: {', '.join(names)}")
    return lines


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
                _ABSENT if step is None else str(step),
                _number(tau.get("value")),
                _interval(tau),
                str(len(run.summary["prompts"])),
                str(run.plan.wiring["block_size"]),
                str(sum(caveat["severity"] == "warning" for caveat in run.summary["caveats"])),
            )
        )
    return _table(("run", "step", "tau", "95 %", "prompts", "block", "warnings"), rows)


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
        f"agreement {_number(recording.agreement)}",
        f"  {target} ({recording.target.architecture}), {recording.plan.dtype}, "
        f"taps {', '.join(map(str, recording.plan.taps))}, template {recording.plan.template}",
    ]
    lines += [f"  ! {name} was not recorded: {reason}" for name, reason in recording.failed.items()]
    return "\n".join(_wrap(line, indent="    ") for line in lines)


def checkpoint_report(value: Mapping[str, Any]) -> str:
    """What `inspect` found: the file, the wiring with provenance, the key map, what else it holds."""
    parts = [_file_lines(value["file"])]
    if value["wiring"] is None:
        parts.append(_wrap(f"! {value['wiring_problem']}", indent="    "))
    else:
        parts.append(_wiring_lines(value["wiring"]))
    parts.append("\n".join(_wrap(line, indent="    ") for line in _key_lines(value)))
    return "\n\n".join(parts)


def _file_lines(file: Mapping[str, Any]) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in file["dtypes"].items())
    step = "step unknown" if file["step"] is None else f"step {file['step']} ({file['step_source']})"
    checked, absent = file["checksums"]["checked"], file["checksums"]["absent"]
    checksums = [f"{checked} verified"] * bool(checked) + [f"{absent} file(s) or record(s) have none"] * bool(
        absent
    )
    lines = [
        f"{file['path']} ({file['kind']}, {_bytes(file['bytes_file'])})",
        f"weights    {file['parameters']:,} parameters, {_bytes(file['bytes_model'])}, tensors: {dtypes}"
        + (f", under {file['state_dict']}" if file["state_dict"] else ""),
        f"training   {step}",
        f"checksums  {', '.join(checksums)}",
    ]
    return "\n".join(_wrap(line, indent=" " * 11) for line in lines)


def _wiring_lines(wiring: Mapping[str, Mapping[str, Any]]) -> str:
    """Each field with value and source; those that are only defaults in one paragraph behind."""
    stated = {
        name: (_plain(field["value"]), field["source"].removesuffix(f": {name}"))
        for name, field in wiring.items()
        if field["source"] != _DEFAULT
    }
    names = max(map(len, stated), default=0)
    values = max((len(value) for value, _ in stated.values() if len(value) <= 16), default=0)
    column = names + values + 2 * len(_GAP)
    lines = [
        f"{'wiring':<{names}}{_GAP}{'value':<{values}}{_GAP}from (under the same name unless said)",
        "-" * WIDTH,
    ]
    for name, (value, source) in stated.items():
        start = f"{name:<{names}}{_GAP}{value:<{values}}{_GAP}"
        if len(start) > column:
            lines.append(_wrap(start.rstrip(), indent=" " * (names + len(_GAP))))
            start = " " * column
        lines.append(_wrap(start + source, indent=" " * column))
    defaults = [f"{n} {_plain(f['value'])}" for n, f in wiring.items() if f["source"] == _DEFAULT]
    if defaults:
        lines.append(_wrap(f"by default, as nothing says otherwise: {', '.join(defaults)}", indent="    "))
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


def _plain(value: Any) -> str:
    """A wiring's value as it would stand in TOML, without the brackets."""
    if isinstance(value, (list, tuple)):
        texts = [str(item) for item in value]
        if len(set(texts)) == 1 and len(texts) > 1:
            return f"{len(texts)} x {texts[0]}"
        return ", ".join(texts)
    if isinstance(value, bool):
        return str(value).lower()
    return _ABSENT if value is None else str(value)


def _short(value: Any) -> str:
    """A value in a sentence; a digest is recognised by its beginning."""
    text = _plain(value)
    return text[:16] if len(text) == 64 else text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a rule, the first to the left and the others to the right, in 80 characters a line.

    A heading may have two lines. A first cell that is too long stands on lines of its own.
    """
    rows = list(rows)
    headings = [heading.split("\n") for heading in head]
    height = max(map(len, headings))
    top = [[""] * (height - len(lines)) + lines for lines in headings]
    cells = [*rows, *([lines[i] for lines in top] for i in range(height))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - len(_GAP) * (len(head) - 1))

    def line(row: Sequence[str]) -> str:
        aligned = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return _GAP.join(aligned).rstrip()

    lines = [line([column[i] for column in top]) for i in range(height)]
    lines.append("-" * (sum(widths) + len(_GAP) * (len(head) - 1)))
    for row in rows:
        fits = len(row[0]) <= widths[0]
        lines += [line(row)] if fits else [*textwrap.wrap(row[0], WIDTH), line(("", *row[1:]))]
    return "\n".join(lines)


def _wrap(text: str, *, indent: str = "") -> str:
    """The text in lines of 80 characters; a path that is longer stays whole, to be copied."""
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _interval(value: Mapping[str, Any]) -> str:
    if value.get("low") is None or value.get("high") is None:
        return _ABSENT
    return f"{_number(value['low'], 2)}, {_number(value['high'], 2)}"


def _number(value: float | None, digits: int = 3) -> str:
    """Rounded to `digits`, or to as many more as keep it from becoming a whole number when it is none."""
    if value is None:
        return _ABSENT
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    for places in range(digits, 16):
        text = f"{value:.{places}f}"
        if float(text) != round(value) or value == round(value):
            return text
    return str(value)


def _signed(value: float | None) -> str:
    sign = "+" if value is not None and value > 0 else ""
    return sign + _number(value)


def _share(part: int, whole: int) -> str:
    """A share in percent, never rounded to none or all."""
    percent = round(100 * part / whole)
    if part and not percent:
        return "<1%"
    return ">99%" if part < whole and percent == 100 else f"{percent}%"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
