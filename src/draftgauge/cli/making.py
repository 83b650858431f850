"""The commands that make what is measured or served: record, train, export."""

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
    listed,
    print_json,
    recordings_root,
    wiring_options,
)
from draftgauge.errors import IncompleteError


@click.command(epilog=EXIT_CODES)
@click.option(
    "--target", required=True, type=click.Path(path_type=Path), help="Local Hugging Face directory."
)
@click.option("--prompts", "source", required=True, help="JSON-lines file, or builtin:coding10.")
@click.option("--checkpoint", type=CHECKPOINT, help="Record the taps that this drafter reads.")
@counted("--max-new-tokens", default=256, show_default=True, help="Longest completion.")
@click.option(
    "--template", default="chat", show_default=True, help="chat, chat-thinking, chat-no-thinking, raw."
)
@click.option("--dtype", help="Compute and storage dtype; the target's own if not given.")
@counted("--num-prompts", help="Only the first so many prompts.")
@click.option(
    "--taps-around", is_flag=True, help="Also keep the layers beside each tap, on the first prompts."
)
@click.option("--portable", is_flag=True, help="Keep the target's head and embedding inside the recording.")
@counted("--batch-size", default=16, show_default=True, help="Prompts generated at a time.")
@recordings_root
@wiring_options
@json_option
def record(
    target: Path,
    source: str,
    checkpoint: str | None,
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
    recording = record_target(target, prompts, request=request, root=root, progress=bar())
    if as_json:
        manifest = json.loads((recording.path / "recording.json").read_text(encoding="utf-8"))
        print_json({"path": str(recording.path), **manifest})
    else:
        click.echo(recording_report(recording))
    if recording.failed:
        asked = len(recording.failed) + len(recording.items)
        raise IncompleteError(
            f"{len(recording.failed)} of {asked} prompts could not be recorded, for the reasons above; mend them "
            "and record again, or evaluate with the others"
        )


@click.command(epilog=EXIT_CODES)
@click.option("--recording", required=True, type=FOLDER, help="The recording to train on.")
@click.option("--out", required=True, type=FOLDER, help="Folder of this training run; repeat to resume.")
@counted("--steps", required=True, help="Steps in all.")
@listed("--save-steps", default="", help="Steps to save at, besides the last.")
@counted("--layers", "num_layers", default=2, show_default=True, help="Draft layers.")
@counted("--block-size", default=8, show_default=True, help="Rows of a block.")
@click.option("--mask-token-id", type=int, required=True, help="Token id of the mask rows.")
@counted("--sequences", default=4, show_default=True, help="Sequences per step.")
@counted("--anchors", "anchors_per_sequence", default=16, show_default=True, help="Anchors per sequence.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="At the cosine's top.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of every random choice.")
@click.option("--autocast", is_flag=True, help="Compute in bfloat16, keep weights in float32.")
@json_option
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
    last = train(open_recording(recording), plan, out=out, progress=bar())
    if as_json:
        print_json({"checkpoint": str(last), "steps": steps, "log": str(out / "train.jsonl")})
    else:
        click.echo(f"trained {steps} steps; last checkpoint {last}")


@click.command(epilog=EXIT_CODES)
@click.argument("checkpoint", type=CHECKPOINT)
@click.argument("out", type=FOLDER)
@click.option(
    "--to", required=True, type=click.Choice(["zlab", "speculators", "sglang"]), help="Whose format to write."
)
@click.option(
    "--target", default="TARGET", show_default=True, help="What to call the target in the command lines."
)
@wiring_options
@json_option
def export(checkpoint: str, out: Path, stated: Any, as_json: bool, **how: Any) -> None:
    """Write a drafter as SGLang, vLLM or z-lab's code reads it.

    Prints the command lines that serve it. Refuses where the format has no
    word for a field of the wiring, so that serving would compute another
    function, and names the field.

    \b
    Example:
      draftgauge export runs/step_4000/checkpoint.pt served --to zlab \\
          --target Qwen/Qwen3-8B
    """
    from draftgauge.exporting import export_checkpoint
    from draftgauge.report.terminal import export_report

    value = export_checkpoint(checkpoint, out, stated=stated, progress=bar(), **how)
    if as_json:
        print_json(value)
    else:
        click.echo(export_report(value))
