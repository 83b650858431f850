"""The commands that work across machines: fleet check, stage, run, watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import (
    EXIT_CODES,
    FOLDER,
    gate_option,
    json_option,
    log_option,
    logged,
    print_json,
)
from draftgauge.errors import IncompleteError, UnfinishedError

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(epilog=EXIT_CODES)
def fleet() -> None:
    """Look at the machines that a fleet file names.

    \b
    Example:
      draftgauge fleet check fleet.toml
    """


@fleet.command("check", epilog=EXIT_CODES)
@click.argument("file", type=_FILE)
@json_option
def fleet_check(file: Path, as_json: bool) -> None:
    """Ask every place: does it answer, what does it hold, whom does it reach?

    All are asked at once, with time-outs. Exit code 5 where one does not answer.

    \b
    Example:
      draftgauge fleet check fleet.toml
    """
    from draftgauge.fleet.checkup import check_fleet
    from draftgauge.report.fleet import fleet_report

    with _reaching(file) as reach:
        value = check_fleet(reach)
    if as_json:
        print_json(value)
    else:
        click.echo(fleet_report(value))
    silent = [name for name, place in value["places"].items() if place["problem"]]
    if silent:
        raise UnfinishedError(f"no answer from {', '.join(silent)}; see above")


@click.command(epilog=EXIT_CODES)
@click.argument("source")
@click.argument("target")
@click.option("--fleet", "file", type=_FILE, help="The fleet file that names the places.")
@click.option("--whole", is_flag=True, help="Move files as they are, the optimizer with them.")
@click.option("--state-dict", help="Which weights in a .pt that holds several, by dotted path.")
@click.option("--store", type=FOLDER, help="Store in this local folder on the way.")
@click.option("--dry-run", is_flag=True, help="Show the plan and move nothing.")
@json_option
def stage(
    source: str,
    target: str,
    file: Path | None,
    whole: bool,
    state_dict: str | None,
    store: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Move a checkpoint, a file or a folder from one place to another.

    Of a trainer's checkpoint the model's tensors and plain values move, as
    safetensors, without the optimizer. Checks space first, goes on where an
    earlier try stopped, compares digests, and publishes by rename. A target that
    ends in / is the folder to put it into. Exit code 5: run it again.

    \b
    Examples:
      draftgauge stage --fleet fleet.toml ct200:/root/out/checkpoint.pt \\
          eval1:checkpoints/step_4000.safetensors
      draftgauge stage --fleet fleet.toml eval1:runs/step_4000-1a2b3c4d runs/
    """
    from draftgauge.fleet.cargo import describe
    from draftgauge.fleet.stage import landing, plan_staging
    from draftgauge.report.fleet import staging_report

    with _reaching(file) as reach:
        spots = reach.fleet.spot(source), reach.fleet.spot(target)
        cargo = describe(reach, spots[0], whole=whole, state_dict=state_dict)
        place = landing(cargo, spots[1], inside=target.endswith("/"))
        hops = [plan_staging(reach, cargo, place)]
        if store is not None:
            stored = landing(cargo, reach.fleet.spot(str(store.absolute())), inside=True)
            hops.insert(0, plan_staging(reach, cargo, stored))
        if dry_run:
            plans = [hop.as_dict() for hop in hops]
            print_json(plans) if as_json else click.echo("\n\n".join(map(staging_report, plans)))
            return
        for hop in hops[:-1]:
            _staged(reach, hop)
            hops[-1] = plan_staging(reach, describe(reach, hop.target, whole=True), place)
        staging = hops[-1]
        staged = _staged(reach, staging)
    value = staging.as_dict() | {"sha256": staged.sha256, "moved_bytes": staged.moved_bytes}
    if as_json:
        print_json(value)
    elif staged.moved_bytes or not staging.there:
        click.echo(
            f"{staged.spot}\nsha256 {staged.sha256}, {staged.moved_bytes} of {staged.nbytes} bytes moved"
        )
    else:
        click.echo(f"{staged.spot} is there already\nsha256 {staged.sha256}")


