"""The command line: parses, calls one function, prints, sets the exit code.

Results go to stdout, progress and errors to stderr. Heavy modules are imported inside the commands, so that
`--help` and listings start at once.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from draftgauge.errors import DraftgaugeError, IncompleteError, InputError, WiringError

_EXIT_CODES = """\b
Exit codes: 0 ok, 1 something given is wrong (the message says what), 2 wrong
usage, 3 an error of ours (a log is written), 4 measured, but incomplete or a
gate failed, 130 interrupted."""

_FOLDER = click.Path(file_okay=False, path_type=Path)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the data as JSON instead of text.")
_runs_root = click.option(
    "--runs", "root", type=_FOLDER, default=Path("runs"), show_default=True, help="Folder of the runs."
)
_recordings_root = click.option(
    "--recordings",
    "root",
    type=_FOLDER,
    default=Path("recordings"),
    show_default=True,
    help="Folder of the recordings.",
)


def _numbers(text: str, *, least: int = 1) -> tuple[int, ...]:
    """Whole numbers separated by commas, as in `4,8,16`; none for an empty text."""
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers like 4,8,16") from None
    if any(number < least for number in numbers):
        raise click.BadParameter(f"{text!r} holds a number below {least}")
    return numbers


def _taps(text: str) -> tuple[int, ...]:
    """Layer outputs counted from 0; -1 is the embedding."""
    return _numbers(text, least=-1)


def _count(text: str | int) -> int:
    """A whole number from 1 on; a default is one already."""
    try:
        (number,) = _numbers(str(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number") from None
    return number


_counted = functools.partial(click.option, type=_count, metavar="N")
_listed = functools.partial(click.option, type=_numbers, metavar="N,N,...")


def _wiring_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that state wiring fields; the command receives them as one `stated`."""

    @click.option(
        "--wiring",
        "wiring_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with wiring fields that the checkpoint does not say.",
    )
    @_listed("--taps", type=_taps, help="Target layers that the drafter reads, counted from 0.")
    @click.option("--mask-token-id", type=int, help="Token id of the mask rows.")
    @_counted("--block-size", help="Block size to use. If another was trained, the result carries a caveat.")
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
            wiring={} if wiring_file is None else _read_toml(wiring_file),
            source="command line" if wiring_file is None else f"--wiring {wiring_file.name}",
            options={name: value for name, value in options.items() if value is not None},
            block_size=block_size,
        )
        command(*args, stated=stated, **rest)

    return wrapped


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise WiringError(f"--wiring {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise WiringError(f"--wiring {path} is not TOML: {exc}") from exc


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}, epilog=_EXIT_CODES
)
@click.version_option(package_name="draftgauge")
def cli() -> None:
    """Measure what a speculative-decoding drafter really wins.

    Record a target once, replay any checkpoint against the recording; the
    acceptance equals online decoding, round for round.

    \b
    Example:
      draftgauge record --target TARGET --prompts builtin:coding10 \\
          --checkpoint step_4000
      draftgauge eval step_4000 --recording recordings/1f2e3d4c5b6a7980
      draftgauge compare runs/step_4000-1a2b3c4d runs/step_2000-5e6f7a8b
    """


@cli.command(epilog=_EXIT_CODES)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_wiring_options
@_as_json
def inspect(checkpoint: Path, stated: Any, state_dict: str | None, as_json: bool) -> None:
    """Open a drafter file and say what it holds and how it is wired.

    Never runs code from the file, never reads the optimizer, verifies the
    stored checksums. What the file does not say is asked for, not guessed.
    Exit code 0 says that `eval` would take it.

    \b
    Example:
      draftgauge inspect runs/step_4000/checkpoint.pt --wiring mine.toml
    """
    from draftgauge.inspection import inspect_checkpoint

    value = inspect_checkpoint(checkpoint, stated, state_dict=state_dict, progress=_bar())
    if as_json:
        _print_json(value)
    else:
        from draftgauge.report.terminal import checkpoint_report

        click.echo(checkpoint_report(value))
    if value["problems"]:
        raise InputError(f"{checkpoint} cannot be evaluated as it is: see the problems above")
    if value["wiring"] is None:
        raise InputError(f"{checkpoint} cannot be evaluated yet: its wiring is not known, see above")


