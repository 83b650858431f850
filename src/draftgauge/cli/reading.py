"""The commands that show what is kept: runs, show, compare."""

from __future__ import annotations

from pathlib import Path

import click

from draftgauge.cli.options import (
    EXIT_CODES,
    beside_option,
    gate_option,
    json_option,
    print_json,
    print_run,
    runs_root,
)


@click.command(epilog=EXIT_CODES)
@runs_root
@json_option
def runs(root: Path, as_json: bool) -> None:
    """List the complete runs of a folder, oldest first.

    \b
    Example:
      draftgauge runs --json | jq '.[].name'
    """
    from draftgauge.report.terminal import run_list
    from draftgauge.runs import list_runs, unreadable_runs

    found, unreadable = list_runs(root), unreadable_runs(root)
    if as_json:
        print_json([{"name": r.name, "path": str(r.path), "plan": r.manifest["plan"]} for r in found])
    else:
        click.echo(run_list(found))
    for name, reason in unreadable.items():
        click.echo(f"! {name} is left out: {reason}", err=True)


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