@click.command(epilog=EXIT_CODES)
@click.argument("plan", type=_FILE)
@json_option
def run(plan: Path, as_json: bool) -> None:
    """Measure what a plan file names: stage, check, evaluate there, compare here.

    Every step whose result is there is skipped, so the same command goes on
    after an interruption. A control or a gate that fails makes the exit code 4.

    \b
    Example:
      draftgauge run drafter.toml
    """
    from draftgauge.fleet.pipeline import Log, run_plan
    from draftgauge.fleet.plans import read_plan
    from draftgauge.fleet.reach import reaching

    read = read_plan(plan)
    with reaching(read.fleet) as reach:
        outcome = run_plan(reach, read, Log(_say, _meter))
    _show_outcome(read, outcome, as_json=as_json)
    failed = [f"control {slug}" for slug in outcome["failed"]]
    failed += [f"gate {gate['gate']!r}" for gate in outcome["gates"] if not gate["passed"]]
    if failed:
        raise IncompleteError(f"measured, but failed: {'; '.join(failed)}")


@click.command(epilog=EXIT_CODES)
@click.argument("plan", type=_FILE)
@click.option("--until", help="End at this step, as in step=20000.")
@click.option("--once", is_flag=True, help="Measure what is there and new, then end.")
@gate_option
@log_option
@json_option
def watch(
    plan: Path, until: str | None, once: bool, gates: tuple[str, ...], log_to: str | None, as_json: bool
) -> None:
    """Measure every new checkpoint of a training folder while training runs on.

    Each is measured as `run` would. The series survives restarts. Ends at
    --until, or as soon as every --gate passes for one checkpoint; where it
    ends and none passed, the exit code is 4.

    \b
    Example:
      draftgauge watch drafter.toml --until step=20000
    """
    from draftgauge.fleet.pipeline import Log
    from draftgauge.fleet.plans import read_plan
    from draftgauge.fleet.reach import reaching
    from draftgauge.fleet.watch import Until
    from draftgauge.fleet.watch import watch as watch_plan
    from draftgauge.gates import parse_gate
    from draftgauge.report.fleet import series_report
    from draftgauge.runs import open_run
    from draftgauge.trackers import require_tracker

    for gate in gates:
        parse_gate(gate)
    if log_to is not None:
        require_tracker(log_to)
    unlogged: list[Exception] = []
    read, ends = read_plan(plan), Until.parse(until, gates=gates, once=once)

    def told(row: dict[str, Any], outcome: dict[str, Any] | None) -> None:
        if outcome is not None:
            _keep(read, outcome)
            unlogged.extend(logged([open_run(Path(outcome["run"]))], log_to))
        print_json(row) if as_json else click.echo(series_report([row]) + "\n")

    with reaching(read.fleet) as reach:
        rows = watch_plan(reach, read, ends, lambda: Log(_say, _meter), on_row=told)
    if not as_json:
        click.echo(series_report(rows))
    if gates and not any(row["gates_passed"] for row in rows):
        raise IncompleteError(f"no checkpoint passed {', '.join(gates)}")
    if unlogged:
        raise IncompleteError(f"{len(unlogged)} run(s) were not logged to {log_to}, for the reasons above")


def _show_outcome(plan: Any, outcome: dict[str, Any], *, as_json: bool) -> None:
    report = _keep(plan, outcome)
    if as_json:
        print_json(outcome)
    else:
        click.echo(report)


def _keep(plan: Any, outcome: dict[str, Any]) -> str:
    """Writes the report of an outcome beside its run; returns its text."""
    from draftgauge.fleet.pipeline import keep_outcome
    from draftgauge.report.fleet import outcome_report
    from draftgauge.report.terminal import run_report
    from draftgauge.runs import open_run

    report = outcome_report(outcome, run_report(open_run(Path(outcome["run"]))))
    path = keep_outcome(plan, outcome, report)
    _say(f"kept in {path}")
    return report


def _staged(reach: Any, staging: Any) -> Any:
    from draftgauge.fleet.stage import stage as move

    with _meter(
        f"{staging.cargo.source.place.name} to {staging.target.place.name}", staging.cargo.nbytes
    ) as moved:
        return move(reach, staging, moved=moved)


@contextmanager
def _reaching(file: Path | None) -> Iterator[Any]:
    from draftgauge.fleet.places import read_fleet
    from draftgauge.fleet.reach import reaching

    with reaching(read_fleet(file)) as reach:
        yield reach


def _say(line: str) -> None:
    click.echo(line, err=True)


def _meter(label: str, total: int) -> Any:
    from draftgauge.progress import byte_bar

    return byte_bar(label, total)
