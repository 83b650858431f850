"""Stored numbers from elsewhere: read into our words, shown beside a run, compared with nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftgauge.acceptance import Policy
from draftgauge.beside import Stored, beside, read_stored
from draftgauge.errors import InputError
from tests.test_compare import run

# Accepted in the rounds of a: 3, 1, 0, 0; of b: 2, 0, 0.
OURS = run("late", {"a": [3, 1], "b": [2]})
CHAIN, TOP4 = Policy("chain"), Policy("coverage", 4)


def stored(folder: Path, value: object) -> Path:
    path = folder / "old.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("vanilla", "chain streak"),
        ("Vanilla Streak", "chain streak"),
        ("vanilla_streak", "chain streak"),
        ("chain", "chain streak"),
        ("chain4", "chain(4) streak"),
        ("chain(4) tau", "chain(4) tau"),
        ("streak", "chain streak"),
        ("tau", "chain tau"),
        ("vanilla tau with bonus", "chain tau"),
        ("vanilla with bonus", "chain tau"),
        ("DDTree top-4", "coverage@4 streak"),
        ("ddtree_top_4", "coverage@4 streak"),
        ("top-8", "coverage@8 streak"),
        ("Top8 streak", "coverage@8 streak"),
        ("DDTree top-8 tau", "coverage@8 tau"),
        ("coverage@4", "coverage@4 streak"),
        ("coverage4", "coverage@4 streak"),
        ("DDTree(16)", "DDTree(16) streak"),
        ("ddtree16 tau", "DDTree(16) tau"),
        # What only resembles one of them is not guessed.
        ("top-1 accuracy", None),
        ("vanilla_latency_s", None),
        ("vanilla2", None),
        ("top-0", None),
        ("DDTree", None),
        ("taut", None),
        ("acceptance_length", None),
        ("seconds", None),
        ("", None),
    ],
)
def test_a_name_there_is_one_of_our_quantities_or_none(
    tmp_path: Path, name: str, quantity: str | None
) -> None:
    (number,) = read_stored(stored(tmp_path, {name: 1.5}))
    found = None if number.policy is None else f"{number.policy.label} {number.quantity}"
    assert (number.named, number.value, found) == (name, 1.5, quantity)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"vanilla": 0.778, "DDTree top-4": 1},
            [
                Stored("vanilla", 0.778, CHAIN, "streak", None),
                Stored("DDTree top-4", 1.0, TOP4, "streak", None),
            ],
        ),
        (
            {"fizzbuzz": {"vanilla": 0.5, "tau": 1.5}, "top-4": 1.25},
            [
                Stored("top-4", 1.25, TOP4, "streak", None),
                Stored("vanilla", 0.5, CHAIN, "streak", "fizzbuzz"),
                Stored("tau", 1.5, CHAIN, "tau", "fizzbuzz"),
            ],
        ),
        (
            [
                {"prompt": "fizzbuzz", "vanilla": 0.5},
                {"vanilla": 2, "id": "lru"},
                {"question_id": 81, "blocks": 9},
            ],
            [
                Stored("vanilla", 0.5, CHAIN, "streak", "fizzbuzz"),
                Stored("vanilla", 2.0, CHAIN, "streak", "lru"),
                Stored("blocks", 9.0, None, None, "81"),
            ],
        ),
    ],
    ids=["overall", "by prompt", "records"],
)
def test_numbers_are_read_in_each_form(value: object, expected: list[Stored], tmp_path: Path) -> None:
    assert read_stored(stored(tmp_path, value)) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, r"holds \{\}; expected numbers by name, as in"),
        ([], r"holds \[\]; expected numbers by name"),
        (3, "holds 3; expected numbers by name"),
        ({"a": {}}, "expected numbers by name"),
        ([1, 2], "record 0 is 1; expected an object of numbers with its prompt's name"),
        ([{"vanilla": 1}], "record 0 names no prompt; expected it under one of prompt, id"),
        ({"vanilla": "fast"}, "old.json: vanilla is 'fast'; expected a number"),
        ({"vanilla": None}, "vanilla is None; expected a number"),
        ({"vanilla": [1.0]}, r"vanilla is \[1.0\]; expected a number"),
        ({"a": {"vanilla": True}}, "a: vanilla is True; expected a number"),
        ({"a": {"b": {"vanilla": 1}}}, r"a: b is \{'vanilla': 1\}; expected a number"),
        ('{"vanilla": NaN}', "vanilla is nan; expected a number"),
        ('{"vanilla": 1e999}', "vanilla is inf; expected a number"),
        ('{"vanilla": 1' + "0" * 400 + "}", "vanilla is 10+; expected a number"),
        ('{"vanilla": 1, "vanilla": 2}', "not readable JSON: 'vanilla' occurs twice"),
        ("{", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_stored(stored(tmp_path, value))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"old\.json is not readable JSON: .*No such file"):
        read_stored(tmp_path / "old.json")


def rows(folder: Path, value: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    path = stored(folder, value)
    shown = beside(OURS, read_stored(path), path=path)
    assert shown["path"] == str(path)
    return {row["named"]: row for row in shown["rows"]}, shown["notes"]


def test_the_same_quantity_of_the_run_stands_beside_it(tmp_path: Path) -> None:
    found, notes = rows(tmp_path, {"vanilla": 0.778, "tau": 9, "DDTree top-4": 1.111})
    assert found["vanilla"] == {
        "named": "vanilla",
        "prompt": None,
        "quantity": "chain streak",
        "stored": 0.778,
        "run": pytest.approx((4 / 4 + 2 / 3) / 2),
        "run_all_anchors": OURS.summary["policies"]["chain"]["all_anchor_streak"]["value"],
    }
    assert found["tau"]["run"] == pytest.approx((8 / 4 + 5 / 3) / 2)
    assert found["tau"]["run_all_anchors"] is None  # a mean over anchors has no bonus
    assert found["DDTree top-4"]["run"] == OURS.summary["policies"]["coverage4"]["streak_response"]["value"]
    assert len(notes) == 1
    assert "A tree of k nodes cannot accept more than k tokens" in notes[0]


def test_a_number_of_one_prompt_stands_beside_that_prompts(tmp_path: Path) -> None:
    found, notes = rows(tmp_path, {"b": {"vanilla": 0.5, "tau": 1.5}})
    assert found["vanilla"]["run"] == pytest.approx(2 / 3)
    assert (
        found["vanilla"]["run_all_anchors"]
        == (OURS.summary["prompts"]["b"]["policies"]["chain"]["all_anchor_streak"])
    )
    assert found["tau"]["run"] == pytest.approx(5 / 3)
    assert notes == []


def test_what_has_no_counterpart_is_shown_alone_and_said(tmp_path: Path) -> None:
    found, notes = rows(tmp_path, {"seconds": 3, "top-6": 1, "gone": {"vanilla": 1}, "b": {"DDTree(8)": 2}})
    for row in found.values():
        assert (row["run"], row["run_all_anchors"]) == (None, None)
    assert found["seconds"]["quantity"] is None
    assert "no quantity of ours, shown as it is: seconds" in notes
    assert "this run has no policy coverage@6, prompt gone, policy DDTree(8)" in notes


def test_without_all_anchors_that_column_is_absent(tmp_path: Path) -> None:
    walked = run("walked", {"a": [1]})
    for value in (walked.summary["policies"]["chain"], walked.summary["prompts"]["a"]["policies"]["chain"]):
        del value["all_anchor_streak"]
    path = stored(tmp_path, {"vanilla": 1, "a": {"vanilla": 1}})
    for row in beside(walked, read_stored(path), path=path)["rows"]:
        assert row["run"] is not None
        assert row["run_all_anchors"] is None


def test_nothing_is_subtracted_or_tested(tmp_path: Path) -> None:
    found, _ = rows(tmp_path, {"vanilla": 0.778})
    assert found["vanilla"].keys() == {"named", "prompt", "quantity", "stored", "run", "run_all_anchors"}
