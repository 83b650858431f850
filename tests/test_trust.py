"""What many controls come to, and how they are told."""

import pytest

from draftgauge.report.trust import check_report, trust_lines
from draftgauge.trust import Control, outcome, worst_first

CONTROLS = [
    Control("no-leak", "nothing leaks", "4 of 4", "passed", {"blocks": 4}),
    Control("context-zeroed", "acceptance falls", "streak 0.1 -> 0.1", "failed", advice="run diagnose"),
    Control("probe", "the same function", "there is none", "skipped", advice="docs/probe.md"),
    Control("context-moved-later", "acceptance falls", "streak 0.1 -> 0.9", "failed", advice="record again"),
    Control("mask-token", "a row of its own", "token 2", "caution", advice="compare it"),
    Control("dtype", "the same tokens", "1 of 9", "undecided"),
]


def test_one_failure_is_enough_to_lose_trust() -> None:
    value = outcome(CONTROLS)
    assert value["trusted"] is False
    assert value["failed"] == ["context-zeroed", "context-moved-later"]
    assert value["controls"][0] == {
        "slug": "no-leak",
        "expectation": "nothing leaks",
        "measured": "4 of 4",
        "verdict": "passed",
        "values": {"blocks": 4},
        "advice": None,
    }


@pytest.mark.parametrize("verdict", ["passed", "caution", "undecided", "skipped"])
def test_what_is_no_failure_keeps_it(verdict) -> None:
    assert outcome([Control("a", "b", "c", verdict)])["trusted"] is True


def test_the_worst_stands_first_and_before_what_only_suffers_from_it() -> None:
    assert [control.slug for control in worst_first(CONTROLS)] == [
        *("context-moved-later", "context-zeroed", "mask-token", "dtype", "no-leak", "probe"),
    ]


def value() -> dict:
    about = {"checkpoint": "drafter", "recording": "rec", "step": 7, "dtype": "float32", "seconds": 1.25}
    return {**about, **outcome(worst_first(CONTROLS))}


def test_the_report_says_verdict_expectation_measurement_and_advice() -> None:
    text = check_report(value())
    assert max(map(len, text.splitlines())) <= 80
    assert "NOT TRUSTED: context-moved-later, context-zeroed failed" in text
    assert "2 failed, 1 caution, 1 undecided, 1 passed, 1 skipped" in text.replace("\n            ", " ")
    assert "FAILED     context-zeroed: acceptance falls" in text
    assert "-> run diagnose" in text
    assert "checked in 1.2 s, in float32" in text


def test_a_run_shows_the_verdict_and_what_failed() -> None:
    text = trust_lines(value())
    assert "NOT TRUSTED" in text
    assert "streak 0.1 -> 0.9" in text
    assert "mask-token" not in text
    good = trust_lines(outcome([CONTROLS[0]]))
    assert good == "controls    trusted: 1 passed"
    assert "not run" in trust_lines(None)
