"""Controls on the drafter pass on a pair that is right, and each fails on what it is there for."""

from functools import cache
from pathlib import Path

import pytest
import torch

from draftgauge.controls import context_controls, drafter_controls
from draftgauge.drafters import Drafter
from draftgauge.pairing import open_drafter, open_pair
from draftgauge.stated import Stated
from draftgauge.trust import Control
from tests import planted
from tests.faults import FAULTS, site_of

QUICK = ("context-zeroed", "context-shuffled", "no-leak", "floor", "ceiling", "mask-token")
FURTHER = ("context-swapped", "context-by-prompt", "context-moved-later", "context-moved-earlier")


def controls(checkpoint: Path, recording: Path, *, count: int = 200, **stated) -> dict[str, Control]:
    pair = open_pair(checkpoint, recording, stated=Stated(wiring=stated))
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    found = drafter_controls(drafter, pair.recording, items=pair.items, count=count)
    found += context_controls(drafter, pair.recording, items=pair.items, count=count)
    return {control.slug: control for control in found}


@cache
def clean(seed: int) -> dict[str, Control]:
    pair = planted.shared_pair(seed)
    return controls(pair.checkpoint, pair.recording.path)


@pytest.mark.parametrize("seed", range(3))
def test_all_pass_where_nothing_is_wrong(seed: int) -> None:
    found = clean(seed)
    assert tuple(found) == (*QUICK, *FURTHER)
    assert {slug: control.verdict for slug, control in found.items()} == dict.fromkeys(found, "passed")


def test_a_control_says_by_how_much_acceptance_falls() -> None:
    values = clean(0)["context-zeroed"].values
    assert values["baseline"] > 1
    assert values["variant"] < 0.05
    assert values["change"] == pytest.approx(values["variant"] - values["baseline"])
    assert values["low"] < values["change"] < values["high"] < 0
    assert f"{values['baseline']:.3f} -> {values['variant']:.3f}" in clean(0)["context-zeroed"].measured


@pytest.mark.parametrize(
    ("what", "slug", "words"),
    [
        ("it drafts from the anchor alone", "context-zeroed", "does not read its context"),
        ("it drafts from the anchor alone", "context-shuffled", "does not read its context"),
        ("one position too late", "context-moved-earlier", "one position too late"),
        ("the anchor's own feature is shown", "context-moved-later", "one position too early"),
        ("rows of another request", "context-by-prompt", "another request's"),
    ],
)
def test_a_planted_fault_fails_its_control(tmp_path: Path, what: str, slug: str, words: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.what == what]
    site = site_of(fault, tmp_path)
    control = controls(site.checkpoint, site.recording)[slug]
    assert control.verdict == "failed"
    assert words in f"{control.measured}; {control.advice}"


def test_too_few_anchors_are_undecided_and_not_failed() -> None:
    pair = planted.shared_pair(0)
    found = controls(pair.checkpoint, pair.recording.path, count=4, rope_theta=1e6)
    assert found["context-moved-later"].verdict == "undecided"
    assert found["context-zeroed"].verdict in ("undecided", "passed")


def test_a_drafter_that_is_never_right_is_below_the_floor() -> None:
    pair = planted.shared_pair(0)
    floor = controls(pair.checkpoint, pair.recording.path, mask_token_id=291)["floor"]
    assert floor.verdict == "caution"
    assert "diagnose" in str(floor.advice)


def test_what_is_always_right_is_too_good() -> None:
    """A stand-in that drafts the references themselves, as a drafter that sees its labels would."""
    pair = open_pair(
        planted.shared_pair(0).checkpoint, planted.shared_pair(0).recording.path, stated=Stated()
    )
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    cheat = _Cheat(drafter, pair)  # of one prompt: what it knows goes by position and token
    found = {c.slug: c for c in drafter_controls(cheat, pair.recording, items=pair.items[:1], count=100)}
    assert found["ceiling"].verdict == "failed"
    assert "too good" in str(found["ceiling"].advice)
    assert found["context-zeroed"].verdict == "failed"


class _Cheat:
    """Knows every sequence, and drafts what follows the anchor, whatever the context says."""

    def __init__(self, drafter: Drafter, pair) -> None:
        self.wiring, self.ends, self._drafter = drafter.wiring, drafter.ends, drafter
        self._following = {}
        item = pair.items[0]
        tokens = pair.recording.tensors(item).tokens.mapped().view("<i4").tolist()
        for a in range(item.prompt_len, len(tokens)):
            self._following[a, tokens[a]] = tokens[a + 1 : a + 1 + self.wiring.depth]
        self.named_parameters, self.named_modules = drafter.named_parameters, drafter.named_modules

    def context(self, features, *, first_position=0):
        return self._drafter.context(features, first_position=first_position)

    def draft(self, context, *, anchors, anchor_tokens, starts=None):
        depth = self.wiring.depth
        rows = torch.zeros(len(anchors), depth, self.wiring.hidden_size)
        for i, pair in enumerate(zip(anchors.tolist(), anchor_tokens.tolist(), strict=True)):
            rows[i, :, 0] = torch.tensor(
                [*self._following.get(pair, ()), *[0] * depth][:depth], dtype=torch.float32
            )
        return rows

    def logits(self, hidden, *, rows=slice(None)):
        wanted = hidden[..., 0].round().long()
        return torch.nn.functional.one_hot(wanted, len(self.ends.head)).float()[..., rows]


def test_a_mask_that_fell_back_to_a_stop_token_is_a_caution() -> None:
    pair = planted.shared_pair(0)
    control = controls(pair.checkpoint, pair.recording.path, mask_token_id=2)["mask-token"]
    assert control.verdict == "caution"
    assert "stop token" in control.measured
    assert "<stop>" in control.measured


def test_a_mask_row_that_was_never_trained_is_a_caution(tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.what == "a row that was never trained"]
    site = site_of(fault, tmp_path)
    control = controls(site.checkpoint, site.recording)["mask-token"]
    assert control.verdict == "caution"
    assert "far from the table's" in control.measured


def test_completions_shorter_than_a_block_skip_what_needs_one() -> None:
    pair = open_pair(
        planted.shared_pair(0).checkpoint, planted.shared_pair(0).recording.path, stated=Stated()
    )
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    short = type(pair.items[0])(**{**vars(pair.items[0]), "length": pair.items[0].prompt_len + 5})
    found = {c.slug: c.verdict for c in drafter_controls(drafter, pair.recording, items=[short], count=20)}
    assert found["context-zeroed"] == "skipped"
