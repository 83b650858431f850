"""Drawings: one specification in the page's colours and in a file's, without anything from elsewhere."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from draftgauge.report.plots import (
    LIGHT,
    WIDTH,
    bars,
    ceilinged,
    curves,
    dots,
    png_file,
    shares,
    svg,
    svg_file,
)

ROWS = [
    {"x": x, "y": x / 4, "series": s, "low": None if x == 1 else x / 5, "high": None if x == 1 else x / 3}
    for s in ("chain", "DDTree(16)")
    for x in (1, 2, 3)
]
NAMES = [{"y": f"prompt {i}", "x": 1.0 + i, "low": None, "high": None} for i in range(3)]
PARTS = [{"y": "chain", "part": part, "x": 0.5} for part in ("covered", "missed")]
SPECS: dict[str, Any] = {
    "curves": curves(ROWS, x="depth", y="share", series="rate", percent=True),
    "curves over numbers": curves(ROWS, x="step", y="tau", series="policy", ordinal=False),
    "one curve": curves(ROWS[:3], x="depth", y="share", series="rate"),
    "bars": bars(ROWS, x="accepted", y="share"),
    "dots": dots(NAMES, x="tau", mark=1.5),
    "shares": shares(PARTS, of=["chain"], parts=["covered", "missed"], x="share"),
    "ceilinged": ceilinged(ROWS[:3], [{"y": 1.0, "name": "coverage@4"}], x="nodes", y="tau"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_drawing_takes_its_colours_from_the_page_and_is_as_wide_as_a_phone(name: str) -> None:
    drawn = svg(SPECS[name])
    assert ET.fromstring(drawn).attrib["width"] == str(WIDTH)
    assert "var(--ink)" in drawn
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) <= LIGHT.keys()
    assert not re.findall(r"(?:fill|stroke)=\"(?:#|rgb|black|steelblue)", re.sub(r'stroke="#888"', "", drawn))
    assert "<script" not in drawn
    assert not re.findall(r'href="(?!#)', drawn)


@pytest.mark.parametrize("name", SPECS)
def test_a_file_has_the_same_drawing_in_light_colours(name: str) -> None:
    drawn = svg_file(SPECS[name])
    assert "var(" not in drawn
    assert LIGHT["ink"] in drawn
    assert png_file(SPECS[name]).startswith(b"\x89PNG")


def test_names_from_prompts_stay_text() -> None:
    drawn = svg(dots([{"y": "<script>x</script>", "x": 1.0, "low": None, "high": None}], x="tau"))
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn


def test_series_are_told_apart_without_colour() -> None:
    drawn = svg(SPECS["curves"])
    assert drawn.count("stroke-dasharray") >= 1
    points = re.findall(r'<path [^>]*aria-roledescription="point"[^>]*>', drawn)
    shapes = {re.sub(r"[\d.,-]+", "n", re.findall(r' d="([^"]*)"', point)[0]) for point in points}
    assert len(shapes) == 2
    legend = ET.tostring(ET.fromstring(drawn), encoding="unicode", method="text")
    assert "chain" in legend
    assert "DDTree(16)" in legend
