"""The commands that show what is known and kept: formats, runs, show, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import (
    EXIT_CODES,
    beside_option,
    gate_option,
    json_option,
    log_option,
    logged,
    print_json,
    print_run,
    runs_root,
    say_left_out,
)
from draftgauge.errors import IncompleteError


@click.command(epilog=EXIT_CODES)
@json_option
def formats(as_json: bool) -> None:
    """Print the formats that are read and written, and how each was checked.

    \b
    Example:
      draftgauge formats --json | jq '.[] | select(.kind == "features")'
    """
    from draftgauge.formats import formats as known
    from draftgauge.report.formats import formats_report

    rows = [vars(row) for row in known()]
    if as_json:
        print_json(rows)
    else:
        click.echo(formats_report(rows))


@click.command(epilog=EXIT_CODES)
@click.option(
    "--table",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a .csv or .parquet, a row for each run and policy.",
)
@log_option
@runs_root
@json_option
def runs(root: Path, table: Path | None, log_to: str | None, as_json: bool) -> None:
    """List the complete runs of a folder, oldest first.

    What cannot be read is named, with the reason, and stops nothing.

    \b
    Examples:
      draftgauge runs --json | jq '.[].name'
      draftgauge runs --table results.parquet
      draftgauge runs --log-to tensorboard
    """
    from draftgauge.report.terminal import run_list
    from draftgauge.runs import Run, found_runs

    found = found_runs(root)
    readable = [run for run in found.values() if isinstance(run, Run)]
    if as_json:
        print_json([_listed(root / name, run) for name, run in found.items()])
    else:
        click.echo(run_list(readable))
    say_left_out(found)
    if table is not None:
        from draftgauge.resulttable import write_results

        write_results(table, readable)
        click.echo(f"wrote {table}", err=True)
    if problems := logged(readable, log_to):
        raise IncompleteError(
            f"{len(problems)} of {len(readable)} run(s) were not logged, for the reasons above"
        )


def _listed(path: Path, run: Any) -> dict[str, Any]:
    """A run in the list, as data; `reason` says why one cannot be read, and is null for all others."""
    plan, reason = (None, run) if isinstance(run, str) else (run.manifest["plan"], None)
    return {"name": path.name, "path": str(path), "plan": plan, "reason": reason}


@click.command(epilog=EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@gate_option
@beside_option
@json_option
def show(run: Path, gates: tuple[str, ...], beside: Path | None, as_json: bool) -> None:
    """Show a run again.

    A run that is not trusted, or a gate that does not pass, is exit code 4.

    \b
    Examples:
      draftgauge show runs/step_4000-1a2b3c4d
      draftgauge show runs/step_4000-1a2b3c4d --beside earlier.json
    """
    from draftgauge.runs import open_run

    print_run(open_run(run), gates=gates, beside=beside, as_json=as_json)


@click.command(epilog=EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("baseline", type=click.Path(path_type=Path))
@json_option
def compare(run: Path, baseline: Path, as_json: bool) -> None:
    """Compare a run with a baseline, paired by prompt.

    On the prompts whose references are the same in both, token for token.
    Refuses runs whose numbers do not mean the same, and says why.

    \b
    Example:
      draftgauge compare runs/step_4000-1a2b3c4d runs/step_2000-5e6f7a8b
    """
    from draftgauge.compare import compare_runs
    from draftgauge.kept import checkpoint_caveat
    from draftgauge.report.comparison import comparison_report
    from draftgauge.report.terminal import caveat_lines
    from draftgauge.runs import open_run

    pair = open_run(run), open_run(baseline)
    value = compare_runs(*pair)
    changed = {r.name: caveat.as_dict() for r in pair if (caveat := checkpoint_caveat(r)) is not None}
    value["checkpoint_changed"] = changed
    if as_json:
        print_json(value)
        return
    click.echo(comparison_report(value))
    for name, found in changed.items():
        click.echo(f"\n{name}:\n{caveat_lines([found])}")
