"""Files elsewhere: what is said of them, connections that break, files that change, and what may be shown."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from draftgauge.errors import CheckpointError, ConnectionLostError, StoreError
from draftgauge.remotefiles import Remote, RemoteFile, names_version, opened, receive, shown

CONTENT = bytes(range(256)) * 12_000  # nearly three blocks


class Shelf:
    """A web server of one file: how it answers is set by the test."""

    def __init__(self) -> None:
        self.content, self.etag = CONTENT, '"one"'
        self.cut_at: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.asked: list[str | None] = []


@contextmanager
def serving(shelf: Shelf) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked = self.headers.get("range")
            shelf.asked.append(asked)
            if shelf.statuses and (status := shelf.statuses.pop(0)) != 200:
                self.send_error(status)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and shelf.ranges else 0
            body = shelf.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("etag", shelf.etag)
            self.send_header("content-length", str(len(body)))
            if start:
                whole = len(shelf.content)
                self.send_header("content-range", f"bytes {start}-{whole - 1}/{whole}")
            self.end_headers()
            if len(shelf.asked) > 1 and shelf.cut_at:  # the first question is about the headers
                body = body[: shelf.cut_at.pop(0)]
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)
            self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/runs/step_4000.pt"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(url: str, path: Path) -> Remote:
    with opened(url, wanted=lambda name: name.endswith(".safetensors"), wait_s=0.01) as remote:
        if remote.is_folder:
            path.mkdir()
        receive(remote, path, url=url)
    return remote


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on_where_it_stopped(ranges: bool, tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.cut_at, shelf.ranges = [1_500_000, 400_000], ranges
    with serving(shelf) as url:
        remote = fetched(url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert remote.revision == f'etag "one", size {len(CONTENT)}'
    assert shelf.asked[:2] == [None, None]
    assert all(asked is not None and asked != "bytes=0-" for asked in shelf.asked[2:])
    assert len(shelf.asked) >= 3


def test_a_server_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.statuses = [503, 429, 200]
    with serving(shelf) as url:
        fetched(url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("statuses", "error", "text"),
    [
        ([404], CheckpointError, "answers 404 Not Found. Check the address"),
        ([403], CheckpointError, "whether it needs a login or a fresh signature"),
        ([503] * 5, ConnectionLostError, "answers 503 5 times. Try again later"),
    ],
)
def test_what_a_server_refuses_is_said(
    statuses: list[int], error: type[Exception], text: str, tmp_path: Path
) -> None:
    shelf = Shelf()
    shelf.statuses = statuses
    with serving(shelf) as url, pytest.raises(error, match=text):
        fetched(f"{url}?X-Amz-Signature=secret", tmp_path / "file")


def test_a_file_that_changes_underway_is_not_glued_together(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.cut_at = [1_200_000]

    def fetch_while_it_changes(url: str) -> None:
        with opened(url, wanted=str.isalpha, wait_s=0.01) as remote:
            shelf.etag = '"two"'
            receive(remote, tmp_path / "file", url=url)

    with serving(shelf) as url, pytest.raises(CheckpointError, match="changed while it was fetched"):
        fetch_while_it_changes(url)


def test_a_server_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with serving(Shelf()) as url:
        pass
    with pytest.raises(ConnectionLostError, match=r"cannot be fetched: .*, 5 times. Check the connection"):
        fetched(url, tmp_path / "file")


def test_what_is_secret_is_not_shown() -> None:
    signed = "https://me:key@host:81/a.pt?versionId=3&X-Amz-Signature=f00"
    assert shown(signed) == "https://host:81/a.pt?versionId=3"
    assert shown("hf://lab/drafter@main/step_1") == "hf://lab/drafter@main/step_1"
    assert names_version(signed)
    assert names_version("gs://bucket/a.pt#1234")
    assert not names_version("https://host/a.pt")


@pytest.fixture
def bucket() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    for name in ("model.safetensors", "optimizer.pt", "notes.txt"):
        files.pipe(f"/lab/step_1/{name}", name.encode() * 9)
    yield files
    files.rm("/lab", recursive=True)


def test_a_folder_of_a_store_comes_without_what_is_not_wanted(bucket: Any, tmp_path: Path) -> None:
    remote = fetched("memory://lab/step_1", tmp_path / "step_1")
    assert remote.is_folder
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "step_1" / "model.safetensors").read_bytes() == b"model.safetensors" * 9
    bucket.pipe("/lab/step_1/model.safetensors", b"another")
    assert fetched("memory://lab/step_1", tmp_path / "again").revision != remote.revision


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("memory://lab/step_2", "does not exist. Check the address"),
        ("memory://lab", "holds no weights; it holds step_1"),
        ("s3://bucket/step_1", "needs a package that is not installed. pip install s3fs"),
        ("carrier-pigeon://roof/a.pt", "Expected hf://, https://, s3://"),
    ],
)
def test_what_a_store_cannot_give_is_said(url: str, text: str, bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        fetched(url, tmp_path / "file")


def test_a_size_that_is_not_kept_is_an_interruption(tmp_path: Path) -> None:
    short = RemoteFile("a.pt", 5, lambda start: iter([b"abc"][start:]))
    with pytest.raises(ConnectionLostError, match=r"3 bytes of a.pt arrived; expected 5"):
        receive(Remote("a.pt", (short,), False, "1"), tmp_path / "a.pt", url="https://host/a.pt")


def test_what_does_not_fit_is_refused_before_it_comes(tmp_path: Path) -> None:
    huge = RemoteFile("a.pt", 1 << 60, lambda _: iter([b""]))
    with pytest.raises(StoreError, match=r"free. Make room, or set XDG_CACHE_HOME"):
        receive(Remote("a.pt", (huge,), False, "1"), tmp_path / "a.pt", url="https://host/a.pt")
    assert not (tmp_path / "a.pt").exists()
