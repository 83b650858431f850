"""What every test stands on: checked tensor shapes, a home of its own, no network, and the real target."""

import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from tests.hosts.fleet import hosts  # noqa: F401 - a fixture: here, so that a session makes the hosts once

# Before anything imports draftgauge: from here on every annotated shape and type is checked at each call.
jaxtyping.install_import_hook("draftgauge", "beartype.beartype")

ROOT = Path(__file__).parents[1]
SMOLLM = ROOT / ".cache" / "SmolLM2-135M-Instruct"
HOME_VARIABLES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")


def pytest_configure(config: pytest.Config) -> None:
    """Move the home directory and close the hub before any library reads where they are, as some do on import."""
    home = Path(tempfile.mkdtemp(prefix="draftgauge-home-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ.update(dict.fromkeys(HOME_VARIABLES, str(home)), HF_HUB_OFFLINE="1")
    for name in ("HF_HOME", "HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
        os.environ.pop(name, None)
    # The rows that tests rank are few: threads would wait for each other, and burn a core while they do.
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")


def is_local(host: Any) -> bool:
    """Whether an address stays on this machine; a name is looked up nowhere, so only `localhost` is one."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(name).partition("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Connecting to or looking up anything but this machine fails the test, past every `except Exception`."""

    def refuse(host: Any) -> None:
        if not is_local(host):
            pytest.fail(f"a test reached for the network: {host!r}")

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def connect_locally(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse(address[0])
            return connect(self, address)

        return connect_locally

    look_up = socket.getaddrinfo

    def look_up_locally(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return look_up(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
        patch.setattr(socket, "getaddrinfo", look_up_locally)
        yield


@pytest.fixture
def tiny_target(tmp_path: Path) -> Callable[..., Path]:
    """Makes a Hugging Face directory of a golden target by its name; more as for `tiny.target_dir`."""
    from tests.tiny import target_dir  # not above: it imports draftgauge, which has to wait for the hook

    def make(name: str, *, folder: str = "target", **said: Any) -> Path:
        return target_dir(tmp_path / folder, name, **said)

    return make


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The real target as a Hugging Face style directory; a test that asks for it is marked `real`."""
    if not (SMOLLM / "config.json").is_file():
        pytest.fail(f"{SMOLLM.relative_to(ROOT)} is not there yet: run `make target`")
    return SMOLLM
