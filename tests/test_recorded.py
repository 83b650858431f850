"""What a recording says of its health without a tensor being read."""

from dataclasses import replace

import pytest

from draftgauge.recording import AFTER_NORM, ENDS_FILE, Recording
from draftgauge.viewer.recorded import health_notes, is_portable
from tests.tiny import recording


def texts(recording: Recording, severity: str) -> str:
    return "\n".join(note.text for note in health_notes(recording) if note.severity == severity)


def with_items(made: Recording, **said: object) -> Recording:
    return replace(made, items=(replace(made.items[0], **said), *made.items[1:]))  # type: ignore[arg-type]


def test_a_sound_recording_says_so() -> None:
    passed = texts(recording(), "passed")
    assert "Every prompt was recorded: 6." in passed
    assert "first choice in the recorded pass" in passed
    assert texts(recording(), "warning") == ""
    assert "It needs the target's own files" in texts(recording(), "note")


@pytest.mark.parametrize(
    ("said", "severity", "text"),
    [
        ({"agreed": 0, "near_ties": 0, "worst_gap": 2.5}, "warning", "are not the target's own first choice"),
        ({"agreed": 0, "near_ties": 0, "worst_gap": 2.5}, "note", "largest logit gap"),
        ({"agreed": None, "near_ties": None, "worst_gap": None}, "warning", "is not known"),
    ],
)
def test_what_is_wrong_with_its_references_is_said(said: dict[str, object], severity: str, text: str) -> None:
    changed = with_items(recording(), **said)
    assert text in texts(changed, severity)
    assert "first choice in the recorded pass" not in texts(changed, "passed")


def test_what_is_missing_is_said() -> None:
    made = recording()
    failed = replace(made, failed={f"p{i}": "no" for i in range(9)})
    assert "9 prompt(s) could not be recorded: p0, p1, p2, p3, p4, p5, ..." in texts(failed, "warning")
    asked = replace(made, produced={"prompts_asked": 10})
    assert "6 of 10 prompts were recorded." in texts(asked, "warning")
    assert "3 prompt(s): the prompt is the unit" in texts(replace(made, items=made.items[:3]), "warning")


def test_where_it_comes_from_is_said() -> None:
    made = recording()
    from_elsewhere = replace(made, plan=replace(made.plan, source="ab", last_layer=AFTER_NORM))
    assert "came from elsewhere" in texts(from_elsewhere, "note")
    assert "kept after the norm" in texts(from_elsewhere, "note")


def test_a_portable_recording_holds_both_ends() -> None:
    made = recording()
    assert not is_portable(made)
    ends = {name: {**place, "file": ENDS_FILE} for name, place in made.target.ends.items()}
    moved = replace(made, target=replace(made.target, ends=ends))
    assert is_portable(moved)
    assert "It needs" not in texts(moved, "note")
