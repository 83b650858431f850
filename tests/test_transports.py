"""What every way to a place must do: look, read from an offset, write, resume, refuse, take odd names as they are."""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from draftgauge.errors import FleetError, UnfinishedError
from draftgauge.fleet.cargo import describe
from draftgauge.fleet.reach import Reach, reaching
from draftgauge.fleet.stage import plan_staging, stage
from draftgauge.store import PARTIAL
from tests import transports
from tests.transports import Ground, moved

DATA = hashlib.shake_128(b"draftgauge").digest(3_000_001)
ODD_NAMES = (
    " spaces ",
    'quote\'s "both"',
    "new\nline",
    "-dash",
    "--help",
    "ünï→中",
    "$(touch pwned)",
    "; touch pwned",
    "`touch pwned`",
    "*",
    "back\\slash\\n",
    "%s%n",
    "~",
    "a&b|c>d",
    "#",
    "!x",
    "tab\there",
)


@pytest.fixture(scope="module")
def reach() -> Iterator[Reach]:
    with reaching(transports.fleet()) as opened:
        yield opened


@pytest.fixture(params=transports.place_names())
def there(request: pytest.FixtureRequest, reach: Reach) -> Iterator[Ground]:
    with transports.ground(reach, request.param) as made:
        yield made


@pytest.fixture
def here(reach: Reach) -> Iterator[Ground]:
    with transports.ground(reach, "workstation") as made:
        yield made


def move(source: Any, target: Any, reach: Reach, **how: Any) -> Any:
    cargo = describe(reach, source, **how)
    return stage(reach, plan_staging(reach, cargo, target), moved=moved)


def test_look_says_what_stands_there(there: Ground, reach: Reach) -> None:
    there.put("file", DATA[:100])
    there.put("folder/inner file", b"x")
    there.put("folder/deep/er", b"yy")
    there.sh('mkfifo "$1"', there.spot("pipe").path)

    def look(name: str) -> Any:
        return reach.call(there.place, "look", path=there.spot(name).path)

    assert look("file")["kind"] == "file"
    assert look("file")["identity"][0] == 100
    assert look("missing") == {"kind": "missing"}
    assert look("pipe") == {"kind": "other"}
    folder = look("folder")
    assert folder["kind"] == "folder"
    assert [(inner, identity[0]) for inner, identity in folder["files"]] == [
        ("deep/er", 2),
        ("inner file", 1),
    ]
    assert reach.call(there.place, "look", path=there.path, depth=1)["kind"] == "folder"


def test_an_identity_changes_with_the_content(there: Ground, reach: Reach) -> None:
    spot = there.put("file", b"one")
    before = reach.call(there.place, "look", path=spot.path)["identity"]
    assert reach.call(there.place, "look", path=spot.path)["identity"] == before
    there.change('sleep 0.02; cat "$1" > "$1.new"; mv "$1.new" "$1"', "file")
    assert reach.call(there.place, "look", path=spot.path)["identity"] != before


def test_a_file_moves_both_ways(there: Ground, here: Ground, reach: Reach) -> None:
    away = move(here.put("source", DATA), there.spot("in a new folder", "target"), reach)
    assert there.get("in a new folder/target") == DATA
    assert away.sha256 == hashlib.sha256(DATA).hexdigest()
    assert away.moved_bytes == len(DATA)
    move(there.spot("in a new folder", "target"), here.spot("back"), reach)
    assert here.get("back") == DATA


def test_an_empty_file_moves(there: Ground, here: Ground, reach: Reach) -> None:
    move(here.put("source", b""), there.spot("target"), reach)
    assert there.get("target") == b""


def test_odd_names_arrive_as_they_are(there: Ground, here: Ground, reach: Reach) -> None:
    for name in ODD_NAMES:
        here.put(f"folder/{name}", name.encode())
    if reach.has_python(there.place):
        move(here.spot("folder"), there.spot("copy"), reach)
        move(there.spot("copy"), here.spot("back"), reach)
    for at, name in enumerate(ODD_NAMES[:: 1 if not reach.has_python(there.place) else 5]):
        move(here.spot("folder", name), there.spot("one by one", name), reach)
        assert there.get(f"one by one/{name}") == name.encode()
        if at % 3 == 0:
            move(there.spot("one by one", name), here.spot("back one by one", name), reach)
            assert here.get(f"back one by one/{name}") == name.encode()
    for found in (*there.names(), *here.names()):
        assert found.rpartition("/")[2] != "pwned"
    if reach.has_python(there.place):
        assert {here.get(f"back/{name}") for name in ODD_NAMES} == {name.encode() for name in ODD_NAMES}


