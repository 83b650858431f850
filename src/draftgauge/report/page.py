"""The report as one HTML page: offline, without a script, in light and dark, for a screen, a phone and a printer.

Takes complete runs; what it shows is drawn by `charts`, `tokens` and `drawn_tree` and put together by a template that
escapes all text. Computes no number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from draftgauge.compare import compare_runs
from draftgauge.errors import RunError
from draftgauge.kept import checkpoint_caveat
from draftgauge.report.charts import Cell, Chart, charts_of, series_charts
from draftgauge.report.comparison import answer, sameness
from draftgauge.report.drawn_tree import DrawnTree, drawn_tree
from draftgauge.report.plots import png_file, svg, svg_file
from draftgauge.report.speedup import Costs
from draftgauge.report.text import interval, number, plain, visible
from draftgauge.report.tokens import TokenView, notable_prompts, token_view
from draftgauge.report.trust import verdict_line
from draftgauge.runs import Run

#: A page with the text of more tokens than this is no longer light.
_MOST_TOKENS = 6000
_NO_COSTS = Costs()
#: An image has no parts for a screen reader: the roles that the drawing gives to its marks would be nameless ones.
_TAG, _ROLE = re.compile(r"<[a-z][^<>]*>"), re.compile(r' (?:role|aria-[a-z]+)="[^"]*"')


def page(
    runs: Sequence[Run],
    *,
    baseline: Run | None = None,
    prompts: Sequence[str] = (),
    costs: Costs = _NO_COSTS,
) -> str:
    """The report of runs as the text of an HTML file; of several the last by step is shown in full.

    Args:
        runs: At least one.
        baseline: Every run is compared with it.
        prompts: Whose text is shown, of the run that is shown in full; the best, the median and the worst if empty.
        costs: The model under which speed-ups are projected.

    Raises:
        RunError: A prompt is not in the run.
    """
    if not runs:
        raise RunError("there is no run to report; name at least one")
    full = _in_full(runs)
    unknown = [name for name in prompts if name not in full.summary["prompts"]]
    if unknown:
        raise RunError(
            f"{full.name} has no prompt {unknown[0]!r}; expected one of {', '.join(full.summary['prompts'])}"
        )
    return _template().render(
        title=full.name if len(runs) == 1 else f"{len(runs)} runs, the last {full.name}",
        run=full,
        several=len(runs) > 1,
        series=series_charts(runs) if len(runs) > 1 else [],
        comparisons=[
            _comparison(run, baseline) for run in runs if baseline is not None and run.path != baseline.path
        ],
        charts=charts_of(full, costs=costs),
        headline=_headlines(full.summary),
        verdict=_verdict(full.summary.get("trust") or {}),
        trust=full.summary.get("trust") or {},
        caveats=_caveats(full),
        texts=_texts(full, prompts),
        provenance=_provenance(full),
    )


def write_plots(runs: Sequence[Run], folder: Path, *, costs: Costs = _NO_COSTS) -> list[Path]:
    """The charts of the report as SVG and PNG files; returns their paths. Files of the same names are replaced."""
    charts = [*(series_charts(runs) if len(runs) > 1 else []), *charts_of(_in_full(runs), costs=costs)]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        if chart.spec is not None:
            image, drawing = folder / f"{chart.slug}.png", folder / f"{chart.slug}.svg"
            image.write_bytes(png_file(chart.spec))
            drawing.write_text(svg_file(chart.spec), encoding="utf-8")
            written += [image, drawing]
    return written


def _in_full(runs: Sequence[Run]) -> Run:
    """Of several runs the one that is shown in full: the last by step."""
    return max(enumerate(runs), key=lambda of: (of[1].manifest["checkpoint"]["step"] or -1, of[0]))[1]


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("draftgauge.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"drawn": _drawn, "cell": _shown, "number": number, "visible": visible}
    style = (resources.files("draftgauge.report") / "templates" / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html", globals={"style": style})


def _drawn(chart: Chart) -> str:
    """The chart's drawing, told to a screen reader by its title; the table behind it has the numbers."""
    assert chart.spec is not None
    text = svg(chart.spec)
    head, _, rest = text.partition(">")
    quiet = head.replace("<svg", f'<svg role="img" aria-labelledby="t-{chart.slug}"', 1)
    return f"{quiet}>{_TAG.sub(lambda tag: _ROLE.sub('', tag[0]), rest)}"


def _shown(value: Cell) -> str:
    """A cell's text: numbers with three digits after the point, counts whole."""
    if value is None:
        return "—"
    return number(value) if isinstance(value, float) else visible(str(value))


