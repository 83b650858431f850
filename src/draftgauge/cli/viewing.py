"""The command that shows what is kept in a browser: view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import EXIT_CODES, FOLDER, json_option, print_json


@click.command(epilog=EXIT_CODES)
@click.argument("folder", metavar="[DIR]", type=FOLDER, default=Path())
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: a free one.")
@click.option("--token", is_flag=True, help="Ask for a token on loopback too: others use this machine.")
@json_option
def view(folder: Path, host: str, port: int, token: bool, as_json: bool) -> None:
    """Show the runs, recordings and series of a folder in a browser.

    Prints the address and serves until Ctrl-C. Nothing is written, and
    nothing outside the folder is read. Beyond loopback the address carries a
    token, without which nobody is answered.

    \b
    Examples:
      draftgauge view
      draftgauge view demo-output --port 8765
    """
    from draftgauge.viewer.library import Library
    from draftgauge.viewer.serving import bind, serve

    library = Library(folder)
    bound = bind(host, port, token=token)

    def ready(_: Any) -> None:
        if as_json:
            print_json({"url": bound.url, "folder": str(library.root)})
        else:
            click.echo(f"{library.root} at {bound.url}\nstop with Ctrl-C")

    serve(bound, library, report=_report, ready=ready)


def _report(*args: Any, **options: Any) -> str:
    """The report of runs; loaded at the first, since lists need nothing of it."""
    from draftgauge.report.page import page

    return page(*args, **options)