@pytest.mark.parametrize("held", [1, 1_000_000, len(DATA)])
def test_it_goes_on_at_the_byte_where_it_stopped(
    held: int, there: Ground, here: Ground, reach: Reach
) -> None:
    cargo = describe(reach, here.put("source", DATA))
    part = f"{PARTIAL}{cargo.fingerprint}-target"
    there.put(part, DATA[:held])
    staging = plan_staging(reach, cargo, there.spot("target"))
    assert staging.held_bytes == held
    assert stage(reach, staging, moved=moved).moved_bytes == len(DATA) - held
    assert there.get("target") == DATA
    assert there.names() == [".target.staged.json", "target"]


def test_it_goes_on_reading_where_it_stopped(there: Ground, here: Ground, reach: Reach) -> None:
    cargo = describe(reach, there.put("source", DATA))
    here.put(f"{PARTIAL}{cargo.fingerprint}-target", DATA[:1_234_567])
    staged = stage(reach, plan_staging(reach, cargo, here.spot("target")), moved=moved)
    assert (here.get("target"), staged.moved_bytes) == (DATA, len(DATA) - 1_234_567)


def test_a_wrong_beginning_is_found_and_moved_again(there: Ground, here: Ground, reach: Reach) -> None:
    """What rsync's --append keeps with exit code 0."""
    cargo = describe(reach, here.put("source", DATA))
    there.put(f"{PARTIAL}{cargo.fingerprint}-target", b"\0" * 1_000_000)
    stage(reach, plan_staging(reach, cargo, there.spot("target")), moved=moved)
    assert there.get("target") == DATA


def test_what_is_there_is_not_moved_again(there: Ground, here: Ground, reach: Reach) -> None:
    move(here.put("source", DATA), there.spot("target"), reach)
    again = move(here.spot("source"), there.spot("target"), reach)
    assert again.moved_bytes == 0
    there.change('rm "$(dirname "$1")/.target.staged.json"', "target")
    found_by_digest = move(here.spot("source"), there.spot("target"), reach)
    assert (found_by_digest.moved_bytes, found_by_digest.sha256) == (0, again.sha256)


def test_same_size_and_other_content_is_not_taken_for_it(there: Ground, here: Ground, reach: Reach) -> None:
    """What rsync skips where the times agree as well."""
    there.put("target", bytes(len(DATA)))
    with pytest.raises(FleetError, match="holds something else"):
        move(here.put("source", DATA), there.spot("target"), reach)
    assert there.get("target") == bytes(len(DATA))


def test_a_full_disk_says_so_and_publishes_nothing(there: Ground, here: Ground, reach: Reach) -> None:
    cargo = describe(reach, here.put("source", DATA))
    there.sh('ln -s /dev/full "$1"', there.spot(f"{PARTIAL}{cargo.fingerprint}-target").path)
    with pytest.raises(UnfinishedError, match=r"(?i)make room there"):
        stage(reach, plan_staging(reach, cargo, there.spot("target")), moved=moved)
    assert "target" not in there.names()


def test_a_source_that_vanished_says_so(there: Ground, here: Ground, reach: Reach) -> None:
    cargo = describe(reach, there.put("source", DATA))
    there.change('rm "$1"', "source")
    with pytest.raises(FleetError, match="source"):
        stage(reach, plan_staging(reach, cargo, here.spot("target")), moved=moved)
    assert "target" not in here.names()


@pytest.mark.parametrize(
    "change",
    ['cp "$1" "$1.new" && printf x >> "$1.new" && mv "$1.new" "$1"', 'cp "$1" "$1.new" && mv "$1.new" "$1"'],
    ids=["grown", "replaced"],
)
def test_a_source_that_changed_is_not_published(
    change: str, there: Ground, here: Ground, reach: Reach
) -> None:
    cargo = describe(reach, there.put("source", DATA))
    there.change(f"sleep 0.02; {change}", "source")
    with pytest.raises(UnfinishedError, match="changed"):
        stage(reach, plan_staging(reach, cargo, here.spot("target")), moved=moved)
    assert "target" not in here.names()


