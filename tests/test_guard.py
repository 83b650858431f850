"""Who is answered: names of this machine on loopback, the token beyond it."""

from pathlib import Path

import httpx2
import pytest

from draftgauge.viewer.guard import is_loopback
from tests.shelf import served
from tests.test_app import raw


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200),
        ("127.0.0.1", 200),
        ("localhost:9999", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("127.1.2.3", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("10.0.0.1", 421),
        ("0.0.0.0", 421),
        ("[::2]", 421),
        ("", 421),
    ],
)
def test_on_loopback_only_names_of_this_machine_are_answered(tmp_path: Path, host: str, status: int) -> None:
    with served(tmp_path) as client:
        answer, text = raw(client, "/", host=host or " ")
    assert answer == status
    assert ("Runs" in text) == (status == 200)


def test_beyond_loopback_nobody_is_answered_without_the_token(tmp_path: Path) -> None:
    from draftgauge.viewer.serving import bind
    from tests.shelf import serving

    bound = bind("0.0.0.0", 0)
    number = bound.socket.getsockname()[1]
    token = bound.url.partition("?token=")[2]
    assert len(token) >= 32
    with serving(bound, tmp_path), httpx2.Client(base_url=f"http://127.0.0.1:{number}") as client:
        for path in ("/", "/static/style.css", "/?token=", "/?token=wrong", "/?token=%C3%A9", "/nowhere"):
            answer = client.get(path, headers={"Cookie": f"draftgauge-{number}=wrong"})
            assert (answer.status_code, "Runs" in answer.text) == (403, False)
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.post(f"/?token={token}").status_code == 405
        answer = client.get(f"/?text=a%26b&token={token}")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/?text=a%26b", "the token is not in the address any more"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert client.get("/").status_code == 200, "the cookie is enough"
        assert client.get("/", headers={"Host": "workstation:80"}).status_code == 200
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{number}/")


def test_the_way_back_from_a_token_leads_to_this_server(tmp_path: Path) -> None:
    from draftgauge.viewer.serving import bind
    from tests.shelf import serving

    bound = bind("127.0.0.1", 0, token=True)
    number = bound.socket.getsockname()[1]
    token = bound.url.partition("?token=")[2]
    with serving(bound, tmp_path), httpx2.Client(base_url=f"http://127.0.0.1:{number}") as client:
        status, _ = raw(client, f"//evil.example/?token={token}")
        answer = client.get(f"/%2F%2Fevil.example?token={token}")
    assert status == 303
    assert not answer.headers["location"].startswith("//")


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("box", False),
    ],
)
def test_loopback_is_what_reaches_this_machine_only(host: str, own: bool) -> None:
    assert is_loopback(host) is own
