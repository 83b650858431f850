"""`draftgauge recordings`: list, import, pick and fill as they are typed, and what they print."""

import json
from pathlib import Path

from draftgauge.recording import open_recording
from tests import foreign, tiny
from tests.tiny import draftgauge


def test_import_pick_fill_and_eval_as_they_are_typed(tmp_path: Path) -> None:
    shop = tiny.workshop()
    source = foreign.stored("loose", tmp_path / "cached", tiny.recording(), names=["one", "long", "three"])
    prompts = tiny.prompts_file(tmp_path / "prompts.jsonl")
    (tmp_path / "empty").mkdir()

    picked = draftgauge("recordings", "pick", "--for", shop / "drafter", "empty", "cached", cwd=tmp_path)
    assert picked.returncode == 0, picked.stderr
    assert "empty\n  no: it is empty" in picked.stdout
    assert "fits by its widths, once imported" in " ".join(picked.stdout.split())
    assert "import it first:\n  draftgauge recordings import cached --target TARGET" in picked.stdout

    words = ("recordings", "import", "cached", "--target", shop / "target", "--checkpoint", shop / "drafter")
    unsaid = draftgauge(*words, cwd=tmp_path)
    assert unsaid.returncode == 1
    assert "--layers aux_hidden=N --layers tap_hidden=N --layers last_hidden=N" in unsaid.stderr
    said = ("--layers", "aux_hidden=1", "--layers", "tap_hidden=3", "--layers", "last_hidden=5")
    done = draftgauge(*words, *said, "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 prompt(s) of prompts.jsonl" in done.stdout
    assert f"imported from {source} (loose)" in " ".join(done.stdout.split())
    assert "last state: before the norm, measured through norm and head" in done.stdout
    assert "! five was not recorded: no features of it are in the source" in done.stdout

    (folder,) = (tmp_path / "recordings").iterdir()
    listed = draftgauge("recordings", "--json", cwd=tmp_path)
    assert [entry["prompts"] for entry in json.loads(listed.stdout)] == [["one", "long", "three"]]

    run = draftgauge("eval", shop / "drafter", "--recording", folder, "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    slugs = {caveat["slug"]: caveat["text"] for caveat in json.loads(run.stdout)["summary"]["caveats"]}
    assert "3 of 6" in slugs["prompts-incomplete"]

    filled = draftgauge(
        *("recordings", "fill", folder, "--target", shop / "target", "--prompts", prompts),
        *("--max-new-tokens", tiny.NEW_TOKENS, "--json"),
        cwd=tmp_path,
    )
    assert filled.returncode == 0, filled.stderr
    made = open_recording(tmp_path / json.loads(filled.stdout)["path"])
    assert [item.id for item in made.items] == list(tiny.PROMPTS)
    kept = {item.id: item.sha256 for item in open_recording(folder).items}
    assert {item.id: item.sha256 for item in made.items if item.id in kept} == kept
    assert made.produced["completes"] == str(folder)
    again = draftgauge("recordings", "pick", "--for", shop / "drafter", "recordings", cwd=tmp_path)
    assert f"take {made.path.relative_to(tmp_path)}: it covers 6 of 6" in again.stdout


def test_nothing_that_fits_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = draftgauge("recordings", "pick", "--for", tiny.workshop() / "drafter", "empty", cwd=tmp_path)
    assert done.returncode == 1
    assert "take none: none of the 1 folder(s) fits" in done.stdout
    assert "record the target with `draftgauge record --checkpoint" in done.stderr


def test_layers_that_are_none_are_wrong_usage(tmp_path: Path) -> None:
    source = foreign.stored("loose", tmp_path / "cached", tiny.recording(), names=["one"])
    words = ("recordings", "import", source, "--target", tiny.workshop() / "target", "--taps", "1,3")
    for said in ("aux_hidden", "aux_hidden=", "aux_hidden=one"):
        done = draftgauge(*words, "--layers", said, cwd=tmp_path)
        assert done.returncode == 2, said
