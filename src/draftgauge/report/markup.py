"""How values become GitHub's Markdown that also reads well as plain text of 80 columns.

Text that comes from prompts, paths and models is never trusted: it stands in code spans, or escaped. Knows nothing
of what the values mean.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from draftgauge.report.text import WIDTH, visible

#: What a name or a sentence may have of a hostile length.
_LONGEST_NAME, _LONGEST_TEXT = 160, 2000
#: What makes a block of Markdown at the beginning of a line.
_BLOCK_START = re.compile(
    r"^(?:[-+*](?=\s|$)|(?=[-=*_])[-=*_\s]+$|#{1,6}(?=\s|$)|[<>]|~~~|\d{1,9}(?=[.)](?:\s|$)))"
)
#: What means something inside a line; `_` inside a word does not.
_INLINE = re.compile(r"[\\`*\[\]|~]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def code(text: str, *, longest: int = _LONGEST_NAME) -> str:
    """A name from outside as a code span, in which nothing of it is markup.

    A bare bar in it is escaped, since it would end a table's cell even there.
    """
    plain = _one_line(text, longest=longest)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if not plain.strip("` ") or plain[0] in "` " or plain[-1] in "` " else ""
    if len(fence) > 2:  # where a line is broken in it, its fence could begin a block
        plain = plain.replace(" ", "\N{NO-BREAK SPACE}")
    return f"{fence}{pad}{plain}{pad}{fence}".replace("|", "\\|")


def escaped(text: str) -> str:
    """A sentence that may hold text from outside, as text: no markup, no tag, no mention."""
    plain = _one_line(text, longest=_LONGEST_TEXT)
    plain = _INLINE.sub(lambda found: "\\" + found[0], plain)
    plain = re.sub("[&<>]", lambda found: _ENTITIES[found[0]], plain)
    # A zero-width space: GitHub notifies whom a rendered text mentions, whatever is escaped.
    return re.sub(r"(?<!\w)@(?=\w)", "@\N{ZERO WIDTH SPACE}", plain)


def paragraph(text: str, *, first: str = "", indent: str = "") -> str:
    """Escaped text in lines of 80 characters, of which none begins a list, a heading or a rule.

    `first` begins the first line, as `- ` does an item of a list, and `indent` all others.
    """
    lines = textwrap.wrap(text, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
    lines = [_BLOCK_START.sub(_guarded, line) for line in lines]
    return "\n".join([first + lines[0], *(indent + line for line in lines[1:])])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already: the first column to the left, the others to the right.

    Cells are padded, so that it is one as plain text too.
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        aligned = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def details(title: str, body: str) -> str:
    """A part that is folded away until somebody opens it; `title` is ours, `body` is Markdown."""
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>"


def _guarded(found: re.Match[str]) -> str:
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"


def _one_line(text: str, *, longest: int) -> str:
    return " ".join(visible(text if len(text) <= longest else text[: longest - 1] + "…").split())
