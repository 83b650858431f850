"""The commands that look at a checkpoint: inspect, eval, check, diagnose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import (
    CHECKPOINT,
    EXIT_CODES,
    FOLDER,
    bar,
    beside_option,
    counted,
    dtype_option,
    gate_option,
    json_option,
    listed,
    log_option,
    logged,
    print_json,
    print_run,
    runs_root,
    say_share_done,
    seed_option,
    share_option,
    wiring_options,
    workers_option,
)
from draftgauge.errors import IncompleteError, InputError


@click.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@wiring_options
@json_option
def inspect(checkpoint: str, stated: Any, state_dict: str | None, as_json: bool) -> None:
    """Open a drafter file and say what it holds and how it is wired.

    Never runs code from the file, never reads the optimizer, verifies the
    stored checksums. What the file does not say is asked for, not guessed.
    Exit code 0 says that `eval` would take it.

    \b
    Example:
      draftgauge inspect runs/step_4000/checkpoint.pt --wiring mine.toml
    """
    from draftgauge.inspection import inspect_checkpoint

    value = inspect_checkpoint(checkpoint, stated, state_dict=state_dict, progress=bar())
    if as_json:
        print_json(value)
    else:
        from draftgauge.report.terminal import checkpoint_report

        click.echo(checkpoint_report(value))
    if value["problems"]:
        raise InputError(f"{checkpoint} cannot be evaluated as it is: see the problems above")
    if value["wiring"] is None:
        raise InputError(f"{checkpoint} cannot be evaluated yet: its wiring is not known, see above")


@click.command("eval", epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--recording", type=FOLDER, help="The recording to replay against.")
@click.option(
    "--like", type=click.Path(path_type=Path), help="Measure exactly what this earlier run measured."
)
@listed("--budgets", default="4,8,16,32,64", show_default=True, help="DDTree budgets, up to 1024.")
@listed("--chain-lengths", default="", help="Also verify only the first n draft tokens.")
@listed("--coverage", default="", help="Coverage widths besides 4 and 8.")
@click.option(
    "--anchors",
    type=click.Choice(["all", "walk"]),
    default="all",
    show_default=True,
    help="Draft everywhere, or only where the policies' walks go.",
)
@counted("--num-prompts", help="Only the first so many prompts.")
@counted("--max-blocks", help="Only the first so many anchors of each completion.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "auto"]),
    default="float32",
    show_default=True,
    help="What to compute in; auto measures what is fastest here.",
)
@workers_option
@share_option
@click.option("--name", help="The run's name; made of checkpoint and plan if not given.")
@counted("--trainer-step", help="The step at which training is now, if it runs on.")
@gate_option
@beside_option
@log_option
@runs_root
@wiring_options
@json_option
def eval_(
    checkpoint: str,
    recording: Path | None,
    like: Path | None,
    stated: Any,
    budgets: tuple[int, ...],
    chain_lengths: tuple[int, ...],
    coverage: tuple[int, ...],
    root: Path,
    name: str | None,
    workers: str,
    share: tuple[int, int] | None,
    gates: tuple[str, ...],
    beside: Path | None,
    log_to: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Measure a drafter checkpoint against a recording.

    Reports chain, DDTree at every budget, coverage, per depth and per prompt,
    with intervals, controls and caveats, and keeps it all in a run directory.
    A control or a gate that fails makes the exit code 4. What was killed goes
    on where it stopped when the same command is given again.

    \b
    Examples:
      draftgauge eval step_4000 --recording recordings/1f2e3d4c5b6a7980
      draftgauge eval step_4000/checkpoint.pt --wiring mine.toml \\
          --recording recordings/1f2e3d4c5b6a7980 --block-size 16
      draftgauge eval step_6000 --like runs/step_4000-1a2b3c4d \\
          --gate "not worse than runs/step_4000-1a2b3c4d by 0.05"
    """
    from draftgauge.acceptance import Policy
    from draftgauge.evaluate import Options, evaluate_checkpoint, evaluate_share
    from draftgauge.gates import parse_gate, require_answerable
    from draftgauge.like import options_like
    from draftgauge.measure import ALWAYS
    from draftgauge.runs import open_run
    from draftgauge.trackers import require_tracker
    from draftgauge.workers import Workers

    crew = Workers.parse(workers)
    if share is not None and workers != "1":
        raise click.UsageError("--shard measures in this process; leave out --workers")
    policies = (
        Policy("chain"),
        *(Policy("chain", n) for n in chain_lengths),
        *(Policy("ddtree", n) for n in budgets),
        *(Policy("coverage", n) for n in coverage),
    )
    options = Options(stated=stated, policies=policies, **how)
    if like is not None:
        _require_only("--like", leave_out=_LIKE_DECIDES)
        recording, options = options_like(open_run(like), options, recording=recording)
    if recording is None:
        raise click.UsageError("state what to measure on: --recording FOLDER or --like RUN")
    for gate in gates:  # before the work, not after it
        require_answerable(parse_gate(gate), (*options.policies, *ALWAYS))
    if log_to is not None:
        require_tracker(log_to)
    where: Any = {"root": root, "name": name, "progress": bar()}
    if share is None:
        run = evaluate_checkpoint(checkpoint, recording, options, workers=crew, **where)
    elif (found := evaluate_share(checkpoint, recording, options, share=share, **where)) is not None:
        run = found
    else:
        say_share_done(share, as_json=as_json)
        return
    problems = logged([run], log_to)
    print_run(run, gates=gates, beside=beside, as_json=as_json)
    for problem in problems:
        raise type(problem)(f"measured, and not logged to {log_to}: see above")


