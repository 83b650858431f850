"""The places that the conformance suite runs over, and how a test makes and reads files at any of them.

On this machine alone: the workstation, a container that is entered with `env`, and one that has no python3. Where
`DRAFTGAUGE_TEST_FLEET` names a fleet file, its places are added; the tests with real hosts do that.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from draftgauge.fleet.places import Fleet, Place, Spot, read_fleet
from draftgauge.fleet.reach import Reach

FLEET_VARIABLE = "DRAFTGAUGE_TEST_FLEET"
#: What a place without python3 is expected to have.
PROGRAMS = (
    *(
        "sh",
        "env",
        "stat",
        "tail",
        "dd",
        "df",
        "ln",
        "sha256sum",
        "find",
        "cat",
        "mkdir",
        "dirname",
        "rm",
        "mv",
    ),
    *("sync", "nice", "renice", "readlink", "uname", "printf", "test", "cp", "touch", "ls", "mkfifo", "head"),
)


@cache
def programs_without_python() -> Path:
    """A folder with links to the programs of a small place."""
    folder = Path(tempfile.mkdtemp(prefix="draftgauge-bin-"))
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


@cache
def fleet() -> Fleet:
    """The places of the suite."""
    text = f"""
[containers.inside]
host = "workstation"
enter = ["env"]
nice = 5
keep_free = "1 MB"

[containers.bare]
host = "workstation"
enter = ["env", "PATH={programs_without_python()}"]
keep_free = "1 MB"
"""
    given = os.environ.get(FLEET_VARIABLE)
    workstation = '[hosts.workstation]\nkeep_free = "1 MB"\n'
    text += workstation if given is None else Path(given).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(text, encoding="utf-8")
        return read_fleet(file)


def place_names() -> list[str]:
    """Names for parametrising; a host that only holds containers is one as well."""
    return sorted(fleet().places)


@dataclass(frozen=True)
class Ground:
    """A new folder at a place, and what a test does there by other means than the ones under test."""

    reach: Reach
    place: Place
    path: str

    def spot(self, *names: str) -> Spot:
        """A path in the folder."""
        return Spot(self.place, "/".join((self.path, *names)))

    def sh(self, program: str, *words: str, stdin: bytes = b"") -> bytes:
        """What a shell program prints there; the words are its arguments."""
        argv = self.reach.words(self.place, ("sh", "-c", program, "sh", *words), shared=True)
        code, out, err = self.reach.start(self.place, argv, 60.0, stdin=stdin)
        assert code == 0, (program, words, err)
        return out

    def put(self, name: str, data: bytes) -> Spot:
        """Writes a file."""
        self.sh('mkdir -p "$(dirname "$1")" && cat > "$1"', self.spot(name).path, stdin=data)
        return self.spot(name)

    def get(self, name: str) -> bytes:
        """Reads a file."""
        return self.sh('cat "$1"', self.spot(name).path)

    def names(self) -> list[str]:
        """All names in the folder, hidden ones as well, a `\\0` after each when listed."""
        listed = self.sh('cd "$1" && find . -type f -print0', self.path).decode().split("\0")
        return sorted(name.removeprefix("./") for name in listed if name)

    def change(self, program: str, name: str) -> None:
        """Does something to a file, `$1`."""
        self.sh(program, self.spot(name).path)


@contextmanager
def ground(reach: Reach, name: str) -> Iterator[Ground]:
    """A folder at a place, removed afterwards."""
    place = reach.fleet.place(name)
    made = Ground(reach, place, "/var/tmp/draftgauge-conformance-" + os.urandom(6).hex())
    made.sh('mkdir -p "$1"', made.path)
    try:
        yield made
    finally:
        made.sh('rm -rf "$1"', made.path)


def moved(_: Any) -> None:
    """Takes what a staging says of its progress."""
