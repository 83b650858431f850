"""The way between two places: who reaches whom, where the bytes are pumped, and why there.

Bytes flow straight between two hosts where one reaches the other by its own ssh, and through the workstation
otherwise, which stores nothing. Knows nothing of what is moved.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftgauge.errors import FleetError, UnfinishedError
from draftgauge.fleet.places import WORKSTATION, Place
from draftgauge.fleet.reach import Reach

CONNECT_S = 5
PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Route:
    """From a source to a target: the host that pumps, the stops on the way, and the reason.

    Example:
        `str(route)` is `ct200 -> pve1 (container) -> workstation -> eval1, because pve1 cannot reach eval1:
        connection timed out`
    """

    source: Place
    target: Place
    pump: Place
    why: str

    @property
    def stops(self) -> tuple[str, ...]:
        """The places that the bytes pass, in order."""
        names = [self.source.name]
        if self.source.is_container:
            names.append(f"{self.source.host} (container)")
        names += [self.pump.name, self.target.host]
        if self.target.is_container:
            names[-1] += " (container)"
            names.append(self.target.name)
        return tuple(name for at, name in enumerate(names) if at == 0 or not _same(names[at - 1], name))

    def __str__(self) -> str:
        return " -> ".join(self.stops) + (f", because {self.why}" if self.why else "")


def plan_route(reach: Reach, source: Place, target: Place) -> Route:
    """The route between two places, from asking their hosts whether they reach each other.

    Raises:
        FleetError: A host refuses.
        UnfinishedError: A host cannot be reached from the workstation.
    """
    near, far_side = reach.fleet.host_of(source), reach.fleet.host_of(target)
    workstation = reach.fleet.places[WORKSTATION]
    if near == far_side:
        pumps = reach.has_python(near)
        return Route(source, target, near if pumps else workstation, "")
    if workstation in (near, far_side):
        return Route(source, target, workstation, "")
    with ThreadPoolExecutor(2) as pool:
        forward = pool.submit(reaches, reach, near, far_side)
        backward = pool.submit(reaches, reach, far_side, near)
        refusals = [forward.result(), backward.result()]
    for host, other, refusal in ((near, far_side, refusals[0]), (far_side, near, refusals[1])):
        if not refusal and reach.has_python(host):
            return Route(source, target, host, f"{host.name} reaches {other.name} itself")
    # What is worth saying of the two directions: a refusal, rather than a missing python3.
    said = [
        f"{host} cannot reach {other}: {refusal}"
        for host, other, refusal in (
            (far_side.name, near.name, refusals[1]),
            (near.name, far_side.name, refusals[0]),
        )
        if refusal
    ]
    return Route(source, target, workstation, "; ".join(said) or "no host between has python3 to pump with")


def reaches(reach: Reach, host: Place, other: Place) -> str:
    """Empty where `host` gets a shell on `other` by its own ssh; else what ssh says, in few words. Asked once.

    Raises:
        FleetError: The host itself refuses.
        UnfinishedError: The host itself cannot be reached.
    """
    pair = host.name, other.name
    if pair not in reach.ways:
        try:
            words = reach.words(other, ("true",), via=host.name, connect_s=CONNECT_S)
        except FleetError as exc:
            return str(exc)
        inner = ("env", "LC_ALL=C", *words)
        # Long after ssh's own limit for connecting: a host that hangs must not stop the others.
        code, _, err = reach.start(host, reach.words(host, inner, shared=True), PROBE_TIMEOUT_S)
        lines = [line.strip() for line in err.splitlines() if line.strip()] or [f"exit code {code}"]
        reach.ways[pair] = _short(lines[-1]) if code else ""
    return reach.ways[pair]


def _short(line: str) -> str:
    """The reason of ssh's last line, without the address that it begins with."""
    return line.rpartition(": ")[2].rstrip(".") or line


def _same(one: str, other: str) -> bool:
    return one.partition(" ")[0] == other.partition(" ")[0]


def what_hosts_say(reach: Reach, hosts: list[Place]) -> dict[tuple[str, str], str]:
    """For every ordered pair of hosts, the workstation's included: empty, or why one cannot reach the other."""
    workstation = reach.fleet.places[WORKSTATION]
    pairs = [(a, b) for a in hosts for b in hosts if b not in (a, workstation)]

    def ask(pair: tuple[Place, Place]) -> str:
        host, other = pair
        try:
            if host == workstation:
                reach.call(other, "about")
                return ""
            return reaches(reach, host, other)
        except (FleetError, UnfinishedError) as exc:
            return _first_reason(exc, host)

    with ThreadPoolExecutor(max(1, min(32, len(pairs)))) as pool:
        return {(a.name, b.name): said for (a, b), said in zip(pairs, pool.map(ask, pairs), strict=True)}


def _first_reason(error: Any, host: Place) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[1] if len(lines) > 1 else lines[0]
    return _short(said) if len(lines) > 1 else said.removeprefix(f"{host.name}: ")
