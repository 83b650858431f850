"""Where a curve's lines go."""

import itertools

import pytest

from draftgauge.viewer.drawing import SPARK_HEIGHT, SPARK_WIDTH, _round_ticks, chart, spark
from draftgauge.viewer.rows import Estimate
from draftgauge.viewer.series import Point


def points(*taus: float, apart: int = 500) -> list[Point]:
    return [
        Point(i * apart, Estimate(tau, tau - 0.1, tau + 0.2), True, f"s{i}") for i, tau in enumerate(taus)
    ]


def test_a_sparkline_goes_from_corner_to_corner() -> None:
    drawn = spark(points(1.0, 1.5, 2.0))
    assert drawn is not None
    assert drawn.path == "M4 32 L70 18 L136 4"
    assert drawn.last == (SPARK_WIDTH - 4, 4.0)
    assert drawn.words.startswith("tau 1.000 at step 0, 2.000 at step 1000; lowest 1.000, highest 2.000")


def test_one_point_is_no_line_and_equal_ones_are_level() -> None:
    assert spark(points(1.0)) is None
    drawn = spark(points(1.5, 1.5))
    assert drawn is not None
    assert drawn.last[1] == SPARK_HEIGHT / 2


def test_a_chart_holds_all_of_every_interval() -> None:
    drawn = chart(points(1.0, 1.5, 2.0), width=960, height=280)
    assert drawn is not None
    assert [text for _, text in drawn.y_ticks] == ["0.5", "1", "1.5", "2", "2.5"]
    for mark in drawn.marks:
        assert mark.low is not None
        assert mark.high is not None
        assert 0 < mark.high < mark.y < mark.low < drawn.bottom
        assert drawn.left < mark.x < drawn.width
    assert chart([], width=960, height=280) is None


def test_one_checkpoint_stands_in_the_middle() -> None:
    drawn = chart(points(1.5), width=350, height=240)
    assert drawn is not None
    assert 150 < drawn.marks[0].x < 240


@pytest.mark.parametrize("count", [2, 7, 40, 1000])
@pytest.mark.parametrize("width", [350, 960])
def test_texts_of_steps_do_not_overlap(count: int, width: int) -> None:
    steps = points(*(1.0 + i / count for i in range(count)), apart=12_345)
    for made in (steps, [*steps[:-1], Point(10**8, Estimate(2.0), True, "far")]):
        drawn = chart(made, width=width, height=240)
        assert drawn is not None
        ends = [(x - 3.6 * len(text), x + 3.6 * len(text)) for x, text in drawn.x_ticks]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1.13, 2.4, [1.0, 1.5, 2.0, 2.5]), (1.5, 1.5, [1.5]), (0.0, 10.0, [0.0, 2.5, 5.0, 7.5, 10.0])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    found = _round_ticks(low, high)
    assert found == ticks
