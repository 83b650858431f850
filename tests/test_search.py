"""Two tests witness for a change: what they say together, and what decides when they differ."""

import numpy as np
import pytest
import torch

from draftgauge.features import read_item
from draftgauge.neighbours import Candidate
from draftgauge.pairing import open_drafter, open_pair
from draftgauge.replay import replay, replay_among
from draftgauge.search import Attempt, Evidence, _judge, gains
from draftgauge.stated import Stated
from draftgauge.stats import Change
from draftgauge.trials import Scores
from tests import planted


def changed(value: float, p: float | None) -> Change:
    return Change(value, value - 0.1, value + 0.1, p, 20)


def evidence(log_prob: tuple[float, float | None], streak: tuple[float, float | None]) -> Evidence:
    return Evidence(changed(*log_prob), changed(*streak))


@pytest.mark.parametrize(
    ("log_prob", "streak", "p", "direction"),
    [
        ((0.3, 1e-6), (0.1, 0.2), 2e-6, 1),
        ((0.3, 0.4), (-0.1, 1e-3), 2e-3, -1),
        ((-0.3, 1e-6), (0.1, 0.2), 2e-6, -1),
        ((-0.3, 1e-6), (0.1, 1e-3), 2e-6, 0),  # the two contradict each other
        ((0.3, 0.9), (0.1, 0.8), 1.0, 1),
        ((0.0, 1.0), (0.0, 1.0), 1.0, 0),
        ((0.3, None), (0.1, None), None, 0),
    ],
)
def test_the_surer_test_decides_unless_the_other_contradicts(log_prob, streak, p, direction) -> None:
    both = evidence(log_prob, streak)
    assert both.p == p
    assert both.direction == direction


def attempt(both: Evidence | None) -> Attempt:
    kept = np.ones(3, dtype=bool)
    scores = Scores(np.zeros((3, 2), dtype=np.float32), np.zeros((3, 2), dtype=bool))
    return Attempt(Candidate("taps", "taps in reverse order", {}, planted.WIRING), kept, kept, scores, both)


def test_what_was_tried_beside_it_makes_a_change_less_sure() -> None:
    """p of 0.0015 doubled for two tests is 0.003: enough for 3 tries at 0.01, not for 20."""
    few = [attempt(evidence((0.3, 1.5e-3), (0.1, 0.5))) for _ in range(3)]
    _judge(few)
    assert [a.outcome for a in few] == ["better"] * 3
    many = [attempt(evidence((0.3, 1.5e-3), (0.1, 0.5))) for _ in range(20)]
    _judge(many)
    assert {a.outcome for a in many} == {"undecidable"}


def test_verdicts_and_the_order_of_gains() -> None:
    tried = [
        attempt(evidence((0.3, 1e-9), (0.1, 1e-9))),
        attempt(evidence((0.1, 1e-9), (0.5, 1e-9))),
        attempt(evidence((-0.3, 1e-9), (-0.1, 0.1))),
        attempt(evidence((-0.3, 1e-9), (0.1, 1e-9))),
        attempt(evidence((1e-9, 0.01), (0.0, 1.0))),
        attempt(evidence((0.3, None), (0.1, None))),
    ]
    _judge(tried)
    assert [a.outcome for a in tried] == ["better", "better", "worse", *["undecidable"] * 3]
    assert gains(tried) == [tried[1], tried[0]]  # by accepted tokens
    assert tried[4].reason == "the drafts are the same"
    assert "less is accepted" in str(tried[3].reason)


def test_scores_among_the_whole_vocabulary_are_those_of_the_replay() -> None:
    pair = planted.shared_pair(3)
    opened = open_pair(pair.checkpoint, pair.recording.path, stated=Stated())
    drafter = open_drafter(opened.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    seen = read_item(pair.recording, opened.items[0], wiring=pair.wiring, dtype=torch.float32)
    anchors = seen.anchors[: -pair.wiring.depth]
    whole = replay(drafter, seen, budget=0, anchors=anchors)
    log_probs, first = replay_among(drafter, seen, anchors=anchors, among=torch.arange(planted.VOCABULARY))
    assert np.array_equal(first, whole.ranks == 0)
    assert log_probs == pytest.approx(whole.log_probs.clip(min=-np.log(planted.VOCABULARY)), abs=1e-5)


def test_a_token_that_the_drafter_lacks_has_the_chance_of_a_blind_guess() -> None:
    pair = planted.shared_pair(3, head="own", vocabulary_map="offset")
    opened = open_pair(pair.checkpoint, pair.recording.path, stated=Stated())
    drafter = open_drafter(opened.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    seen = read_item(pair.recording, opened.items[0], wiring=pair.wiring, dtype=torch.float32)
    anchors = seen.anchors[: -pair.wiring.depth]
    among = seen.tokens.unique()
    log_probs, first = replay_among(drafter, seen, anchors=anchors, among=among)
    wanted = seen.tokens[anchors[:, None] + torch.arange(1, pair.wiring.depth + 1)]
    lacking = ~torch.isin(wanted, drafter.ends.target_ids).numpy()
    assert lacking.any()
    assert log_probs[lacking] == pytest.approx(-np.log(len(among)))
    assert not first[lacking].any()
    assert first.any()
