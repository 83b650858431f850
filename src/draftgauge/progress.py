"""How long work shows where it is: a bar with rate and estimate on stderr, or nothing.

Functions that take long have a `progress` parameter and are silent unless the caller passes `bar`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

from tqdm import tqdm

Item = TypeVar("Item")


@runtime_checkable  # for the tests, which check every annotation at every call
class Progress(Protocol):
    """Passes items through while showing how many of `total` are done, in `unit`s."""

    def __call__(
        self, items: Iterable[Item], *, label: str, total: int | None = None, unit: str = "it"
    ) -> Iterable[Item]:
        """The same items."""


def silent(
    items: Iterable[Item], *, label: str, total: int | None = None, unit: str = "it"
) -> Iterable[Item]:
    """Shows nothing."""
    return items


def bar(items: Iterable[Item], *, label: str, total: int | None = None, unit: str = "it") -> Iterator[Item]:
    """A line on stderr with rate and time left; in a log it is renewed every ten seconds."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    yield from tqdm(
        items, desc=label, total=total, unit=f" {unit}", file=sys.stderr, mininterval=interval, ncols=88
    )


@contextlib.contextmanager
def byte_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many bytes of `total` are done; shows rate and time left on stderr."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        desc=label, total=total, unit="B", unit_scale=True, file=sys.stderr, mininterval=interval, ncols=88
    ) as shown:
        first = True

        def done(count: int) -> None:
            nonlocal first
            if first or count < shown.n:  # what was there before does not count for the rate
                shown.reset(total)
                shown.initial, shown.n, first = count, count, False
            shown.update(count - shown.n)

        yield done
