"""Starting the command line, against starting Python: every command's help, and the commands that only read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.records import Record, found, python_seconds

CLI = ("-m", "draftgauge")


def commands() -> Iterator[tuple[str, ...]]:
    """The words that call every command, a group's own with its two names."""
    import click

    from draftgauge.cli import cli

    for name, command in cli.commands.items():
        yield (name,)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.commands)


def bench_start(rounds: int = 5) -> Iterator[Record]:
    """The three ratios: the program's own help, the slowest command's, and the slowest that reads."""
    python = python_seconds("-c", "pass", rounds=2 * rounds)
    own = python_seconds(*CLI, "--help", rounds=2 * rounds)
    yield found("help", own / python, help_s=own, python_s=python)
    helps = {" ".join(words): python_seconds(*CLI, *words, "--help", rounds=rounds) for words in commands()}
    yield _slowest("start-help", helps, python)
    with tempfile.TemporaryDirectory() as folder:
        reads = {
            words[0]: python_seconds(*CLI, *words, cwd=Path(folder), rounds=rounds)
            for words in _reading(Path(folder))
        }
    yield _slowest("start-read", reads, python)


def _reading(folder: Path) -> list[tuple[str, ...]]:
    """The commands that do not compute, called with something tiny in a folder."""
    from draftgauge.evaluate import Options, evaluate_checkpoint
    from tests import tiny

    checkpoint = tiny.drafter_dir(folder / "drafter")
    options = Options(num_prompts=1)
    run = evaluate_checkpoint(checkpoint, tiny.recording().path, options, root=folder / "runs")
    return [("runs",), ("show", f"runs/{run.name}"), ("formats",), ("inspect", "drafter")]


def _slowest(name: str, seconds: Mapping[str, float], python: float) -> Record:
    slowest = max(seconds, key=lambda command: seconds[command])
    return found(name, seconds[slowest] / python, slowest=slowest, seconds=dict(seconds), python_s=python)
