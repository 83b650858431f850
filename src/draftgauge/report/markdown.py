"""Renders runs as GitHub's Markdown: for a pull request, a step summary, or a reader of plain text.

Takes complete runs and says what the terminal's report says of them, shorter. Knows nothing of how a number is
computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftgauge.compare import compare_runs
from draftgauge.kept import checkpoint_caveat
from draftgauge.report.categories import tau_by_category
from draftgauge.report.comparison import answer, sameness
from draftgauge.report.markup import code, details, escaped, paragraph, table
from draftgauge.report.text import ABSENT, interval, number, reach, reasons, rest, share, signed
from draftgauge.report.trust import verdict_line
from draftgauge.runs import Run

#: Longer listings end with a count of the rest.
_MOST_ROWS = 20
#: What a name may take of a table's line.
_NAME_WIDTH = 32


def markdown(runs: Sequence[Run], *, baseline: Run | None = None) -> str:
    """Runs as Markdown; of several a table in the order given, and the last in full, as a series is read.

    With a baseline, each is compared with it, but not it with itself.

    Raises:
        RunError: A run is not comparable with the baseline.
    """
    parts = [_overview(runs, baseline)] if len(runs) > 1 else []
    last = runs[-1]
    return "\n\n".join([*parts, _run(last, baseline if _is_another(last, baseline) else None)]) + "\n"


def _is_another(run: Run, baseline: Run | None) -> bool:
    return baseline is not None and baseline.path.absolute() != run.path.absolute()


def _overview(runs: Sequence[Run], baseline: Run | None) -> str:
    """The chain of several runs: of a series, tau over step; and the difference of each from the baseline."""
    rows, differences = [], []
    for run in runs:
        step, tau = _step(run), run.summary["policies"]["chain"]["tau_response"]
        trusted = {True: "yes", False: "**NO**", None: "not known"}[_trust(run).get("trusted")]
        said = ABSENT if step is None else str(step)
        name = code(run.name, longest=_NAME_WIDTH)
        rows.append((name, said, number(tau["value"]), interval(tau), str(tau["n"]), trusted))
        if baseline is not None and _is_another(run, baseline):
            paired = compare_runs(run, baseline)["policies"]["chain"]["tau_response"]
            difference = paired["difference"]
            shown = (signed(difference["value"]), interval(difference), paired["verdict"])
            differences.append((name, *shown))
    head = ("run", "step", "tau", "95 %", "n", "trusted")
    parts = [
        f"## {len(runs)} runs",
        table(head, rows),
        _note("tau of the chain, by response; the last run in full below"),
    ]
    if baseline is not None and differences:
        parts.append(paragraph(f"Compared with {code(baseline.name)}, paired by prompt:"))
        parts.append(table(("tau of the chain", "difference", "95 %", "verdict"), differences))
    return "\n\n".join(parts)


def _run(run: Run, baseline: Run | None) -> str:
    summary = run.summary
    step, changed = _step(run), checkpoint_caveat(run)
    parts = [
        f"## {code(run.name)}" + ("" if step is None else f", step {step}"),
        _trust_text(run),
        _headline(next(iter(summary["policies"].values()))),
        "" if baseline is None else _comparison(run, baseline),
        _policies(summary),
        _caveats([*summary["caveats"], *([] if changed is None else [changed.as_dict()])]),
        details("Acceptance per depth", _depths(summary)) if summary["per_depth"] is not None else "",
        details("Why rounds ended", _ends(summary)),
        _categories(summary),
        details("The same blocks as others would count them", _conventions(summary)),
        details("Provenance", _provenance(run)),
    ]
    return "\n\n".join(part for part in parts if part)


def _step(run: Run) -> int | None:
    step: int | None = run.manifest["checkpoint"]["step"]
    return step


def _trust(run: Run) -> Mapping[str, Any]:
    trust: Mapping[str, Any] = run.summary.get("trust") or {}
    return trust


def _trust_text(run: Run) -> str:
    """The verdict of the controls; of those that failed, what each expected, found and advises."""
    trust = _trust(run)
    if not trust:
        return paragraph("Controls were not run: an earlier draftgauge made this run.")
    if trust["trusted"]:
        return paragraph(escaped(f"Controls: {_verdict(trust)}."))
    failed = [control for control in trust["controls"] if control["verdict"] == "failed"]
    said = [
        f"{c['slug']}: {c['expectation']}; measured: {c['measured']}. {c['advice'] or ''}" for c in failed
    ]
    head = f"**{escaped(f'Controls: {_verdict(trust)}.')} Do not use these numbers.**"
    return "\n\n".join([paragraph(head), _items(said)])


def _verdict(trust: Mapping[str, Any]) -> str:
    """The terminal's line without its label, in one line."""
    return " ".join(verdict_line(trust).split()[1:])


