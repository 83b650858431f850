"""The charts of a report: what each shows, drawn, in a table, and in a sentence.

Takes runs and their summaries; draws with `plots`. Computes nothing that a summary holds already, but for the taus by
place in the response, which come from the walks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftgauge.acceptance import Policy
from draftgauge.report.categories import tau_by_category
from draftgauge.report.places import tau_by_place
from draftgauge.report.plots import Spec, bars, ceilinged, curves, dots, shares
from draftgauge.report.speedup import Costs, projections
from draftgauge.report.text import number, visible
from draftgauge.runs import Run

Cell = str | int | float | None
Summary = Mapping[str, Any]
#: More prompts than this are shown by the lowest and the highest of them.
_MOST_PROMPTS = 40
_ENDS = {
    "not_covered": "not covered",
    "not_selected": "covered, not selected",
    "depth": "whole block accepted",
    "reference": "end of text",
}


@dataclass(frozen=True)
class Chart:
    """A drawing with the table behind it; `slug` names it in files, `note` says how it is to be read.

    `rows` hold numbers unrounded, the first cell names the row; `spec` is None where there is nothing to draw.
    """

    slug: str
    title: str
    note: str
    spec: Spec | None
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def charts_of(run: Run, *, costs: Costs) -> list[Chart]:
    """Every chart of one run, in the order of a report."""
    summary = run.summary
    depth = len(summary["policies"]["chain"]["counts"]["accepted_histogram"]) - 1
    found = [
        _depths(summary),
        _lengths(summary),
        _budgets(summary),
        _ends(summary),
        _prompts(summary),
        _categories(summary),
        _places(run),
        _conventions(summary),
        _speed(summary, depth=depth, costs=costs),
    ]
    return [chart for chart in found if chart is not None]


def series_charts(runs: Sequence[Run]) -> list[Chart]:
    """The charts of several runs: tau over step and, where every run has it, acceptance per depth over step.

    Runs without a step are told by their names, in the order given.
    """
    steps = [run.manifest["checkpoint"]["step"] for run in runs]
    stepped = None not in steps and len(set(steps)) == len(steps)
    order = sorted(range(len(runs)), key=lambda i: steps[i]) if stepped else list(range(len(runs)))
    runs = [runs[i] for i in order]
    places = [steps[i] for i in order] if stepped else [str(i + 1) for i in range(len(runs))]
    return [_taus(runs, places, stepped=stepped), *_depths_over(runs, places, stepped=stepped)]


# --- one run --------------------------------------------------------------------------------------------


def _depths(summary: Summary) -> Chart | None:
    curve = summary["per_depth"]
    if curve is None:
        return None
    kinds = ("marginal", "conditional", "survival")
    reach = curve.get("intervals") or {}
    rows, drawn = [], []
    for d in range(len(curve["marginal"])):
        row: list[Cell] = [str(d + 1)]
        for kind in kinds:
            interval = (reach.get(kind) or {d: None})[d]
            low, high = interval or (None, None)
            row += [curve[kind][d], low, high]
            if curve[kind][d] is not None:
                drawn.append({"x": d + 1, "y": curve[kind][d], "series": kind, "low": low, "high": high})
        rows.append((*row, curve["anchors_marginal"][d]))
    head = ("depth", *(f"{kind}{part}" for kind in kinds for part in ("", ", low", ", high")), "anchors")
    note = (
        "Over all anchors. Marginal: the token at this depth is the drafter's first choice. Survival: so are all "
        "before it. Conditional: it is, where all before it are."
    )
    return Chart(
        "depth",
        "Acceptance per depth",
        note,
        curves(drawn, x="depth", y="share of anchors", series="rate", percent=True),
        head,
        tuple(rows),
    )


def _lengths(summary: Summary) -> Chart:
    slugs = ["chain", *_largest_tree(summary)]
    counts = {slug: summary["policies"][slug]["counts"] for slug in slugs}
    labels = {slug: summary["policies"][slug]["label"] for slug in slugs}
    drawn, rows = [], []
    for length in range(len(counts["chain"]["accepted_histogram"])):
        found = [counts[slug]["accepted_histogram"][length] for slug in slugs]
        rows.append((str(length), *found))
        for slug, count in zip(slugs, found, strict=True):
            rounds = counts[slug]["rounds"]
            drawn.append({"x": length, "y": count / rounds if rounds else 0, "series": labels[slug]})
    return Chart(
        "lengths",
        "Accepted lengths",
        "Of every round on the policy's own walk: how many draft tokens it accepted. The bonus token is not counted.",
        bars(drawn, x="accepted draft tokens", y="share of rounds", percent=False),
        ("accepted", *(f"{labels[slug]}, rounds" for slug in slugs)),
        tuple(rows),
    )


def _largest_tree(summary: Summary) -> list[str]:
    trees = [Policy.parse(slug) for slug in summary["policies"]]
    return (
        [max(t for t in trees if t.kind == "ddtree").slug] if any(t.kind == "ddtree" for t in trees) else []
    )


def _budgets(summary: Summary) -> Chart:
    drawn, levels, rows = [], [], []
    for slug, value in summary["policies"].items():
        policy, tau = Policy.parse(slug), value["tau_response"]
        rows.append((value["label"], tau["value"], tau["low"], tau["high"], value["tau_pooled"]["value"]))
        if tau["value"] is None:
            continue
        if policy.kind == "ddtree":
            drawn.append({"x": policy.n, "y": tau["value"], "low": tau["low"], "high": tau["high"]})
        elif policy.kind == "coverage" or policy.n is None:
            levels.append({"y": tau["value"], "name": value["label"]})
    return Chart(
        "budgets",
        "Tau over the tree's budget",
        "Tokens committed in a round, with the bonus, as a mean over responses. Dashed: the chain, and coverage@k, "
        "which no tree k wide at every depth can pass; a deeper, narrower tree can.",
        ceilinged(drawn, levels, x="DDTree budget, nodes", y="tau") if drawn else None,
        ("policy", "tau by response", "low", "high", "tau pooled"),
        tuple(rows),
    )


def _ends(summary: Summary) -> Chart:
    labels, drawn, rows = [], [], []
    for value in summary["policies"].values():
        counts = value["counts"]
        found = [counts[f"ended_{name}"] for name in _ENDS]
        rows.append((value["label"], counts["rounds"], *found))
        labels.append(value["label"])
        for count, part in zip(found, _ENDS.values(), strict=True):
            drawn.append({"y": value["label"], "part": part, "x": count / max(counts["rounds"], 1)})
    return Chart(
        "ends",
        "What ended the rounds",
        "Not covered: the text goes on with a token outside the drafter's choices. Covered, not selected: it was "
        "among them, and the tree had no room for it; a larger budget wins it.",
        shares(drawn, of=labels, parts=list(_ENDS.values()), x="share of rounds"),
        ("policy", "rounds", *_ENDS.values()),
        tuple(rows),
    )


def _prompts(summary: Summary) -> Chart:
    slugs = ["chain", *_largest_tree(summary)]
    taus = {n: [p["policies"][s]["tau"] for s in slugs] for n, p in summary["prompts"].items()}
    known = sorted((n for n in taus if taus[n][0] is not None), key=lambda n: (-taus[n][0], n))
    shown = (
        known
        if len(known) <= _MOST_PROMPTS
        else [*known[: _MOST_PROMPTS // 2], *known[-_MOST_PROMPTS // 2 :]]
    )
    left = len(known) - len(shown)
    rest = (
        f" Drawn are the {_MOST_PROMPTS // 2} highest and lowest of {len(known)}; the table has all."
        if left
        else ""
    )
    overall = summary["policies"]["chain"]["tau_response"]["value"]
    drawn = [{"y": visible(n), "x": taus[n][0], "low": None, "high": None} for n in shown]
    labels = [summary["policies"][slug]["label"] for slug in slugs]
    rows = [
        (n, summary["prompts"][n]["category"], *taus[n], summary["prompts"][n]["completion_tokens"])
        for n in [*known, *(n for n in taus if n not in known)]
    ]
    return Chart(
        "prompts",
        "Tau by prompt",
        f"Tau of the chain, the highest first. Dashed: the mean over responses.{rest}",
        dots(drawn, x="tau", mark=overall),
        ("prompt", "category", *(f"tau, {label}" for label in labels), "tokens"),
        tuple(rows),
    )


def _categories(summary: Summary) -> Chart | None:
    found = tau_by_category(summary, "chain")
    if len(found) < 2:  # one category is all prompts
        return None
    rows = [(name, tau["value"], tau["low"], tau["high"], tau["n"]) for name, tau in reversed(found.items())]
    drawn = [{"y": visible(row[0]), "x": row[1], "low": row[2], "high": row[3]} for row in rows]
    return Chart(
        "categories",
        "Tau by category",
        "Tau of the chain, the highest first; bars are 95 % intervals over the prompts of a category.",
        dots(drawn, x="tau", mark=summary["policies"]["chain"]["tau_response"]["value"]),
        ("category", "tau", "low", "high", "prompts"),
        tuple(rows),
    )


def _places(run: Run) -> Chart:
    rows, drawn = [], []
    for found in tau_by_place(run):
        name = f"{found['from']} on" if found["to"] is None else f"{found['from']} to {found['to'] - 1}"
        tau = found["tau"]
        rows.append((name, tau["value"], tau["low"], tau["high"], found["rounds"]))
        drawn.append(
            {"x": name, "y": tau["value"], "series": "chain", "low": tau["low"], "high": tau["high"]}
        )
    spec = curves(drawn, x="tokens before the round", y="tau", series="policy")
    return Chart(
        "places",
        "Tau along the response",
        "Tau of the chain, pooled over the rounds that start in each stretch of the responses.",
        spec,
        ("tokens", "tau", "low", "high", "rounds"),
        tuple(rows),
    )


def _conventions(summary: Summary) -> Chart:
    slugs = ["chain", *_largest_tree(summary)]
    names = list(summary["policies"]["chain"]["conventions"])
    rows = [(name, *(summary["policies"][slug]["conventions"][name] for slug in slugs)) for name in names]
    return Chart(
        "conventions",
        "The same blocks as others would count them",
        "One set of rounds under each project's own rule. Numbers under different rules are never compared.",
        None,
        ("convention", *(summary["policies"][slug]["label"] for slug in slugs)),
        tuple(rows),
    )


def _speed(summary: Summary, *, depth: int, costs: Costs) -> Chart:
    found = projections(summary, depth=depth, costs=costs)
    drawn = [{"y": p.label, "x": p.speedup, "low": None, "high": None} for p in found]
    return Chart(
        "speed",
        "Projected speed-up",
        "A model, not a measurement: pooled tau over the cost of a round, in steps of the target alone: 1 + "
        f"{number(costs.draft)} for the draft + {number(costs.node)} for each drafted node. Take both from your "
        "engine.",
        dots(drawn, x="times the speed of the target alone", mark=1.0),
        ("policy", "nodes", "tau pooled", "speed-up"),
        tuple((p.label, p.nodes, p.tau, p.speedup) for p in found),
    )


# --- several runs ---------------------------------------------------------------------------------------


def _taus(runs: Sequence[Run], places: Sequence[Any], *, stepped: bool) -> Chart:
    slugs = ["chain", *(_largest_tree(runs[0].summary) if runs else [])]
    drawn, rows = [], []
    for run, place in zip(runs, places, strict=True):
        row: list[Cell] = [run.name, run.manifest["checkpoint"]["step"]]
        for slug in slugs:
            tau = run.summary["policies"].get(slug, {}).get("tau_response")
            value, low, high = (None, None, None) if tau is None else (tau["value"], tau["low"], tau["high"])
            row += [value, low, high]
            if value is not None:
                label = runs[0].summary["policies"][slug]["label"]
                drawn.append({"x": place, "y": value, "series": label, "low": low, "high": high})
        trust = run.summary.get("trust") or {}
        rows.append((*row, {True: "yes", False: "NO"}.get(trust.get("trusted", ""), "not known")))
    labels = [runs[0].summary["policies"][slug]["label"] for slug in slugs]
    head = (
        "run",
        "step",
        *(f"{label}{part}" for label in labels for part in ("", ", low", ", high")),
        "trusted",
    )
    said = (
        "Over the trainer's step." if stepped else "In the order given: not every run has a step of its own."
    )
    across = "step" if stepped else "run"
    return Chart(
        "series",
        "Tau over step" if stepped else "Tau by run",
        f"Tau by response, with 95 % intervals over prompts. {said}",
        curves(drawn, x=across, y="tau", series="policy", ordinal=not stepped),
        head,
        tuple(rows),
    )


def _depths_over(runs: Sequence[Run], places: Sequence[Any], *, stepped: bool) -> list[Chart]:
    depths = [1, 2, 4, 8, 16]
    curves_ = [run.summary["per_depth"] for run in runs]
    if any(curve is None for curve in curves_):
        return []
    shown = [d for d in depths if all(d <= len(curve["survival"]) for curve in curves_)]
    drawn, rows = [], []
    for run, place, curve in zip(runs, places, curves_, strict=True):
        rows.append((run.name, *(curve["survival"][d - 1] for d in shown)))
        found = {d: curve["survival"][d - 1] for d in shown if curve["survival"][d - 1] is not None}
        drawn += [
            {"x": place, "y": y, "series": f"depth {d}", "low": None, "high": None} for d, y in found.items()
        ]
    across = "step" if stepped else "run"
    return [
        Chart(
            "series-depth",
            "Survival over step" if stepped else "Survival by run",
            "The share of anchors at which a chain gets at least so deep.",
            curves(drawn, x=across, y="share of anchors", series="depth", ordinal=not stepped, percent=True),
            ("run", *(f"depth {d}" for d in shown)),
            tuple(rows),
        )
    ]
