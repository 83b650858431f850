"""Files that are written once: whole or not at all, never twice, never by two at a time."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from draftgauge.errors import StoreError
from draftgauge.store import (
    PARTIAL,
    keep,
    locked,
    publish_directory,
    publish_file,
    sha256_file,
    sha256_json,
    sweep,
    write_json,
)

Publish = Callable[[Path], AbstractContextManager[Path]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(publish: Publish, partial: Path) -> None:
    """Something into the partial, as a caller would."""
    if publish is publish_directory:
        (partial / "below").mkdir()
        (partial / "below" / "file").write_text("content")
    else:
        partial.write_text("content")


PUBLISHERS = pytest.mark.parametrize("publish", [publish_file, publish_directory])


def test_a_digest_of_a_file_is_sha256sums(tmp_path: Path) -> None:
    content = os.urandom((1 << 22) + 17)  # more than one block
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_digest_of_json_does_not_see_the_order_of_keys() -> None:
    assert sha256_json({"a": 1, "b": [1, "é"]}) == sha256_json({"b": [1, "é"], "a": 1})
    assert sha256_json({"a": [1, 2]}) != sha256_json({"a": [2, 1]})


@PUBLISHERS
def test_nothing_is_there_until_the_block_ends(publish: Publish, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "name"
    with publish(path) as partial:
        write(publish, partial)
        assert not path.exists()
        assert partial.parent == path.parent
        assert partial.name.startswith(PARTIAL)
    assert names(path.parent) == ["name"]
    assert (path / "below" / "file" if publish is publish_directory else path).read_text() == "content"


@PUBLISHERS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(
    publish: Publish, error: type[BaseException], tmp_path: Path
) -> None:
    def fail() -> None:
        with publish(tmp_path / "name") as partial:
            write(publish, partial)
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


@PUBLISHERS
def test_a_disk_that_refuses_is_named_and_nothing_is_left(publish: Publish, tmp_path: Path) -> None:
    def fail() -> None:
        with publish(tmp_path / "name") as partial:
            write(publish, partial)
            raise OSError(28, "No space left on device")

    with pytest.raises(
        StoreError, match="name could not be written: No space left on device; check space and"
    ):
        fail()
    assert names(tmp_path) == []


def test_an_error_of_the_work_itself_is_not_called_one_of_writing(tmp_path: Path) -> None:
    """Within a folder much more happens than writing into it: a source that is gone is said to be gone."""
    with pytest.raises(FileNotFoundError, match="gone"), publish_directory(tmp_path / "name"):
        (tmp_path / "gone").read_bytes()
    assert names(tmp_path) == []


def test_an_error_about_a_file_of_the_folder_is_one_of_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="name could not be written: No such file or directory; check space"),
        publish_directory(tmp_path / "name") as partial,
    ):
        (partial / "below" / "file").write_text("")
    assert names(tmp_path) == []


@PUBLISHERS
def test_what_is_there_is_never_overwritten(publish: Publish, tmp_path: Path) -> None:
    path = tmp_path / "name"
    with publish(path) as partial:
        write(publish, partial)
    before = {file: file.stat() for file in [path, *path.rglob("*")]}
    with pytest.raises(StoreError, match="name exists already and is never overwritten; choose another name"):
        publish(path).__enter__()
    assert {file: file.stat() for file in [path, *path.rglob("*")]} == before
    assert names(tmp_path) == ["name"]


def test_a_block_that_writes_nothing_publishes_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="name could not be written: No such file"),
        publish_file(tmp_path / "name"),
    ):
        pass
    assert names(tmp_path) == []


def test_a_folder_whose_parent_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not be written"):
        publish_directory(tmp_path / "file" / "run").__enter__()
    with pytest.raises(StoreError, match="cannot be written"):
        locked(tmp_path / "file" / "run").__enter__()


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "é", "value": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"name": "é", "value": [1, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"value": float("nan")})
    assert names(tmp_path) == ["a.json"]


WRITE = """
import sys
from pathlib import Path
from draftgauge.store import publish_directory
with publish_directory(Path(sys.argv[1])) as partial:
    (partial / "file").write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """A process in the midst of publishing a folder, until it reads a line."""
    command = [sys.executable, "-c", WRITE, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_what_a_killed_process_left_is_swept_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    with writer(tmp_path / "killed") as killed, writer(tmp_path / "living") as living:
        killed.kill()
        killed.wait()
        assert len(names(tmp_path)) == 2
        with publish_directory(tmp_path / "mine") as partial:
            sweep(tmp_path)
            assert names(tmp_path) == sorted([partial.name, f"{PARTIAL}{living.pid}-living"])
        assert living.stdin is not None
        living.stdin.write("\n")
    assert living.returncode == 0
    assert names(tmp_path) == ["living", "mine"]
    assert (tmp_path / "living" / "file").read_text() == "half"


def test_only_unfinished_folders_are_swept(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL}17-run").mkdir()
    (tmp_path / f"{PARTIAL}17-run" / "file").write_text("half")
    (tmp_path / f"{PARTIAL}17-note").write_text("a file, which is not ours to hold")
    (tmp_path / "run").mkdir()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert names(tmp_path) == [f"{PARTIAL}17-note", "run"]


HOLD = """
import sys
from pathlib import Path
from draftgauge.store import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_another_process_that_writes_is_named_and_waited_for_by_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="recording is being written by another process; wait for it or"):
            locked(folder).__enter__()
        holder.stdin.write("\n")
    with locked(folder):
        assert names(folder) == [".lock"]


def test_a_lock_is_given_back_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), locked(tmp_path):
        raise ValueError("mine")
    with locked(tmp_path), pytest.raises(StoreError, match="is being written by another process"):
        locked(tmp_path).__enter__()


def test_partials_of_a_killed_process_are_removed_by_who_holds_the_folder(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL}17-item.safetensors").write_text("half")
    (tmp_path / f"{PARTIAL}17-step_4").mkdir()
    (tmp_path / f"{PARTIAL}17-step_4" / "file").write_text("half")
    (tmp_path / "item.safetensors").write_text("whole")
    with locked(tmp_path):
        assert names(tmp_path) == [".lock", "item.safetensors"]


def test_keeping_a_file_makes_no_second_copy(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_text("weights")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to(Path("..") / "model.safetensors")
    assert keep(source, tmp_path / "kept") == "hard link"
    assert keep(link, tmp_path / "kept too") == "hard link"  # of the bytes, not of the symbolic link
    for kept in (tmp_path / "kept", tmp_path / "kept too"):
        assert not kept.is_symlink()
        assert kept.stat().st_ino == source.stat().st_ino
    with pytest.raises(StoreError, match="kept exists already and is never overwritten"):
        keep(source, tmp_path / "kept")
    assert keep(tmp_path / "gone", tmp_path / "other") == "reference"
    assert not (tmp_path / "other").exists()