@cli.command(epilog=_EXIT_CODES)
@click.option(
    "--target", required=True, type=click.Path(path_type=Path), help="Local Hugging Face directory."
)
@click.option("--prompts", "source", required=True, help="JSON-lines file, or builtin:coding10.")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="Record the taps that this drafter reads."
)
@_counted("--max-new-tokens", default=256, show_default=True, help="Longest completion.")
@click.option(
    "--template", default="chat", show_default=True, help="chat, chat-thinking, chat-no-thinking, raw."
)
@click.option("--dtype", help="Compute and storage dtype; the target's own if not given.")
@_counted("--num-prompts", help="Only the first so many prompts.")
@click.option("--portable", is_flag=True, help="Keep the target's head and embedding inside the recording.")
@_counted("--batch-size", default=16, show_default=True, help="Prompts generated at a time.")
@_recordings_root
@_wiring_options
@_as_json
def record(
    target: Path,
    source: str,
    checkpoint: Path | None,
    stated: Any,
    state_dict: str | None,
    root: Path,
    num_prompts: int | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Record what a target does on a set of prompts.

    Generates the target's greedy completions (or takes those that the file
    gives), and stores the taps and the final state of one pass over each.
    Repeat the same command to resume.

    \b
    Examples:
      draftgauge record --target SmolLM2 --prompts builtin:coding10 \\
          --taps 1,10,19,27
      draftgauge record --target SmolLM2 --prompts mine.jsonl \\
          --checkpoint step_4000 --max-new-tokens 512
    """
    from draftgauge.prompts import read_prompts
    from draftgauge.record import Request, record_target
    from draftgauge.report.terminal import recording_report

    taps = {**stated.wiring, **stated.options}.get("taps")
    if checkpoint is not None:
        from draftgauge.checkpoint import open_checkpoint
        from draftgauge.stated import wiring_of

        taps = wiring_of(open_checkpoint(checkpoint, state_dict=state_dict), stated).taps
    if taps is None:
        raise click.UsageError("state what to record: --checkpoint CHECKPOINT or --taps N,N,...")
    prompts = read_prompts(source).first(num_prompts)
    request = Request(taps=tuple(taps), **how)
    recording = record_target(target, prompts, request=request, root=root, progress=_bar())
    if as_json:
        manifest = json.loads((recording.path / "recording.json").read_text(encoding="utf-8"))
        _print_json({"path": str(recording.path), **manifest})
    else:
        click.echo(recording_report(recording))
    if recording.failed:
        asked = len(recording.failed) + len(recording.items)
        raise IncompleteError(
            f"{len(recording.failed)} of {asked} prompts could not be recorded, for the reasons above; mend them "
            "and record again, or evaluate with the others"
        )


@cli.command("eval", epilog=_EXIT_CODES)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--recording", required=True, type=_FOLDER, help="The recording to replay against.")
@_listed("--budgets", default="4,8,16,32,64", show_default=True, help="DDTree budgets, up to 1024.")
@_listed("--chain-lengths", default="", help="Also verify only the first n draft tokens.")
@_listed("--coverage", default="", help="Coverage widths besides 4 and 8.")
@click.option(
    "--anchors",
    type=click.Choice(["all", "walk"]),
    default="all",
    show_default=True,
    help="Draft everywhere, or only where the policies' walks go.",
)
@_counted("--num-prompts", help="Only the first so many prompts.")
@_counted("--max-blocks", help="Only the first so many anchors of each completion.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What to compute in.",
)
@click.option("--name", help="The run's name; made of checkpoint and plan if not given.")
@_runs_root
@_wiring_options
@_as_json
def eval_(
    checkpoint: Path,
    recording: Path,
    stated: Any,
    budgets: tuple[int, ...],
    chain_lengths: tuple[int, ...],
    coverage: tuple[int, ...],
    root: Path,
    name: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Measure a drafter checkpoint against a recording.

    Reports chain, DDTree at every budget, coverage, per depth and per prompt,
    with intervals and caveats, and keeps it all in a run directory.

    \b
    Examples:
      draftgauge eval step_4000 --recording recordings/1f2e3d4c5b6a7980
      draftgauge eval step_4000/checkpoint.pt --wiring mine.toml \\
          --recording recordings/1f2e3d4c5b6a7980 --block-size 16
      draftgauge eval step_4000 --recording recordings/1f2e3d4c5b6a7980 \\
          --num-prompts 3 --max-blocks 50 --budgets 16,256,1024
    """
    from draftgauge.acceptance import Policy
    from draftgauge.evaluate import Options, evaluate_checkpoint

    policies = (
        Policy("chain"),
        *(Policy("chain", n) for n in chain_lengths),
        *(Policy("ddtree", n) for n in budgets),
        *(Policy("coverage", n) for n in coverage),
    )
    options = Options(stated=stated, policies=policies, **how)
    run = evaluate_checkpoint(checkpoint, recording, options, root=root, name=name, progress=_bar())
    _print_run(run, as_json=as_json)


