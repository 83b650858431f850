"""Staging: a file, a folder or what an evaluation needs of a checkpoint, from one spot to another.

The path: look at the source, ask the target what it holds, plan the route, check the space, move, compare the
digests of both ends, publish by rename. It goes on at the byte where an earlier one stopped; what is there already
is not moved. Knows nothing of evaluations.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import tenacity

from draftgauge.errors import BeingWrittenError, ConnectionLostError, FleetError, UnfinishedError
from draftgauge.fleet import pump
from draftgauge.fleet.cargo import Cargo
from draftgauge.fleet.places import WORKSTATION, Spot
from draftgauge.fleet.reach import End, Reach, refuse, reply_of
from draftgauge.fleet.routes import Route, plan_route
from draftgauge.store import PARTIAL
from draftgauge.weights import in_bytes

Moved = Callable[[int], None]
#: A connection that is lost this often without a byte in between is given up; the part stays.
TRIES_WITHOUT_PROGRESS = 5
DIGEST_TIMEOUT_S = 3600.0
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Staging:
    """What a staging will do: what, where to, on which way, and how much of it is there already."""

    cargo: Cargo
    target: Spot
    route: Route
    part: str
    held_bytes: int
    free_bytes: int
    there: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The plan as data."""
        return {
            "source": str(self.cargo.source),
            "target": str(self.target),
            "what": self.cargo.what,
            "step": self.cargo.step,
            "bytes": self.cargo.nbytes,
            "held_bytes": self.held_bytes,
            "free_bytes": self.free_bytes,
            "files": [inner or self.target.name for inner, _ in self.cargo.outputs],
            "route": list(self.route.stops),
            "route_why": self.route.why,
            "already_there": bool(self.there),
            "sha256": self.there or None,
        }


@dataclass(frozen=True)
class Staged:
    """A spot where everything arrived: the SHA-256 of all its bytes, and how many of them moved this time."""

    spot: Spot
    sha256: str
    nbytes: int
    moved_bytes: int


def landing(cargo: Cargo, target: Spot, *, inside: bool) -> Spot:
    """Where a cargo comes to lie: at `target`, or under its own name `inside` that folder.

    Raises:
        FleetError: The name says that it is another kind of file than the one that moves.
    """
    if inside:
        return target.below(cargo.name)
    kinds = [posixpath.splitext(name)[1] for name in (cargo.source.name, cargo.name, target.name)]
    if kinds[0] != kinds[1] and kinds[1] != kinds[2] and cargo.outputs[0][0] == "":
        raise FleetError(
            f"{target}: what moves of {cargo.source} is a safetensors file; give it a name that ends in "
            ".safetensors, or --whole to move the file as it is"
        )
    return target


def plan_staging(reach: Reach, cargo: Cargo, target: Spot) -> Staging:
    """Looks at the target and the way to it; writes nothing.

    Raises:
        FleetError: Something else is at the target, it cannot be written, or it has too little space for ever.
        UnfinishedError: Too little space now, or a place that cannot be reached.
    """
    folder = posixpath.dirname(target.path)
    part = posixpath.join(folder, f"{PARTIAL}{cargo.fingerprint}-{target.name}")
    route = plan_route(reach, cargo.source.place, target.place)
    there = _already_there(reach, cargo, target)
    held = cargo.nbytes if there else _held(reach, cargo, target, part)
    room = reach.call(target.place, "space", path=folder)
    if not room["writable"]:
        raise FleetError(f"{room['folder']} at {target.place.name} may not be written; choose another folder")
    needed = cargo.nbytes - held + target.place.keep_free_bytes
    if not there and room["free_bytes"] < needed:
        raise UnfinishedError(
            f"{target} needs {in_bytes(cargo.nbytes - held)} and {in_bytes(target.place.keep_free_bytes)} are to "
            f"stay free (keep_free), but {room['folder']} has {in_bytes(room['free_bytes'])}. Make room there, and "
            "run the same command again"
        )
    return Staging(cargo, target, route, part, held, room["free_bytes"], there)


def stage(reach: Reach, staging: Staging, *, moved: Moved) -> Staged:
    """Carries out a plan; `moved` is told how many bytes of the whole are there, as they come.

    Raises:
        FleetError: The source is damaged or gone, or the bytes arrive otherwise than they left, twice.
        UnfinishedError: A connection, a disk or the source's writer stopped it; the part stays for the next try.
    """
    cargo, target = staging.cargo, staging.target
    if staging.there:
        return Staged(target, staging.there, cargo.nbytes, 0)
    sha256 = _moved_and_compared(reach, staging, moved)
    reach.call(target.place, "publish", part=staging.part, path=target.path, timeout_s=600.0)
    _leave_note(reach, cargo, target, sha256)
    return Staged(target, sha256, cargo.nbytes, cargo.nbytes - staging.held_bytes)


