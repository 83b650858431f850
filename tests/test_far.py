"""What is sent to other places: it must run on an old python3, and know nothing but the standard library.

What its verbs do is seen in test_transports, at every kind of place; here is what only ranges of files can do.
"""

import ast
import base64
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import ConnectionLostError, FleetError
from draftgauge.fleet import far, pump
from draftgauge.fleet.places import read_fleet
from draftgauge.fleet.reach import Reach, reaching

SENT = {far, pump}


@pytest.fixture
def reach() -> Iterator[Reach]:
    with reaching(read_fleet(None)) as opened:
        yield opened


def identity(path: Path) -> list[int]:
    return far.identity(path.stat())


def pieces_of(reach: Reach, path: Path, *pieces: dict[str, Any]) -> bytes:
    listed = [{"path": str(path), **piece} for piece in pieces]
    return reach.read(reach.fleet.place("workstation"), listed, {str(path): identity(path)})


@pytest.mark.parametrize("module", SENT, ids=lambda module: module.__name__)
def test_it_runs_on_an_old_python(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 7))
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    ours = {name for name in names if name.partition(".")[0] == "draftgauge"}
    assert ours <= {other.__name__ for other in SENT}
    assert {name.partition(".")[0] for name in names - ours} <= sys.stdlib_module_names
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.NamedExpr | ast.Match)], "newer than 3.7"
    assert any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)


def test_ranges_are_read_in_the_order_asked(reach: Reach, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)))
    got = pieces_of(
        reach, file, {"offset": 200, "size": 3}, {"offset": 0, "size": 2}, {"offset": 255, "size": 1}
    )
    assert got == bytes([200, 201, 202, 0, 1, 255])


def test_text_stands_between_ranges(reach: Reach, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    text = {"text": base64.b64encode(b"<>").decode()}
    place = reach.fleet.place("workstation")
    pieces = [text, {"path": str(file), "offset": 3, "size": 2}, text]
    assert reach.read(place, pieces, {str(file): identity(file)}) == b"<>34<>"


def test_a_record_is_compared_whole_also_where_a_part_of_it_is_asked(reach: Reach, tmp_path: Path) -> None:
    file, record = tmp_path / "file", bytes(range(100)) * 50_000
    file.write_bytes(b"head" + record)
    said = {"record": 4, "record_size": len(record), "crc": zlib.crc32(record), "name": "fc.weight"}
    assert pieces_of(reach, file, {"offset": 104, "size": 10, **said}) == record[100:110]
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1  # outside of what is asked
    file.write_bytes(damaged)
    with pytest.raises(
        FleetError, match=r"damaged: the record of fc.weight has CRC-32 [0-9a-f]{8}; expected"
    ):
        pieces_of(reach, file, {"offset": 104, "size": 10, **said})


def test_a_file_that_ends_before_a_range_has_changed(reach: Reach, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"123")
    with pytest.raises(Exception, match="became shorter"):
        pieces_of(reach, file, {"offset": 2, "size": 5})


def receive(reach: Reach, part: Path, outputs: list[list[Any]], data: bytes, *, skip: int = 0) -> Any:
    """One stream into a part, as the pump would send it."""
    place = reach.fleet.place("workstation")
    command = reach.command(place, "receive", {"part": str(part), "outputs": outputs, "skip": skip})
    code, _, err = reach.start(place, command.argv, 30.0, stdin=command.stdin + data)
    from draftgauge.fleet.reach import End, reply_of

    return reply_of(place, End(code, "", err))


def test_a_stream_that_ends_early_is_no_success(reach: Reach, tmp_path: Path) -> None:
    """What scp and a pipe into cat take for one."""
    part = tmp_path / ".partial-x"
    with pytest.raises(ConnectionLostError, match="3 of 5 bytes arrived"):
        receive(reach, part, [["", 5]], b"abc")
    assert part.read_bytes() == b"abc"
    assert receive(reach, part, [["", 5]], b"de", skip=3)["bytes"] == 5
    assert part.read_bytes() == b"abcde"


def test_more_than_was_announced_is_no_success(reach: Reach, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLostError, match="more bytes arrived"):
        receive(reach, tmp_path / ".partial-x", [["", 2]], b"abc")


def test_an_orphan_that_writes_the_same_bytes_does_no_harm(reach: Reach, tmp_path: Path) -> None:
    """A receiver of an earlier connection that wakes up writes where the bytes belong, not at the end."""
    part = tmp_path / ".partial-x"
    receive(reach, part, [["", 6]], b"abcdef")
    with pytest.raises(ConnectionLostError):
        receive(reach, part, [["", 6]], b"bcd", skip=1)
    assert part.read_bytes() == b"abcdef"


def test_only_parts_are_written(reach: Reach, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="not an unfinished file of ours"):
        receive(reach, tmp_path / "yours", [["", 1]], b"x")
    assert not (tmp_path / "yours").exists()


@pytest.mark.parametrize("inner", ["../out", "/etc/out", "a/../../out"])
def test_no_output_leads_out_of_its_part(inner: str, reach: Reach, tmp_path: Path) -> None:
    """Names come from another machine, which need not be a friend."""
    with pytest.raises(FleetError, match="leads out of"):
        receive(reach, tmp_path / "folder" / ".partial-x", [[inner, 1]], b"x")
    assert not (tmp_path / "out").exists()


def test_the_digest_is_of_what_lies_on_the_disk(reach: Reach, tmp_path: Path) -> None:
    part = tmp_path / ".partial-x"
    part.write_bytes(b"XXX")
    wrong = receive(reach, part, [["", 5]], b"de", skip=3)["sha256"]
    part.write_bytes(b"abc")
    right = receive(reach, part, [["", 5]], b"de", skip=3)["sha256"]
    assert wrong != right
