"""Options that several commands share, and how results are printed.

Knows nothing of what the commands do.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from draftgauge.errors import DraftgaugeError, IncompleteError, InputError, UnfinishedError, WiringError

EXIT_CODES = """\b
Exit codes: 0 ok, 1 something given is wrong (the message says what), 2 wrong
usage, 3 an error of ours (a log is written), 4 measured, but incomplete or a
gate failed, 5 a machine or connection stopped it: the same command goes on,
130 interrupted."""

#: A drafter: a path, or an address as `hf://owner/repo@revision`, which is fetched.
CHECKPOINT = click.Path(path_type=str)
FOLDER = click.Path(file_okay=False, path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the data as JSON instead of text.")
runs_root = click.option(
    "--runs", "root", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of the runs."
)
recordings_root = click.option(
    "--recordings",
    "root",
    type=FOLDER,
    default=Path("recordings"),
    show_default=True,
    help="Folder of the recordings.",
)


def whole_numbers(text: str, *, least: int = 1) -> tuple[int, ...]:
    """Whole numbers separated by commas, as in `4,8,16`; none for an empty text."""
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers like 4,8,16") from None
    if any(number < least for number in numbers):
        raise click.BadParameter(f"{text!r} holds a number below {least}")
    return numbers


def layers(text: str) -> tuple[int, ...]:
    """Layer outputs counted from 0; -1 is the embedding."""
    return whole_numbers(text, least=-1)


def count(text: str | int) -> int:
    """A whole number from 1 on; a default is one already."""
    try:
        (number,) = whole_numbers(str(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number") from None
    return number


counted = functools.partial(click.option, type=count, metavar="N")
listed = functools.partial(click.option, type=whole_numbers, metavar="N,N,...")


dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What to compute in.",
)
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of anchors.")
gate_option = click.option(
    "--gate",
    "gates",
    multiple=True,
    help='Exit with 4 unless this holds: "tau>=2.0", "not worse than RUN by 0.05".',
)
beside_option = click.option(
    "--beside",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON of stored numbers from elsewhere, shown beside the run.",
)

log_option = click.option(
    "--log-to",
    type=click.Choice(["tensorboard", "wandb", "mlflow", "trackio"]),
    help="Also log to this tracker, at the checkpoint's step.",
)


def _share(text: str) -> tuple[int, int]:
    """`2/8`: the second of eight."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal()):
        raise click.BadParameter(f"{text!r} is not a share like 2/8")
    return int(number), int(of)


workers_option = click.option(
    "--workers",
    default="1",
    show_default=True,
    metavar="N|ray",
    help="Measure in so many processes, or on a Ray cluster.",
)
share_option = click.option(
    "--shard",
    "share",
    type=_share,
    metavar="I/N",
    help="Measure only the I-th of N shares, as a job of an array; the last one puts the run together.",
)


def wiring_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that state wiring fields; the command receives them as one `stated`."""

    @click.option(
        "--wiring",
        "wiring_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with wiring fields that the checkpoint does not say.",
    )
    @listed("--taps", type=layers, help="Target layers that the drafter reads, counted from 0.")
    @click.option("--mask-token-id", type=int, help="Token id of the mask rows.")
    @counted("--block-size", help="Block size to use. If another was trained, the result carries a caveat.")
    @click.option("--state-dict", help="Which weights in a .pt that holds several, by dotted path.")
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        wiring_file: Path | None,
        taps: tuple[int, ...] | None,
        mask_token_id: int | None,
        block_size: int | None,
        **rest: Any,
    ) -> None:
        from draftgauge.stated import Stated

        options = {"taps": taps, "mask_token_id": mask_token_id}
        stated = Stated(
            wiring={} if wiring_file is None else read_toml(wiring_file),
            source="command line" if wiring_file is None else f"--wiring {wiring_file.name}",
            options={name: value for name, value in options.items() if value is not None},
            block_size=block_size,
        )
        command(*args, stated=stated, **rest)

    return wrapped


def read_toml(path: Path) -> dict[str, Any]:
    """The fields of a `--wiring` file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise WiringError(f"--wiring {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise WiringError(f"--wiring {path} is not TOML: {exc}") from exc


def print_run(run: Any, *, gates: Sequence[str], beside: Path | None, as_json: bool) -> None:
    """A run, as text or as data, with its gates and what is shown beside it; then stops where it must not be used.

    Raises:
        IncompleteError: A control or a gate failed.
    """
    from draftgauge.beside import beside as placed
    from draftgauge.beside import read_stored
    from draftgauge.gates import judge, parse_gate
    from draftgauge.kept import checkpoint_caveat
    from draftgauge.report.comparison import stored_report
    from draftgauge.report.terminal import caveat_lines, run_report

    judged = [judge(parse_gate(gate), run) for gate in gates]
    stored = None if beside is None else placed(run, read_stored(beside), path=beside)
    changed = checkpoint_caveat(run)
    if as_json:
        value = {"run": run.manifest, "summary": run.summary, "path": str(run.path)}
        value |= {"gates": [judgement.as_dict() for judgement in judged], "beside": stored}
        print_json(value | {"checkpoint_changed": None if changed is None else changed.as_dict()})
    else:
        click.echo(run_report(run))
        parts = [] if changed is None else [caveat_lines([changed.as_dict()])]
        parts += [] if stored is None else [stored_report(stored)]
        parts += [f"gate {j.verdict}: {j.gate}: {j.text}" for j in judged]
        for part in parts:
            click.echo(f"\n{part}")
        click.echo(f"\nkept in {run.path}")
    failed = [f"control {slug}" for slug in run.failed_controls]
    failed += [f"gate {judgement.gate!r} ({judgement.text})" for judgement in judged if not judgement.passed]
    if run.manifest["status"] != "complete":
        failed.append(f"{len(run.manifest['lost'])} prompt(s) were lost with their workers")
    if failed:
        raise IncompleteError(f"measured, but failed: {'; '.join(failed)}")


def say_share_done(share: tuple[int, int], *, as_json: bool) -> None:
    """Says that a share is measured and that there is no run yet."""
    number, of = share
    if as_json:
        print_json({"run": None, "share": number, "of": of})
    else:
        click.echo(f"share {number}/{of} is measured; the run is put together when the others are")


def print_json(value: Any) -> None:
    """Data on stdout."""
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def logged(runs: Sequence[Any], log_to: str | None) -> list[DraftgaugeError]:
    """Logs runs to a tracker, if one is named, by step; returns, and says on stderr, why some could not be."""
    if log_to is None:
        return []
    from draftgauge.trackers import log_run, require_tracker

    problems: list[DraftgaugeError] = []
    tracker = require_tracker(log_to)
    for run in sorted(runs, key=lambda run: run.manifest["checkpoint"]["step"] or 0):
        try:
            log_run(run, tracker)
        except (InputError, UnfinishedError) as exc:
            problems.append(exc)
            click.echo(f"! not logged to {log_to}: {exc}", err=True)
    return problems


def say_left_out(found: Mapping[str, Any]) -> None:
    """Names on stderr what a list leaves out because it cannot be read, with the reason."""
    for name, reason in found.items():
        if isinstance(reason, str):
            click.echo(f"! {name} is left out: {reason}", err=True)


def bar() -> Any:
    """What shows progress on stderr; loaded only by commands that work."""
    from draftgauge.progress import bar

    return bar