#: What an earlier run decides, so that it cannot be stated beside it.
_LIKE_DECIDES = (
    *("budgets", "chain_lengths", "coverage", "anchors", "num_prompts", "max_blocks", "dtype"),
    "block_size",
)


def _require_only(option: str, *, leave_out: tuple[str, ...]) -> None:
    """Makes sure that nothing was stated which another option decides."""
    context = click.get_current_context()
    given = [
        n for n in leave_out if context.get_parameter_source(n) == click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{option} measures exactly what that run measured; leave out {names}")


@click.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--recording", required=True, type=FOLDER, help="The recording that it is measured on.")
@dtype_option
@seed_option
@wiring_options
@json_option
def check(
    checkpoint: str, recording: Path, stated: Any, state_dict: str | None, as_json: bool, **how: Any
) -> None:
    """Run every control: is a measurement of this pair to be trusted?

    Each control says what it expects, what it measured and its verdict. Where
    the target is at hand, a few prompts are extracted again; where the trainer
    wrote a probe, it is replayed. A failed control makes the exit code 4.

    \b
    Example:
      draftgauge check step_4000 --recording recordings/1f2e3d4c5b6a7980
    """
    from draftgauge.check import check_checkpoint
    from draftgauge.report.trust import check_report

    value = check_checkpoint(
        checkpoint, recording, stated=stated, state_dict=state_dict, progress=bar(), **how
    )
    if as_json:
        print_json(value)
    else:
        click.echo(check_report(value))
    if not value["trusted"]:
        raise IncompleteError(f"not trusted: {', '.join(value['failed'])} failed")


@click.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--recording", required=True, type=FOLDER, help="The recording that it is measured on.")
@click.option(
    "--write",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the better wiring here, for --wiring.",
)
@dtype_option
@seed_option
@wiring_options
@json_option
def diagnose(
    checkpoint: str,
    recording: Path,
    write: Path | None,
    stated: Any,
    state_dict: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Search the wirings nearby: is the drafter weak, or wired wrongly?

    Tries taps, RoPE, masks, windows, anchor row, mask token, ends, block size
    and more on the same anchors, drops what is clearly worse, combines what is
    better, and answers in words. Recordings made with --taps-around hold the
    layers that moved taps need.

    \b
    Example:
      draftgauge diagnose step_4000 --write fixed.toml \\
          --recording recordings/1f2e3d4c5b6a7980
    """
    from draftgauge.diagnose import diagnose_checkpoint, write_wiring
    from draftgauge.report.diagnosis import diagnosis_report

    if write is not None and write.exists():
        raise InputError(f"--write {write} exists already and is never overwritten; choose another name")
    value = diagnose_checkpoint(
        checkpoint, recording, stated=stated, state_dict=state_dict, progress=bar(), **how
    )
    if as_json:
        print_json(value)
    else:
        click.echo(diagnosis_report(value))
    if write is not None and value["settings"]:
        write_wiring(write, value["settings"], stated=stated)
        click.echo(f"wrote {write}", err=True)
    elif write is not None:
        click.echo(f"{write} was not written: there is nothing better to write", err=True)
