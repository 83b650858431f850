"""Files that lie elsewhere: what a server says of them, and their bytes, received once and whole.

`http(s)://` is read with httpx2, every other protocol through fsspec. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import httpx2
import tenacity

from draftgauge.errors import CheckpointError, ConnectionLostError, StoreError, first_line
from draftgauge.progress import Progress, silent

_BLOCK_BYTES = 1 << 20
_ATTEMPTS = 5
_TIMEOUT_S = 60.0
_LATER = {408, 429, 500, 502, 503, 504}
#: Free space that is left alone.
_SPARE_BYTES = 64 << 20
#: The parts of an address that name one version of a file for ever; all others are left out where it is shown.
_VERSION_KEYS = ("versionid", "version_id", "generation", "snapshot")
#: What a store says of a file that changes with its content, under the names that stores have for it.
_SAID = (
    "versionid",
    "generation",
    "etag",
    "md5hash",
    "contentmd5",
    "lastmodified",
    "updated",
    "mtime",
    "created",
)
#: The package that serves a protocol, where fsspec's own message does not name what to install.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_PLAIN = {"accept-encoding": "identity"}  # so that sizes and ranges are those of the file


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere: its name, its size if it is said, and its bytes from a position on."""

    name: str
    size: int | None
    blocks: Callable[[int], Iterator[bytes]]


@dataclass(frozen=True)
class Remote:
    """What an address points to: one file, or the files of a folder; `revision` changes with their content."""

    name: str
    files: tuple[RemoteFile, ...]
    is_folder: bool
    revision: str


def shown(url: str) -> str:
    """An address as it may be kept: without user, password and signatures, with what names a version.

    Example:
        `shown("https://me:key@host/a.pt?versionId=3&X-Amz-Signature=f00")` is `https://host/a.pt?versionId=3`.
    """
    parts = urlsplit(url)
    kept = [(key, value) for key, value in parse_qsl(parts.query) if key.lower() in _VERSION_KEYS]
    place = parts.netloc if parts.scheme == "hf" else parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=place, query=urlencode(kept)))


def names_version(url: str) -> bool:
    """Whether an address can only ever mean one content."""
    parts = urlsplit(url)
    versioned = any(key.lower() in _VERSION_KEYS and value for key, value in parse_qsl(parts.query))
    return versioned or (parts.scheme in ("gs", "gcs") and parts.fragment.isdigit())


@contextlib.contextmanager
def opened(url: str, *, wanted: Callable[[str], bool], wait_s: float = 1.0) -> Iterator[Remote]:
    """What lies at an address, to be received within the block.

    Args:
        url: `http(s)://...`, or an address of a protocol that fsspec knows.
        wanted: Which files of a folder are meant.
        wait_s: How long to wait after the first failed question; doubled from try to try.

    Raises:
        CheckpointError: There is no such file, it may not be read, or its protocol needs a package.
        ConnectionLostError: The connection broke again and again.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_passes),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=wait_s, max=30),
        reraise=True,
    )
    if urlsplit(url).scheme.lower() in ("http", "https"):
        with _http_explained(url), httpx2.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
            stated = retrying(_ask, client, url)
            name = _file_name(unquote(urlsplit(url).path), url)

            def blocks(start: int) -> Iterator[bytes]:
                yield from _http_blocks(client, url, start, stated=stated)

            yield Remote(name, (RemoteFile(name, stated.size, blocks),), False, stated.revision)
    else:
        with _fsspec_explained(url):
            yield _of_fsspec(url, wanted, retrying=retrying)


def receive(remote: Remote, path: Path, *, url: str, progress: Progress = silent) -> None:
    """Write what lies elsewhere to a file, or into a new folder; after a broken connection it goes on.

    Raises:
        ConnectionLostError: Fewer or more bytes came than were said.
        StoreError: There is no room for it.
    """
    _require_space(path, sum(file.size or 0 for file in remote.files), url)
    for file in remote.files:
        target = path / file.name if remote.is_folder else path
        total = None if file.size is None else math.ceil(file.size / _BLOCK_BYTES)
        with target.open("wb") as out:
            for block in progress(_whole(file), label=f"fetch {file.name}", total=total, unit="MiB"):
                out.write(block)
            got = out.tell()
        if file.size is not None and got != file.size:
            raise ConnectionLostError(
                f"{shown(url)}: {got} bytes of {file.name} arrived; expected {file.size}. Nothing was kept: run the "
                "same command again"
            )


def _whole(file: RemoteFile) -> Iterator[bytes]:
    """A file's bytes over as many connections as it takes, each going on where the last one broke."""
    at = failures = 0
    while True:
        try:
            for block in file.blocks(at):
                at += len(block)
                yield block
        except (httpx2.HTTPError, OSError) as exc:
            failures += 1
            if not _passes(exc) or failures == _ATTEMPTS:
                raise
        else:
            return


def _passes(error: BaseException) -> bool:
    """Whether trying again may help: a broken connection, or a server that says later."""
    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in _LATER
    passing = isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError)
    return passing and not isinstance(error, httpx2.UnsupportedProtocol)


def _require_space(path: Path, size: int, url: str) -> None:
    there = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size + _SPARE_BYTES:
        raise StoreError(
            f"{shown(url)} has {size} bytes; {there} has {free} free. Make room, or set XDG_CACHE_HOME to one on "
            "a larger disk"
        )


def _file_name(path: str, url: str) -> str:
    name = PurePosixPath(path.rstrip("/")).name
    if name in ("", ".", ".."):
        raise CheckpointError(f"{shown(url)} names no file. Give the address of a checkpoint")
    return name