def _headline(policy: Mapping[str, Any]) -> str:
    """One policy's tau, averaged both ways, with intervals or why there are none."""
    kinds = {"by response": policy["tau_response"], "pooled": policy["tau_pooled"]}
    said = []
    for name, estimate in kinds.items():
        said_reach = interval(estimate)
        value = f"**{number(estimate['value'])}**" + ("" if said_reach == ABSENT else f" \\[{said_reach}\\]")
        said.append(f"{value} {name}")
    lines = [paragraph(f"Tau of the {policy['label']}, tokens per round with the bonus: {', '.join(said)}.")]
    return "\n\n".join([*lines, *(paragraph(f"{escaped(reason)}.") for reason in reasons(kinds.values()))])


def _policies(summary: Mapping[str, Any]) -> str:
    """Tau of every policy, which is tau over the tree's budget, below the ceiling that coverage is."""
    rows = [
        (
            value["label"],
            number(value["tau_response"]["value"]),
            interval(value["tau_response"]),
            number(value["tau_pooled"]["value"]),
            interval(value["tau_pooled"]),
            number(value["streak_response"]["value"]),
        )
        for value in summary["policies"].values()
    ]
    head = ("policy", "tau", "95 %", "pooled", "95 %", "streak")
    note = (
        "tau with the bonus token, streak without; coverage@k is the ceiling of any tree k wide, not a policy"
    )
    return f"{table(head, rows)}\n\n{_note(note)}"


def _depths(summary: Mapping[str, Any]) -> str:
    curves = summary["per_depth"]
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
        )
        for d in depths
    ]
    head = ("depth", "marginal", "survival", "95 %", "conditional", "anchors")
    note = f"eal_marginal (what trainers log): {number(curves['eal_marginal'])}"
    return f"{table(head, rows)}\n\n{_note(note)}"


def _ends(summary: Mapping[str, Any]) -> str:
    rows = []
    for value in summary["policies"].values():
        counts = value["counts"]
        ends = [counts[f"ended_{why}"] for why in ("not_covered", "not_selected", "depth", "reference")]
        rows.append((value["label"], str(counts["rounds"]), *(share(end, counts["rounds"]) for end in ends)))
    return table(("policy", "rounds", "not covered", "not selected", "depth", "end of text"), rows)


def _categories(summary: Mapping[str, Any]) -> str:
    """The first policy's tau in every category, the lowest first."""
    found = tau_by_category(summary, next(iter(summary["policies"])))
    rows = [
        (code(name, longest=_NAME_WIDTH), number(tau["value"]), interval(tau), str(tau["n"]))
        for name, tau in found.items()
    ]
    if not rows:
        return ""
    listed = table(("category", "tau", "95 %", "n"), rows[:_MOST_ROWS]) + _rest(len(rows), "categories")
    return details("Tau by category", listed)


def _conventions(summary: Mapping[str, Any]) -> str:
    first = next(iter(summary["policies"].values()))
    rows = [(name, number(value)) for name, value in first["conventions"].items()]
    return table(("as counted by", first["label"]), rows)


