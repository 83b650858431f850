"""An address is had, said, and left again."""

import socket
from pathlib import Path

import httpx2
import pytest

from draftgauge.errors import InputError
from draftgauge.viewer.serving import bind
from tests.shelf import serving


def test_a_free_port_is_said() -> None:
    bound = bind("127.0.0.1", 0)
    port = bound.socket.getsockname()[1]
    assert bound.url == f"http://127.0.0.1:{port}/"
    assert bound.access.token is None
    bound.socket.close()


def test_all_addresses_are_said_by_the_name_of_the_machine() -> None:
    bound = bind("0.0.0.0", 0)
    assert bound.url.startswith(f"http://{socket.gethostname()}:")
    assert bound.url.endswith(f"/?token={bound.access.token}")
    bound.socket.close()


def test_tokens_are_fresh() -> None:
    pair = [bind("127.0.0.1", 0, token=True) for _ in range(2)]
    assert pair[0].access.token != pair[1].access.token
    assert pair[0].access.cookie != pair[1].access.cookie, "browsers keep cookies by host, whatever the port"
    for bound in pair:
        bound.socket.close()


def test_an_address_in_brackets_can_be_opened(tmp_path: Path) -> None:
    try:
        bound = bind("::1", 0)
    except InputError:
        pytest.skip("this machine has no IPv6")
    assert bound.url.startswith("http://[::1]:")
    with serving(bound, tmp_path):
        assert httpx2.get(bound.url).status_code == 200


def test_an_address_that_cannot_be_had_is_an_error_with_a_way_out() -> None:
    bound = bind("127.0.0.1", 0)
    with pytest.raises(InputError, match="choose another --port"):
        bind("127.0.0.1", bound.socket.getsockname()[1])
    bound.socket.close()
    with pytest.raises(InputError, match="another --host"):
        bind("203.0.113.7", 0)


def test_the_port_is_free_again_afterwards(tmp_path: Path) -> None:
    with serving(bind("127.0.0.1", 0), tmp_path) as bound:
        port = bound.socket.getsockname()[1]
    bind("127.0.0.1", port).socket.close()
