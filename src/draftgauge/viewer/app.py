"""The pages of the viewer, by their addresses.

    /                  the runs, with filters             /series        curves over steps
    /run/KEY           a run's report                     /series/KEY    what a watch has measured so far
    /compare?run=KEY   the report of several              /recordings    /recording/KEY

KEY is a folder below the one that is viewed. Every page says what lies there at that moment; what went away or
changed while it was read gives a page that says so. How a run's report looks is not known here.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from draftgauge.errors import DraftgaugeError, InputError
from draftgauge.report.text import number, share, short, signed, visible
from draftgauge.runs import Run
from draftgauge.viewer.drawing import chart, spark
from draftgauge.viewer.guard import Access, Guard
from draftgauge.viewer.library import Library
from draftgauge.viewer.listing import VERDICTS, Query, listing
from draftgauge.viewer.recorded import health_notes, is_portable
from draftgauge.viewer.rows import RunRow, recording_row
from draftgauge.viewer.series import families, run_key

#: A report is one file with its own style, and no script at all.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; font-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
#: More reports beside each other cannot be read, and take long to make.
MOST_COMPARED = 40
#: Which runs a run's page offers to compare with.
_MOST_OFFERED = 50
_FILES: Mapping[str, str] = {
    "style.css": "text/css",
    "live.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_ICON = "icon.svg"
#: What a short answer says again of the page that the browser has.
_KEPT = ("etag", "content-security-policy")

#: Makes the report of runs: `report.page.page`, or a stand-in.
Report = Callable[..., str]
Page = Callable[[Request], Response]


def viewer(library: Library, *, access: Access, report: Report) -> ASGIApp:
    """The application that serves the pages of a folder."""
    pages = Pages(library, report)
    addresses: Mapping[str, Page] = {
        "/": pages.runs,
        "/run/{key:path}": pages.run,
        "/compare": pages.compare,
        "/series": pages.all_series,
        "/series/{key:path}": pages.series,
        "/recordings": pages.recordings,
        "/recording/{key:path}": pages.recording,
        "/static/{name}": pages.static,
        "/favicon.ico": pages.static,
    }
    routes = [Route(address, pages.safely(page)) for address, page in addresses.items()]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: pages.unknown}), access)


class Pages:
    """One method for each kind of page; all of them may run at the same time."""

    def __init__(self, library: Library, report: Report) -> None:
        self._library = library
        self._report = report
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("draftgauge.viewer"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"number": number, "signed": signed, "tail": tail, "head": head}
        self._templates.filters["visible"] = visible
        self._templates.filters |= {"when": when, "said": said}
        self._templates.globals |= {"share": share, "folder": library.root.name, "place": str(library.root)}
        static = resources.files("draftgauge.viewer") / "static"
        self._files = {name: (static / name).read_bytes() for name in _FILES}

    def safely(self, page: Page) -> Page:
        """The page, or one that says why there is none; of an error of ours the terminal has the traceback."""

        def answer(request: Request) -> Response:
            try:
                return page(request)
            except DraftgaugeError as exc:
                return self._plain(request, "This cannot be shown", str(exc), status=404)
            except Exception as exc:  # everything else is ours, and must not end the server or reach the page
                traceback.print_exc()
                what = f"{type(exc).__name__}: an error of ours. The terminal of `draftgauge view` says more."
                return self._plain(request, "This page could not be made", what, status=500)

        return answer

    def runs(self, request: Request) -> Response:
        """The runs of the folder."""
        found = self._library.look()
        query = Query.read(request.query_params)
        listed = listing(found.runs, query)
        return self._answer(
            request,
            "runs.html",
            found=found,
            query=query,
            listed=listed,
            recordings=sorted({row.recording for row in found.runs}),
            verdicts=VERDICTS,
            series=_together(listed.rows) if query.family else "",
            curves=[(key, family, spark(family.points)) for key, family in families(found.runs).items()],
            watched=[(series, spark(series.points)) for series in found.series],
        )

    def run(self, request: Request) -> Response:
        """The report of one run."""
        key, prompts = request.path_params["key"], request.query_params.getlist("prompt")
        run = self._library.run(key)
        rows = {row.key: row for row in self._library.look().runs}
        row = rows.get(key)
        if (said := request.query_params.get("plan")) is not None and run.manifest["plan_digest"] != said:
            return self._plain(
                request,
                f"{key} is another run by now",
                "It was replaced by one that measured something else since the page that you came from was made.",
                status=409,
                link=(f"/run/{key}", "Show the run that lies there now"),
            )
        same = [r for r in rows.values() if row is not None and r.recording == row.recording and r.key != key]
        offered = same[:_MOST_OFFERED]
        bar = self._render("bar.html", key=key, run=run, chosen=prompts, offered=offered, kind="run")
        return self._reported(request, {key: run}, bar, prompts=prompts)

    def compare(self, request: Request) -> Response:
        """The report of several runs, against one of them where that is asked for."""
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(keys) <= MOST_COMPARED:
            what = f"Mark 2 to {MOST_COMPARED} runs in the list; {len(keys)} came."
            return self._plain(request, "Nothing to compare", what, status=400)
        runs = {key: self._library.run(key) for key in keys}
        oldest = min(runs, key=lambda key: str(runs[key].manifest["started"]))
        baseline = request.query_params.get("baseline", oldest if len(runs) == 2 else "")
        if baseline and baseline not in runs:
            raise InputError(f"the baseline {baseline!r} is not one of the runs that are compared")
        prompts = request.query_params.getlist("prompt")
        bar = self._render(
            "bar.html",
            key="",
            run=None,
            chosen=prompts,
            offered=list(runs),
            baseline=baseline,
            kind="compare",
        )
        return self._reported(request, runs, bar, baseline=baseline, prompts=prompts)

    def _reported(
        self,
        request: Request,
        runs: Mapping[str, Run],
        bar: str,
        *,
        baseline: str = "",
        prompts: Sequence[str],
    ) -> Response:
        """A report under the viewer's own bar; or what became of its runs while it was made."""
        before = {key: self._library.identity(key) for key in runs}
        shown = [run for key, run in runs.items() if key != baseline]
        failure = None
        try:
            text = self._report(shown, baseline=runs.get(baseline), prompts=prompts)
        except Exception as exc:  # decided below: a file that goes away fails in whatever reads it
            failure = exc
        for key, identity in before.items():
            now = self._library.identity(key)
            if now is None:
                return self._plain(request, f"{key} is gone", "It was removed while it was read.", status=410)
            if now != identity:
                what = "It was replaced while it was read."
                return self._plain(
                    request,
                    f"{key} changed",
                    what,
                    status=409,
                    link=(f"/run/{key}", "Show what lies there now"),
                )
        if isinstance(failure, DraftgaugeError):
            return self._plain(request, "This cannot be shown", str(failure), status=409)
        if failure is not None:
            raise failure
        begin = text.index(">", text.index("<body")) + 1
        return self._sent(
            request, text[:begin] + bar + text[begin:], {"Content-Security-Policy": REPORT_POLICY}
        )

    def all_series(self, request: Request) -> Response:
        """Every curve over steps: of watches, and of runs of one training."""
        found = self._library.look()
        return self._answer(
            request,
            "all_series.html",
            found=found,
            curves=[(key, family, spark(family.points)) for key, family in families(found.runs).items()],
            watched=[(series, spark(series.points)) for series in found.series],
        )

    def series(self, request: Request) -> Response:
        """What a watch has measured so far; the page's own script asks for it again and again."""
        series = self._library.series(request.path_params["key"])
        rows = {row.key: row for row in self._library.look().runs}
        points = series.points
        return self._answer(
            request,
            "series.html",
            series=series,
            keys=[run_key(row, rows, watched=series.key) for row in series.rows],
            charts=[
                ("wide", chart(points, width=960, height=280)),
                ("narrow", chart(points, width=350, height=240)),
            ],
        )

    def recordings(self, request: Request) -> Response:
        """The recordings of the folder."""
        found = self._library.look()
        used: dict[str, int] = {}
        for row in found.runs:
            used[row.recording] = used.get(row.recording, 0) + 1
        return self._answer(request, "recordings.html", found=found, used=used)

    def recording(self, request: Request) -> Response:
        """One recording: what was recorded, and what is known of its health."""
        key = request.path_params["key"]
        recording = self._library.recording(key)
        row = recording_row(recording, key=key)
        runs = [run for run in self._library.look().runs if run.recording == row.name]
        return self._answer(
            request,
            "recording.html",
            recording=recording,
            row=row,
            runs=runs,
            notes=health_notes(recording),
            portable=is_portable(recording),
        )

    def static(self, request: Request) -> Response:
        """A file of the viewer's own."""
        name = request.path_params.get("name", _ICON)
        if name not in self._files:
            raise InputError(f"there is no file {name!r}")
        return self._cached(request, Response(self._files[name], media_type=_FILES[name]))

    def unknown(self, request: Request, exc: Exception) -> Response:
        """There is no such page."""
        assert isinstance(exc, HTTPException)
        return self._plain(request, "There is no such page", request.url.path, status=exc.status_code)

    def _plain(
        self, request: Request, title: str, text: str, *, status: int, link: tuple[str, str] | None = None
    ) -> Response:
        html = self._render("plain.html", title=title, text=text, link=link or ("/", "Back to the runs"))
        return HTMLResponse(_bytes(html), status)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(values)

    def _answer(self, request: Request, template: str, **values: Any) -> Response:
        return self._sent(request, self._render(template, **values), {})

    def _sent(self, request: Request, html: str, headers: Mapping[str, str]) -> Response:
        return self._cached(request, HTMLResponse(_bytes(html), headers=dict(headers)))

    @staticmethod
    def _cached(request: Request, response: Response) -> Response:
        """The response, or that the browser has it already."""
        tag = f'"{hashlib.sha256(bytes(response.body)).hexdigest()[:32]}"'
        response.headers["ETag"] = tag
        if request.headers.get("if-none-match") == tag:
            # With the same headers: a browser puts them in the place of those that it has.
            kept = {name: response.headers[name] for name in _KEPT if name in response.headers}
            return Response(status_code=304, headers=kept)
        return response