# --- http ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stated:
    """What a server says of a file: its size, its tag, and all that changes with its content."""

    size: int | None
    etag: str | None
    revision: str

    @classmethod
    def of(cls, headers: httpx2.Headers) -> _Stated:
        length = headers.get("content-length", "")
        size = int(length) if length.isdigit() and "content-encoding" not in headers else None
        said = {"etag": headers.get("etag"), "last-modified": headers.get("last-modified"), "size": size}
        text = ", ".join(f"{key} {value}" for key, value in said.items() if value is not None)
        return cls(size, headers.get("etag"), text)


class _ChangedError(Exception):
    """The file is another one than before the connection broke."""


def _ask(client: httpx2.Client, url: str) -> _Stated:
    """The headers of an answer whose body is left unread: some servers know no HEAD."""
    with client.stream("GET", url, headers=_PLAIN) as answer:
        answer.raise_for_status()
        return _Stated.of(answer.headers)


def _http_blocks(client: httpx2.Client, url: str, start: int, *, stated: _Stated) -> Iterator[bytes]:
    """The bytes from `start` on; a server that knows no ranges sends all of them again."""
    headers = _PLAIN | ({"range": f"bytes={start}-"} if start else {})
    with client.stream("GET", url, headers=headers) as answer:
        answer.raise_for_status()
        skip = start
        if answer.status_code == httpx2.codes.PARTIAL_CONTENT:
            total = answer.headers.get("content-range", "").rpartition("/")[2]
            if answer.headers.get("etag") != stated.etag or total not in ("", "*", str(stated.size)):
                raise _ChangedError
            skip = 0
        elif _Stated.of(answer.headers) != stated:
            raise _ChangedError
        for block in answer.iter_bytes(_BLOCK_BYTES):
            if skip < len(block):
                yield block[skip:]
            skip = max(0, skip - len(block))


@contextlib.contextmanager
def _http_explained(url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPStatusError as exc:
        status, reason = exc.response.status_code, exc.response.reason_phrase
        if status in _LATER:
            raise ConnectionLostError(
                f"{shown(url)} answers {status} {_ATTEMPTS} times. Try again later"
            ) from exc
        login = ", and whether it needs a login or a fresh signature" if status in (401, 403) else ""
        raise CheckpointError(f"{shown(url)} answers {status} {reason}. Check the address{login}") from exc
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as exc:
        raise CheckpointError(f"{shown(url)} is no address: {exc}. Check it") from exc
    except _ChangedError as exc:
        raise CheckpointError(
            f"{shown(url)} changed while it was fetched. Run the same command again"
        ) from exc
    except httpx2.HTTPError as exc:
        raise ConnectionLostError(
            f"{shown(url)} cannot be fetched: {first_line(exc)}, {_ATTEMPTS} times. Check the connection and run the "
            "same command again"
        ) from exc


# --- fsspec --------------------------------------------------------------------------------------------


def _of_fsspec(url: str, wanted: Callable[[str], bool], *, retrying: tenacity.Retrying) -> Remote:
    import fsspec  # noqa: PLC0415 - takes a while, and most checkpoints are local

    files, root = fsspec.url_to_fs(url)
    name, info = _file_name(root, url), retrying(files.info, root)
    is_folder = info["type"] == "directory"
    entries = {name: info}
    if is_folder:
        listed = {PurePosixPath(entry["name"]).name: entry for entry in retrying(files.ls, root, detail=True)}
        entries = {n: entry for n, entry in sorted(listed.items()) if entry["type"] == "file" and wanted(n)}
        if not entries:
            raise CheckpointError(
                f"{shown(url)} holds no weights; it holds {', '.join(list(listed)[:8]) or 'nothing'}. Give the "
                "folder of a checkpoint"
            )
    said = {n: _said(entry) for n, entry in entries.items()}
    revision = hashlib.sha256(repr(said).encode()).hexdigest() if is_folder else said[name]
    remote = (
        RemoteFile(n, entry.get("size"), _fsspec_blocks(files, entry["name"])) for n, entry in entries.items()
    )
    return Remote(name, tuple(remote), is_folder, revision)


def _fsspec_blocks(files: Any, path: str) -> Callable[[int], Iterator[bytes]]:
    def blocks(start: int) -> Iterator[bytes]:
        with files.open(path, "rb") as file:
            file.seek(start)
            while block := file.read(_BLOCK_BYTES):
                yield block

    return blocks


def _said(info: Mapping[str, Any]) -> str:
    by_name = {re.sub("[_-]", "", str(key)).lower(): value for key, value in info.items()}
    said = [f"{key} {by_name[key]}" for key in _SAID if by_name.get(key) is not None]
    return ", ".join([*said, f"size {info.get('size')}"])


@contextlib.contextmanager
def _fsspec_explained(url: str) -> Iterator[None]:
    protocol = urlsplit(url).scheme.lower()
    try:
        yield
    except ImportError as exc:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else f"Install what it needs: {first_line(exc)}"
        raise CheckpointError(
            f"{shown(url)}: {protocol}:// needs a package that is not installed. {remedy}"
        ) from exc
    except FileNotFoundError as exc:
        raise CheckpointError(f"{shown(url)} does not exist. Check the address") from exc
    except PermissionError as exc:
        raise CheckpointError(
            f"{shown(url)} may not be read: {first_line(exc)}. Check your credentials"
        ) from exc
    except ValueError as exc:
        raise CheckpointError(
            f"{shown(url)}: {first_line(exc)}. Expected hf://, https://, s3://, gs:// or another protocol of fsspec"
        ) from exc
    except OSError as exc:
        raise ConnectionLostError(
            f"{shown(url)} cannot be fetched: {first_line(exc)}. Check the connection and run the same command again"
        ) from exc
