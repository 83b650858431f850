"""Three real hosts and two containers on this machine, as fixtures; what they are made of stands in three_hosts.sh.

Knows nothing of draftgauge.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("three_hosts.sh")
NEEDED = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "nft", "lxc-create", "lxc-attach")


class Hosts:
    """The hosts ws, train and eval; train holds the containers 200, with python3, and 201, without."""

    def __init__(self, folder: Path, **sizes: str) -> None:
        self.folder = folder
        number = os.getpid() % 200
        self.environment = dict(
            os.environ,
            HOSTS_DIR=str(folder),
            HOSTS_PREFIX=f"dg{os.getpid()}",
            HOSTS_NET=f"10.{number}",
            PYTHON=os.path.realpath(sys.executable),
            **{f"SIZE_{host}": size for host, size in sizes.items()},
        )

    def script(self, *words: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
        """Runs the script; its failure is a failure of the test."""
        done = subprocess.run(
            ["bash", str(SCRIPT), *words], env=self.environment, capture_output=True, check=False, **how
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done

    def up(self) -> None:
        """Starts everything."""
        # Files, not pipes: the hosts outlive the script and would hold its pipes open.
        log = self.folder / "up.log"
        with log.open("wb") as out:
            done = subprocess.run(
                ["bash", str(SCRIPT), "up"], env=self.environment, stdout=out, stderr=out, check=False
            )
        assert done.returncode == 0, log.read_text()
        python = self.environment["PYTHON"]
        for words in (("200", python), ("201",)):
            with log.open("ab") as out:
                done = subprocess.run(
                    ["bash", str(SCRIPT), "container", *words],
                    env=self.environment,
                    stdout=out,
                    stderr=out,
                    check=False,
                )
            assert done.returncode == 0, log.read_text()

    def down(self) -> None:
        """Ends everything."""
        self.script("down")

    def words(self, host: str, *words: str) -> list[str]:
        """The command that runs words on a host."""
        return ["bash", str(SCRIPT), "exec", host, *words]

    def run(self, host: str, *words: str, check: bool = True, **how: Any) -> subprocess.CompletedProcess[Any]:
        """Runs words on a host."""
        done = subprocess.run(
            self.words(host, *words), env=self.environment, capture_output=True, check=False, **how
        )
        if check:
            assert done.returncode == 0, (words, done.stdout[-4000:], done.stderr[-4000:])
        return done

    def start(self, host: str, *words: str, **how: Any) -> subprocess.Popen[Any]:
        """Starts words on a host."""
        return subprocess.Popen(self.words(host, *words), env=self.environment, **how)

    def cut(self, host: str) -> None:
        """Silences the link to a host: nobody is told."""
        self.script("cut", host)

    def mend(self, host: str) -> None:
        """Takes the silence away."""
        self.script("mend", host)

    def kill_connections(self, host: str) -> None:
        """Kills every ssh connection of a host, not the server that accepts new ones."""
        self.run(host, "bash", "-c", "pkill -9 -f '^sshd: root@' || true")

    def root(self, host: str) -> Path:
        """The root of a host, seen from this machine."""
        pid = self.script("pid", host).stdout.decode().strip()
        return Path(f"/proc/{pid}/root")


def why_not() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "making hosts needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or not Path("/usr/sbin/sshd").exists():
        return f"not installed: {', '.join(missing or ['sshd'])} (Debian: make hosts)"
    name = f"dgtry{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"namespaces are refused here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The three hosts, running."""
    if reason := why_not():
        pytest.skip(reason)
    made = Hosts(tmp_path_factory.mktemp("hosts"), train="1g", eval="1g", ws="512m")
    try:
        try:
            made.up()
        except AssertionError as refused:
            pytest.skip(f"the three hosts do not start here: {str(refused)[-500:]}")
        yield made
    finally:
        made.down()
