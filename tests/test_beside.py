"""Stored numbers from elsewhere: read into our words, shown beside a run, compared with nothing."""

import json
from pathlib import Path

import pytest

from draftgauge.acceptance import Policy
from draftgauge.beside import beside, read_stored
from draftgauge.errors import InputError
from tests.test_compare import run

OURS = run("late", {"a": [3, 1], "b": [2]})


def stored(folder: Path, value: object) -> Path:
    path = folder / "old.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("name", "policy", "quantity"),
    [
        ("vanilla", Policy("chain"), "streak"),
        ("vanilla tau with bonus", Policy("chain"), "tau"),
        ("tau", Policy("chain"), "tau"),
        ("DDTree top-4", Policy("coverage", 4), "streak"),
        ("DDTree top-8 tau", Policy("coverage", 8), "tau"),
        ("coverage@4", Policy("coverage", 4), "streak"),
        ("DDTree(16)", Policy("ddtree", 16), "streak"),
        ("seconds", None, None),
    ],
)
def test_names_of_elsewhere_are_read(
    tmp_path: Path, name: str, policy: Policy | None, quantity: str | None
) -> None:
    (number,) = read_stored(stored(tmp_path, {name: 1.5}))
    assert (number.named, number.value, number.policy, number.quantity) == (name, 1.5, policy, quantity)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2], "holds list"),
        ({}, "expected an object of numbers"),
        ({"vanilla": "fast"}, "vanilla is 'fast', expected a number"),
        ({"a": {"vanilla": True}}, "a: vanilla is True"),
    ],
)
def test_what_is_no_number_is_named(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_stored(stored(tmp_path, value))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{")
    with pytest.raises(InputError, match="not readable JSON"):
        read_stored(tmp_path / "old.json")


def test_the_same_quantity_of_the_run_stands_beside_it(tmp_path: Path) -> None:
    """Rounds of a: 4, 2, 1, 1; of b: 3, 1, 1. Accepted per round: a 4/4, b 2/3."""
    path = stored(tmp_path, {"vanilla": 0.778, "DDTree top-4": 1.111, "seconds": 3, "b": {"vanilla": 0.5}})
    value = beside(OURS, read_stored(path), path=path)
    rows = {row["label"]: row for row in value["rows"]}
    assert rows["chain streak"]["stored"] == 0.778
    assert rows["chain streak"]["run"] == pytest.approx((1 + 2 / 3) / 2)
    assert rows["chain streak"]["run_all_anchors"] is not None
    assert rows["coverage@4 streak"]["named"] == "DDTree top-4"
    assert rows["b: chain streak"]["run"] == pytest.approx(2 / 3)
    assert (rows["seconds"]["run"], rows["seconds"]["stored"]) == (None, 3)
    notes = " ".join(value["notes"])
    assert "a tree of k nodes cannot accept more than k tokens" in notes
    assert "not one of our quantities: seconds" in notes


def test_nothing_of_it_is_a_difference(tmp_path: Path) -> None:
    path = stored(tmp_path, {"vanilla": 0.778})
    assert not [
        key for row in beside(OURS, read_stored(path), path=path)["rows"] for key in row if "diff" in key
    ]
