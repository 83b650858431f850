"""How values become text: tables in columns, and no number that rounding made up."""

from typing import Any

import pytest

from draftgauge.report.text import (
    bytes_of,
    interval,
    number,
    plain,
    reach,
    reasons,
    rest,
    share,
    short,
    signed,
    table,
    visible,
    wrap,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5234, "1.523"),
        (0.0, "0.000"),
        (1.0, "1.000"),
        (7.0, "7.000"),
        (0.9996, "0.9996"),
        (0.99999996, "0.99999996"),
        (1.0004, "1.0004"),
        (6.99997, "6.99997"),
        (0.0004, "4.0e-04"),
        (0.00051, "0.001"),
        (1e-12, "1.0e-12"),
        (None, "-"),
    ],
)
def test_rounding_never_makes_a_whole_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "+0.250"),
        (-0.25, "-0.250"),
        (0.0, "0.000"),
        (-0.0001, "-1.0e-04"),
        (0.9999, "+0.9999"),
        (None, "-"),
    ],
)
def test_differences_have_their_sign(value: float | None, text: str) -> None:
    assert signed(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"low": 1.234, "high": 2.345}, "1.23, 2.35"),
        ({"low": None, "high": None}, "-"),
        ({}, "-"),
        ({"low": 1.996, "high": 2.0}, "1.996, 2.00"),
    ],
)
def test_an_interval_is_two_numbers_or_absent(value: dict[str, Any], text: str) -> None:
    assert interval(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 9, "0%"), (9, 9, "100%"), (1, 1000, "<1%"), (999, 1000, ">99%"), (1, 4, "25%")],
)
def test_shares_are_never_rounded_to_none_or_all(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10_400_000_000, "10.4 GB")],
)
def test_sizes_have_a_readers_unit(count: int, text: str) -> None:
    assert bytes_of(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 10, 19], "1, 10, 19"),
        (["full", "full"], "2 x full"),
        (["full"], "full"),
        (True, "true"),
        (None, "-"),
        (1e-6, "1e-06"),
    ],
)
def test_a_value_stands_as_in_toml(value: Any, text: str) -> None:
    assert plain(value) == text


def test_a_digest_is_recognised_by_its_beginning() -> None:
    assert short("ab" * 32) == "ab" * 8
    assert short("ab" * 31) == "ab" * 31


def test_reasons_are_said_once_and_rests_only_where_there_are_any() -> None:
    assert reasons([{"reason": "few"}, {"reason": None}, {"reason": "few"}, {"reason": "none"}]) == [
        "few",
        "none",
    ]
    assert (rest(3, "prompts"), rest(0, "prompts"), rest(-2, "prompts")) == (
        "\n(more prompts in --json: 3)",
        "",
        "",
    )


def test_a_table_aligns_names_to_the_left_and_numbers_to_the_right() -> None:
    text = table(("policy", "tau", "of\nall"), [("chain", "1.5", "10"), ("DDTree(16)", "2.25", "3")])
    assert text.splitlines() == [
        "                   of",
        "policy       tau  all",
        "---------------------",
        "chain        1.5   10",
        "DDTree(16)  2.25    3",
    ]


def test_a_name_that_is_too_long_stands_on_lines_of_its_own() -> None:
    text = table(("prompt", "tau"), [("word " * 30, "1.500"), ("b", "2.000")])
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[2:-2]).split()) == " ".join(["word"] * 30)
    assert lines[-2].split() == ["1.500"]
    assert lines[-1].split() == ["b", "2.000"]


def test_lines_are_wrapped_and_paths_stay_whole() -> None:
    path = "/a/long-path" * 12
    assert path in wrap(f"read from {path} and nothing else", indent="  ").split()
    lines = wrap("word " * 40 + "\nnext", indent="  ").splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.startswith("  ") for line in lines] == [False, True, True, False]


def test_what_acts_unseen_is_spelled_out_and_a_name_is_one_line() -> None:
    assert visible("  plain") == "  plain"
    assert visible("  é\tx\ny") == "  é x y"
    assert visible("a\u202eb\x1b[31mc\x00") == "a\\u202eb\\u001b[31mc\\u0000"
    assert "\x1b" not in table(("name", "tau"), [("a\x1b[2J", "1")]) + wrap("b\x1b[2J")
    assert len(table(("name", "tau"), [("two\nlines", "1")]).splitlines()) == 3


@pytest.mark.parametrize(
    ("ends", "text"), [(None, "-"), ([0.5, 1.0], "0.50, 1.00"), ([0.0, 0.999999], "0.00, 0.999999")]
)
def test_an_interval_is_rounded_as_numbers_are(ends: list[float] | None, text: str) -> None:
    assert reach(ends) == text
