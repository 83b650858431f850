"""Who is answered, and with which headers: reading only, by names of this machine or with the token.

On loopback a browser's own pages could reach us under a name that somebody else gave to 127.0.0.1 (DNS rebinding),
so the Host header has to name this machine. Beyond loopback everybody can reach us, so the address carries a token,
which a cookie remembers. Knows nothing of what is served.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Of every answer that says nothing else. Pages have no inline script and no inline style, and load from here only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "private, no-cache",
}
_READING = ("GET", "HEAD")


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only; a name is one only if it is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Who may read: whoever has the token if there is one; else whoever names this machine."""

    token: str | None
    cookie: str = "draftgauge"


class Guard:
    """Stands before the pages."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or lets the pages answer; either way with every header that has to be there."""
        if scope["type"] != "http":  # nothing here speaks anything else
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._instead(Request(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _instead(self, request: Request) -> Response | None:
        """What is answered instead of a page; None where the page may answer."""
        if request.method not in _READING:
            return PlainTextResponse("this server only reads\n", 405, {"Allow": ", ".join(_READING)})
        if self._access.token is None:
            return None if is_loopback(_host(request)) else _strange(request)
        said = request.query_params.get("token")
        if said is not None and _same(said, self._access.token):
            return self._remember(request, self._access.token)
        if _same(request.cookies.get(self._access.cookie, ""), self._access.token):
            return None
        return PlainTextResponse(
            "this address needs its token: open the whole address that `draftgauge view` printed\n", 403
        )

    def _remember(self, request: Request, token: str) -> Response:
        """To the same page without the token in its address, where it would stand in histories and on screens."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        path = "/" + quote(request.url.path.lstrip("/"))
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
        answer.set_cookie(self._access.cookie, token, httponly=True, samesite="lax")
        return answer


def _host(request: Request) -> str:
    """The name in the Host header, without the port and an IPv6 address's brackets."""
    host = request.headers.get("host", "").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _strange(request: Request) -> Response:
    return PlainTextResponse(
        f"{_host(request)[:80]!r} is no name of this machine; open http://127.0.0.1 with the same port\n", 421
    )


def _same(said: str, token: str) -> bool:
    return secrets.compare_digest(said.encode(), token.encode())
