"""The commands about recordings: list them, import, pick and fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import (
    CHECKPOINT,
    EXIT_CODES,
    FOLDER,
    bar,
    counted,
    json_option,
    layers,
    print_json,
    recordings_root,
    say_left_out,
    wiring_options,
)
from draftgauge.errors import IncompleteError

_TARGET = click.option(
    "--target", required=True, type=click.Path(path_type=Path), help="Local Hugging Face directory."
)


@click.group(epilog=EXIT_CODES, invoke_without_command=True)
@recordings_root
@json_option
@click.pass_context
def recordings(context: click.Context, root: Path, as_json: bool) -> None:
    """List the complete recordings of a folder; import, pick or complete one.

    \b
    Examples:
      draftgauge recordings --recordings recordings
      draftgauge recordings pick --for step_4000 recordings harness/cached
    """
    if context.invoked_subcommand is not None:
        return
    from draftgauge.recording import Recording, found_recordings
    from draftgauge.report.terminal import recording_list

    found = found_recordings(root)
    if as_json:
        print_json([_listed(root / name, recording) for name, recording in found.items()])
    else:
        click.echo(recording_list([r for r in found.values() if isinstance(r, Recording)]))
    say_left_out(found)


def _listed(path: Path, recording: Any) -> dict[str, Any]:
    """A recording in the list, as data; `reason` says why one cannot be read, and is null for all others."""
    unreadable = isinstance(recording, str)
    return {
        "path": str(path),
        "prompts": None if unreadable else [item.id for item in recording.items],
        "reason": recording if unreadable else None,
    }


def _said(values: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """What `--layers TENSOR=N,N` says, by tensor."""
    said = {}
    for value in values:
        name, equals, numbers = value.partition("=")
        if not equals or not numbers:
            raise click.BadParameter(f"{value!r} is not TENSOR=N,N,... as in aux_hidden=1,16,31,46")
        said[name] = layers(numbers)
    return said


@recordings.command("import", epilog=EXIT_CODES)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@_TARGET
@click.option("--checkpoint", type=CHECKPOINT, help="Import the taps that this drafter reads.")
@click.option("--prompts", help="JSON-lines file, or builtin:coding10: what the features are of.")
@click.option(
    "--layers",
    "said",
    multiple=True,
    metavar="TENSOR=N,N",
    help="Which layers the states in a stored tensor are, side by side.",
)
@click.option("--template", help="chat, chat-thinking, chat-no-thinking, raw; measured if not given.")
@click.option("--portable", is_flag=True, help="Keep the target's head and embedding inside the recording.")
@recordings_root
@wiring_options
@json_option
def import_(
    source: Path,
    target: Path,
    checkpoint: str | None,
    prompts: str | None,
    said: tuple[str, ...],
    stated: Any,
    state_dict: str | None,
    root: Path,
    as_json: bool,
    **how: Any,
) -> None:
    """Make a recording of features that another project stored.

    Reads SpecForge's .ckpt and .ckpt.gz, hs_*.safetensors of vLLM and
    speculators, DeepSpec's caches, Model-Optimizer's .pt, and loose .pt or
    .safetensors of named tensors. The target is not loaded: of its weights
    only embedding, head and final norm are read, which the stored last state
    must give the references through. Layers count from 0.

    \b
    Examples:
      draftgauge recordings import rows --target Qwen3-8B \\
          --checkpoint step_4000
      draftgauge recordings import cached --target Qwen3-27B \\
          --taps 1,16,31,46,63 --prompts prompts.jsonl \\
          --layers aux_hidden=1,16,31,46 --layers last_hidden=63
    """
    from draftgauge.importing import ImportRequest, import_features
    from draftgauge.prompts import read_prompts

    taps = _taps(checkpoint, stated, state_dict=state_dict)
    request = ImportRequest(taps=taps, layers=_said(said), **how)
    asked = None if prompts is None else read_prompts(prompts)
    recording = import_features(source, target, prompts=asked, request=request, root=root, progress=bar())
    _show(recording, as_json=as_json)
    named = set() if asked is None else {prompt.id for prompt in asked.prompts}
    failed = [name for name in recording.failed if name.partition("/")[0] not in named and name not in named]
    if failed:
        raise IncompleteError(f"{len(failed)} file(s) could not be imported, for the reasons above")


def _taps(checkpoint: str | None, stated: Any, *, state_dict: str | None) -> tuple[int, ...]:
    if checkpoint is not None:
        from draftgauge.checkpoint import open_checkpoint
        from draftgauge.stated import wiring_of

        return wiring_of(open_checkpoint(checkpoint, state_dict=state_dict), stated).taps
    taps = {**stated.wiring, **stated.options}.get("taps")
    if taps is None:
        raise click.UsageError("state which taps: --checkpoint CHECKPOINT or --taps N,N,...")
    return tuple(taps)


def _show(recording: Any, *, as_json: bool) -> None:
    from draftgauge.report.terminal import recording_report

    if as_json:
        manifest = json.loads((recording.path / "recording.json").read_text(encoding="utf-8"))
        print_json({"path": str(recording.path), **manifest})
    else:
        click.echo(recording_report(recording))


@recordings.command(epilog=EXIT_CODES)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--for", "checkpoint", required=True, type=CHECKPOINT, help="The drafter to measure.")
@click.option(
    "--target", type=click.Path(path_type=Path), help="Compare the age of features with its weights'."
)
@wiring_options
@json_option
def pick(
    folders: tuple[Path, ...],
    checkpoint: str,
    target: Path | None,
    stated: Any,
    state_dict: str | None,
    as_json: bool,
) -> None:
    """Say which of several folders a drafter can be measured on.

    For each: whether it fits, what it lacks, how many prompts it covers, its
    age against the target's; then which to take, and why. Exit code 1 where
    none fits.

    \b
    Example:
      draftgauge recordings pick --for step_4000 recordings harness/cached
    """
    from draftgauge.errors import RecordingError
    from draftgauge.picking import pick_recording
    from draftgauge.report.recordings import pick_report

    value = pick_recording(checkpoint, folders, stated, state_dict=state_dict, target=target)
    if as_json:
        print_json(value)
    else:
        click.echo(pick_report(value))
    if value["take"] is None:
        raise RecordingError(
            f"{value['why']}, for the reasons above; record the target with `draftgauge record --checkpoint "
            f"{checkpoint}`"
        )


@recordings.command(epilog=EXIT_CODES)
@click.argument("recording", type=FOLDER)
@_TARGET
@click.option("--prompts", required=True, help="JSON-lines file, or builtin:coding10: the whole set.")
@counted("--max-new-tokens", default=256, show_default=True, help="Longest completion of those added.")
@counted("--batch-size", default=16, show_default=True, help="Prompts generated at a time.")
@recordings_root
@json_option
def fill(recording: Path, target: Path, prompts: str, root: Path, as_json: bool, **how: Any) -> None:
    """Complete a recording with the prompts that it lacks.

    Keeps the items that are there, records the others with the target, and
    makes a new recording of both; the old one stays as it is.

    \b
    Example:
      draftgauge recordings fill recordings/1f2e3d4c5b6a7980 \\
          --target SmolLM2 --prompts builtin:coding10
    """
    from draftgauge.prompts import read_prompts
    from draftgauge.record import fill_recording

    made = fill_recording(recording, target, prompts=read_prompts(prompts), root=root, progress=bar(), **how)
    _show(made, as_json=as_json)
    if made.failed:
        raise IncompleteError(f"{len(made.failed)} prompt(s) could not be recorded, for the reasons above")
