"""What lies in a folder is found, whatever else lies there; nothing outside is, and nothing unfinished."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftgauge.errors import InputError, RunError
from draftgauge.runs import BLOCKS, MANIFEST, SUMMARY
from draftgauge.viewer import library
from draftgauge.viewer.library import Library, inside
from tests.shelf import put_recording, put_run, put_series, watch_row
from tests.test_runs import change

ROOT = Path(__file__).parents[1]


def test_runs_recordings_and_series_are_found_wherever_they_lie(tmp_path: Path) -> None:
    put_run(tmp_path / "runs" / "a", started="2026-01-01T00:00:00Z")
    put_run(tmp_path / "project" / "results" / "runs" / "b", started="2026-01-02T00:00:00Z")
    put_run(tmp_path / "c", started="2026-01-03T00:00:00Z")
    put_recording(tmp_path / "recordings" / "1f2e")
    put_series(tmp_path / "project" / "results", watch_row(1, 1.5))
    (tmp_path / "src").mkdir()
    found = Library(tmp_path).look()
    assert [row.key for row in found.runs] == ["c", "project/results/runs/b", "runs/a"]
    assert [row.key for row in found.recordings] == ["recordings/1f2e"]
    assert [row.key for row in found.series] == ["project/results/watch"]
    assert not found.cut
    assert set(found.others) == {"src"}, "it lies beside a run and is none"


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    found = Library(tmp_path).look()
    assert (found.runs, found.recordings, found.series, found.others) == ((), (), (), {})


@pytest.mark.parametrize("name", ["run", "recording"])
def test_a_run_itself_is_no_folder_of_runs(tmp_path: Path, name: str) -> None:
    put_run(tmp_path / "run")
    put_recording(tmp_path / "recording")
    with pytest.raises(InputError, match="view the folder that it lies in"):
        Library(tmp_path / name)
    with pytest.raises(InputError, match="is not a folder"):
        Library(tmp_path / "nowhere")


def test_what_is_damaged_or_foreign_is_listed_with_the_reason_beside_the_rest(tmp_path: Path) -> None:
    put_run(tmp_path / "good")
    (put_run(tmp_path / "torn") / SUMMARY).write_text('{"version": 1, "pol')
    (put_run(tmp_path / "half") / SUMMARY).unlink()
    (put_run(tmp_path / "foreign") / MANIFEST).write_text('{"kind": "somebody\'s"}')
    (tmp_path / "notes").mkdir()
    (put_recording(tmp_path / "cut") / "recording.json").write_text("{")
    found = Library(tmp_path).look()
    assert [row.name for row in found.runs] == ["good"]
    reasons = {
        "cut": "not readable JSON",
        "foreign": "is of kind",
        "half": "summary.json is missing",
        "notes": "holds no run.json and no recording.json",
        "torn": "is not readable",
    }
    assert found.others.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in found.others[name]
        assert str(tmp_path) not in found.others[name]


def test_unfinished_folders_do_not_exist(tmp_path: Path) -> None:
    put_run(tmp_path / "runs" / ".partial-17-mine")
    put_run(tmp_path / ".cache" / "theirs")
    book = Library(tmp_path)
    found = book.look()
    assert (found.runs, found.others) == ((), {})
    with pytest.raises(InputError, match="there is no run"):
        book.run("runs/.partial-17-mine")


def test_a_writer_that_is_killed_leaves_nothing_to_see(tmp_path: Path) -> None:
    """A process writes a run as `eval` does, is killed before it is published, and leaves its unfinished folder."""
    code = (
        "import sys, time; from pathlib import Path; from tests.test_runs import PLAN\n"
        "from draftgauge.runs import new_run, SUMMARY\nfrom draftgauge.store import write_json\n"
        "with new_run(Path(sys.argv[1]) / 'mine', PLAN, facts={'checkpoint': {}}, checkpoint=()) as folder:\n"
        "    write_json(folder / SUMMARY, {'version': 1, 'policies': {}, 'prompts': {}})\n"
        "    (folder / 'run.json').write_text('{}'); print('written', flush=True); time.sleep(60)\n"
    )
    book = Library(tmp_path)
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    before = book.look()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    after = book.look()
    assert any(path.name.startswith(".partial-") for path in tmp_path.iterdir())
    for found in (before, after):
        assert (found.runs, found.others) == ((), {})


def test_a_run_that_went_away_or_was_replaced_is_seen_at_once(tmp_path: Path) -> None:
    book = Library(tmp_path)
    put_run(tmp_path / "mine", tau=1.5)
    assert [row.tau.value for row in book.look().runs] == [1.5]
    first = book.identity("mine")
    shutil.rmtree(tmp_path / "mine")
    assert (book.look().runs, book.identity("mine")) == ((), None)
    put_run(tmp_path / "mine", tau=2.5)
    assert [row.tau.value for row in book.look().runs] == [2.5]
    assert book.identity("mine") not in (None, first)


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        put_run(tmp_path / f"{i}")
    read = []
    inner = library.read_run
    monkeypatch.setattr(library, "read_run", lambda path, key: (read.append(key), inner(path, key=key))[1])
    book = Library(tmp_path)
    book.look()
    book.look()
    assert sorted(read) == ["0", "1", "2", "3", "4"]
    os.utime(tmp_path / "3" / SUMMARY, ns=(1, 1))
    book.look()
    assert read[5:] == ["3"]


def test_thousands_of_runs_cost_little_more_than_their_bytes(tmp_path: Path) -> None:
    """The first look against reading every manifest, and a second one against asking for every file's identity."""
    put_run(tmp_path / "0")
    for i in range(1, 2000):
        (tmp_path / f"{i}").mkdir()
        for name in (MANIFEST, SUMMARY):
            shutil.copy(tmp_path / "0" / name, tmp_path / f"{i}" / name)
    files = [tmp_path / f"{i}" / name for i in range(2000) for name in (MANIFEST, SUMMARY)]
    started = time.process_time()
    for file in files:
        json.loads(file.read_bytes())
    reading_s = time.process_time() - started
    book = Library(tmp_path)
    started = time.process_time()
    assert len(book.look().runs) == 2000
    first_s = time.process_time() - started
    started = time.process_time()
    assert len(book.look().runs) == 2000
    second_s = time.process_time() - started
    # Said, not asserted: every call is checked in these tests, which costs many times what the calls do.
    print(f"reading {reading_s:.2f} s, first look {first_s:.2f} s, second look {second_s:.2f} s")


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "..",
        "../out",
        "runs/../../out",
        "/etc",
        "runs//mine",
        "runs/./mine",
        "mine\0",
        "runs/mine/",
        "x" * 5000,
    ],
)
def test_no_key_leads_out_of_the_folder(tmp_path: Path, key: str) -> None:
    put_run(tmp_path / "out")
    put_run(tmp_path / "in" / "runs" / "mine")
    book = Library(tmp_path / "in")
    assert book.run("runs/mine").name == "mine"
    for ask in (book.run, book.recording, book.series):
        with pytest.raises(InputError, match="there is no"):
            ask(key)


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    secret, root = put_run(tmp_path / "out" / "secret", tau=9.0), tmp_path / "in"
    mine = put_run(root / "mine", tau=1.0)
    (root / "linked").symlink_to(secret)
    (root / "above").symlink_to(tmp_path)
    (root / "circle").symlink_to(root / "circle")
    for name in (MANIFEST, SUMMARY):
        (shutil.copytree(mine, root / f"by-{name}") / name).unlink()
        (root / f"by-{name}" / name).symlink_to(secret / name)
    (shutil.copytree(mine, root / "blocks") / BLOCKS).symlink_to(secret / MANIFEST)
    book = Library(root)
    found = book.look()
    assert {row.name: row.tau.value for row in found.runs} == {"mine": 1.0, "blocks": 1.0}
    assert {name for name, reason in found.others.items() if "leads out" in reason} == {
        "linked", "above", f"by-{MANIFEST}", f"by-{SUMMARY}",
    }  # fmt: skip
    for key in ("linked", "above/out/secret", f"by-{MANIFEST}", f"by-{SUMMARY}", "blocks", "circle"):
        with pytest.raises(InputError):
            book.run(key)


