"""Binds an address and serves the viewer there until it is stopped.

Beyond loopback the address carries a fresh token. Knows nothing of pages.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from draftgauge.errors import InputError
from draftgauge.viewer.app import Report, viewer
from draftgauge.viewer.guard import Access, is_loopback
from draftgauge.viewer.library import Library

#: Addresses that stand for all of this machine's; nobody can open them.
_ALL = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True)
class Bound:
    """An address that is listened at, and who may read there."""

    socket: socket.socket
    access: Access
    url: str


def bind(host: str, port: int, *, token: bool = False) -> Bound:
    """Listens at an address; port 0 is a free one. With `token`, one is asked for on loopback too.

    Raises:
        InputError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InputError(
            f"{host} port {port} cannot be listened at: {reason}; choose another --port, 0 for a free one, "
            "or another --host"
        ) from exc
    number = bound.getsockname()[1]
    secret = secrets.token_urlsafe(24) if token or not is_loopback(host) else None
    name = socket.gethostname() if host in _ALL else host
    url = f"http://{f'[{name}]' if ':' in name else name}:{number}/"
    return Bound(
        bound, Access(secret, f"draftgauge-{number}"), url if secret is None else f"{url}?token={secret}"
    )


def serve(bound: Bound, library: Library, *, report: Report, ready: Callable[[uvicorn.Server], None]) -> None:
    """Serves until it is interrupted; `ready` is told of the server before it answers."""
    config = uvicorn.Config(
        viewer(library, access=bound.access, report=report),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,  # it would write tokens down
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    ready(server)
    with contextlib.suppress(KeyboardInterrupt), bound.socket:  # how a viewer ends
        server.run(sockets=[bound.socket])
