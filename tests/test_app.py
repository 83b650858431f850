"""The pages over HTTP: what they show, what they refuse, and what becomes of a run that goes away meanwhile."""

import html
import http.client
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from draftgauge.errors import RunError
from draftgauge.runs import MANIFEST, SUMMARY, Run
from draftgauge.viewer.app import MOST_COMPARED, head, said, tail, when
from tests.shelf import (
    HOSTILE,
    plain_report,
    put_recording,
    put_run,
    put_series,
    put_training,
    served,
    watch_row,
)
from tests.test_runs import change


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    root = tmp_path_factory.mktemp("kept")
    put_training(root / "runs", {250: 1.25, 500: 1.5, 1000: 1.75})
    put_run(root / "runs" / "odd", tau=None, trusted=False, started="2026-12-01T00:00:00Z", step=None)
    (put_run(root / "runs" / "torn") / SUMMARY).write_text("{")
    put_run(root / "out")
    put_series(
        root / "results", watch_row(250, 1.25, run="results/runs/step_250-1a2b3c4d"), watch_row(500, None)
    )
    put_recording(root / "recordings" / "1f2e3d4c5b6a7980")
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx2.Client]:
    with served(folder) as made:
        yield made


def raw(client: httpx2.Client, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """What is answered to a path that no client tidied."""
    url = client.base_url
    connection = http.client.HTTPConnection(str(url.host), url.port)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"{url.host}:{url.port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def rows_of(text: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="/run/([^"]*)"', text)


def test_the_list_shows_every_run_and_what_is_none(client: httpx2.Client) -> None:
    text = client.get("/").text
    names = ["runs/odd", "out", "runs/step_1000-1a2b3c4d", "runs/step_500-1a2b3c4d", "runs/step_250-1a2b3c4d"]
    assert sorted(rows_of(text)) == sorted(names)
    assert "<b>1.750</b>" in text
    assert "1.55 to 2.05" in text
    assert "absent" in text
    assert 'title="context-zeroed">not trusted' in text
    assert "runs/torn" in text
    assert "is not readable" in text
    assert "tau 1.250 at step 250, 1.750 at step 1000" in text, "the sparkline says what it shows"


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("text=step_5", ["runs/step_500-1a2b3c4d"]),
        ("verdict=not+trusted", ["runs/odd"]),
        ("checkpoint=exp2&order=tau", [f"runs/step_{step}-1a2b3c4d" for step in (1000, 500, 250)]),
        (
            "family=runs/step_500-1a2b3c4d&order=-step",
            [f"runs/step_{step}-1a2b3c4d" for step in (250, 500, 1000)],
        ),
        ("recording=nowhere", []),
    ],
)
def test_filters_are_plain_parameters(client: httpx2.Client, query: str, names: list[str]) -> None:
    assert rows_of(client.get(f"/?{query}").text) == names


def test_a_series_of_runs_is_one_report(client: httpx2.Client) -> None:
    text = client.get("/?family=runs/step_500-1a2b3c4d").text
    (link,) = re.findall(r'<a href="(/compare[^"]*)"', text)
    names = ", ".join(f"step_{step}-1a2b3c4d" for step in (250, 500, 1000))
    assert f"<h1>{names} []</h1>" in client.get(html.unescape(link)).text
    assert "/compare?" not in client.get("/").text


def test_a_filter_stays_in_its_form(client: httpx2.Client) -> None:
    text = client.get("/", params={"text": '"><b>', "verdict": "trusted"}).text
    assert 'name="text" value="&#34;&gt;&lt;b&gt;"' in text
    assert "<option selected>trusted</option>" in text
    assert "0 of 5 runs" in text


def test_a_run_is_its_report_under_a_way_back(client: httpx2.Client) -> None:
    answer = client.get("/run/runs/step_500-1a2b3c4d", params={"prompt": ["a", "b"]})
    assert "<h1>step_500-1a2b3c4d [a,b]</h1>" in answer.text
    assert '<a href="/">Runs</a>' in answer.text
    assert answer.text.index("viewer-bar") < answer.text.index("<main>")
    assert '<option value="a" selected>a</option>' in answer.text
    assert "style-src 'unsafe-inline'" in answer.headers["content-security-policy"]
    assert "script-src" not in answer.headers["content-security-policy"]


def test_two_runs_are_compared_with_the_older_and_more_side_by_side(client: httpx2.Client) -> None:
    keys = [f"runs/step_{step}-1a2b3c4d" for step in (250, 1000, 500)]
    late, early = "step_1000-1a2b3c4d", "step_250-1a2b3c4d"
    assert f"<h1>{late} against {early} []</h1>" in client.get("/compare", params={"run": keys[:2]}).text
    assert (
        f"<h1>{early}, {late}, step_500-1a2b3c4d []</h1>" in client.get("/compare", params={"run": keys}).text
    )
    text = client.get("/compare", params={"run": keys[:2], "baseline": keys[1]}).text
    assert f"<h1>{early} against {late} []</h1>" in text
    text = client.get("/compare", params={"run": keys[:2], "baseline": ""}).text
    assert f"<h1>{early}, {late} []</h1>" in text


@pytest.mark.parametrize(
    ("keys", "status", "reason"),
    [
        ([], 400, "0 came"),
        (["out", "out"], 400, "1 came"),
        ([str(i) for i in range(MOST_COMPARED + 1)], 400, f"{MOST_COMPARED + 1} came"),
        (["out", "nowhere"], 404, "there is no run &#39;nowhere&#39;"),
        (["out", "runs/torn"], 404, "not readable"),
    ],
)
def test_what_cannot_be_compared_says_so(
    client: httpx2.Client, keys: list[str], status: int, reason: str
) -> None:
    answer = client.get("/compare", params={"run": keys})
    assert answer.status_code == status
    assert reason in answer.text
    assert client.get("/compare", params={"run": ["out", "runs/odd"], "baseline": "x"}).status_code == 404


def test_a_series_links_to_its_runs_and_says_why_there_is_no_number(client: httpx2.Client) -> None:
    text = client.get("/series/results/watch").text
    assert 'href="/run/runs/step_250-1a2b3c4d"' in text
    assert "the file is cut short" in text
    assert "step_500, step 500" not in text, "no number, no mark"
    assert "step_250, step 250: tau 1.250" in text
    for path in ("/series", "/"):
        assert 'href="/series/results/watch"' in client.get(path).text


def test_a_series_grows_while_it_is_viewed(tmp_path: Path) -> None:
    path = put_series(tmp_path, watch_row(500, 1.5))
    with served(tmp_path) as client:
        first = client.get("/series/watch")
        tag = {"If-None-Match": first.headers["etag"]}
        assert client.get("/series/watch", headers=tag).status_code == 304
        with path.open("a") as file:
            file.write(json.dumps(watch_row(1000, 1.9))[:40])
        assert client.get("/series/watch", headers=tag).status_code == 304, "a torn line is not there yet"
        with path.open("a") as file:
            file.write(json.dumps(watch_row(1000, 1.9))[40:] + "\n")
        second = client.get("/series/watch", headers=tag)
    assert second.status_code == 200
    assert 'data-rows="1"' in first.text
    assert 'data-rows="2"' in second.text
    assert "step_1000, step 1000: tau 1.900" in second.text


def test_recordings_say_what_is_known_of_their_health(client: httpx2.Client) -> None:
    text = client.get("/recordings").text
    assert 'href="/recording/recordings/1f2e3d4c5b6a7980"' in text
    assert 'href="/?recording=1f2e3d4c5b6a7980"' in text
    page = client.get("/recording/recordings/1f2e3d4c5b6a7980").text
    for words in (
        "1, 3, 5",
        "first choice in the recorded pass",
        "Every prompt was recorded: 6",
        "tiny.jsonl",
    ):
        assert words in page


def test_an_empty_folder_says_what_would_fill_it(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        assert "draftgauge eval" in client.get("/").text
        assert "draftgauge watch" in client.get("/series").text
        assert "draftgauge record" in client.get("/recordings").text


@pytest.mark.parametrize(
    "path",
    [
        "/run/../../../../etc/passwd",
        "/run/..%2f..%2f..%2fetc%2fpasswd",
        "/run/%2e%2e/%2e%2e/out",
        "/run//etc",
        "/run/%2fetc%2fpasswd",
        "/run/runs/../out",
        "/run/out/%00",
        "/run/",
        "/run/runs",
        "/recording/../recordings",
        "/series/..",
        "/series/results/watch/series.jsonl",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/templates/base.html",
        "/nowhere",
        "//etc/passwd",
    ],
)
def test_paths_lead_nowhere_else(client: httpx2.Client, path: str) -> None:
    status, text = raw(client, path)
    assert status == 404
    assert "root:" not in text
    assert "Traceback" not in text
    assert "import" not in text


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    put_run(tmp_path / "secret", tau=9.125)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "secret")
    with served(tmp_path / "in") as client:
        assert "leads out of the folder" in client.get("/").text
        assert "9.125" not in client.get("/").text
        assert client.get("/run/linked").status_code == 404


@pytest.mark.parametrize("path", ["/", "/run/out", "/static/style.css"])
def test_a_page_that_the_browser_has_keeps_its_headers(client: httpx2.Client, path: str) -> None:
    first = client.get(path)
    again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("etag", "content-security-policy", "cache-control"):
        assert again.headers[name] == first.headers[name]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/run/out", "/static/style.css", "/nowhere"])
def test_nothing_but_reading_is_answered(client: httpx2.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/", "/run/out", "/series/results/watch", "/static/live.js", "/favicon.ico"]
)
def test_head_says_what_get_would(client: httpx2.Client, path: str) -> None:
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == client.get(path).headers["etag"]


@pytest.mark.parametrize("path", ["/", "/run/out", "/nowhere", "/static/style.css", "/series/results/watch"])
def test_every_answer_has_the_headers(client: httpx2.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "form-action 'self'" in policy
    assert "script-src 'unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers


def test_pages_have_no_inline_script_and_no_inline_style(client: httpx2.Client) -> None:
    for path in (
        "/",
        "/series",
        "/series/results/watch",
        "/recordings",
        "/recording/recordings/1f2e3d4c5b6a7980",
    ):
        text = client.get(path).text
        scripts = re.findall(r"<script[^>]*>", text)
        assert scripts == (
            ['<script src="/static/live.js" defer>'] if path == "/series/results/watch" else []
        )
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
        assert set(re.findall(r'(?:src|href)="(?!/|\?)([^"]*)"', text)) == {"#main"}, "all is here"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "_")
    row = watch_row(5, 1.5, source=HOSTILE, reason=HOSTILE, when=HOSTILE)
    put_run(tmp_path / name, checkpoint=f"/{HOSTILE}/step_5", step=5, started=HOSTILE)
    other = put_run(tmp_path / "b", checkpoint=f"/{HOSTILE}/step_6", step=6, trusted=False)
    change(other / "summary.json", trust={"trusted": False, "failed": [HOSTILE], "controls": []})
    change(other / "run.json", recording={"path": HOSTILE, "prompts": HOSTILE * 20_000, "target": HOSTILE})
    put_series(tmp_path / "w" / name, row)
    kept = put_recording(tmp_path / "kept")
    value = json.loads((kept / "recording.json").read_text())
    value["items"][0] |= {"id": HOSTILE, "category": HOSTILE, "text": HOSTILE * 20_000}
    change(
        kept / "recording.json", items=value["items"], failed={HOSTILE: HOSTILE}, produced={HOSTILE: HOSTILE}
    )
    (tmp_path / "recordings" / HOSTILE.replace("/", "!")).mkdir(parents=True)
    with served(tmp_path) as client:
        pages = ["/", "/series", "/recordings", "/recording/kept", f"/?text={HOSTILE}"]
        pages += [f"/series/{name}", "/run/b", f"/compare?run=b&run={HOSTILE}", f"/{HOSTILE}"]
        for path in pages:
            answer = client.get(path)
            assert answer.status_code in (200, 404)
            assert "<script>alert" not in answer.text
            assert "<img" not in answer.text
            assert "49" not in re.findall(r"&amp;amp;(\d+)", answer.text)
            assert len(answer.content) < 200_000
        (link,) = [key for key in rows_of(client.get("/").text) if key != "b"]
        assert client.get(f"/run/{link}").status_code == 200


def test_halves_of_characters_are_shown_as_something(tmp_path: Path) -> None:
    """JSON may escape one half of a surrogate pair alone; no browser could be sent that."""
    for name in (MANIFEST, SUMMARY):
        path = put_run(tmp_path / name) / name
        path.write_text(path.read_text().replace("/kept/", "\\ud800/").replace("few-", "\\ud800"))
    kept = put_recording(tmp_path / "kept") / "recording.json"
    kept.write_text(kept.read_text().replace('"id": "five"', '"id": "\\ud800"').replace("chat", "\\ud800"))
    put_series(tmp_path / "w", watch_row(5, 1.5, reason="\ud800"), watch_row(6, 1.5))
    (tmp_path / "mine" / os.fsdecode(b"by\xfftes")).mkdir(parents=True)
    with served(tmp_path) as client:
        for path in (
            "/",
            "/recordings",
            "/recording/kept",
            "/series",
            "/series/w/watch",
            "/run/%FF",
            "/run/kept",
        ):
            assert client.get(path).status_code in (200, 404)
        assert client.get("/?text=%FF&family=%ED%A0%80").status_code == 200


def test_a_run_that_is_gone_says_so(tmp_path: Path) -> None:
    put_run(tmp_path / "mine")
    with served(tmp_path) as client:
        shutil.rmtree(tmp_path / "mine")
        answer = client.get("/run/mine")
    assert answer.status_code == 404
    assert "there is no run &#39;mine&#39; here, or not any more" in answer.text


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("replaced", "status", "says"), [(False, 410, "mine is gone"), (True, 409, "mine changed")]
)
def test_a_run_that_goes_away_while_it_is_read_says_so(
    tmp_path: Path, replaced: bool, fails: bool, status: int, says: str
) -> None:
    put_run(tmp_path / "mine")

    def report(runs: list[Run], **options: Any) -> str:
        shutil.rmtree(tmp_path / "mine")
        if replaced:
            put_run(tmp_path / "mine", tau=2.5)
        if fails:
            runs[0].blocks()
        return plain_report(runs, **options)

    with served(tmp_path, report=report) as client:
        answer = client.get("/run/mine")
    assert answer.status_code == status
    assert says in answer.text
    assert "Traceback" not in answer.text


