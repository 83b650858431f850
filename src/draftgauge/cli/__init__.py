"""The command line: parses, calls one function, prints, sets the exit code.

Results go to stdout, progress and errors to stderr. Heavy modules are imported inside the commands, so that
`--help` and listings start at once.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

import click

from draftgauge.cli.crosscheck import crosscheck
from draftgauge.cli.engines import references
from draftgauge.cli.fleet import fleet, run, stage, watch
from draftgauge.cli.making import export, record, train
from draftgauge.cli.measuring import check, diagnose, eval_, inspect
from draftgauge.cli.options import EXIT_CODES
from draftgauge.cli.reading import compare, formats, runs, show
from draftgauge.cli.recordings import recordings
from draftgauge.cli.reporting import report
from draftgauge.cli.sweeping import sweep
from draftgauge.cli.viewing import view
from draftgauge.errors import DraftgaugeError


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}, epilog=EXIT_CODES
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


_MAKING = (inspect, references, record, train, export)
_MEASURING = (eval_, sweep, check, diagnose, crosscheck)
_READING = (recordings, runs, show, compare, report, view, formats)
for _command in (*_MAKING, *_MEASURING, *_READING, fleet, stage, run, watch):
    cli.add_command(_command)


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
