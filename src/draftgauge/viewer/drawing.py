"""Where the lines of a sparkline and of a series go, in units of an SVG; the templates draw them.

Knows nothing of files or of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftgauge.report.text import number
from draftgauge.viewer.series import Point

SPARK_WIDTH, SPARK_HEIGHT = 140.0, 36.0
_MARGIN = 4.0
_TICKS = 5


@dataclass(frozen=True)
class Spark:
    """A sparkline: its path, where its last point is, and what it says in words."""

    path: str
    last: tuple[float, float]
    words: str


@dataclass(frozen=True)
class Mark:
    """One checkpoint in a chart: its place, the ends of its interval if it has one, and what it says."""

    x: float
    y: float
    low: float | None
    high: float | None
    trusted: bool
    words: str


@dataclass(frozen=True)
class Chart:
    """A series as a chart: a path through the marks, and ticks as (place, text)."""

    width: int
    height: int
    left: float
    bottom: float
    path: str
    marks: tuple[Mark, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def spark(points: Sequence[Point]) -> Spark | None:
    """The sparkline of a series; None where there are fewer than two points."""
    if len(points) < 2:
        return None
    xs, ys = [float(point.step) for point in points], [point.value for point in points]
    across = _Scale(min(xs), max(xs), _MARGIN, SPARK_WIDTH - _MARGIN)
    up = _Scale(min(ys), max(ys), SPARK_HEIGHT - _MARGIN, _MARGIN)
    places = [(across(x), up(y)) for x, y in zip(xs, ys, strict=True)]
    words = (
        f"tau {number(ys[0])} at step {points[0].step}, {number(ys[-1])} at step {points[-1].step}; "
        f"lowest {number(min(ys))}, highest {number(max(ys))}, {len(points)} checkpoints"
    )
    return Spark(_path(places), places[-1], words)


def chart(points: Sequence[Point], *, width: int, height: int) -> Chart | None:
    """The chart of a series, with intervals; None where there is no point."""
    if not points:
        return None
    left, bottom, top = 46.0, height - 34.0, 12.0
    ends = [e for p in points for e in (p.value, p.tau.low, p.tau.high) if e is not None]
    ticks = _round_ticks(min(ends), max(ends))
    up = _Scale(min(ticks[0], *ends), max(ticks[-1], *ends), bottom - 6.0, top)
    steps = [float(point.step) for point in points]
    across = _Scale(steps[0], steps[-1], left + 14.0, width - 22.0)
    marks = tuple(
        Mark(
            x=across(float(point.step)),
            y=up(point.value),
            low=None if point.tau.low is None else up(point.tau.low),
            high=None if point.tau.high is None else up(point.tau.high),
            trusted=point.trusted,
            words=f"{point.name}, step {point.step}: tau {number(point.value)}"
            + ("" if point.trusted else ", not trusted"),
        )
        for point in points
    )
    most = max(2, width // 110)
    named = steps if len(steps) <= most else [steps[i * (len(steps) - 1) // (most - 1)] for i in range(most)]
    x_ticks, free = list[tuple[float, str]](), -math.inf
    for step in dict.fromkeys(named):
        half = 4.0 * len(f"{step:,.0f}")
        if across(step) - half > free:  # steps may lie close together: their texts must not
            x_ticks.append((across(step), f"{step:,.0f}"))
            free = across(step) + half + 8.0
    return Chart(
        width=width,
        height=height,
        left=left,
        bottom=bottom,
        path=_path([(mark.x, mark.y) for mark in marks]),
        marks=marks,
        x_ticks=tuple(x_ticks),
        y_ticks=tuple((up(tick), f"{tick:g}") for tick in ticks),
    )


@dataclass(frozen=True)
class _Scale:
    """From values to places; one value alone stands in the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = 0.5 if self.low == self.high else (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g} {y:g}" for x, y in places)


def _round_ticks(low: float, high: float) -> list[float]:
    """About five round values around `low` and `high`.

    Example:
        From 1.13 to 2.4 gives `[1.0, 1.5, 2.0, 2.5]`.
    """
    rough = max(high - low, abs(high) * 0.02, 1e-6) / (_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(n * power for n in (1.0, 2.0, 2.5, 5.0, 10.0) if n * power >= rough * 0.999)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [round(i * unit, 12) for i in range(first, last + 1)]
