"""What lies in a folder: runs, recordings and series, found below it and read as far as a list needs.

Looks anew at every question, and reads a manifest again only where its file is another one. Nothing outside the
folder is opened, through symbolic links neither; unfinished folders do not exist here. Knows nothing of pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from draftgauge.errors import InputError, RecordingError, RunError
from draftgauge.recording import MANIFEST as RECORDING
from draftgauge.recording import Recording, open_recording
from draftgauge.runs import BLOCKS, CHECKPOINT, SUMMARY, Run, open_run
from draftgauge.runs import MANIFEST as RUN
from draftgauge.viewer.rows import RecordingRow, RunRow, read_recording, read_run
from draftgauge.viewer.series import SERIES, Watched, read_series

#: A plan's runs lie three folders deep in its project, and a few projects may lie in one folder.
DEEPEST = 5
#: Whoever views a whole disk is told that not all of it was looked at.
MOST_FOLDERS = 20_000
_NEVER = {"node_modules", "__pycache__", "site-packages"}
_PARTS: Mapping[str, tuple[str, ...]] = {RUN: (RUN, SUMMARY), RECORDING: (RECORDING,), SERIES: (SERIES,)}

#: What tells a file from another that took its name: device, inode, size, time.
Identity = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Found:
    """What lies in the folder: runs newest first, recordings and series by name.

    `others` says of every folder that lies beside them, or looks like one of them, why it is none. `cut` says that
    the folder holds too much to look at all of it.
    """

    runs: tuple[RunRow, ...]
    recordings: tuple[RecordingRow, ...]
    series: tuple[Watched, ...]
    others: Mapping[str, str]
    cut: bool


class Library:
    """The folder that is viewed."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InputError(f"{root} is not a folder; give the one that your runs and recordings lie in")
        for manifest in (RUN, RECORDING):
            if (root / manifest).is_file():
                raise InputError(
                    f"{root} is itself a {manifest.removesuffix('.json')}; view the folder that it lies in: "
                    f"`draftgauge view {root.resolve().parent}`"
                )
        self.root = root.resolve()
        self._known: dict[tuple[str, str], tuple[Identity, Any]] = {}
        self._lock = threading.Lock()

    def look(self) -> Found:
        """Everything that lies there now."""
        with self._lock:
            walk = _Walk(self.root)
            rows: dict[str, list[Any]] = {RUN: [], RECORDING: [], SERIES: []}
            others, seen = dict[str, str](), set[tuple[str, str]]()
            for folder, manifest in walk.folders():
                key = folder.relative_to(self.root).as_posix()
                seen.add((manifest, key))
                row = self._row(folder, key, manifest)
                if isinstance(row, str):
                    others[key] = row
                elif row is not None:
                    rows[manifest].append(row)
            self._known = {name: known for name, known in self._known.items() if name in seen}
        runs = sorted(rows[RUN], key=lambda row: (row.started, row.key), reverse=True)
        return Found(
            runs=tuple(runs),
            recordings=tuple(rows[RECORDING]),
            series=tuple(rows[SERIES]),
            others=dict(sorted((others | walk.others).items())),
            cut=walk.cut,
        )

    def _row(self, folder: Path, key: str, manifest: str) -> Any:
        """The row of what a folder holds, or why it has none; None where it was removed meanwhile."""
        try:
            identity = self._identity(folder, _PARTS[manifest])
        except FileNotFoundError:
            return None if not folder.is_dir() else f"{_PARTS[manifest][-1]} is missing in it"
        except (OSError, InputError) as exc:
            return _reason(exc)
        known = self._known.get((manifest, key))
        if known is None or known[0] != identity:
            known = identity, self._read(folder, key, manifest)
            self._known[manifest, key] = known
        return known[1]

    def _read(self, folder: Path, key: str, manifest: str) -> Any:
        read: Mapping[str, Callable[..., Any]] = {
            RUN: read_run,
            RECORDING: read_recording,
            SERIES: read_series,
        }
        try:
            return read[manifest](folder, key=key)
        except (InputError, OSError) as exc:
            return _reason(exc).replace(f"{folder.parent}{os.sep}", "")

    def run(self, key: str) -> Run:
        """The run in a folder below; its recording's path is where that lies here, or no path at all.

        A run says itself where its recording lies, and whoever shows the run opens what stands there.

        Raises:
            InputError: There is none, none that can be read, or it leads out of the folder.
        """
        run = open_run(self._folder(key, RUN, (SUMMARY, BLOCKS, CHECKPOINT)))
        said = run.manifest.get("recording")
        if not isinstance(said, Mapping) or not isinstance(said.get("path"), str):
            return run
        here = self._recording_here(said["path"])
        path = f"{said['path']} (outside the folder that is viewed)" if here is None else str(here)
        return replace(run, manifest={**run.manifest, "recording": {**said, "path": path}})

    def _recording_here(self, said: str) -> Path | None:
        """Where a recording lies below: at the path that is said, or under its name; None if it is not here."""
        name = PurePosixPath(said).name
        others = [self.root / row.key for row in self.look().recordings if row.name == name]
        return next((path for path in (Path(said), *others) if self._is_recording_inside(path)), None)

    def _is_recording_inside(self, path: Path) -> bool:
        """Whether there is a recording in a folder, none of whose files leads out."""
        try:
            if not path.is_absolute() or not inside(path / RECORDING, self.root):
                return False
            recording = open_recording(path)
            return all(item.file == Path(item.file).name for item in recording.items) and all(
                not file.is_symlink() or inside(file, self.root) for file in path.iterdir()
            )
        except (OSError, ValueError, RecordingError):
            return False

    def recording(self, key: str) -> Recording:
        """The recording in a folder below.

        Raises:
            InputError: There is none, none that can be read, or it leads out of the folder.
        """
        return open_recording(self._folder(key, RECORDING, ()))

    def series(self, key: str) -> Watched:
        """The series in a folder below.

        Raises:
            InputError: There is none, or it leads out of the folder.
        """
        folder = self._folder(key, SERIES, ())
        row = self._row(folder, key, SERIES)
        if isinstance(row, Watched):
            return row
        raise InputError(row or f"{key} is not here any more")

    def identity(self, key: str) -> Identity | None:
        """What tells the run in a folder below from another of its name; None where it is gone."""
        try:
            folder = self._folder(key, RUN, ())
            return self._identity(folder, (RUN, SUMMARY, *([BLOCKS] if (folder / BLOCKS).exists() else [])))
        except (OSError, InputError):
            return None

    def _folder(self, key: str, manifest: str, beside: Sequence[str]) -> Path:
        """A folder below by its key, when it and all that would be read of it lie in the folder that is viewed."""
        missing = InputError(f"there is no {manifest.partition('.')[0]} {key!r} here, or not any more")
        parts = key.split("/")
        if any(not part or part.startswith(".") or "\0" in part for part in parts):
            raise missing
        folder = self.root.joinpath(*parts)
        try:
            self._identity(folder, (manifest,))
        except OSError:
            raise missing from None
        for name in beside:
            if (folder / name).is_symlink():
                self._require_inside(folder / name)
        return folder

    def _identity(self, folder: Path, names: Sequence[str]) -> Identity:
        """The identity of files of a folder, which are made sure to lie inside.

        Raises:
            InputError: One leads out.
            OSError: One is not there.
        """
        stats = []
        for name in names:
            self._require_inside(folder / name)
            stat = (folder / name).stat()
            stats.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(stats)

    def _require_inside(self, path: Path) -> None:
        if not inside(path, self.root):
            raise InputError(f"{path.relative_to(self.root)} leads out of the folder that is viewed")


