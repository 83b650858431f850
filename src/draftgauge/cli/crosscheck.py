"""The command that holds the replay beside other witnesses: crosscheck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import (
    CHECKPOINT,
    EXIT_CODES,
    FOLDER,
    bar,
    counted,
    dtype_option,
    json_option,
    listed,
    print_json,
    wiring_options,
)
from draftgauge.errors import IncompleteError


@click.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--recording", required=True, type=FOLDER, help="The recording to replay against.")
@click.option("--target", type=FOLDER, help="Also decode online, with the target in this directory.")
@click.option("--engine", metavar="URL", help="Also ask a server that runs target and drafter.")
@click.option("--model", help="The model's name, where the server has several.")
@click.option(
    "--log", type=click.Path(dir_okay=False, path_type=Path), help="Also read counts that somebody kept."
)
@click.option("--log-method", help="Which method, where the log holds several.")
@listed("--budgets", default="16", show_default=True, help="DDTree budgets to compare online.")
@counted("--num-prompts", help="Only the first so many prompts.")
@dtype_option
@wiring_options
@json_option
def crosscheck(
    checkpoint: str, recording: Path, stated: Any, budgets: tuple[int, ...], as_json: bool, **how: Any
) -> None:
    """Find out why a server accepts less than your metrics say.

    Holds the replay beside an online loop of our own, a running server and a
    log, each under its own convention and per depth, on the same prompts, and
    says where they part first: recording or wiring, references, engine,
    template or traffic, or the drafter itself. Near-ties are told apart by
    their logit gap. Exit code 4 where they part. A key for the server is read
    from DRAFTGAUGE_API_KEY.

    \b
    Examples:
      draftgauge crosscheck step_4000 --recording recordings/1f2e3d4c5b6a7980 \\
          --target SmolLM2
      draftgauge crosscheck step_4000 --recording recordings/1f2e3d4c5b6a7980 \\
          --engine http://localhost:30000 --log production.log
    """
    from draftgauge.acceptance import Policy
    from draftgauge.crosscheck import Question, crosscheck_checkpoint
    from draftgauge.report.crosscheck import crosscheck_report

    policies = (Policy("chain"), *(Policy("ddtree", budget) for budget in budgets))
    question = Question(stated=stated, policies=policies, **how)
    value = crosscheck_checkpoint(checkpoint, recording, question, progress=bar())
    if as_json:
        print_json(value)
    else:
        click.echo(crosscheck_report(value))
    where = value["first_difference"]["where"]
    if where not in (None, "drafter"):
        raise IncompleteError(f"the witnesses part, first in: {where}; see above")
