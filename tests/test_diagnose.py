"""The search finds what was planted, names it first, and finds nothing where nothing is wrong."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from draftgauge.checkpoint import open_checkpoint
from draftgauge.diagnose import diagnose_checkpoint, write_wiring
from draftgauge.errors import StoreError
from draftgauge.stated import Stated, wiring_of
from tests import planted
from tests.planting import toml_layers

#: The pair's layers, and the same with the full one causal in the block, as TOML has them.
RIGHT = toml_layers(*planted.WIRING.attention)
CAUSAL = [{**RIGHT[0], "block_causal": True}, RIGHT[1]]


@cache
def diagnosed(seed: int = 0) -> dict[str, Any]:
    pair = planted.shared_pair(seed)
    return diagnose_checkpoint(pair.checkpoint, pair.recording.path, seed=seed)


def with_fault(**stated: Any) -> dict[str, Any]:
    pair = planted.shared_pair(0)
    return diagnose_checkpoint(pair.checkpoint, pair.recording.path, stated=Stated(wiring=stated))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_nearby_is_better_where_nothing_is_wrong(seed: int) -> None:
    value = diagnosed(seed)
    assert value["verdict"] == "given-wins"
    assert value["changes"] == []
    assert value["settings"] == {}
    assert value["base"]["prompts"] == 8
    assert "the wiring given wins" in value["answer"]
    assert not [row for row in value["candidates"] if row["outcome"] == "better"]


def test_what_makes_no_difference_is_undecidable_and_not_right() -> None:
    """A window of 12 inside a block of 6 hides no row, so the drafts are the same."""
    (row,) = [r for r in diagnosed()["candidates"] if r["label"].startswith("a window inside the block")]
    assert row["outcome"] == "undecidable"
    assert row["log_prob_change"]["value"] == pytest.approx(0, abs=1e-6)
    assert row["streak_change"]["value"] == 0
    assert row["reason"] == "the drafts are the same"
    assert "attention" in diagnosed()["undecidable"]


def test_the_table_holds_every_wiring_with_its_interval() -> None:
    rows = diagnosed()["candidates"]
    assert len({row["label"] for row in rows}) == len(rows) > 40
    for row in rows:
        for change in (row["log_prob_change"], row["streak_change"]):
            assert change["low"] <= change["value"] <= change["high"]
        assert row["anchors"] in (128, 512, diagnosed()["base"]["anchors"])
    worst = next(row for row in rows if row["label"] == "taps in reverse order")
    assert worst["outcome"] == "worse"
    assert worst["anchors"] == 128  # hopeless ones are dropped early


@pytest.mark.parametrize(
    ("stated", "settings"),
    [
        ({"taps": [2, 4, 5]}, {"taps": [1, 3, 4]}),
        ({"rope_layout": "interleaved"}, {"rope_layout": "half"}),
        ({"mask_token_id": 291}, {"mask_token_id": 290}),
        ({"predicts_from_anchor": True}, {"predicts_from_anchor": False}),
        ({"block_size": 12}, {"block_size": 6}),
        ({"attention": CAUSAL}, {"attention": RIGHT}),
        ({"taps": [2, 4, 5], "rope_theta": 10000.0}, {"taps": [1, 3, 4], "rope_theta": 500.0}),
    ],
    ids=["taps", "layout", "mask", "anchor row", "block size", "block mask", "taps and RoPE"],
)
def test_a_planted_fault_is_found_and_mended(stated: dict[str, Any], settings: dict[str, Any]) -> None:
    value = with_fault(**stated)
    assert value["verdict"] == "better-found"
    assert value["settings"] == settings
    first, last = value["changes"][0], value["changes"][-1]
    assert {name for change in value["changes"] for name in change["fields"]} == settings.keys()
    assert first["before"] < last["low"] < last["after"] < last["high"]
    assert value["streak"] == pytest.approx(diagnosed()["base"]["streak"], abs=0.02)
    assert json.loads(json.dumps(value)) == value


def test_where_nothing_works_that_is_the_answer() -> None:
    """A recording of another target: no wiring nearby can win what is not there."""
    value = diagnose_checkpoint(planted.shared_pair(0).checkpoint, planted.shared_pair(1).recording.path)
    assert value["verdict"] == "none-works"
    assert value["settings"] == {}
    assert "draftgauge check" in value["answer"]


def test_layers_that_were_not_recorded_are_not_tried_and_said(tmp_path: Path) -> None:
    pair = planted.pair(tmp_path, around=False)
    value = diagnose_checkpoint(pair.checkpoint, pair.recording.path)
    missing = [row for row in value["candidates"] if row["outcome"] == "not tried"]
    assert {row["field"] for row in missing} == {"taps"}
    assert "--taps-around" in missing[0]["reason"]
    tried = {row["label"]: row["outcome"] for row in value["candidates"]}
    assert tried["taps in reverse order"] == "worse"


@pytest.mark.parametrize(
    "settings",
    [
        {"taps": [1, 3, 4]},
        {"rope_theta": 500.0},
        {"mask_token_id": 290},
        {"predicts_from_anchor": False},
        {"attention": toml_layers(*planted.WIRING.attention)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_written_file_makes_the_right_wiring(tmp_path: Path, settings: dict[str, Any]) -> None:
    """What the user stated is kept beside what was found, and the file is what `--wiring` takes."""
    pair = planted.shared_pair(0)
    stated = Stated(wiring={"rms_norm_eps": 1e-6}, options={"mask_token_id": 290})
    path = tmp_path / "fixed.toml"
    write_wiring(path, settings, stated=stated)
    written = tomllib.loads(path.read_text())
    assert written.keys() == {"rms_norm_eps", "mask_token_id", *settings}
    assert wiring_of(open_checkpoint(pair.checkpoint), Stated(wiring=written)) == pair.wiring


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "fixed.toml"
    path.write_text("taps = [1]")
    with pytest.raises(StoreError, match="never overwritten"):
        write_wiring(path, {"taps": [1, 3]}, stated=Stated())
    assert path.read_text() == "taps = [1]"