class _Walk:
    """One look over the folders below `root`; `others` and `cut` are known when it has ended."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._left = MOST_FOLDERS
        self.others: dict[str, str] = {}
        self.cut = False

    def folders(self) -> Iterator[tuple[Path, str]]:
        """Every folder with a manifest, and the manifest's name."""
        yield from self._below(self._root, self._names(self._root)[1], DEEPEST)

    def _below(self, folder: Path, inner: Sequence[str], depth: int) -> Iterator[tuple[Path, str]]:
        beside, shelf = list[str](), False
        for name in inner:
            path = folder / name
            if self._left <= 0:
                self.cut = True
                return
            self._left -= 1
            files, folders = self._names(path)
            manifests = [manifest for manifest in _PARTS if manifest in files]
            yield from ((path, manifest) for manifest in manifests)
            if RUN in manifests or RECORDING in manifests:
                shelf = True
                continue
            deeper = list(self._below(path, folders, depth - 1)) if depth > 1 else []
            yield from deeper
            if not deeper and not manifests:
                beside.append(name)
        if shelf or folder.name in ("runs", "recordings"):
            for name in beside:
                key = (folder / name).relative_to(self._root).as_posix()
                self.others.setdefault(
                    key, f"it holds no {RUN} and no {RECORDING}: {_unfinished(folder / name)}"
                )

    def _names(self, folder: Path) -> tuple[set[str], list[str]]:
        """The files and the folders in a folder that may be looked into; hidden ones are unfinished, or not ours."""
        files, folders = set[str](), list[str]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in _NEVER:
                        continue
                    if not _is_text(entry.name):
                        key = (Path(entry.path).relative_to(self._root)).as_posix()
                        self.others[key.encode("utf-8", "replace").decode()] = "its name is not UTF-8"
                    elif not entry.is_dir():
                        files.add(entry.name)
                    elif not entry.is_symlink() or inside(Path(entry.path), self._root):
                        folders.append(entry.name)
                    else:
                        key = Path(entry.path).relative_to(self._root).as_posix()
                        self.others[key] = "a symbolic link that leads out of the folder that is viewed"
        except OSError as exc:
            if folder.is_dir():
                self.others[folder.relative_to(self._root).as_posix()] = _reason(exc)
        return files, sorted(folders)


def inside(path: Path, root: Path) -> bool:
    """Whether a path leads to something below `root` that is not hidden there.

    Raises:
        OSError: It leads nowhere.
    """
    try:
        real = path.resolve(strict=True)
    except RuntimeError:  # links in a circle, before Python 3.13
        return False
    return real.is_relative_to(root) and not any(
        part.startswith(".") for part in real.relative_to(root).parts
    )


def _is_text(name: str) -> bool:
    """Whether a file's name can be sent: on Linux it may be any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unfinished(folder: Path) -> str:
    """What a folder without a manifest seems to be."""
    if any(folder.glob("*.safetensors")):
        return "a recording that was not finished, or another folder with tensors"
    return "not a run, and not a recording"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, (RunError, RecordingError)):
        return f"it cannot be read: {error.strerror or error}"
    return str(error)