def _held(reach: Reach, cargo: Cargo, target: Spot, part: str) -> int:
    """How many bytes of a cargo a part holds, from its beginning."""
    outputs = [list(output) for output in cargo.outputs]
    return int(reach.call(target.place, "holds", part=part, outputs=outputs)["bytes"])


# --- what is there already -------------------------------------------------------------------------------


def _note_path(target: Spot) -> str:
    """Beside what was staged, a hidden file that says what it was taken from."""
    return posixpath.join(posixpath.dirname(target.path), f".{target.name}.staged.json")


def _leave_note(reach: Reach, cargo: Cargo, target: Spot, sha256: str) -> None:
    said = {
        "source": str(cargo.source),
        "fingerprint": cargo.fingerprint,
        "sha256": sha256,
        "bytes": cargo.nbytes,
    }
    reach.call(target.place, "note", path=_note_path(target), text=json.dumps(said))


def _already_there(reach: Reach, cargo: Cargo, target: Spot) -> str:
    """The digest of what lies at the target, if it is the cargo already; empty if nothing lies there.

    Raises:
        FleetError: Something else lies there.
    """
    seen = reach.call(target.place, "look", path=target.path)
    if seen["kind"] == "missing":
        return ""
    files = [["", seen["identity"]]] if seen["kind"] == "file" else seen.get("files", [])
    sizes = {inner: identity[0] for inner, identity in files}
    if sizes == dict(cargo.outputs):
        there = _digest_at(reach, target, dict(files), cargo)
        text = reach.call(target.place, "text", path=_note_path(target), limit=1 << 16)["text"]
        if there == _noted(text, cargo):
            return there
        if there == _source_digest(reach, cargo):
            _leave_note(reach, cargo, target, there)
            return there
    raise FleetError(
        f"{target} exists already and holds something else; it is never overwritten. Choose another name"
        + (", or end the path with / to put it inside" if seen["kind"] == "folder" else "")
    )