def _caveats(caveats: Sequence[Mapping[str, str]]) -> str:
    marks = {"warning": "**Warning**: ", "note": ""}
    said = [f"{marks[c['severity']]}{escaped(c['text'])} ({code(c['slug'])})" for c in caveats]
    return _items(said, escape=False) if said else "No caveats."


def _comparison(run: Run, baseline: Run) -> str:
    """Paired differences of every policy, and of the first one the prompts that lost and won most."""
    value = compare_runs(run, baseline)
    prompts = len(value["prompts"])
    rows = []
    for policy in value["policies"].values():
        tau = policy["tau_response"]
        numbers = (number(tau["baseline"]), number(tau["run"]), signed(tau["difference"]["value"]))
        rows.append((policy["label"], *numbers, interval(tau["difference"]), number(tau["resolvable"])))
    first = next(iter(value["policies"].values()))
    head = ("tau by response", "baseline", "run", "difference", "95 %", "resolvable")
    parts = [
        paragraph(f"Compared with {code(value['baseline'])}, paired on {prompts} prompt(s):"),
        paragraph(f"**{escaped(answer(first, prompts=prompts))}**"),
        table(head, rows),
        *(
            paragraph(f"{escaped(r)}.")
            for r in reasons(p["tau_response"]["difference"] for p in value["policies"].values())
        ),
        details("By prompt, and what differs", f"{_pairs(first)}\n\n{_items(sameness(value))}"),
    ]
    if failed := value["trust"]["baseline"]["failed"]:
        parts.insert(0, paragraph(f"**The baseline is NOT TRUSTED: {escaped(', '.join(failed))} failed.**"))
    return "\n\n".join(parts)


def _pairs(policy: Mapping[str, Any]) -> str:
    pairs = sorted(policy["prompts"].items(), key=lambda of: of[1]["run"] - of[1]["baseline"])
    rows = [
        (
            code(name, longest=_NAME_WIDTH),
            number(pair["baseline"]),
            number(pair["run"]),
            signed(pair["run"] - pair["baseline"]),
        )
        for name, pair in pairs
    ]
    head = (f"tau of the {policy['label']}", "baseline", "run", "difference")
    return table(head, rows[:_MOST_ROWS]) + _rest(len(rows), "prompts")


def _provenance(run: Run) -> str:
    """Everything that is needed to measure it again."""
    manifest, plan, reference = run.manifest, run.plan, run.summary["reference"]
    checkpoint, recording = manifest["checkpoint"], manifest["recording"]
    agreement = number(reference["reference_agreement"])
    facts = {
        "checkpoint": f"{code(checkpoint.get('url') or checkpoint['path'])} {code(plan.checkpoint_digest)}",
        "recording": f"{code(recording['path'])} {code(plan.recording_digest)}",
        "target": code(plan.target_digest),
        "prompts": f"{code(str(recording['prompts']))}, {len(run.summary['prompts'])} of them",
        "references": f"{reference['tokens']} tokens, agreement {agreement}",
        "computed": f"{plan.dtype}, block size {plan.wiring['block_size']}, {plan.anchors} anchors, "
        f"template {code(plan.template)}",
        "measured": f"{manifest['started']} in {manifest['duration_s']:.1f} s, plan {code(manifest['plan_digest'])}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        "machine": ", ".join(f"{name} {value}" for name, value in manifest["machine"].items()),
        "called": code(" ".join(manifest["argv"]), longest=1000),
    }
    return _items([f"{name}: {text}" for name, text in facts.items()], escape=False)


def _items(texts: Iterable[str], *, escape: bool = True) -> str:
    """A list; `escape` is for texts that are not Markdown yet."""
    return "\n".join(paragraph(escaped(t) if escape else t, first="- ", indent="  ") for t in texts)


def _note(text: str) -> str:
    return paragraph(escaped(text))


def _rest(count: int, what: str) -> str:
    """How many rows were not listed, if any."""
    said = rest(count - _MOST_ROWS, what).strip()
    return f"\n\n{said}" if said else ""