@cli.command(epilog=_EXIT_CODES)
@click.option("--recording", required=True, type=_FOLDER, help="The recording to train on.")
@click.option("--out", required=True, type=_FOLDER, help="Folder of this training run; repeat to resume.")
@_counted("--steps", required=True, help="Steps in all.")
@_listed("--save-steps", default="", help="Steps to save at, besides the last.")
@_counted("--layers", "num_layers", default=2, show_default=True, help="Draft layers.")
@_counted("--block-size", default=8, show_default=True, help="Rows of a block.")
@click.option("--mask-token-id", type=int, required=True, help="Token id of the mask rows.")
@_counted("--sequences", default=4, show_default=True, help="Sequences per step.")
@_counted("--anchors", "anchors_per_sequence", default=16, show_default=True, help="Anchors per sequence.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="At the cosine's top.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
@click.option("--autocast", is_flag=True, help="Compute in bfloat16, keep weights in float32.")
@_as_json
def train(
    recording: Path, out: Path, steps: int, save_steps: tuple[int, ...], as_json: bool, **how: Any
) -> None:
    """Train a DFlash drafter on a recording.

    A compact reference trainer. Checkpoints are OUT/step_N/checkpoint.pt, the
    log is OUT/train.jsonl. Repeat the same command to resume.

    \b
    Example:
      draftgauge train --recording recordings/1f2e3d4c5b6a7980 \\
          --out training --steps 4000 --save-steps 400 --mask-token-id 3
    """
    from draftgauge.recording import open_recording
    from draftgauge.train import TrainPlan, train

    plan = TrainPlan(steps=steps, save_steps=save_steps, **how)
    last = train(open_recording(recording), plan, out=out, progress=_bar())
    if as_json:
        _print_json({"checkpoint": str(last), "steps": steps, "log": str(out / "train.jsonl")})
    else:
        click.echo(f"trained {steps} steps; last checkpoint {last}")


@cli.command(epilog=_EXIT_CODES)
@_recordings_root
@_as_json
def recordings(root: Path, as_json: bool) -> None:
    """List the complete recordings of a folder.

    \b
    Example:
      draftgauge recordings --recordings recordings
    """
    from draftgauge.recording import list_recordings
    from draftgauge.report.terminal import recording_list

    found = list_recordings(root)
    if as_json:
        _print_json([{"path": str(r.path), "prompts": [i.id for i in r.items]} for r in found])
    else:
        click.echo(recording_list(found))


@cli.command(epilog=_EXIT_CODES)
@_runs_root
@_as_json
def runs(root: Path, as_json: bool) -> None:
    """List the complete runs of a folder, oldest first.

    \b
    Example:
      draftgauge runs --json | jq '.[].name'
    """
    from draftgauge.report.terminal import run_list
    from draftgauge.runs import list_runs

    found = list_runs(root)
    if as_json:
        _print_json([{"name": r.name, "path": str(r.path), "plan": r.manifest["plan"]} for r in found])
    else:
        click.echo(run_list(found))


@cli.command(epilog=_EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@_as_json
def show(run: Path, as_json: bool) -> None:
    """Show a run again.

    \b
    Example:
      draftgauge show runs/step_4000-1a2b3c4d
    """
    from draftgauge.runs import open_run

    _print_run(open_run(run), as_json=as_json)


@cli.command(epilog=_EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("baseline", type=click.Path(path_type=Path))
@_as_json
def compare(run: Path, baseline: Path, as_json: bool) -> None:
    """Compare a run with a baseline, paired by prompt.

    Refuses runs whose numbers do not mean the same, and says why.

    \b
    Example:
      draftgauge compare runs/step_4000-1a2b3c4d runs/step_2000-5e6f7a8b
    """
    from draftgauge.compare import compare_runs
    from draftgauge.report.terminal import comparison_report
    from draftgauge.runs import open_run

    value = compare_runs(open_run(run), open_run(baseline))
    if as_json:
        _print_json(value)
    else:
        click.echo(comparison_report(value))


def _print_run(run: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json({"run": run.manifest, "summary": run.summary, "path": str(run.path)})
        return
    from draftgauge.report.terminal import run_report

    click.echo(run_report(run))
    click.echo(f"\nkept in {run.path}")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def _bar() -> Any:
    from draftgauge.progress import bar

    return bar


def main() -> None:
    """The entry point: maps every error to its exit code."""
    message = None
    try:
        code = cli.main(prog_name="draftgauge", standalone_mode=False) or 0
    except click.ClickException as exc:
        exc.show()
        code = exc.exit_code
    except DraftgaugeError as exc:
        code, message = exc.exit_code, f"error: {exc}"
    except (KeyboardInterrupt, click.Abort):
        code, message = 130, "interrupted"
    except Exception as exc:  # everything else is ours: keep what is needed to mend it
        code, message = 3, f"internal error ({type(exc).__name__}), please report it with {_write_log()}"
    if message is not None:
        click.echo(message, err=True)  # not earlier: progress bars close when the error is let go
    sys.exit(code)


def _write_log() -> str:
    """Writes versions, arguments and the traceback; returns where, or the text where it cannot be written."""
    packages = ("draftgauge", "torch", "transformers", "numpy", "numba")
    text = (
        f"argv: {sys.argv}\npython: {platform.python_version()} on {platform.platform()}\n"
        f"versions: { ({name: _version_of(name) for name in packages}) }\n\n{traceback.format_exc()}"
    )
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "draftgauge"
    path = state / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        state.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return f"this:\n{text}"
    return f"the log {path}"


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
