"""Files that are written once: a temporary beside the target, verified, synced, then renamed into place.

Whoever is killed at any moment leaves nothing, or a partial whose name says so and that nobody lists. Knows
nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draftgauge.errors import StoreError

#: Names of unfinished files and folders start so; no listing shows them.
PARTIAL = ".partial-"
_BLOCK_BYTES = 1 << 22
#: What a disk answers to nobody but a writer.
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def cache_folder() -> Path:
    """Where what can be made or fetched again is kept: `draftgauge` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(stated) if Path(stated).is_absolute() else Path.home() / ".cache") / "draftgauge"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@contextlib.contextmanager
def publish_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on a clean exit it is synced and renamed to `path`.

    Raises:
        StoreError: `path` exists already (nothing is ever overwritten), the folder cannot be written, or the
            disk is full; nothing is left behind.
    """
    if path.exists():
        raise StoreError(f"{path} exists already and is never overwritten; choose another name")
    partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on a clean exit it is synced and renamed to `path`.

    The folder is held until then, so that `sweep` tells it from what a killed process left. What else fails in
    the block is let through as it is: only the disk's refusals are ours to explain.

    Raises:
        StoreError: `path` exists already (nothing is ever overwritten), or the disk refuses.
    """
    if path.exists():
        raise StoreError(f"{path} exists already and is never overwritten; choose another name")
    partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        with _explained(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        with _held(partial):
            try:
                yield partial
            except OSError as exc:
                if _is_of_writing(exc, partial):
                    raise _unwritten(path, exc) from exc
                raise
            with _explained(path):
                for entry in sorted(partial.rglob("*")):
                    if entry.is_file() and not entry.is_symlink():
                        _sync(entry)
                partial.rename(path)
                _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes the unfinished folders that killed processes left in `folder`, and none that is still written."""
    for left in folder.glob(f"{PARTIAL}*"):
        try:
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # published or removed meanwhile, or no folder
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its writer holds it, or nobody here can tell
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, published whole; numbers that are not finite are refused, not written as `NaN`."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    with publish_file(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the folder `path` for this process while the block runs.

    Partials that a killed process left in it are removed first: nobody else writes there now.

    Raises:
        StoreError: Another process holds it, or it cannot be written.
    """
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise StoreError(
            f"{path} is being written by another process; wait for it or choose another"
        ) from exc
    except OSError as exc:
        raise StoreError(
            f"{path} cannot be written: {exc.strerror or exc}; check the path and its rights"
        ) from exc
    try:
        for left in path.glob(f"{PARTIAL}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        lock.release()


def keep(source: Path, target: Path) -> str:
    """Keeps `source` under `target` without a second copy of its bytes; returns how.

    A hard link where both lie on one file system; otherwise nothing is made and the caller records a
    reference with a digest.

    Raises:
        StoreError: `target` exists already.
    """
    if target.exists():
        raise StoreError(f"{target} exists already and is never overwritten; choose another name")
    try:
        # Resolved, since a link to a symbolic link would keep where it points and not the bytes.
        target.hardlink_to(source.resolve())
    except OSError:
        return "reference"
    return "hard link"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Holds a folder while the block runs; the kernel lets it go with the process, however that ends."""
    with _explained(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Where a file system has no locks, nobody can sweep either.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Says of any error of the system in the block that `path` could not be written."""
    try:
        yield
    except OSError as exc:
        raise _unwritten(path, exc) from exc


def _unwritten(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} could not be written: {error.strerror or error}; check space and rights")


def _is_of_writing(error: OSError, partial: Path) -> bool:
    """Whether the disk refused, or the error is about a file of the unfinished folder."""
    named = error.filename
    inside = isinstance(named, str | os.PathLike) and Path(named).is_relative_to(partial)
    return inside or error.errno in _DISK_REFUSES


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
