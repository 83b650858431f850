"""Calls to a server: what is tried again and how long, what is told of a refusal, and what is never shown."""

import time
from email.utils import formatdate
from typing import Any

import pytest

from draftgauge.engines.calls import Calls, Patience, retry_after_s
from draftgauge.errors import AnswerError, ConnectionLostError, EngineError
from tests.engine_servers import AT_ONCE, DROP, KEY, Request, StandIn, serving


class Says(StandIn):
    """Answers every call with the same."""

    def answer(self, request: Request) -> Any:
        return self.said["answer"]


@pytest.mark.parametrize(
    "refusal",
    [
        (429, {"Retry-After": "0"}),
        (429, {}),
        (503, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        (502, {"Retry-After": "soon"}),
        (504, {}),
        DROP,
    ],
    ids=str,
)
def test_what_passes_is_tried_again(refusal: Any) -> None:
    server = Says(said={"answer": {"ok": 1}}, refusals=[refusal] * 3)
    with serving(server), Calls(server.url, patience=AT_ONCE) as calls:
        assert calls.post("/generate", {}) == {"ok": 1}
    assert len(server.requests) == 4


@pytest.mark.parametrize("refusal", [(429, {}), DROP], ids=str)
def test_a_bound_ends_the_tries(refusal: Any) -> None:
    server = Says(said={"answer": {}}, refusals=[refusal] * 9)
    told = pytest.raises(ConnectionLostError, match=r"/generate did not answer in 4 tries .*same command")
    with serving(server), Calls(server.url, patience=AT_ONCE) as calls, told:
        calls.post("/generate", {})
    assert len(server.requests) == AT_ONCE.attempts


def test_nobody_there_is_a_lost_connection() -> None:
    with serving(Says()) as server:
        pass
    with Calls(server.url, patience=AT_ONCE) as calls, pytest.raises(ConnectionLostError):
        calls.find("/v1/models")


def test_the_server_says_how_long_to_wait() -> None:
    """Instead of the hour that we would wait, which no test has."""
    server = Says(said={"answer": {}}, refusals=[(429, {"Retry-After": "0"})] * 2)
    patience = Patience(wait_s=3600.0, longest_s=3600.0)
    with serving(server), Calls(server.url, patience=patience) as calls:
        assert calls.post("/generate", {}) == {}


def test_pauses_double_up_to_a_bound_that_holds_for_the_server_too() -> None:
    patience = Patience(wait_s=0.5, longest_s=3.0)
    assert [patience.pause_s(attempt) for attempt in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 3.0]
    assert patience.pause_s(4, after_s=0.25) == 0.25
    assert patience.pause_s(1, after_s=3600.0) == 3.0


def test_the_header_is_a_number_or_a_date() -> None:
    assert [retry_after_s(text) for text in ("3", "0.5", "-1", "soon", None)] == [3.0, 0.5, 0.0, None, None]
    assert retry_after_s("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    to_come = retry_after_s(formatdate(time.time() + 3600, usegmt=True))
    assert to_come is not None
    assert 3000 < to_come <= 3600


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {"error": {"message": "too long"}}), "refused with status 400: too long"),
        ((422, {"detail": "too long"}), "refused with status 422: too long"),
        ((500, {"object": "error", "message": "too long"}), "refused with status 500: too long"),
        ((413, "too\nlong"), "refused with status 413: too long"),
        ((400, {"error": "x" * 900}), "x" * 300 + "..."),
        ((400, [1]), "[1]"),
        ((200, "too long"), "answered no JSON: too long"),
        ((200, [1]), "answered list; expected a JSON object"),
    ],
)
def test_a_refused_request_is_told_in_the_servers_words(answer: Any, said: str) -> None:
    server = Says(said={"answer": answer})
    with serving(server), Calls(server.url, patience=AT_ONCE) as calls, pytest.raises(AnswerError) as caught:
        calls.post("/v1/completions", {})
    assert said in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_altogether_is_another_error(status: int) -> None:
    server = Says(said={"answer": (status, {"error": f"wrong key {KEY}"})})
    with serving(server), Calls(server.url, key=KEY) as calls, pytest.raises(EngineError) as caught:
        calls.post("/v1/completions", {})
    assert not isinstance(caught.value, AnswerError)
    assert KEY not in str(caught.value)
    assert "wrong key ***" in str(caught.value)
    assert ("DRAFTGAUGE_API_KEY" in str(caught.value)) == (status != 404)


def test_credentials_are_sent_and_not_shown() -> None:
    server = Says(said={"answer": {}})
    with serving(server):
        inside = server.url.replace("http://", f"http://user:{KEY}@")
        with Calls(f"{inside}/v1/?token={KEY}") as calls:
            calls.post("/generate", {})
            assert calls.url == server.url
        with Calls(server.url, key=KEY) as calls:
            calls.post("/generate", {})
    sent = [request.headers.get("Authorization", "").partition(" ")[0] for request in server.requests]
    assert sent == ["Basic", "Bearer"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "/v1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(EngineError, match="address"):
        Calls(url)


def test_what_is_not_there_is_none() -> None:
    with serving(Says(said={"answer": (404, {})})) as server, Calls(server.url) as calls:
        assert calls.find("/server_info") is None
        assert calls.text("/metrics") is None
    with serving(Says(said={"answer": "<html>"})) as server, Calls(server.url) as calls:
        assert calls.find("/server_info") is None
        assert calls.text("/metrics") == "<html>"
