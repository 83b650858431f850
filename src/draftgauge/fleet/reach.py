"""How a place is reached: the beginning of a command, the user's own ssh, and one request with its reply.

The system's ssh is the only client that honours all of a user's configuration. Commands are lists of words; the
one place where words become text is ssh, whose far side is a shell, and there `shlex.join` quotes them. Knows
nothing of checkpoints or of routes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from draftgauge.errors import BeingWrittenError, ConnectionLostError, FleetError, UnfinishedError
from draftgauge.fleet import far, pump, shell
from draftgauge.fleet.places import WORKSTATION, Fleet, Place

#: The modules that are sent, in the order in which they import each other.
_SENT = (pump, far)
FAR = json.dumps(
    [[module.__name__, Path(str(module.__file__)).read_text("utf-8")] for module in _SENT]
).encode()
#: Reads the text of modules from standard input and runs the last one's `main`. `-I` keeps the folder that it
#: starts in out of its imports, `-S` starts faster.
BOOT = (
    "import sys,json,types\n"
    "i=sys.stdin.buffer\n"
    "for n,t in [['draftgauge',''],['draftgauge.fleet','']]+json.loads(i.read(int(i.readline())).decode()):\n"
    " m=sys.modules[n]=types.ModuleType(n)\n"
    " m.__path__=[]\n"
    " exec(compile(t,n,'exec'),m.__dict__)\n"
    "m.main()"
)
CALL_TIMEOUT_S = 60.0
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout={connect_s}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
#: What ssh says when another try would end the same way.
_FOR_GOOD = ("Permission denied", "Host key verification failed", "Could not resolve hostname", "Bad owner")


@dataclass(frozen=True)
class Command:
    """Words to start, and the first bytes of its standard input."""

    argv: tuple[str, ...]
    stdin: bytes

    def as_request(self) -> dict[str, Any]:
        """The form in which `far` takes it."""
        return {"argv": list(self.argv), "stdin": base64.b64encode(self.stdin).decode()}


@dataclass(frozen=True)
class End:
    """How one end of a stream ended: exit code, output, and what it said on standard error."""

    code: int
    out: str
    err: str


@dataclass
class Reach:
    """The ways to the places of a fleet, with ssh connections that are shared while it is open."""

    fleet: Fleet
    sockets: str
    without_python: dict[str, bool] = field(default_factory=dict)
    ways: dict[tuple[str, str], str] = field(default_factory=dict)

    def call(self, place: Place, verb: str, *, timeout_s: float = CALL_TIMEOUT_S, **request: Any) -> Any:
        """One request to a place, and its reply.

        Raises:
            FleetError: The place refuses for good.
            UnfinishedError: It cannot be reached now, or waits for space or for a file to be finished.
        """
        if place.name == WORKSTATION and verb in far.QUIET:
            kind, value = far.answer({"verb": verb, **request})
            return value if kind == "reply" else refuse_for(place, value)
        command = self.command(place, verb, request, shared=True)
        code, out, err = self.start(place, command.argv, timeout_s, stdin=command.stdin)
        if self.has_python(place):
            return reply_of(place, End(code, "", err))
        if code:
            refuse(place, End(code, "", err))
        return shell.reply(verb, request, out)

    def read(self, place: Place, pieces: Sequence[Mapping[str, Any]], identities: Mapping[str, Any]) -> bytes:
        """The bytes of small pieces of files at a place that has Python.

        Raises:
            FleetError: The place refuses for good.
            UnfinishedError: It cannot be reached now, or a file is not the one that was looked at.
        """
        request = {"pieces": list(pieces), "identities": dict(identities)}
        command = self.command(place, "send", request, shared=True)
        code, out, err = self.start(place, command.argv, CALL_TIMEOUT_S, stdin=command.stdin)
        reply_of(place, End(code, "", err))
        return out

    def command(
        self,
        place: Place,
        verb: str,
        request: Mapping[str, Any],
        *,
        shared: bool = False,
        via: str = WORKSTATION,
    ) -> Command:
        """The command of a request, for the host `via`; `shared` connections are for small things only."""
        if self.has_python(place):
            body = json.dumps({"verb": verb, **request}).encode()
            stdin = b"%d\n%s%d\n%s" % (len(FAR), FAR, len(body), body)
            python = sys.executable if place.name == WORKSTATION else place.python
            words: tuple[str, ...] = (python, "-I", "-S", "-c", BOOT)
        else:
            words, stdin = shell.argv(verb, request), b""
        return Command(self.words(place, words, shared=shared, via=via), stdin)

    def words(
        self,
        place: Place,
        inner: tuple[str, ...],
        *,
        shared: bool = False,
        via: str = WORKSTATION,
        connect_s: int = 10,
    ) -> tuple[str, ...]:
        """The words that the host `via` starts to run `inner` at a place."""
        inner = (*place.enter, *inner)
        if via == place.host:
            return inner
        host = self.fleet.host_of(place)
        address = host.ssh if via == WORKSTATION else self.fleet.places[via].reaches.get(host.name, host.ssh)
        if address is None:
            raise FleetError(
                f"{via} has no address for {host.name}; give one: hosts.{via}.reaches = {{ {host.name} = ... }}"
            )
        options = self._sharing(shared) if via == WORKSTATION else ()
        ssh = (word.format(connect_s=connect_s) for word in _SSH)
        return (*ssh, *options, "--", address, shlex.join(inner))

    def has_python(self, place: Place) -> bool:
        """Whether `python3` runs at a place; asked once."""
        if place.name == WORKSTATION:
            return True
        if place.name not in self.without_python:  # places are asked side by side: no lock while one answers
            words = ("sh", "-c", 'command -v "$1" >/dev/null || echo none', "sh", place.python)
            argv = self.words(place, words, shared=True)
            code, out, err = self.start(place, argv, CALL_TIMEOUT_S)
            if code:
                refuse(place, End(code, "", err))
            self.without_python[place.name] = out.strip() == b"none"
        return not self.without_python[place.name]

    def start(
        self, place: Place, argv: tuple[str, ...], timeout_s: float, *, stdin: bytes = b""
    ) -> tuple[int, bytes, str]:
        """Exit code, output and what was said on standard error of words for this machine.

        Raises:
            FleetError: This machine lacks the program.
            ConnectionLostError: It took too long.
        """
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as exc:
            raise ConnectionLostError(
                f"{place.name} did not answer within {timeout_s:.0f} s; try again"
            ) from exc
        except FileNotFoundError as exc:
            raise FleetError(f"{argv[0]} is not installed on this machine; install it") from exc
        return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")

    def _sharing(self, shared: bool) -> tuple[str, ...]:
        if not shared:
            return ("-o", "ControlPath=none")
        path = f"ControlPath={self.sockets}/%C"
        return ("-o", "ControlMaster=auto", "-o", path, "-o", "ControlPersist=60")


@contextlib.contextmanager
def reaching(fleet: Fleet) -> Iterator[Reach]:
    """The ways to the places of a fleet; connections that were shared close with the block."""
    with tempfile.TemporaryDirectory(prefix="dg-", ignore_cleanup_errors=True) as sockets:
        Path(sockets).chmod(0o700)
        try:
            yield Reach(fleet, sockets)
        finally:
            for socket in Path(sockets).iterdir():
                subprocess.run(
                    ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "--", "any"],
                    capture_output=True,
                    check=False,
                    timeout=10,
                )


def reply_of(place: Place, end: End) -> Any:
    """The reply in what a far side said on standard error.

    Raises:
        FleetError: It refused for good.
        UnfinishedError: It was cut off, or refused for now.
    """
    for line in end.err.encode("utf-8", "replace").split(b"\n"):
        if line.startswith(pump.MARK + b"reply ") and not end.code:
            return json.loads(line[len(pump.MARK) + 6 :])
    return refuse(place, end)


def refuse(place: Place, end: End) -> NoReturn:
    """Raises what a failed end means, with the place and its own last lines.

    Raises:
        FleetError: Another try would end the same way.
        UnfinishedError: It may go well later.
    """
    for line in end.err.split("\n"):
        if line.startswith(pump.MARK.decode() + "error "):
            refuse_for(place, json.loads(line[len(pump.MARK) + 6 :]))
    said = last_lines(end.err)
    text = f"{place.name}: ended with exit code {end.code}" + (f":\n{said}" if said else "")
    if "No space left on device" in said:
        raise UnfinishedError(f"{text}\nMake room there and run the same command again")
    if end.code == 255 and not any(words in said for words in _FOR_GOOD):
        raise ConnectionLostError(f"{text}\nThe connection failed; run the same command again")
    if end.code < 0:
        raise ConnectionLostError(f"{text}\nIt was killed; run the same command again")
    raise FleetError(text)


def refuse_for(place: Place, error: Mapping[str, str]) -> NoReturn:
    """Raises what a refusal of the far side means.

    Raises:
        FleetError: Another try would end the same way.
        UnfinishedError: It waits for space, for a writer or for a connection.
    """
    kind, text = error["kind"], f"{place.name}: {error['text']}"
    if kind == "short":
        raise ConnectionLostError(f"{text}. Run the same command again")
    if kind == "space":
        raise UnfinishedError(f"{text}. Make room there and run the same command again")
    if kind == "changed":
        raise BeingWrittenError(f"{text}. Run the same command again, or use another source")
    if kind == "system":
        raise UnfinishedError(f"{text}. Run the same command again")
    raise FleetError(text)


def last_lines(err: str, count: int = 5) -> str:
    """The last lines that a machine said itself."""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith(pump.MARK.decode())]
    return "\n".join(f"  {line}" for line in lines[-count:])
