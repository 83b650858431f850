"""Plots as Vega-Lite specifications: one and the same gives the SVG in the page, and SVG and PNG files.

Colours are names of CSS variables, so that a page in the dark shows the same drawing in other colours; in a file
they are those of the light page. The qualitative ones are Okabe and Ito's, which colour-blind people tell apart;
lines differ in dash and points in shape as well. Knows nothing of runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]
Row = Mapping[str, Any]

#: A drawing is as wide as a phone's page, in pixels.
WIDTH = 340
#: What the variables are in a file, which is always light.
LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "ink": "#1d2733",
    "muted": "#56616e",
    "line": "#d7dde3",
    "edge": "#8a96a3",
    "c1": "#0072b2",
    "c2": "#d55e00",
    "c3": "#009e73",
    "c4": "#b3578b",
    "c5": "#7a6a00",
    "c6": "#4f5b67",
}
_COLOURS = [f"var(--c{i})" for i in range(1, 7)]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3]]
_VARIABLE = re.compile(r"var\(--(\w+)\)")
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
#: Room for names in a reader's font, which is wider than the one that they were measured in.
_NAMED = {"left": 28, "right": 6, "top": 2, "bottom": 2}
_CONFIG: Spec = {
    "background": None,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "gridColor": "var(--line)",
        "domainColor": "var(--edge)",
        "tickColor": "var(--edge)",
        "labelLimit": 140,
    },
    "axisX": {"grid": False, "labelAngle": 0},
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--muted)",
        "labelFontSize": 11,
        "orient": "top",
        "title": None,
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
        "columns": 3,
        "columnPadding": 24,
    },
    "line": {"strokeWidth": 2},
    "point": {"size": 40, "filled": True, "opacity": 1},
}


def svg(spec: Spec) -> str:
    """The drawing as SVG whose colours are the page's variables."""
    import vl_convert  # noqa: PLC0415 - a browser's engine comes with it

    return str(vl_convert.vegalite_to_svg(_whole(spec)))


def svg_file(spec: Spec) -> str:
    """The drawing as SVG of its own, in light colours on white."""
    import vl_convert  # noqa: PLC0415

    return str(vl_convert.vegalite_to_svg(_light(spec)))


def png_file(spec: Spec) -> bytes:
    """The drawing as PNG, in light colours on white, at twice the resolution."""
    import vl_convert  # noqa: PLC0415

    return bytes(vl_convert.vegalite_to_png(_light(spec), scale=2))


def _whole(spec: Spec) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": WIDTH,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": 2,
        "config": _CONFIG,
        **spec,
    }


def _light(spec: Spec) -> Spec:
    text = _VARIABLE.sub(lambda found: LIGHT[found[1]], json.dumps(_whole(spec)))
    lit: Spec = json.loads(text)
    return lit | {"background": LIGHT["paper"]}


# --- kinds of drawings ----------------------------------------------------------------------------------


def curves(
    rows: Sequence[Row], *, x: str, y: str, series: str, ordinal: bool = True, percent: bool = False
) -> Spec:
    """Lines over x with points and intervals; rows have `x`, `y`, `series`, and `low` and `high` or None.

    A line without an order of `x` (`ordinal` false) has a linear axis.
    """
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    across: Spec = {"field": "x", "type": "ordinal" if ordinal else "quantitative", "title": x, "sort": None}
    across |= {} if ordinal else {"scale": {"zero": False, "nice": True}, "axis": {"tickCount": 5}}
    colour = {"field": "series", "type": "nominal", "scale": _coloured(names)}
    up = {"field": "y", "type": "quantitative", "title": y} | _axis(percent)
    base = {"x": across, "color": colour}
    dash: Spec = {
        "strokeDash": {"field": "series", "type": "nominal", "scale": {"domain": names, "range": _DASHES}}
    }
    legend: Spec = {} if len(names) > 1 else {"color": {**colour, "legend": None}}
    bars: Spec = {"mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.55}}
    bars["encoding"] = {**base, **legend, "y": {**up, "field": "low"}, "y2": {"field": "high"}}
    shape: Spec = {"field": "series", "type": "nominal", "scale": {"domain": names}}
    shape |= {} if len(names) > 1 else {"legend": None}
    return {
        "height": 220,
        "data": {"values": list(rows)},
        "layer": [
            bars | {"transform": [{"filter": "datum.low != null"}]},
            {"mark": "line", "encoding": {**base, **legend, "y": up, **_unlegended(dash, names)}},
            {"mark": "point", "encoding": {**base, **legend, "y": up, "shape": shape}},
        ],
    }


def _unlegended(dash: Spec, names: Sequence[str]) -> Spec:
    return {"strokeDash": {**dash["strokeDash"], "legend": None}} if len(names) == 1 else dash


def bars(rows: Sequence[Row], *, x: str, y: str, percent: bool = False) -> Spec:
    """Bars side by side for each series; rows have `x`, `y` and `series`."""
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    colour = {"field": "series", "type": "nominal", "scale": _coloured(names)}
    return {
        "height": 200,
        "data": {"values": list(rows)},
        "mark": {"type": "bar", "cornerRadiusEnd": 1},
        "encoding": {
            "x": {"field": "x", "type": "ordinal", "title": x},
            "xOffset": {"field": "series", "sort": names},
            "y": {"field": "y", "type": "quantitative", "title": y} | _axis(percent),
            "color": colour if len(names) > 1 else {**colour, "legend": None},
        },
    }


def shares(rows: Sequence[Row], *, of: Sequence[str], parts: Sequence[str], x: str) -> Spec:
    """One bar for each row's `y`, divided into shares; rows have `y`, `part` and `x` between 0 and 1."""
    order = {part: i for i, part in enumerate(parts)}
    return {
        "height": {"step": 24},
        "padding": _NAMED,
        "data": {"values": [{**row, "order": order[str(row["part"])]} for row in rows]},
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1},
        "encoding": {
            "y": {"field": "y", "type": "nominal", "sort": list(of), "title": None},
            "x": {"field": "x", "type": "quantitative", "title": x} | _axis(True),
            "color": {"field": "part", "type": "nominal", "scale": _coloured(parts), "sort": list(parts)}
            | {"legend": {"columns": 2}},
            "order": {"field": "order", "type": "ordinal"},
        },
    }


