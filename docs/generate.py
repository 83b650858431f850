"""Write docs/cli.md, the help of every command, from the commands themselves.

`python docs/generate.py` (or `make docs`) writes it; with `--check` nothing is written and the exit code is 1
where the file is not current.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from draftgauge.cli import cli

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 80
HEAD = """# The commands

<!-- Written by docs/generate.py from the commands' own help: edit that, then run `make docs`. -->
"""


def commands(command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Every command below and including `command`, each in the context that it is called in."""
    name = command.name if parent else "draftgauge"
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    yield context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            yield from commands(command.commands[child], context)


def page() -> str:
    """The whole of docs/cli.md."""
    sections = [
        f"## {context.command_path}\n\n```text\n{context.get_help().rstrip()}\n```\n"
        for context in commands(cli)
    ]
    return "\n".join([HEAD, *sections])


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether docs/cli.md is current")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/cli.md is not what the commands say: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
