"""The table of formats, in lines for the terminal and as a table of Markdown for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from draftgauge.report.text import wrap

_HEAD = ("what", "format", "read by", "written by", "checked with")


def formats_report(rows: Iterable[Mapping[str, str]]) -> str:
    """Each kind of thing with its formats, and below each what reads and writes it."""
    parts = []
    for kind, group in groupby(rows, key=lambda row: row["kind"]):
        lines = [kind]
        for row in group:
            lines.append(wrap(f"  {row['format']}", indent="    "))
            done = [f"read by {row['read']}"] if row["read"] != "refused by name" else [row["read"]]
            done += [f"written by {row['written']}"] if row["written"] else []
            lines.append(wrap(f"      {'; '.join(done)}; checked with {row['checked']}", indent="      "))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def formats_markdown(rows: Iterable[Mapping[str, str]]) -> str:
    """The same as a table of Markdown; what a cell holds of code is left as it is."""
    lines = [" | ".join(_HEAD), " | ".join("---" for _ in _HEAD)]
    lines += [
        " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in row.values()) for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines)