def test_a_missing_source_is_named(there: Ground, reach: Reach) -> None:
    with pytest.raises(FleetError, match="nothing-here does not exist"):
        describe(reach, there.spot("nothing-here"))


def test_only_our_parts_can_be_removed_or_published(there: Ground, reach: Reach) -> None:
    there.put("yours", b"x")
    for verb, more in (("remove", {}), ("publish", {"path": there.spot("new").path})):
        with pytest.raises(FleetError):
            reach.call(there.place, verb, part=there.spot("yours").path, **more)
    assert there.names() == ["yours"]


def test_small_texts_are_written_whole_and_read_from_their_end(there: Ground, reach: Reach) -> None:
    path = there.spot("deep", "text").path
    for text in ("first\n", "second: ünï 'quoted' $x\nend\n"):
        reach.call(there.place, "note", path=path, text=text)
    assert reach.call(there.place, "text", path=path, limit=4)["text"] == "end\n"
    assert reach.call(there.place, "text", path=path, limit=1000)["text"] == text
    assert reach.call(there.place, "text", path=there.spot("none").path, limit=9)["text"] is None
    assert there.names() == ["deep/text"]


def test_space_is_that_of_the_nearest_folder_that_exists(there: Ground, reach: Reach) -> None:
    room = reach.call(there.place, "space", path=there.spot("not", "yet").path)
    assert room["folder"] == there.path
    assert room["free_bytes"] > 0
    assert room["writable"] is True


def test_a_folder_moves_whole_or_is_refused_for_want_of_python(
    there: Ground, here: Ground, reach: Reach
) -> None:
    here.put("folder/a b", DATA[:1000])
    here.put("folder/empty", b"")
    here.put("folder/inner/ü", DATA[1000:])
    if not reach.has_python(there.place):
        with pytest.raises(FleetError, match="python3"):
            move(here.spot("folder"), there.spot("copy"), reach)
        return
    move(here.spot("folder"), there.spot("copy"), reach)
    move(there.spot("copy"), here.spot("back"), reach)
    assert {n.removeprefix("back/") for n in here.names() if n.startswith("back/")} == {
        "a b",
        "empty",
        "inner/ü",
    }
    assert here.get("back/inner/ü") == DATA[1000:]


def test_a_folder_goes_on_in_the_middle_of_a_file(there: Ground, here: Ground, reach: Reach) -> None:
    if not reach.has_python(there.place):
        pytest.skip("a folder needs python3 there")
    here.put("folder/a", DATA[:1000])
    here.put("folder/b", DATA[1000:])
    cargo = describe(reach, here.spot("folder"))
    part = f"{PARTIAL}{cargo.fingerprint}-copy"
    there.put(f"{part}/a", DATA[:1000])
    there.put(f"{part}/b", DATA[1000:5000])
    staging = plan_staging(reach, cargo, there.spot("copy"))
    assert staging.held_bytes == 5000
    stage(reach, staging, moved=moved)
    assert there.get("copy/b") == DATA[1000:]


def test_a_hostile_working_folder_runs_nothing(there: Ground, reach: Reach) -> None:
    """A json.py where Python starts must not be imported."""
    there.put("json.py", b"open('pwned', 'w').write('x')")
    argv = reach.command(there.place, "look", {"path": there.path}, shared=True)
    program = 'cd "$1" && shift && exec "$@"'
    inner = ("sh", "-c", program, "sh", there.path, *argv.argv[len(there.place.enter) :])
    if there.place.ssh is None:
        code, _, err = reach.start(there.place, (*there.place.enter, *inner), 60.0, stdin=argv.stdin)
        assert code == 0, err
    assert there.names() == ["json.py"]


def test_what_a_note_says_of_a_staging(there: Ground, here: Ground, reach: Reach) -> None:
    move(here.put("source", DATA), there.spot("target"), reach)
    said = json.loads(there.get(".target.staged.json"))
    assert said["source"] == here.spot("source").path
    assert said["sha256"] == hashlib.sha256(DATA).hexdigest()
    assert os.environ["HOME"] not in json.dumps({k: v for k, v in said.items() if k != "source"})
