"""Which of several folders a drafter can be measured on: what each lacks, and which to take."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftgauge.picking import pick_recording
from draftgauge.prompts import PromptSet
from draftgauge.record import Request, record_target
from draftgauge.recording import Recording
from draftgauge.report.recordings import pick_report
from tests import foreign, tiny


def picked(*folders: Path, **said: Any) -> dict[str, Any]:
    return pick_recording(tiny.workshop() / "drafter", folders, **said)


def recorded(root: Path, *names: str, taps: tuple[int, ...] = (1, 3)) -> Recording:
    request = Request(taps=taps, max_new_tokens=4)
    prompts: PromptSet = tiny.prompt_set(names)
    return record_target(tiny.workshop() / "target", prompts, request=request, root=root)


def test_the_recording_that_covers_most_is_taken(tmp_path: Path) -> None:
    few = recorded(tmp_path / "few", "one", "pair")
    many = recorded(tmp_path / "many", "one", "pair", "long")
    value = picked(few.path, tmp_path / "many")
    assert value["take"] == str(many.path)
    assert value["why"] == "it covers 3 of 3 prompt(s); the next 2"
    assert value["command"] is None
    assert [c["prompts"] for c in value["candidates"]] == [2, 3]
    assert all(c["fits"] and c["agreement"] == 1.0 for c in value["candidates"])


def test_each_that_does_not_fit_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").write_text("nothing here")
    lacking = recorded(tmp_path / "lacking", "one", taps=(1, 5))
    broken = shutil.copytree(lacking.path, tmp_path / "broken")
    (broken / "recording.json").write_text("{")
    narrow = foreign.stored("vllm", tmp_path / "narrow", tiny.recording(), taps=(1,), names=["one"])
    value = picked(tmp_path / "empty", tmp_path / "other", lacking.path, broken, narrow, tmp_path / "nowhere")
    empty, other, taps, damaged, few, nowhere = value["candidates"]
    assert (empty["kind"], empty["lacks"]) == ("empty", "it is empty")
    assert (other["kind"], other["lacks"]) == ("unreadable", "it holds neither a recording nor features")
    assert "holds [1, 5]: [3] missing" in taps["lacks"]
    assert "is not readable JSON" in damaged["lacks"]
    assert few["lacks"] == "hs_one: hidden_states holds 1 taps, the drafter reads [1, 3]"
    assert nowhere["lacks"] == "it does not exist"
    assert not any(c["fits"] for c in value["candidates"])
    assert (value["take"], value["why"]) == (None, "none of the 6 folder(s) fits")


def test_features_are_taken_where_nothing_better_is_there_and_how_is_said(tmp_path: Path) -> None:
    source = foreign.stored("loose", tmp_path / "features", tiny.recording())
    value = picked(source)
    assert value["take"] == str(source)
    assert value["command"] == (
        f"draftgauge recordings import {source} --target TARGET --checkpoint {tiny.workshop() / 'drafter'}"
    )
    (only,) = value["candidates"]
    assert (only["kind"], only["prompts"], only["form"]) == (
        "features",
        6,
        "any .pt or .safetensors of named tensors",
    )
    made = recorded(tmp_path / "recordings", *tiny.PROMPTS)
    assert picked(source, made.path)["why"] == "it covers 6 of 6 prompt(s); the next has to be imported first"


@pytest.mark.parametrize("form", ["specforge", "specforge_gz", "vllm", "modelopt", "deepspec"])
def test_every_form_is_looked_at(form: str, tmp_path: Path) -> None:
    if form == "deepspec":
        record = record_target(
            tiny.workshop() / "target",
            tiny.prompt_set(["one", "long"]),
            request=Request(taps=(1, 3), max_new_tokens=4, dtype="bfloat16"),
            root=tmp_path / "recordings",
        )
    else:
        record = tiny.recording()
    source = foreign.stored(form, tmp_path / "features", record, names=["one", "long"])
    (only,) = picked(source)["candidates"]
    assert (only["kind"], only["fits"], only["prompts"], only["lacks"]) == ("features", True, 2, "")


def test_what_is_older_than_its_target_is_taken_last(tmp_path: Path) -> None:
    target = tiny.target_dir(tmp_path / "target", stops=[tiny.STOP])
    request = Request(taps=(1, 3), max_new_tokens=4)
    stale = record_target(target, tiny.prompt_set(["one", "pair"]), request=request, root=tmp_path / "r")
    fresh = recorded(tmp_path / "fresh", "one")
    late = (stale.path / "recording.json").stat().st_mtime + 60
    os.utime(target / "model.safetensors", (late, late))
    value = picked(stale.path, fresh.path)
    assert value["take"] == str(fresh.path)
    assert value["why"] == "it covers 1 of 1 prompt(s); the next is older than its target"
    older, newer = (line for line in pick_report(value).splitlines() if "prompt(s), " in line)
    assert older.endswith(", older than its target's weights")
    assert newer.endswith(", newer than its target's weights")


def test_the_age_of_features_is_that_of_a_target_that_is_named(tmp_path: Path) -> None:
    source = foreign.stored("vllm", tmp_path / "features", tiny.recording(), names=["one"])
    assert picked(source)["candidates"][0]["behind_target"] is None
    assert picked(source, target=tiny.workshop() / "target")["candidates"][0]["behind_target"] is False