def _noted(text: str | None, cargo: Cargo) -> str | None:
    """The digest in a note, where it speaks of this cargo."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        said = json.loads(text or "")
        if said.get("fingerprint") == cargo.fingerprint:
            return str(said.get("sha256"))
    return None


def _digest_at(reach: Reach, target: Spot, files: dict[str, Any], cargo: Cargo) -> str:
    """SHA-256 of the outputs as they lie at the target, one after the other."""
    pieces, identities = [], {}
    for inner, size in cargo.outputs:
        path = posixpath.join(target.path, inner) if inner else target.path
        pieces.append({"path": path, "offset": 0, "size": size})
        identities[path] = files[inner]
    return _digest(reach, target, pieces, identities, nice=0)


def _source_digest(reach: Reach, cargo: Cargo) -> str:
    return _digest(
        reach, cargo.source, list(cargo.pieces), dict(cargo.identities), nice=cargo.source.place.nice
    )


def _digest(reach: Reach, spot: Spot, pieces: list[Any], identities: dict[str, Any], *, nice: int) -> str:
    request: dict[str, Any] = {"pieces": pieces, "identities": identities, "nice": nice}
    verb = "send" if reach.has_python(spot.place) else "digest"
    done = reach.call(spot.place, verb, timeout_s=DIGEST_TIMEOUT_S, digest_only=True, **request)
    return str(done["sha256"])


# --- moving ----------------------------------------------------------------------------------------------


def _moved_and_compared(reach: Reach, staging: Staging, moved: Moved) -> str:
    """Moves until both ends have the same digest; a part that turns out wrong is moved once more."""
    for last in (False, True):
        sent, arrived = _moved_despite_losses(reach, staging, moved)
        if sent == arrived:
            return sent
        reach.call(staging.target.place, "remove", part=staging.part)
        if last:
            break
    raise FleetError(
        f"{staging.target}: what arrived has SHA-256 {arrived}, what left {staging.cargo.source} has {sent}, twice; "
        "nothing was published. Look at the disk and the memory of both machines"
    )


def _moved_despite_losses(reach: Reach, staging: Staging, moved: Moved) -> tuple[str, str]:
    """Moves, and goes on after every lost connection as long as there is progress."""
    seen: list[int] = []

    def stalled(_: tenacity.RetryCallState) -> bool:
        return len(seen) >= TRIES_WITHOUT_PROGRESS and len(set(seen[-TRIES_WITHOUT_PROGRESS:])) == 1

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ConnectionLostError),
        wait=tenacity.wait_exponential(multiplier=0.5, max=20),
        stop=stalled,
        reraise=True,
    )

    def once() -> tuple[str, str]:
        skip = _held(reach, staging.cargo, staging.target, staging.part)
        seen.append(skip)
        return _move(reach, staging, skip, moved)

    return retrying(once)


def _move(reach: Reach, staging: Staging, skip: int, moved: Moved) -> tuple[str, str]:
    """One stream from the source to the part; returns the digests that both ends say."""
    cargo, target, route = staging.cargo, staging.target, staging.route
    source = cargo.source.place
    outputs = [list(output) for output in cargo.outputs]
    request = {
        "pieces": list(cargo.pieces),
        "identities": dict(cargo.identities),
        "skip": skip,
        "nice": source.nice,
    }
    via = route.pump.name
    small = cargo.nbytes - skip <= SMALL_BYTES  # bulk goes beside the shared connections, not through them
    reader = reach.command(source, "send", request, via=via, shared=small)
    arriving = {"part": staging.part, "outputs": outputs, "skip": skip}
    writer = reach.command(target.place, "receive", arriving, via=via, shared=small)
    limit = min(filter(None, (source.bytes_per_s, target.place.bytes_per_s)), default=None)
    moved(skip)

    def told(total: int) -> None:
        moved(min(skip + total, cargo.nbytes))

    if via == WORKSTATION:
        ends = pump.pump(reader.as_request(), writer.as_request(), limit, told)
    else:
        ends = _pumped_there(reach, route, (reader.as_request(), writer.as_request()), limit, told)
    left, came = (End(**end) for end in ends)
    if (left.code or came.code) and not reach.has_python(source):
        _require_unchanged(reach, cargo)  # the reader there would not have said it
    _require_both(staging, left, came)
    arrived = _said(reach, target, came) or _part_digest(reach, staging)
    sent = _said(reach, cargo.source, left)
    if not sent:
        sent = _source_digest(reach, cargo)
        _require_unchanged(reach, cargo)
    return sent, arrived


def _require_both(staging: Staging, left: End, came: End) -> None:
    """Raises for the end that failed first: a writer whose reader stopped only says that too little came."""
    starved = '"kind": "short"' in came.err or (left.code and pump.MARK.decode() not in came.err)
    if came.code and (not starved or "No space" in came.err):
        refuse(staging.target.place, came)
    if left.code:
        refuse(staging.cargo.source.place, left)
    if came.code:
        refuse(staging.target.place, came)


def _said(reach: Reach, spot: Spot, end: End) -> str:
    """The digest that an end with Python replied; empty from one without."""
    if not reach.has_python(spot.place):
        return ""
    return str(reply_of(spot.place, end)["sha256"])


def _part_digest(reach: Reach, staging: Staging) -> str:
    """The digest of a part at a place without Python, whose receiver does not count what it wrote."""
    held = _held(reach, staging.cargo, staging.target, staging.part)
    if held != staging.cargo.nbytes:
        raise ConnectionLostError(f"{staging.target}: {held} of {staging.cargo.nbytes} bytes arrived")
    pieces = [{"path": staging.part, "offset": 0, "size": held}]
    return _digest(reach, staging.target, pieces, {}, nice=0)


def _require_unchanged(reach: Reach, cargo: Cargo) -> None:
    """Of a source without Python: it is still what was looked at."""
    seen = reach.call(cargo.source.place, "look", path=cargo.source.path)
    if seen["kind"] == "missing":
        raise FleetError(f"{cargo.source} is gone")
    if seen.get("identity") != cargo.identities[cargo.source.path]:
        raise BeingWrittenError(f"{cargo.source} changed while it was read. Run the same command again")


def _pumped_there(
    reach: Reach,
    route: Route,
    commands: tuple[dict[str, Any], dict[str, Any]],
    limit: int | None,
    told: Moved,
) -> list[dict[str, Any]]:
    """Lets another host pump between the two that it reaches; it says how far it is."""
    request = {"reader": commands[0], "writer": commands[1], "limit": limit}
    command = reach.command(route.pump, "relay", request)
    with _running(command.argv) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(command.stdin)
            process.stdin.close()
        kept: list[bytes] = []
        for line in process.stderr:
            if line.startswith(pump.MARK + b"moved "):
                told(int(line.rpartition(b" ")[2]))
            else:
                kept = [*kept[-200:], line]
        end = End(process.wait(), "", b"".join(kept).decode("utf-8", "replace"))
    ends: list[dict[str, Any]] = reply_of(route.pump, end)["ends"]
    return ends


@contextlib.contextmanager
def _running(argv: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def staged_as_dict(staged: Staged) -> dict[str, Any]:
    """A finished staging as data."""
    return asdict(staged) | {"spot": str(staged.spot)}