def dots(rows: Sequence[Row], *, x: str, mark: float | None = None) -> Spec:
    """A point for each name, in the rows' order, with its interval; rows have `y`, `x`, `low` and `high` or None.

    `mark` is a value for all that a line is drawn at.
    """
    names = [str(row["y"]) for row in rows]
    up = {"field": "y", "type": "nominal", "sort": names, "title": None}
    across = {
        "field": "x",
        "type": "quantitative",
        "title": x,
        "scale": {"zero": False},
        "axis": {"tickCount": 5},
    }
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "strokeWidth": 1.5, "color": "var(--c1)", "opacity": 0.55},
            "transform": [{"filter": "datum.low != null"}],
            "encoding": {"y": up, "x": {**across, "field": "low"}, "x2": {"field": "high"}},
        },
        {"mark": {"type": "point", "color": "var(--c1)", "size": 45}, "encoding": {"y": up, "x": across}},
    ]
    if mark is not None:
        line = {"type": "rule", "color": "var(--muted)", "strokeDash": [3, 3]}
        layers.append({"mark": line, "data": {"values": [{"at": mark}]}})
        layers[-1]["encoding"] = {"x": {"field": "at", "type": "quantitative"}}
    return {"height": {"step": 18}, "padding": _NAMED, "data": {"values": list(rows)}, "layer": layers}


def ceilinged(rows: Sequence[Row], levels: Sequence[Row], *, x: str, y: str) -> Spec:
    """A curve over doubling x with intervals, below lines that are drawn across; `levels` have `y` and `name`."""
    across = {"field": "x", "type": "quantitative", "title": x, "scale": {"type": "log", "base": 2}}
    across["axis"] = {"values": sorted({row["x"] for row in rows}), "grid": False}
    up = {"field": "y", "type": "quantitative", "title": y, "scale": {"zero": False}}
    line = {"y": {"field": "y", "type": "quantitative"}}
    name = {"type": "text", "align": "right", "dy": -6, "color": "var(--muted)", "fontSize": 11, "x": "width"}
    return {
        "height": 240,
        "data": {"values": list(rows)},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 1.5, "color": "var(--c1)", "opacity": 0.55},
                "transform": [{"filter": "datum.low != null"}],
                "encoding": {"x": across, "y": {**up, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "line", "color": "var(--c1)", "point": {"color": "var(--c1)", "size": 45}},
                "encoding": {"x": across, "y": up},
            },
            {
                "data": {"values": list(levels)},
                "mark": {"type": "rule", "strokeDash": [4, 3], "color": "var(--muted)"},
                "encoding": line,
            },
            {
                "data": {"values": list(levels)},
                "mark": name,
                "encoding": {**line, "text": {"field": "name"}},
            },
        ],
    }


def _axis(percent: bool) -> Spec:
    if not percent:
        return {"scale": {"zero": True}, "axis": {"tickCount": 5}}
    return {"scale": {"domain": [0, 1]}, "axis": {"format": "%", "tickCount": 5}}


def _coloured(names: Sequence[str]) -> Spec:
    return {"domain": list(names), "range": [_COLOURS[i % len(_COLOURS)] for i in range(len(names))]}
