"""Which runs a list shows: filters, order and page, from the query of its address.

Every choice is a plain query parameter, so that a list can be linked to and works without scripts. Knows nothing of
files or of HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from draftgauge.viewer.rows import RunRow

PAGE_ROWS = 100
#: What a list can be ordered by, and whether the first click puts the largest on top.
ORDERS: Mapping[str, tuple[Callable[[RunRow], Any], bool]] = {
    "measured": (lambda row: row.started, True),
    "run": (lambda row: row.name.casefold(), False),
    "step": (lambda row: -1 if row.step is None else row.step, True),
    "tau": (lambda row: -1.0 if row.tau.value is None else row.tau.value, True),
}
VERDICTS = ("trusted", "not trusted", "no controls")


@dataclass(frozen=True)
class Query:
    """What a list is asked for; an empty text asks for nothing.

    `text` is looked for in everything that a row shows, `checkpoint` in the checkpoint's path, `family` is a run
    whose whole training is shown; `order` may begin with `-` for the other way round.
    """

    text: str = ""
    checkpoint: str = ""
    recording: str = ""
    verdict: str = ""
    family: str = ""
    order: str = "measured"
    page: int = 1

    @classmethod
    def read(cls, said: Mapping[str, str]) -> Query:
        """From the parameters of an address; what is not understood counts as not said."""
        order, page = said.get("order", ""), said.get("page", "")
        return cls(
            text=said.get("text", "").strip(),
            checkpoint=said.get("checkpoint", "").strip(),
            recording=said.get("recording", ""),
            verdict=said.get("verdict", "") if said.get("verdict", "") in VERDICTS else "",
            family=said.get("family", ""),
            order=order if order.removeprefix("-") in ORDERS else "measured",
            page=int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 7 else 1,
        )

    @property
    def filters(self) -> bool:
        """Whether it leaves anything out."""
        return any((self.text, self.checkpoint, self.recording, self.verdict, self.family))

    def address(self, **other: str | int) -> str:
        """The query part that asks for the same, with other values for some; `?` alone where nothing is said."""
        said = {**vars(self), "page": 1, **other}
        return "?" + urlencode(
            {name: value for name, value in said.items() if value not in ("", 1, "measured")}
        )

    def next_order(self, name: str) -> str:
        """The order that a click on a column's head asks for: its first way, or the other way round."""
        return f"-{name}" if self.order == name else name

    def direction(self, name: str) -> str | None:
        """How the list is ordered by a column, in the words of `aria-sort`; None where it is not."""
        if self.order.removeprefix("-") != name:
            return None
        falling = ORDERS[name][1] != self.order.startswith("-")
        return "descending" if falling else "ascending"


@dataclass(frozen=True)
class Listing:
    """One page of a list: its rows, how many there are on all pages, and how many pages."""

    rows: tuple[RunRow, ...]
    matching: int
    page: int
    pages: int


def listing(runs: Sequence[RunRow], query: Query) -> Listing:
    """The rows that a query asks for; a page beyond the last is the last."""
    rows = [row for row in _of_family(runs, query.family) if _matches(row, query)]
    name = query.order.removeprefix("-")
    key, falling = ORDERS[name]
    rows.sort(key=key, reverse=falling != query.order.startswith("-"))
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    page = min(query.page, pages)
    return Listing(tuple(rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]), len(rows), page, pages)


def _of_family(runs: Sequence[RunRow], key: str) -> Sequence[RunRow]:
    if not key:
        return runs
    family = next((row.family for row in runs if row.key == key), None)
    return [row for row in runs if row.family == family]


def _matches(row: RunRow, query: Query) -> bool:
    shown = "\n".join((row.key, row.checkpoint, row.recording, row.prompt_set, *row.failed, *row.warnings))
    return (
        all(word in shown.casefold() for word in query.text.casefold().split())
        and query.checkpoint.casefold() in row.checkpoint.casefold()
        and query.recording in ("", row.recording)
        and query.verdict in ("", row.verdict)
    )
