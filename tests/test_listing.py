"""A list is what its address asks for: filters, order, pages."""

from dataclasses import replace
from pathlib import Path

import pytest

from draftgauge.viewer import listing as module
from draftgauge.viewer.listing import Query, listing
from draftgauge.viewer.rows import Estimate, RunRow, read_run
from tests.shelf import put_run


@pytest.fixture
def rows(tmp_path: Path) -> list[RunRow]:
    row = read_run(put_run(tmp_path / "x"), key="x")
    return [
        replace(row, key="runs/late", step=20, tau=Estimate(1.2), started="2026-03", checkpoint="/A/b.pt"),
        replace(row, key="runs/Early", step=3, tau=Estimate(1.9), started="2026-02", trusted=False, failed=("x",)),
        replace(row, key="other/bare", step=None, tau=Estimate(), started="2026-01", trusted=None, recording="ffff"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({}, ["late", "Early", "bare"]),
        ({"text": "EARLY"}, ["Early"]),
        ({"text": "runs coding10"}, ["late", "Early"]),
        ({"text": "few-prompts ear"}, ["Early"]),
        ({"checkpoint": "/a/B"}, ["late"]),
        ({"recording": "ffff"}, ["bare"]),
        ({"verdict": "trusted"}, ["late"]),
        ({"verdict": "not trusted"}, ["Early"]),
        ({"verdict": "no controls"}, ["bare"]),
        ({"verdict": "perfect"}, ["late", "Early", "bare"]),
        ({"text": "nowhere"}, []),
        ({"order": "-measured"}, ["bare", "Early", "late"]),
        ({"order": "run"}, ["bare", "Early", "late"]),
        ({"order": "step"}, ["late", "Early", "bare"]),
        ({"order": "tau"}, ["Early", "late", "bare"]),
        ({"order": "-tau"}, ["bare", "late", "Early"]),
        ({"order": "__class__"}, ["late", "Early", "bare"]),
        ({"page": "9"}, ["late", "Early", "bare"]),
        ({"page": "-1"}, ["late", "Early", "bare"]),
        ({"page": "9" * 5000}, ["late", "Early", "bare"]),
    ],
)
def test_an_address_chooses_and_orders(rows: list[RunRow], said: dict[str, str], names: list[str]) -> None:
    found = listing(rows, Query.read(said))
    assert [row.name for row in found.rows] == names
    assert found.matching == len(names)


def test_a_family_is_shown_by_any_of_its_runs(rows: list[RunRow]) -> None:
    rows[1] = replace(rows[1], family=("another",))
    assert [row.name for row in listing(rows, Query(family="other/bare")).rows] == ["late", "bare"]
    assert listing(rows, Query(family="gone")).rows == ()


def test_pages_divide_a_long_list(rows: list[RunRow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_ROWS", 2)
    first, second = (listing(rows, Query(page=page)) for page in (1, 2))
    assert ([row.name for row in first.rows], first.pages) == (["late", "Early"], 2)
    assert ([row.name for row in second.rows], second.page) == (["bare"], 2)


def test_addresses_ask_for_the_same_again() -> None:
    query = Query.read({"text": "a&b=c", "order": "-tau", "page": "3"})
    assert query.address(page=4) == "?text=a%26b%3Dc&order=-tau&page=4"
    assert query.address(text="") == "?order=-tau"
    assert query.filters
    assert not Query().filters


def test_a_second_click_turns_the_order_round() -> None:
    assert Query().next_order("tau") == "tau"
    assert Query(order="tau").next_order("tau") == "-tau"
    assert Query(order="-tau").next_order("tau") == "tau"
    ways = [Query(order=order).direction("run") for order in ("run", "-run", "tau")]
    assert ways == ["ascending", "descending", None]
    assert Query(order="tau").direction("tau") == "descending"
