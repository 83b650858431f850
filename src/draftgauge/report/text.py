"""How values become text: tables, wrapped lines, rounded numbers. The one place where anything is rounded.

Readable at 80 columns, without colour, in a log. Knows nothing of what the values mean.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 80
ABSENT = "-"
GAP = "  "


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under a rule, the first to the left and the others to the right, in 80 characters a line.

    A heading may have two lines. A first cell that is too long stands on lines of its own.
    """
    rows = [(visible(first), *others) for first, *others in rows]
    headings = [heading.split("\n") for heading in head]
    height = max(map(len, headings))
    top = [[""] * (height - len(lines)) + lines for lines in headings]
    cells = [*rows, *([lines[i] for lines in top] for i in range(height))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - len(GAP) * (len(head) - 1))

    def line(row: Sequence[str]) -> str:
        aligned = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return GAP.join(aligned).rstrip()

    lines = [line([column[i] for column in top]) for i in range(height)]
    lines.append("-" * (sum(widths) + len(GAP) * (len(head) - 1)))
    for row in rows:
        fits = len(row[0]) <= widths[0]
        lines += [line(row)] if fits else [*textwrap.wrap(row[0], WIDTH), line(("", *row[1:]))]
    return "\n".join(lines)


def wrap(text: str, *, indent: str = "") -> str:
    """The text in lines of 80 characters; a path that is longer stays whole, to be copied."""
    return "\n".join(
        textwrap.fill(
            visible(line), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    )


def visible(text: str) -> str:
    """The text in one line in which every character shows.

    What acts unseen, as marks of direction do, is spelled out: U+202E becomes a backslash and `u202e`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_spelled, re.sub(r"[^\S ]+", " ", text)))


def _spelled(character: str) -> str:
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn")
    return f"\\u{ord(character):04x}" if unseen else character


def reasons(estimates: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why values or intervals are absent, each reason once."""
    return list(dict.fromkeys(e["reason"] for e in estimates if e["reason"] is not None))


def rest(count: int, what: str) -> str:
    """How many were not listed, if any."""
    return f"\n(more {what} in --json: {count})" if count > 0 else ""


def plain(value: Any) -> str:
    """A wiring's value as it would stand in TOML, without the brackets."""
    if isinstance(value, (list, tuple)):
        texts = [str(item) for item in value]
        if len(set(texts)) == 1 and len(texts) > 1:
            return f"{len(texts)} x {texts[0]}"
        return ", ".join(texts)
    if isinstance(value, bool):
        return str(value).lower()
    return ABSENT if value is None else str(value)


def short(value: Any) -> str:
    """A value in a sentence; a digest is recognised by its beginning."""
    text = plain(value)
    return text[:16] if len(text) == 64 else text


def interval(value: Mapping[str, Any]) -> str:
    """An estimate's interval, if it has one."""
    if value.get("low") is None or value.get("high") is None:
        return ABSENT
    return f"{number(value['low'], 2)}, {number(value['high'], 2)}"


def reach(ends: Sequence[float] | None) -> str:
    """An interval that is given as its two ends, if there is one."""
    return ABSENT if ends is None else f"{number(ends[0], 2)}, {number(ends[1], 2)}"


def number(value: float | None, digits: int = 3) -> str:
    """Rounded to `digits`, or to as many more as keep it from becoming a whole number when it is none."""
    if value is None:
        return ABSENT
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    for places in range(digits, 16):
        text = f"{value:.{places}f}"
        if float(text) != round(value) or value == round(value):
            return text
    return str(value)


def signed(value: float | None) -> str:
    """A difference, with its sign."""
    sign = "+" if value is not None and value > 0 else ""
    return sign + number(value)


def share(part: int, whole: int) -> str:
    """A share in percent, never rounded to none or all."""
    percent = round(100 * part / whole)
    if part and not percent:
        return "<1%"
    return ">99%" if part < whole and percent == 100 else f"{percent}%"


def bytes_of(count: int) -> str:
    """A size in the unit that a person would use."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
