"""Renders for the terminal: readable at 80 columns, without colour, in a log.

Takes plain values (`summary.json`, comparisons, wirings) and returns text; rounds only here. Words are those
of the glossary in docs/how-it-works.md.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftgauge.recording import Recording
from draftgauge.runs import Run

WIDTH = 80
_ABSENT = "-"


def run_report(run: Run) -> str:
    """One run: headline, policies, curves, prompts, conventions, caveats, provenance."""
    summary, manifest = run.summary, run.manifest
    chain = summary["policies"].get("chain") or next(iter(summary["policies"].values()))
    parts = [
        f"{run.name}\n{'=' * len(run.name)}",
        _source_lines(manifest),
        f"tau ({chain['label']}, with bonus)  by response {_estimate(chain['tau_response'])}\n"
        f"{'':{len(chain['label']) + 20}}pooled {_estimate(chain['tau_pooled'])}",
        _policy_table(summary),
        _depth_table(summary),
        _prompt_table(summary),
        _convention_table(summary),
        caveat_lines(summary["caveats"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _source_lines(manifest: Mapping[str, Any]) -> str:
    checkpoint, recording = manifest["checkpoint"], manifest["recording"]
    step = checkpoint["step"]
    lines = [
        f"checkpoint  {checkpoint['path']}" + (f" (step {step})" if step is not None else ""),
        f"recording   {recording['path']} ({recording['prompts']})",
        f"measured    {manifest['started']} in {manifest['duration_s']:.1f} s, "
        f"draftgauge {manifest['versions']['draftgauge']}, {manifest['plan']['dtype']}, "
        f"block size {manifest['plan']['wiring']['block_size']}",
    ]
    return "\n".join(lines)


def _policy_table(summary: Mapping[str, Any]) -> str:
    table = _table("policy", "tau", "95 %", "streak", "all anchors", "rounds", "lost: cov/sel/depth/end")
    for value in summary["policies"].values():
        counts, rounds = value["counts"], value["counts"]["rounds"]
        ends = [counts[f"ended_{why}"] for why in ("not_covered", "not_selected", "depth", "reference")]
        table.add_row(
            value["label"],
            _number(value["tau_response"]["value"]),
            _interval(value["tau_response"]),
            _number(value["streak_response"]["value"]),
            _number(value.get("all_anchor_streak", {}).get("value")),
            str(rounds),
            " ".join(f"{end / rounds:.0%}" for end in ends) if rounds else _ABSENT,
        )
    note = (
        "tau: tokens per round with the bonus; streak: accepted, without it; both walked, by response. Rounds "
        "lost because the token was not covered / covered but not selected / the block was used up / the text "
        "ended. coverage@k: the ceiling of any tree k wide, not a policy."
    )
    return _render(table) + _wrap(note)


def _depth_table(summary: Mapping[str, Any]) -> str:
    curves = summary["per_depth"]
    if curves is None:
        return ""
    depths = range(1, len(curves["marginal"]) + 1)
    if len(depths) > 9:
        depths = sorted({*range(1, 7), *range(8, len(depths) + 1, 4), len(depths)})  # type: ignore[assignment]
    table = _table("depth", *[str(depth) for depth in depths])
    for name in ("marginal", "survival", "conditional"):
        table.add_row(name, *[_number(curves[name][depth - 1]) for depth in depths])
    table.add_row("anchors", *[str(curves["anchors_marginal"][depth - 1]) for depth in depths])
    return _render(table) + f"eal_marginal (what trainers log): {_number(curves['eal_marginal'])}"


def _prompt_table(summary: Mapping[str, Any]) -> str:
    slugs = _few(summary["policies"])
    labels = [summary["policies"][slug]["label"] for slug in slugs]
    table = _table("tau by prompt", "tokens", *labels)
    for name, prompt in summary["prompts"].items():
        values = [_number(prompt["policies"][slug]["tau"]) for slug in slugs]
        table.add_row(name, str(prompt["completion_tokens"]), *values)
    return _render(table).rstrip("\n")


def _few(policies: Mapping[str, Any]) -> list[str]:
    """As many policies as fit in a row: the chain, trees, then coverages."""
    return list(policies)[:4] + [slug for slug in policies if slug.startswith("coverage")][:2]


def _convention_table(summary: Mapping[str, Any]) -> str:
    slugs = [slug for slug in summary["policies"] if not slug.startswith("coverage")][:5]
    table = _table("the same rounds as", *[summary["policies"][slug]["label"] for slug in slugs])
    names = next(iter(summary["policies"].values()))["conventions"]
    for name in names:
        values = [_number(summary["policies"][slug]["conventions"][name]) for slug in slugs]
        table.add_row(name, *values)
    return _render(table).rstrip("\n")


def caveat_lines(caveats: Sequence[Mapping[str, str]]) -> str:
    """The caveats, one paragraph each, with their slug."""
    if not caveats:
        return "no caveats"
    marks = {"warning": "!", "note": "-"}
    return "\n".join(_wrap(f"{marks[c['severity']]} {c['text']} [{c['slug']}]", indent="  ") for c in caveats)


def comparison_report(value: Mapping[str, Any]) -> str:
    """A comparison of two runs."""
    head = f"{value['run']}  against  {value['baseline']}, paired on {len(value['prompts'])} prompts"
    table = _table("tau by response", "baseline", "run", "difference", "95 %", "resolvable")
    for policy in value["policies"].values():
        row = policy["tau_response"]
        table.add_row(
            policy["label"],
            _number(row["baseline"]),
            _number(row["run"]),
            _signed(row["difference"]["value"]),
            _interval(row["difference"]),
            _number(row["resolvable"]),
        )
    different = ", ".join(value["different"]) or "nothing"
    lines = [
        head,
        _render(table).rstrip("\n"),
        _wrap(
            "resolvable: the smallest difference that this many prompts would show in 4 of 5 cases. "
            f"The same: {', '.join(value['same'])}. Different: {different}."
        ),
    ]
    if value["dropped"]:
        lines.append(
            _wrap(f"! left out, since only one run has them: {', '.join(value['dropped'])}", indent="  ")
        )
    return "\n".join(lines)


def run_list(runs: Sequence[Run]) -> str:
    """The runs of a folder, one line each."""
    if not runs:
        return "no runs here; `draftgauge eval` makes one"
    table = _table("run", "step", "tau", "95 %", "prompts", "block", "caveats")
    for run in runs:
        chain = run.summary["policies"].get("chain", {})
        tau = chain.get("tau_response", {})
        warnings = sum(c["severity"] == "warning" for c in run.summary["caveats"])
        table.add_row(
            run.name,
            str(
                run.manifest["checkpoint"]["step"]
                if run.manifest["checkpoint"]["step"] is not None
                else _ABSENT
            ),
            _number(tau.get("value")),
            _interval(tau),
            str(len(run.summary["prompts"])),
            str(run.plan.wiring["block_size"]),
            f"{warnings} warning(s)" if warnings else "",
        )
    return _render(table).rstrip("\n")


def recording_list(recordings: Sequence[Recording]) -> str:
    """The recordings of a folder, one line each."""
    if not recordings:
        return "no recordings here; `draftgauge record` makes one"
    table = _table("recording", "target", "prompts", "tokens", "taps", "dtype", "agreement")
    for recording in recordings:
        table.add_row(
            recording.path.name,
            recording.target.path.rsplit("/", 1)[-1],
            f"{len(recording.items)} ({recording.produced.get('prompts')})",
            str(sum(item.completion_len for item in recording.items)),
            ",".join(map(str, recording.plan.taps)),
            recording.plan.dtype,
            _number(recording.agreement),
        )
    return _render(table).rstrip("\n")


def recording_report(recording: Recording) -> str:
    """One recording: what was recorded, item by item, and what failed."""
    tokens = sum(item.completion_len for item in recording.items)
    lines = [
        f"recording {recording.path}",
        f"target {recording.target.path} ({recording.target.architecture}, {recording.plan.dtype})",
        f"{len(recording.items)} prompts, {tokens} reference tokens, taps {list(recording.plan.taps)}, "
        f"reference agreement {_number(recording.agreement)}",
    ]
    lines += [f"! {name} was not recorded: {reason}" for name, reason in recording.failed.items()]
    return "\n".join(_wrap(line, indent="  ") for line in lines)


def checkpoint_report(value: Mapping[str, Any]) -> str:
    """What `inspect` found: the file, the wiring with provenance, the key map, what else it holds."""
    file = value["file"]
    head = [
        f"{file['path']}  ({file['kind']}, {_bytes(file['bytes_file'])})",
        f"model: {file['parameters']:,} parameters, {_bytes(file['bytes_model'])}, {file['dtypes']}"
        + (
            f", step {file['step']} ({file['step_source']})" if file["step"] is not None else ", step unknown"
        ),
        f"checksums: {file['checksums']}",
    ]
    parts = ["\n".join(_wrap(line, indent="  ") for line in head)]
    if value.get("wiring") is not None:
        table = _table("wiring", "value", "from", last_folds=True)
        for name, field in value["wiring"].items():
            table.add_row(name, _plain(field["value"]), field["source"])
        parts.append(_render(table).rstrip("\n"))
    else:
        parts.append(_wrap(f"! {value['wiring_problem']}", indent="  ", keep_lines=True))
    keys = value["key_map"]
    counts = {
        status: sum(use["status"] == status for use in keys) for status in ("loaded", "renamed", "unused")
    }
    lines = ["tensors: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count)]
    lines += [f"  renamed {u['stored']} -> {u['canonical']}" for u in keys if u["status"] == "renamed"][:8]
    lines += [f"  unused {use['stored']}: {use['reason']}" for use in keys if use["status"] == "unused"]
    lines += [f"  {problem}" for problem in value["problems"]]
    lines += [f"also in the file: {name}: {what}" for name, what in value["extras"].items()]
    if value["opaque_classes"]:
        lines.append("values of classes that are never loaded: " + ", ".join(value["opaque_classes"]))
    parts.append("\n".join(_wrap(line, indent="  ") for line in lines))
    return "\n\n".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        texts = [str(item) for item in value]
        if len(set(texts)) == 1 and len(texts) > 1:
            return f"{len(texts)} x {texts[0]}"
        return ", ".join(texts)
    return _ABSENT if value is None else str(value)


def _table(*columns: str, last_folds: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for i, column in enumerate(columns):
        numeric = i > 0 and not last_folds
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _render(table: Table) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _wrap(text: str, *, indent: str = "", keep_lines: bool = False) -> str:
    lines = text.splitlines() if keep_lines else [text]
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def _estimate(value: Mapping[str, Any]) -> str:
    interval = _interval(value)
    return _number(value["value"]) + (f"  [{interval}]" if interval != _ABSENT else f"  ({value['reason']})")


def _interval(value: Mapping[str, Any]) -> str:
    if value.get("low") is None or value.get("high") is None:
        return _ABSENT
    return f"{value['low']:.2f}, {value['high']:.2f}"


def _number(value: float | None) -> str:
    """Two or three digits, never rounded into 0 or 1 when it is not."""
    if value is None:
        return _ABSENT
    text = f"{value:.3f}"
    if float(text) in (0.0, 1.0) and value not in (0.0, 1.0):
        return f"{value:.1e}" if abs(value) < 0.5 else f"{value:.6f}"
    return text


def _signed(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:+.3f}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