def _verdict(trust: Mapping[str, Any]) -> str:
    """How many controls passed and failed, without the terminal's label; empty where none were run."""
    return verdict_line(trust).partition(": ")[2] if trust else ""


def _headlines(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chain and the largest tree: tau averaged both ways, each with its interval or the reason for none."""
    trees = [slug for slug in summary["policies"] if slug.startswith("ddtree")]
    shown = ["chain", *sorted(trees, key=lambda slug: int(slug.removeprefix("ddtree")))[-1:]]
    found = []
    for slug in shown:
        policy = summary["policies"][slug]
        for kind, said in (("tau_response", "by response"), ("tau_pooled", "pooled over rounds")):
            estimate = policy[kind]
            reach = interval(estimate) if estimate["low"] is not None else ""
            found.append(
                {"name": f"{slug}.{kind}", "label": policy["label"], "kind": said, "reach": reach, **estimate}
            )
    return found


def _caveats(run: Run) -> list[Mapping[str, str]]:
    changed = checkpoint_caveat(run)
    return [*run.summary["caveats"], *([] if changed is None else [changed.as_dict()])]


def _comparison(run: Run, baseline: Run) -> dict[str, Any]:
    """The paired differences with the baseline, or why there are none."""
    try:
        value = compare_runs(run, baseline)
    except RunError as exc:
        return {"run": run.name, "baseline": baseline.name, "reason": str(exc)}
    rows = []
    for slug, policy in value["policies"].items():
        tau = policy["tau_response"]
        rows.append({"slug": slug, "label": policy["label"], **tau})
    chain = value["policies"].get("chain") or next(iter(value["policies"].values()))
    said = {
        "answer": answer(chain, prompts=len(value["prompts"])),
        "sameness": sameness(value),
        "reason": None,
    }
    return value | said | {"rows": rows}


# --- texts ----------------------------------------------------------------------------------------------


def _texts(run: Run, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """The chosen prompts token by token, each with the draft tree of one of its rounds; as many as stay light."""
    found: list[dict[str, Any]] = []
    tokens = 0
    for name in prompts or notable_prompts(run):
        view = token_view(run, name)
        tokens += len(view.tokens)
        if found and tokens > _MOST_TOKENS:
            break
        tree = drawn_tree(run, name)
        found.append(
            {"name": name, "view": view, "rounds": _rounds(view), "tree": tree, "nodes": _nodes(tree)}
        )
    return found


def _rounds(view: TokenView) -> list[list[Any]]:
    """The tokens of the completion by round: what was given by the prompt and the prefill first."""
    found: list[list[Any]] = []
    for token in view.tokens:
        if not found or found[-1][-1].round != token.round or found[-1][-1].kind == "prompt" != token.kind:
            found.append([])
        found[-1].append(token)
    return found


def _nodes(tree: DrawnTree) -> Chart:
    """The tree's nodes as a table."""
    rows = [(str(n.depth), n.token, n.probability, "yes" if n.accepted else "no", n.kind) for n in tree.rows]
    head = ("depth", "token", "probability", "accepted", "what")
    return Chart("tree", "Nodes of the tree", "", None, head, tuple(rows))


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Everything that is needed to measure it again."""
    manifest = run.manifest
    checkpoint, recording = manifest["checkpoint"], manifest["recording"]
    where = checkpoint.get("url") or checkpoint["path"]
    said = {
        "command": "draftgauge " + " ".join(map(str, manifest["argv"][1:])),
        "checkpoint": where + (f" at {checkpoint['revision']}" if checkpoint.get("revision") else ""),
        "weights in it": checkpoint["state_dict"] or "the whole file",
        "step": plain(checkpoint["step"]),
        "recording": recording["path"],
        "prompts": recording["prompts"],
        "target": recording["target"],
        "measured": f"{manifest['started']}, in {manifest['duration_s']:.1f} s",
        "machine": ", ".join(f"{key} {value}" for key, value in manifest["machine"].items()),
        "versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
    }
    plan = {name: value for name, value in manifest["plan"].items() if name != "wiring"}
    said |= {name.replace("_", " "): plain(value) for name, value in plan.items()}
    sources = manifest["provenance"]
    said |= {
        f"wiring: {name}": f"{plain(value)} ({sources.get(name, 'not said')})"
        for name, value in manifest["plan"]["wiring"].items()
    }
    return [(name, visible(str(value))) for name, value in said.items()]
