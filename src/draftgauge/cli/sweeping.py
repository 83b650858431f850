"""The command that measures many checkpoints: sweep."""

from __future__ import annotations

from pathlib import Path

import click

from draftgauge.cli.options import EXIT_CODES, bar, json_option, print_json, runs_root, workers_option
from draftgauge.errors import IncompleteError


@click.command(epilog=EXIT_CODES)
@click.argument("plan", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--table",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a .csv or .parquet, a row for each run and policy.",
)
@workers_option
@runs_root
@json_option
def sweep(plan: Path, table: Path | None, workers: str, root: Path, as_json: bool) -> None:
    """Measure every checkpoint of a plan on every recording.

    With every block size that the plan names. What was measured before is not
    measured again, so the same command goes on where it was stopped, and a
    plan may grow. What cannot be measured is named, and stops nothing else.

    \b
    Example of a plan:
      checkpoints = ["out/step_*"]
      recordings = ["recordings/1f2e3d4c5b6a7980"]
      block_sizes = [8, 16, 32]

    \b
    Example:
      draftgauge sweep plan.toml --table results.csv
    """
    from draftgauge.report.grid import grid_report
    from draftgauge.resulttable import require_table, write_results
    from draftgauge.sweep import read_sweep, run_sweep
    from draftgauge.workers import Workers

    if table is not None:
        require_table(table)
    asked, crew, shown = read_sweep(plan), Workers.parse(workers), bar()
    outcomes = []
    for number, outcome in enumerate(run_sweep(asked, root=root, workers=crew, progress=shown), 1):
        what = outcome.reason if outcome.run is None else outcome.run.name
        click.echo(f"{number} of {len(asked.combinations)}: {what}", err=True)
        outcomes.append(outcome)
    values = [outcome.as_dict() for outcome in outcomes]
    if as_json:
        print_json(values)
    else:
        click.echo(grid_report(values))
    if table is not None:
        write_results(table, [outcome.run for outcome in outcomes if outcome.run is not None])
        click.echo(f"wrote {table}", err=True)
    failed = sum(value["run"] is None for value in values)
    distrusted = sum(value["trusted"] is False for value in values)
    if failed or distrusted:
        raise IncompleteError(
            f"of {len(values)} combinations {failed} could not be measured and {distrusted} are not trusted"
        )