def _together(rows: Sequence[RunRow]) -> str:
    """The address of one report of all these runs, by step; empty where they are too few or too many."""
    keys = [row.key for row in sorted(rows, key=lambda row: (row.step or 0, row.started))]
    if not 2 <= len(keys) <= MOST_COMPARED:
        return ""
    return "/compare?" + urlencode([*(("run", key) for key in keys), ("baseline", "")])


def _bytes(html: str) -> bytes:
    """A page as it is sent; JSON can hold halves of characters, which UTF-8 cannot."""
    return html.encode("utf-8", "replace")


def tail(text: str, longest: int) -> str:
    """The end of a path, from a slash on where there is one: its end is what tells it apart."""
    text = visible(text[-4 * longest :])
    if len(text) <= longest:
        return text
    end = text[1 - longest :]
    return f"…{end[end.index('/') :] if '/' in end[:-1] else end}"


def head(text: str, longest: int) -> str:
    """The beginning of a text, and how much more there is."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"


def when(moment: str) -> str:
    """A time of a manifest as a reader wants it.

    Example:
        `"2026-11-30T17:04:09Z"` gives `"2026-11-30 17:04"`.
    """
    return f"{moment[:10]} {moment[11:16]}" if moment[10:11] == "T" else moment


def said(value: Any) -> str:
    """A value of a manifest in a sentence; one without anything in it is `none`."""
    if isinstance(value, Mapping):
        named = ((name, said(inner), isinstance(inner, Mapping)) for name, inner in value.items())
        return (
            ", ".join(f"{name} ({text})" if deep else f"{name} {text}" for name, text, deep in named)
            or "none"
        )
    return short(value) or "none"