def test_a_recording_is_read_where_it_lies_below_and_nowhere_else(tmp_path: Path) -> None:
    """Whatever path the run says: that is text of whoever made the run."""
    out, root = put_recording(tmp_path / "out" / "1f2e"), tmp_path / "in"
    inner = put_recording(root / "kept" / "5a6b")
    traps = {"linked": root / "kept" / "linked", "pointing": root / "kept" / "pointing"}
    shutil.copytree(inner, traps["linked"])
    (traps["linked"] / "00000.safetensors").unlink()
    (traps["linked"] / "00000.safetensors").symlink_to(out / "00000.safetensors")
    items = json.loads((shutil.copytree(inner, traps["pointing"]) / "recording.json").read_text())["items"]
    change(traps["pointing"] / "recording.json", items=[{**items[0], "file": f"{out}/00000.safetensors"}])
    (root / "kept" / "away").symlink_to(out)
    said = {
        "here": inner,
        "moved": "/elsewhere/5a6b",
        "out": out,
        "away": root / "kept" / "away",
        "none": "5a6b/../x",
    }
    for name, path in {**said, **traps}.items():
        put_run(root / name, recording={"path": str(path), "prompts": "p", "target": "t"})
    book = Library(root)
    paths = {name: book.run(name).manifest["recording"]["path"] for name in (*said, *traps)}
    for name in ("here", "moved"):
        assert paths.pop(name) == str(inner.resolve())
    for path in paths.values():
        assert path.endswith(" (outside the folder that is viewed)")
        assert not Path(path).exists()


def test_links_inside_are_followed_and_none_to_what_is_hidden(tmp_path: Path) -> None:
    put_run(tmp_path / "a" / "mine")
    put_run(tmp_path / ".partial-1-theirs")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    (tmp_path / "shown").symlink_to(tmp_path / ".partial-1-theirs")
    found = Library(tmp_path).look()
    assert sorted(row.key for row in found.runs) == ["a/mine", "again/mine"]
    assert not inside(tmp_path / "shown", tmp_path.resolve())


def test_a_name_that_is_no_text_stops_nothing(tmp_path: Path) -> None:
    put_run(tmp_path / "mine")
    (tmp_path / os.fsdecode(b"by\xfftes")).mkdir()
    found = Library(tmp_path).look()
    assert [row.name for row in found.runs] == ["mine"]
    assert found.others == {"by?tes": "its name is not UTF-8"}


def test_too_much_is_said_to_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        put_run(tmp_path / f"{i}")
    monkeypatch.setattr(library, "MOST_FOLDERS", 4)
    found = Library(tmp_path).look()
    assert (len(found.runs), found.cut) == (4, True)


def test_a_damaged_run_says_so_when_it_is_opened(tmp_path: Path) -> None:
    (put_run(tmp_path / "torn") / SUMMARY).write_text("{")
    with pytest.raises(RunError, match="not readable"):
        Library(tmp_path).run("torn")
