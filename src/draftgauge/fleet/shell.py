"""The few verbs that a place without Python answers, as programs of a POSIX shell: whole files only.

A program is constant text; names are its arguments and never part of it. `stat`, `tail`, `dd`, `df`, `ln` and
`sha256sum` as in coreutils and busybox are all that is needed. Knows nothing of how a place is reached.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from draftgauge.errors import FleetError

_OURS = (
    'case "${1##*/}" in .partial-*) ;; *) echo "$1 is not an unfinished file of ours" >&2; exit 1 ;; esac; '
)
PROGRAMS: dict[str, str] = {
    "look": 'if [ -f "$1" ]; then echo file; stat -L -c "%s %i %y" "$1"; '
    'elif [ -d "$1" ]; then echo folder; find "$1" -maxdepth "$2" -type f '
    '-exec stat -L -c "%s %i %y" {} \\; -print0; '
    'elif [ -e "$1" ] || [ -L "$1" ]; then echo other; else echo missing; fi',
    "space": 'd=$1; while [ ! -d "$d" ]; do d=$(dirname "$d"); done; [ -w "$d" ] && echo yes || echo no; '
    'df -Pk "$d" | tail -n 1; echo "$d"',
    "send": "command -v ionice >/dev/null && ionice -c3 -p $$; command -v renice >/dev/null && "
    'renice -n "$3" -p $$ >/dev/null; exec tail -c +"$2" "$1"',
    "digest": 'sha256sum < "$1"',
    "holds": 'if [ -f "$1" ]; then stat -c %s "$1"; else echo 0; fi',
    "receive": _OURS
    + 'mkdir -p "$(dirname "$1")" && { dd bs=1 seek="$2" count=0 2>/dev/null; cat; } 1<>"$1" && sync',
    "publish": _OURS + 'ln "$1" "$2" && rm -f "$1" && sync',
    "remove": _OURS + 'rm -f "$1"',
    "text": 'if [ -f "$1" ]; then echo yes; tail -c "$2" "$1"; else echo no; fi',
    "note": 'p=$(dirname "$1")/.partial-$$; mkdir -p "$(dirname "$1")" && printf %s "$2" > "$p" && mv "$p" "$1"',
    "about": "uname -n",
}


def argv(verb: str, request: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of a verb, for the place itself.

    Raises:
        FleetError: It needs Python there.
    """
    path = str(request.get("path", request.get("part", "")))
    given: dict[str, tuple[object, ...]] = {
        "look": (path, request.get("depth", 64)),
        "receive": (path, request.get("skip", 0)),
        "publish": (request.get("part"), path),
        "text": (path, request.get("limit")),
        "note": (path, request.get("text")),
    }
    if verb == "send":
        piece = _whole_file(request)
        given["send"] = (piece["path"], int(request.get("skip", 0)) + 1, request.get("nice", 0))
    elif verb == "digest":
        given["digest"] = (_whole_file(request)["path"],)
    elif verb in ("receive", "holds"):
        if [inner for inner, _ in request["outputs"]] != [""]:
            raise FleetError("a folder is written file by file, which needs python3 at the place; install it")
    elif verb not in PROGRAMS:
        raise FleetError(f"python3 is needed at the place for this ({verb}); install it there")
    words = tuple(str(word) for word in given.get(verb, (path,)))
    return ("env", "LC_ALL=C", "sh", "-c", PROGRAMS[verb], "sh", *(_plain(word) for word in words))


def reply(verb: str, request: Mapping[str, Any], out: bytes) -> dict[str, Any]:
    """What the output of a verb says, in the form in which Python would have said it."""
    if verb == "look":
        return _look(str(request["path"]), out)
    text = out.decode("utf-8", "surrogateescape")
    if verb == "space":
        writable, numbers, folder = text.split("\n", 2)
        return {
            "folder": folder.rstrip("\n"),
            "free_bytes": int(numbers.split()[3]) * 1024,
            "writable": writable == "yes",
        }
    if verb == "holds":
        (_, size), *_ = request["outputs"]
        return {"bytes": min(int(text), size)}
    if verb == "digest":
        return {"sha256": text.split()[0]}
    if verb == "text":
        found, _, content = text.partition("\n")
        return {"text": content if found == "yes" else None}
    return {"python": None, "host": text.strip(), "space": {}} if verb == "about" else {}


def _whole_file(request: Mapping[str, Any]) -> Mapping[str, Any]:
    pieces = request["pieces"]
    if len(pieces) != 1 or "path" not in pieces[0] or pieces[0]["offset"] or "crc" in pieces[0]:
        raise FleetError("only whole files can be read at a place without python3")
    piece: Mapping[str, Any] = pieces[0]
    return piece


def _look(path: str, out: bytes) -> dict[str, Any]:
    kind, _, rest = out.partition(b"\n")
    if kind == b"file":
        return {"kind": "file", "identity": _identity(rest.rstrip(b"\n"))}
    if kind == b"folder":
        files = []
        for entry in filter(None, rest.split(b"\0")):
            stated, _, name = entry.partition(b"\n")
            inner = posixpath.relpath(name.decode("utf-8", "surrogateescape"), path)
            if not any(part.startswith(".partial-") for part in inner.split("/")):
                files.append([inner, _identity(stated)])
        return {"kind": "folder", "files": sorted(files), "skipped": []}
    return {"kind": kind.decode("ascii", "replace")}


def _identity(line: bytes) -> list[Any]:
    size, inode, time = line.decode("ascii", "replace").split(" ", 2)
    return [int(size), time, int(inode)]


def _plain(word: str) -> str:
    """Paths that begin with '-' would be options to the programs above; all others are left as they are."""
    return f"./{word}" if word.startswith("-") else word
