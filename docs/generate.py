"""Write docs/cli.md, the help of every command, and the table in docs/formats.md, from the program itself.

`python docs/generate.py` (or `make docs`) writes them; with `--check` nothing is written and the exit code is 1
where one is not current.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from draftgauge.cli import cli
from draftgauge.formats import formats
from draftgauge.report.formats import formats_markdown

HERE = Path(__file__).parent
BEGIN, END = "<!-- Written by docs/generate.py: run `make docs`. -->\n", "<!-- End of what is written. -->\n"
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


def commands_page() -> str:
    """The whole of docs/cli.md."""
    sections = [
        f"## {context.command_path}\n\n```text\n{context.get_help().rstrip()}\n```\n"
        for context in commands(cli)
    ]
    return "\n".join([HEAD, *sections])


def formats_page() -> str:
    """docs/formats.md with its table renewed; the rest of it is written by hand."""
    before, _, rest = (HERE / "formats.md").read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{formats_markdown(vars(row) for row in formats())}\n\n{END}{after}"


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are current")
    pages = {HERE / "cli.md": commands_page(), HERE / "formats.md": formats_page()}
    stale = [p for p, text in pages.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    if not parser.parse_args().check:
        for page in stale:
            page.write_text(pages[page], encoding="utf-8")
        return 0
    for page in stale:
        print(f"docs/{page.name} is not what the program says: run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
