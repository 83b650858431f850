"""Anchors for comparisons: spread evenly however few are taken, paired, and counted by stretches of text."""

import numpy as np
import pytest
import torch

from draftgauge.acceptance import streaks
from draftgauge.errors import RecordingError
from draftgauge.features import read_item
from draftgauge.pairing import open_drafter, open_pair
from draftgauge.recording import Item
from draftgauge.replay import replay, replay_streaks
from draftgauge.stated import Stated
from draftgauge.trials import Trial, choose_anchors, paired_change, streaks_of
from tests import planted


def item(prompt_len: int, length: int, name: str = "a") -> Item:
    counts = {"agreed": 0, "near_ties": 0, "worst_gap": 0.0}
    return Item(name, None, f"{name}.safetensors", "", prompt_len, length, stopped=False, text="", **counts)


def test_anchors_leave_room_for_a_whole_block() -> None:
    """Tokens 3 to 9 are the completion; a block of depth 2 fits behind anchors 3 to 7."""
    trial = choose_anchors([item(3, 10)], room=2)
    assert trial.anchors.tolist() == [3, 4, 5, 6, 7]
    assert sorted(trial.turn.tolist()) == [0, 1, 2, 3, 4]


def test_completions_that_are_too_short_are_refused_by_number() -> None:
    with pytest.raises(RecordingError, match=r"none of 2 completion\(s\) has 4 tokens"):
        choose_anchors([item(3, 5), item(1, 4, "b")], room=3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [10, 40, 100])
def test_any_number_of_anchors_is_spread_over_the_whole_text(seed: int, count: int) -> None:
    trial = choose_anchors([item(10, 1016)], room=5, count=count, seed=seed)
    assert len(trial) == count
    gaps = np.diff(np.concatenate([[9], trial.anchors, [1011]]))
    assert gaps.max() <= 2.7 * 1001 / count  # three distances at most, within a golden ratio of each other


def test_earlier_turns_are_part_of_later_ones() -> None:
    many = choose_anchors([item(3, 100), item(5, 90, "b")], room=4, count=50, seed=1)
    few = choose_anchors([item(3, 100), item(5, 90, "b")], room=4, count=20, seed=1)
    assert many.turns(0, 20).anchors.tolist() == few.anchors.tolist()
    assert len(many.turns(20, 50)) == 30


def test_neighbouring_anchors_of_one_prompt_are_one_unit() -> None:
    """Completions begin at 4 and 7: anchors 4 and 19 are in the first 16 tokens, 20 in the next."""
    items = (item(4, 60), item(7, 60, "b"))
    trial = Trial(items, np.array([0, 0, 0, 1, 1]), np.array([4, 19, 20, 7, 40]), np.arange(5))
    units = trial.units.tolist()
    assert units[0] == units[1]
    assert len({*units}) == 4


def test_a_paired_change_is_per_anchor() -> None:
    items = tuple(item(1, 200, str(i)) for i in range(6))
    trial = choose_anchors(items, room=5, count=60)
    before = np.full(60, 2)
    after = before - np.where(trial.index == 0, 2, 1)
    value = paired_change(trial, before, after)
    assert value.value == pytest.approx((after - before).mean())
    assert value.low is not None
    assert value.low < value.value < value.high < 0
    assert value.n == len(np.unique(trial.units))


def test_streaks_are_those_of_the_whole_replay() -> None:
    pair = planted.shared_pair(1)
    opened = open_pair(pair.checkpoint, pair.recording.path, stated=Stated())
    drafter = open_drafter(opened.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")

    def read(which):
        return read_item(pair.recording, which, wiring=pair.wiring, dtype=torch.float32)

    trial = choose_anchors(opened.items, room=5, count=90)
    streak = streaks_of(drafter, trial, read=read)
    for i, which in enumerate(opened.items):
        whole = replay(drafter, read(which), budget=0)
        expected = dict(zip(whole.anchors.tolist(), streaks(whole.ranks).tolist(), strict=True))
        mine = trial.index == i
        assert streak[mine].tolist() == [expected[anchor] for anchor in trial.anchors[mine].tolist()]
    assert streak.max() == 5


@pytest.mark.parametrize(
    "changes", [{}, {"head": "own", "vocabulary_map": "offset"}], ids=["whole", "pruned"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streaks_without_ranks_are_the_streaks_of_the_ranks(changes: dict, dtype: str) -> None:
    """Also at the end of the text, where a block has fewer references than depths."""
    pair = planted.shared_pair(3, **changes)
    opened = open_pair(pair.checkpoint, pair.recording.path, stated=Stated())
    drafter = open_drafter(opened.checkpoint, pair.wiring, recording=pair.recording, dtype=dtype)
    seen = read_item(pair.recording, opened.items[0], wiring=pair.wiring, dtype=getattr(torch, dtype))
    ranks = replay(drafter, seen, budget=0).ranks
    assert replay_streaks(drafter, seen, anchors=seen.anchors).tolist() == streaks(ranks).tolist()
