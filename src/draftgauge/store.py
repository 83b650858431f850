"""Files that are written once: a temporary beside the target, verified, synced, then renamed into place.

Whoever is killed at any moment leaves nothing, or a partial whose name says so and that nobody lists. Knows
nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
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
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except OSError as exc:
        raise StoreError(
            f"{path} could not be written: {exc.strerror or exc}; check space and rights"
        ) from exc
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on a clean exit it is synced and renamed to `path`.

    Raises:
        StoreError: `path` exists already (nothing is ever overwritten), or the disk refuses.
    """
    if path.exists():
        raise StoreError(f"{path} exists already and is never overwritten; choose another name")
    partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for entry in sorted(partial.rglob("*")):
            if entry.is_file() and not entry.is_symlink():
                _sync(entry)
        partial.rename(path)
        _sync(path.parent)
    except OSError as exc:
        raise StoreError(
            f"{path} could not be written: {exc.strerror or exc}; check space and rights"
        ) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