def test_a_form_of_a_run_that_was_replaced_does_not_show_another(tmp_path: Path) -> None:
    folder = put_run(tmp_path / "mine")
    with served(tmp_path) as client:
        plan = re.findall(r'name="plan" value="(\w+)"', client.get("/run/mine").text)[0]
        assert client.get("/run/mine", params={"plan": plan}).status_code == 200
        change(folder / "run.json", plan_digest="f" * 64)
        answer = client.get("/run/mine", params={"plan": plan})
    assert answer.status_code == 409
    assert "mine is another run by now" in answer.text


def test_a_report_that_is_refused_is_a_plain_page(tmp_path: Path) -> None:
    put_run(tmp_path / "mine")

    def report(*_: Any, **__: Any) -> str:
        raise RunError("the two <runs> cannot be compared")

    with served(tmp_path, report=report) as client:
        answer = client.get("/run/mine")
    assert answer.status_code == 409
    assert "the two &lt;runs&gt; cannot be compared" in answer.text


def test_an_error_of_ours_shows_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put_run(tmp_path / "mine")

    def report(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError("secret detail")

    with served(tmp_path, report=report) as client:
        answer = client.get("/run/mine")
        assert client.get("/").status_code == 200, "it goes on"
    assert answer.status_code == 500
    assert "an error of ours" in answer.text
    assert "secret detail" not in answer.text
    assert "secret detail" in capfd.readouterr().err
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_thousands_of_runs_are_pages_of_a_list(tmp_path: Path) -> None:
    first = put_run(tmp_path / "run-0000")
    for i in range(1, 2000):
        shutil.copytree(first, tmp_path / f"run-{i:04}")
    with served(tmp_path) as client:
        text = client.get("/?order=run").text
        assert "2000 runs; page 1 of 20" in text.replace("\n", "")
        assert rows_of(text) == [f"run-{i:04}" for i in range(100)]
        last = client.get("/?order=run&page=20").text
        assert rows_of(last)[-1] == "run-1999"
        assert rows_of(client.get("/?text=run-1234").text) == ["run-1234"]


def test_words_of_a_page() -> None:
    assert tail("/a/long/path/of/a/model.pt", 16) == "…/of/a/model.pt"
    assert tail("x" * 20, 5) == "…xxxx"
    assert head("abcdef", 4) == "abcd… (2 more characters)"
    assert when("2026-11-30T17:04:09Z") == "2026-11-30 17:04"
    assert when("long ago") == "long ago"
    assert said({"a": [1, 2], "b": {}, "c": True}) == "a 1, 2, b (none), c true"
    assert said({"w.pt": {"bytes": 3, "sha256": "ab" * 32}}) == "w.pt (bytes 3, sha256 abababababababab)"
