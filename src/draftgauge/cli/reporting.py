"""The command that writes a report for others: report."""

from __future__ import annotations

from pathlib import Path

import click

from draftgauge.cli.options import EXIT_CODES, json_option, print_json


@click.command(epilog=EXIT_CODES)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--baseline", type=click.Path(path_type=Path), help="Also compare every run with this one.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The page; REPORT.html if not given."
)
@click.option("--prompt", "prompts", multiple=True, metavar="ID", help="Show this prompt's text; repeatable.")
@click.option("--draft-cost", default=0.05, show_default=True, help="Of drafting a block, in target steps.")
@click.option(
    "--node-cost", default=0.002, show_default=True, help="Of verifying a node more, in target steps."
)
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Also write every chart there."
)
@click.option("--md", is_flag=True, help="Print Markdown for a pull request, and write no page.")
@json_option
def report(
    runs: tuple[Path, ...],
    baseline: Path | None,
    out: Path | None,
    prompts: tuple[str, ...],
    draft_cost: float,
    node_cost: float,
    plots: Path | None,
    md: bool,
    as_json: bool,
) -> None:
    """Write runs as one page that opens offline.

    Several runs are shown as a series, the last in full. The page needs no
    network and no script; --plots writes its charts as SVG and PNG as well.

    \b
    Examples:
      draftgauge report runs/step_4000-1a2b3c4d --out step_4000.html
      draftgauge report runs/step_* --baseline runs/step_250-5e6f7a8b
      draftgauge report runs/step_4000-1a2b3c4d --md >> "$GITHUB_STEP_SUMMARY"
    """
    from draftgauge.report.speedup import Costs
    from draftgauge.runs import open_run

    found = [open_run(run) for run in runs]
    other = None if baseline is None else open_run(baseline)
    if md:
        from draftgauge.report.markdown import markdown

        click.echo(markdown(found, baseline=other), nl=False)
        return
    from draftgauge.report.page import page, write_plots

    costs = Costs(draft=draft_cost, node=node_cost)
    path = out or Path(f"{found[-1].name}.html")
    text = page(found, baseline=other, prompts=prompts, costs=costs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    drawn = [] if plots is None else write_plots(found, plots, costs=costs)
    if as_json:
        print_json({"page": str(path), "bytes": len(text.encode()), "plots": [str(plot) for plot in drawn]})
    else:
        click.echo("\n".join(map(str, [path, *drawn])))
