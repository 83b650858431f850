"""A diagnosis in 80 columns: the answer first, then what was tried, then what remains open."""

from functools import cache
from typing import Any

import pytest

from draftgauge.diagnose import diagnose_checkpoint
from draftgauge.report.diagnosis import diagnosis_report
from draftgauge.stated import Stated
from tests import planted


@cache
def value(mask: int | None = None) -> dict[str, Any]:
    pair = planted.shared_pair(0)
    stated = Stated(wiring={} if mask is None else {"mask_token_id": mask})
    return diagnose_checkpoint(pair.checkpoint, pair.recording.path, stated=stated)


def a_worse_one() -> dict[str, Any]:
    """With a label that fits into its column."""
    rows = value()["candidates"]
    return next(row for row in rows if row["outcome"] == "worse" and len(row["label"]) < 20)


def test_everything_stands_in_80_columns() -> None:
    for mask in (None, 291):
        text = diagnosis_report({**value(mask), "checkpoint": "drafter", "recording": "recording"})
        assert max(map(len, text.splitlines())) <= 80


def test_the_answer_comes_before_the_table() -> None:
    text = diagnosis_report(value())
    answer = " ".join(value()["answer"].split())
    assert answer in " ".join(text.split())
    assert text.index("the wiring given wins") < text.index(a_worse_one()["label"])


def test_a_row_has_verdict_change_interval_and_anchors() -> None:
    row = a_worse_one()
    lines = diagnosis_report(value()).splitlines()
    (line,) = [line for line in lines if line.split("  ")[0] == row["label"]]
    cells = line.removeprefix(row["label"]).split()
    assert cells[0] == "worse"
    change = row["log_prob_change"]
    assert float(cells[1]) == pytest.approx(change["value"], abs=5e-4)
    assert cells[2:4] == [f"{change['low']:+.3f},", f"{change['high']:+.3f}"]
    assert float(cells[4]) == pytest.approx(row["streak_change"]["value"], abs=5e-4)
    assert cells[5] == str(row["anchors"])


def test_what_cannot_be_decided_is_not_called_right() -> None:
    text = " ".join(diagnosis_report(value()).split())
    assert "undecidable on this data, for some of their values:" in text
    assert "does not say that they are right" in text


def test_a_better_wiring_says_what_to_set() -> None:
    text = " ".join(diagnosis_report(value(291)).split())
    assert "mask token 290 (<mask>): streak" in text
    assert "set mask_token_id = 290" in text
    assert "nearby, after that" in text


def test_what_was_not_tried_says_what_would_help() -> None:
    row = {**value()["candidates"][0], "outcome": "not tried", "log_prob_change": None, "streak_change": None}
    impossible = {**row, "outcome": "impossible", "reason": "d2t names a token twice"}
    text = diagnosis_report({**value(), "candidates": [row, impossible]})
    assert "1 not tried" in text
    assert "--taps-around" in text
    assert "1 impossible: d2t names a token twice" in text
