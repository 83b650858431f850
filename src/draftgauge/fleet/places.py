"""The fleet file: which machines there are, how to reach them, and what they allow.

A *place* is a host or a container on a host; the machine that runs the command is the place `workstation`. A
*spot* is a path at a place. This module reads and checks, and touches no machine.

Example of a fleet file:
    [hosts.pve1]
    ssh = "pve1"                      # as in `ssh pve1`: your own config, keys, agent and jump hosts are used

    [containers.ct200]
    host = "pve1"
    kind = "pct"
    id = "200"
    bandwidth = "100 MB/s"

    [hosts.eval1]
    ssh = "operator@eval1"
    work = "/srv/draftgauge"          # recordings/, runs/ and checkpoints/ lie below
    python = "/srv/venv/bin/python"   # the environment that holds draftgauge
"""

from __future__ import annotations

import difflib
import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from draftgauge.errors import FleetError

WORKSTATION = "workstation"
#: How a command is started inside a container, by kind. `pct pull` and its like are never used: they lock the
#: container, do not resume, and may end well without having copied.
ENTER: dict[str, tuple[str, ...]] = {
    "pct": ("pct", "exec", "{id}", "--"),
    "lxc": ("lxc-attach", "-n", "{id}", "--"),
    "lxd": ("lxc", "exec", "{id}", "--"),
    "incus": ("incus", "exec", "{id}", "--"),
    "docker": ("docker", "exec", "-i", "{id}"),
    "podman": ("podman", "exec", "-i", "{id}"),
    "kubectl": ("kubectl", "exec", "-i", "{id}", "--"),
    "chroot": ("chroot", "{id}"),
}
_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Nice = Annotated[int, msgspec.Meta(ge=0, le=19)]


class HostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[hosts.NAME]` table."""

    work: _Text | None = None
    python: _Text = "python3"
    bandwidth: str | None = None
    keep_free: str = "1 GB"
    nice: _Nice = 0
    ssh: _Text | None = None
    reaches: dict[str, str] = {}


class ContainerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[containers.NAME]` table; training goes first there."""

    work: _Text | None = None
    python: _Text = "python3"
    bandwidth: str | None = None
    keep_free: str = "1 GB"
    nice: _Nice = 10
    host: _Text
    kind: _Text | None = None
    id: _Text | None = None
    enter: list[_Text] | None = None


@dataclass(frozen=True)
class Place:
    """A host, or a container on one.

    `ssh` is the address from the workstation, None for the workstation itself. `enter` is the beginning of a
    command in the container, empty for a host. `reaches` holds other addresses of hosts, as seen from here.
    """

    name: str
    host: str
    ssh: str | None
    enter: tuple[str, ...]
    reaches: Mapping[str, str]
    work: str | None
    python: str
    bytes_per_s: int | None
    keep_free_bytes: int
    nice: int

    @property
    def is_container(self) -> bool:
        """Whether it is reached through another place."""
        return bool(self.enter)


@dataclass(frozen=True)
class Spot:
    """A path at a place, as in `eval1:/srv/draftgauge/recordings`."""

    place: Place
    path: str

    def __str__(self) -> str:
        return self.path if self.place.name == WORKSTATION else f"{self.place.name}:{self.path}"

    def below(self, *names: str) -> Spot:
        """A path inside this one."""
        return Spot(self.place, posixpath.join(self.path, *names))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)


@dataclass(frozen=True)
class Fleet:
    """All places by name; `workstation` is always among them."""

    path: Path | None
    places: Mapping[str, Place]

    def place(self, name: str) -> Place:
        """The place of that name.

        Raises:
            FleetError: There is none.
        """
        if name not in self.places:
            near = difflib.get_close_matches(name, self.places, n=1)
            if self.path is None:
                raise FleetError(
                    f"there is no place {name!r}: no fleet file was given (--fleet FILE, or `fleet` in a plan)"
                )
            raise FleetError(
                f"there is no place {name!r}; {self.path} names {', '.join(sorted(self.places))}."
                + (f" Did you mean {near[0]}?" if near else "")
            )
        return self.places[name]

    def host_of(self, place: Place) -> Place:
        """The host of a container, or the host itself."""
        return self.places[place.host]

    def spot(self, text: str) -> Spot:
        """What `PLACE:PATH` means; without a place, or beginning with `/`, `.` or `~`, it is a local path.

        A relative path at a place lies below its `work` folder.

        Raises:
            FleetError: An unknown place, an empty path, or a relative path where no `work` is given.
        """
        name, colon, path = text.partition(":")
        if not colon or text[:1] in ("/", ".", "~"):
            return Spot(self.places[WORKSTATION], str(Path(text).expanduser().absolute()))
        place = self.place(name)
        if "\0" in path or not path:
            raise FleetError(f"{text!r} names no path; expected PLACE:PATH, as in {name}:/data/checkpoint.pt")
        if place.name == WORKSTATION:
            return Spot(place, str(Path(path).expanduser().absolute()))
        if path.startswith("/"):
            return Spot(place, posixpath.normpath(path))
        if place.work is None:
            raise FleetError(
                f"{text!r} is a relative path, and {name} has no `work` folder in {self.path}; give the whole "
                "path, beginning with /"
            )
        return Spot(place, posixpath.normpath(posixpath.join(place.work, path)))


def read_fleet(path: Path | None) -> Fleet:
    """Reads a fleet file; without one, the workstation is the only place.

    Raises:
        FleetError: It cannot be read, or a key in it is unknown, missing or impossible; both are named.
    """
    tables = {} if path is None else _toml(path)
    unknown = sorted(set(tables) - {"hosts", "containers"})
    if unknown:
        raise FleetError(f"{path}: unknown table [{unknown[0]}]; expected [hosts.NAME] and [containers.NAME]")
    hosts, containers = _tables(path, tables, "hosts"), _tables(path, tables, "containers")
    hosts.setdefault(WORKSTATION, {})
    twice = sorted(set(hosts) & set(containers))
    if twice:
        raise FleetError(f"{path}: {twice[0]} is both a host and a container; rename one")
    places = {name: _host(f"{path}: hosts.{name}", name, table) for name, table in hosts.items()}
    for name, place in places.items():
        for other in place.reaches:
            if other not in hosts:
                raise FleetError(f"{path}: hosts.{name}.reaches names {other!r}, which is no host")
    for name, table in containers.items():
        places[name] = _container(f"{path}: containers.{name}", name, table, places)
    return Fleet(path, places)


def size_in_bytes(text: str, *, where: str) -> int:
    """`20 GB` or `50 MB/s` as a number.

    Raises:
        FleetError: It is no number with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB|)(?:/s)?", text.strip())
    if found is None:
        raise FleetError(f"{where} is {text!r}; expected a number and one of kB, MB, GB, TB, as in '20 GB'")
    return int(float(found[1]) * _UNITS[found[2]])


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a mapping.

    Raises:
        FleetError: It cannot be read, or is not TOML.
    """
    return _toml(path)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise FleetError(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise FleetError(f"{path} is not TOML: {exc}") from exc


def _tables(path: Path | None, tables: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    found = tables.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise FleetError(f"{path}: {key} must hold tables, as in [{key}.NAME]")
    for name in found:
        if not _NAME.fullmatch(name):
            raise FleetError(
                f"{path}: {key}.{name!r} is no name for a place; use letters, digits, '.', '_' and '-'"
            )
    return dict(found)


def _convert(where: str, table: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as exc:
        raise FleetError(f"{where}: {exc}") from exc


def _host(where: str, name: str, raw: dict[str, Any]) -> Place:
    table: HostTable = _convert(where, raw, HostTable)
    if name == WORKSTATION and table.ssh is not None:
        raise FleetError(f"{where}.ssh: the workstation is this machine; leave `ssh` out, or rename the host")
    if name != WORKSTATION and table.ssh is None:
        raise FleetError(f"{where}: `ssh` is missing; give what you would write after `ssh`")
    for address in filter(None, (table.ssh, *table.reaches.values())):
        _require_word(f"{where}.ssh", address)
    return _place(where, name, name, table, ssh=table.ssh, enter=(), reaches=table.reaches)


def _container(where: str, name: str, raw: dict[str, Any], hosts: Mapping[str, Place]) -> Place:
    table: ContainerTable = _convert(where, raw, ContainerTable)
    if table.host not in hosts or hosts[table.host].is_container:
        raise FleetError(
            f"{where}.host is {table.host!r}; expected one of the hosts: {', '.join(sorted(hosts))}"
        )
    if (table.kind is None) == (table.enter is None):
        raise FleetError(
            f"{where}: give either `kind` with `id`, or `enter`, the words before a command in there"
        )
    if table.kind is None:
        enter = tuple(table.enter or ())
        if not enter:
            raise FleetError(f"{where}.enter is empty; expected words, as in ['kubectl', 'exec', '-i', ...]")
    else:
        if table.kind not in ENTER:
            raise FleetError(f"{where}.kind is {table.kind!r}; expected one of {', '.join(ENTER)}")
        if table.id is None:
            raise FleetError(f"{where}: `id` is missing; give the container's name or number as text")
        _require_word(f"{where}.id", table.id)
        enter = tuple(word.format(id=table.id) if word == "{id}" else word for word in ENTER[table.kind])
    host = hosts[table.host]
    return _place(where, name, host.name, table, ssh=host.ssh, enter=enter, reaches={})


def _place(
    where: str,
    name: str,
    host: str,
    table: HostTable | ContainerTable,
    *,
    ssh: str | None,
    enter: tuple[str, ...],
    reaches: Mapping[str, str],
) -> Place:
    if table.work is not None and not table.work.startswith("/"):
        raise FleetError(f"{where}.work is {table.work!r}; expected a whole path, beginning with /")
    bandwidth = table.bandwidth
    per_s = None if bandwidth is None else size_in_bytes(bandwidth, where=f"{where}.bandwidth")
    if per_s == 0:
        raise FleetError(f"{where}.bandwidth is 0; leave it out where there is no limit")
    return Place(
        name=name,
        host=host,
        ssh=ssh,
        enter=enter,
        reaches=reaches,
        work=table.work,
        python=table.python,
        bytes_per_s=per_s,
        keep_free_bytes=size_in_bytes(table.keep_free, where=f"{where}.keep_free"),
        nice=table.nice,
    )


def _require_word(where: str, text: str) -> None:
    """Refuses what a program would take for an option or for several words."""
    if text.startswith("-") or re.search(r"[\s\0-\x1f]", text):
        raise FleetError(f"{where} is {text!r}; it must not begin with '-' or hold spaces")
