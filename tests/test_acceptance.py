"""Ranks to numbers: every expected value is worked out by hand or taken from a peer's own run."""

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgauge.acceptance import (
    CONVENTIONS,
    NO_REFERENCE,
    UNREACHABLE,
    Blocks,
    Counts,
    PerDepth,
    Policy,
    Walk,
    all_anchor_counts,
    available,
    counts_of,
    per_depth,
    policy_streaks,
    streaks,
    tree_streaks,
    walk,
    walk_blocks,
)
from draftgauge.errors import InputError

E, U = int(NO_REFERENCE), int(UNREACHABLE)
CHAIN = Policy("chain")


def int32(values):
    return np.array(values, dtype=np.int32)


# A sequence of 9 tokens whose prompt has 2, and a drafter of depth 3: anchors 2..7.
RANKS = [[0, 0, 0], [0, 4, 0], [1, 0, 0], [0, 0, 0], [0, 2, E], [0, E, E]]
ORDER = [[1, 2, 3], [1, 5, 9], [2, 4, 6], [1, 3, 8], [1, 4, E], [1, E, E]]
BLOCKS = Blocks(np.arange(2, 8), int32(RANKS), 2, 9, order=int32(ORDER), order_budget=8)


@pytest.mark.parametrize(
    ("slug", "label", "kind", "n"),
    [
        ("chain", "chain", "chain", None),
        ("chain4", "chain(4)", "chain", 4),
        ("ddtree16", "DDTree(16)", "ddtree", 16),
        ("coverage4", "coverage@4", "coverage", 4),
    ],
)
def test_a_policy_has_a_slug_and_a_label(slug, label, kind, n):
    policy = Policy.parse(slug)
    assert (policy.kind, policy.n, policy.slug, policy.label) == (kind, n, slug, label)


@pytest.mark.parametrize(
    "text", ["", "tree16", "ddtree", "coverage", "chain0", "ddtree016", "chain-1", "ddtree16 "]
)
def test_refuses_what_is_no_policy(text):
    with pytest.raises(InputError, match="expected chain, chainN, ddtreeN or coverageN"):
        Policy.parse(text)


def test_policies_are_ordered_as_they_are_reported():
    slugs = ["coverage4", "ddtree128", "chain4", "ddtree16", "chain"]
    ordered = sorted(Policy.parse(slug) for slug in slugs)
    assert [policy.slug for policy in ordered] == ["chain", "chain4", "ddtree16", "ddtree128", "coverage4"]


def test_available_depths_shrink_towards_the_end():
    assert available(np.array([3, 6, 8]), length=10, depth=4).tolist() == [4, 3, 1]


@pytest.mark.parametrize(
    ("slug", "expected"),
    [
        ("chain", [3, 1, 0, 3, 1, 1]),
        ("chain1", [1, 1, 0, 1, 1, 1]),
        ("chain2", [2, 1, 0, 2, 1, 1]),
        ("chain9", [3, 1, 0, 3, 1, 1]),
        ("coverage1", [3, 1, 0, 3, 1, 1]),
        ("coverage3", [3, 1, 3, 3, 2, 1]),
        ("coverage9", [3, 3, 3, 3, 2, 1]),
        ("ddtree1", [1, 1, 0, 1, 1, 1]),
        ("ddtree4", [3, 1, 2, 2, 2, 1]),
        ("ddtree8", [3, 2, 3, 3, 2, 1]),
    ],
)
def test_streaks_of_every_policy(slug, expected):
    assert policy_streaks(Policy.parse(slug), ranks=int32(RANKS), order=int32(ORDER)).tolist() == expected


def test_a_token_outside_the_vocabulary_and_a_missing_one_end_every_streak():
    assert streaks(int32([[0, U, 0], [0, 0, E], [U, 0, 0]]), width=2**30).tolist() == [1, 2, 0]


def test_no_budget_accepts_nothing():
    assert tree_streaks(int32(ORDER), budget=0).tolist() == [0] * 6


def test_a_tree_policy_needs_a_tree_of_its_size():
    with pytest.raises(InputError, match=r"DDTree\(4\) needs the position.*ddtree4"):
        policy_streaks(Policy("ddtree", 4), ranks=int32(RANKS))
    with pytest.raises(InputError, match="expanded to 8 nodes; expected at least 9"):
        walk_blocks(Policy("ddtree", 9), BLOCKS)


def test_a_walk_moves_by_streak_and_bonus():
    assert walk(int32([1, 0, 2, 0, 0, 0]), first=5).tolist() == [5, 7, 10]
    assert walk(int32([]), first=5).tolist() == []


@pytest.mark.parametrize(
    ("slug", "anchors", "streak", "committed", "missed_rank"),
    [
        ("chain", [2, 6], [3, 1], [4, 2], [E, 2]),
        ("chain1", [2, 4, 5, 7], [1, 0, 1, 1], [2, 1, 2, 1], [0, 1, 0, E]),
        ("ddtree4", [2, 6], [3, 2], [4, 2], [E, E]),
        ("ddtree1", [2, 4, 5, 7], [1, 0, 1, 1], [2, 1, 2, 1], [0, 1, 0, E]),
        ("coverage3", [2, 6], [3, 2], [4, 2], [E, E]),
    ],
)
def test_every_policy_walks_its_own_path(slug, anchors, streak, committed, missed_rank):
    rounds = walk_blocks(Policy.parse(slug), BLOCKS)
    assert rounds.anchors.tolist() == anchors
    assert rounds.streak.tolist() == streak
    assert rounds.room.tolist() == [8 - a for a in anchors]
    assert rounds.committed.tolist() == committed
    assert rounds.missed_rank.tolist() == missed_rank


def test_a_walk_needs_only_the_anchors_that_it_visits():
    some = [0, 4]  # anchors 2 and 6
    blocks = Blocks(BLOCKS.anchors[some], BLOCKS.ranks[some], 2, 9, order=BLOCKS.order[some], order_budget=8)
    assert counts_of(walk_blocks(CHAIN, blocks)) == counts_of(walk_blocks(CHAIN, BLOCKS))
    with pytest.raises(InputError, match="reaches anchor 4, which was not replayed"):
        walk_blocks(Policy("chain", 1), blocks)


def test_a_completion_of_one_token_has_no_round():
    blocks = Blocks(np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int32), 8, 9)
    counts = counts_of(walk_blocks(CHAIN, blocks))
    assert counts == Counts(1, 0, 0, 0, 1, (0, 0, 0, 0), 0, 0, 0, 0)
    assert all_anchor_counts(CHAIN, blocks) == (0, 0)
    assert per_depth(blocks).marginal() == [None, None, None]
    assert per_depth(blocks).eal_marginal() is None


@pytest.mark.parametrize(
    ("anchors", "ranks", "prompt_tokens", "length", "message"),
    [
        ([2], [[0]], 0, 4, "has a prompt of 0"),
        ([2], [[0]], 4, 4, "has a prompt of 4"),
        ([2, 2], [[0], [0]], 2, 5, "not increasing positions in 2..3"),
        ([1], [[0]], 2, 5, "not increasing positions"),
        ([4], [[0]], 2, 5, "not increasing positions"),
        ([3], [[0, 0]], 2, 5, "do not end where"),
        ([2], [[0, E]], 2, 5, "do not end where"),
        ([2], [[0, -1]], 2, 5, "do not end where"),
    ],
)
def test_refuses_blocks_that_are_not_of_one_sequence(anchors, ranks, prompt_tokens, length, message):
    with pytest.raises(InputError, match=message):
        Blocks(np.array(anchors), int32(ranks), prompt_tokens, length)


# Anchors 2..7 of depth 2; why a round at each of them ends, per policy: c not covered, s not selected,
# d depth, r reference.
WHY_RANKS = [[0, 0], [0, 3], [U, 0], [1, 0], [2, 5], [0, E]]
WHY_ORDER = [[1, 2], [1, E], [E, E], [2, 5], [E, E], [1, E]]


@pytest.mark.parametrize(
    ("slug", "why"),
    [
        ("chain", "dccccr"),
        ("chain1", "ddcccd"),
        ("ddtree2", "dccscr"),
        ("ddtree4", "dscssr"),
        ("coverage2", "dccdcr"),
        ("coverage4", "ddcdcr"),
    ],
)
def test_every_round_ends_for_one_reason(slug, why):
    policy = Policy.parse(slug)
    streak = policy_streaks(policy, ranks=int32(WHY_RANKS), order=int32(WHY_ORDER))
    for row, reason in enumerate(why):
        ranks = [*WHY_RANKS[row], E]
        one = Walk(
            policy,
            2,
            int32([2 + row]),
            streak[[row]],
            int32([6 - row]),
            int32([ranks[streak[row]]]),
            7,
            False,
        )
        counts = counts_of(one)
        ended = {
            "c": counts.ended_not_covered,
            "s": counts.ended_not_selected,
            "d": counts.ended_depth,
            "r": counts.ended_reference,
        }
        assert ended == {"c": 0, "s": 0, "d": 0, "r": 0} | {reason: 1}, (slug, row)


def test_counts_of_a_walk_and_of_two():
    chain = counts_of(walk_blocks(CHAIN, BLOCKS))
    assert chain == Counts(
        prompts=1,
        rounds=2,
        accepted=4,
        committed=6,
        completion_tokens=7,
        accepted_histogram=(0, 1, 0, 1),
        ended_not_covered=1,
        ended_not_selected=0,
        ended_depth=1,
        ended_reference=0,
    )
    assert chain + chain == Counts(2, 4, 8, 12, 14, (0, 2, 0, 2), 2, 0, 2, 0)
    with pytest.raises(InputError, match="do not add"):
        chain + Counts(1, 0, 0, 0, 1, (0, 0), 0, 0, 0, 0)


@st.composite
def blocks(draw):
    prompt_tokens, completion, depth = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 5)),
    )
    length = prompt_tokens + completion
    anchors = np.arange(prompt_tokens, length - 1)
    rank = st.sampled_from([0, 0, 0, 1, 3, U])
    size = len(anchors) * depth
    ranks = int32(draw(st.lists(rank, min_size=size, max_size=size))).reshape(-1, depth)
    ranks[np.arange(1, depth + 1) > available(anchors, length=length, depth=depth)[:, None]] = NO_REFERENCE
    return Blocks(anchors, ranks, prompt_tokens, length)


@given(blocks(), st.sampled_from(["chain", "chain1", "chain3", "coverage2", "coverage4"]))
def test_a_walk_commits_every_token_once_and_every_round_is_accounted_for(blocks, slug):
    counts = counts_of(walk_blocks(Policy.parse(slug), blocks))
    assert counts.committed == blocks.length - blocks.prompt_tokens - 1 == counts.completion_tokens - 1
    assert sum(counts.accepted_histogram) == counts.rounds
    assert sum(i * n for i, n in enumerate(counts.accepted_histogram)) == counts.accepted
    ends = (counts.ended_not_covered, counts.ended_not_selected, counts.ended_depth, counts.ended_reference)
    assert sum(ends) == counts.rounds
    assert counts.ended_reference <= 1


@given(st.lists(blocks(), min_size=1, max_size=4))
def test_rates_per_depth_equal_their_definitions(prompts):
    depth = min(p.depth for p in prompts)
    prompts = [Blocks(p.anchors, p.ranks[:, :depth], p.prompt_tokens, p.length) for p in prompts]
    total = reduce(add, map(per_depth, prompts))
    rows = [row for p in prompts for row in p.ranks.tolist()]
    for d in range(1, depth + 1):
        known = [row for row in rows if row[d - 1] != E]
        entered = [row for row in known if not any(row[: d - 1])]
        expected = {
            "marginal": (sum(row[d - 1] == 0 for row in known), len(known)),
            "survival": (sum(not any(row[:d]) for row in known), len(known)),
            "conditional": (sum(row[d - 1] == 0 for row in entered), len(entered)),
        }
        for name, (part, whole) in expected.items():
            assert getattr(total, name)()[d - 1] == (part / whole if whole else None)


def test_rates_per_depth_by_hand():
    found = per_depth(BLOCKS)
    assert found == PerDepth(
        anchors_marginal=(6, 5, 4), hits=(5, 3, 4), anchors_conditional=(6, 4, 2), survived=(5, 2, 2)
    )
    assert found.marginal() == [5 / 6, 3 / 5, 1.0]
    assert found.survival() == [5 / 6, 2 / 5, 2 / 4]
    assert found.conditional() == [5 / 6, 2 / 4, 1.0]
    assert found.eal_marginal() == pytest.approx(5 / 6 + 1 / 2 + 1 / 2)


@pytest.mark.parametrize(
    ("slug", "expected"),
    [
        ("chain", (3 + 1 + 0 + 3 + 1, 5)),  # the last anchor is censored: streak 1 of 1 available
        ("chain1", (1 + 1 + 0 + 1 + 1 + 1, 6)),  # one token is verified, so one available is enough
        ("coverage3", (3 + 1 + 3 + 3, 4)),  # the last two are censored
        ("ddtree8", (3 + 2 + 3 + 3, 4)),
    ],
)
def test_the_all_anchor_mean_leaves_censored_anchors_out(slug, expected):
    assert all_anchor_counts(Policy.parse(slug), BLOCKS) == expected


def response(streak, length, *, stopped=False, depth=4):
    """A walk from anchor 1 with these streaks, in a sequence of `length` tokens."""
    anchors = 1 + np.cumsum([0, *(s + 1 for s in streak[:-1])]) if streak else np.zeros(0)
    anchors = int32(anchors)
    missed = int32([0] * len(streak))
    return Walk(
        CHAIN, depth, anchors, int32(streak), int32(length - 1 - anchors), missed, length - 1, stopped
    )


LONG = response([0, 4, 1, 3], 13)  # anchors 1, 2, 7, 9; rooms 11, 10, 5, 3: the last accepts all 3 of 3
SHORT = response([2, 2], 7, stopped=True)  # anchors 1, 4; rooms 5, 2: the last accepts the stop token
BONUS = response([2, 1], 7, stopped=True)  # the stop token is the last round's bonus
SINGLE = response([], 2)  # the prefill's token is the whole completion


@pytest.mark.parametrize(
    ("name", "walks", "expected"),
    [
        ("zlab_2026_04", [LONG, SHORT], ((1 + 5 + 2 + 4) / 4 + (3 + 3) / 2) / 2),
        ("ddtree", [LONG, SHORT], ((1 + 5 + 2 + 4) / 4 + (3 + 3) / 2) / 2),
        ("zlab_2026_08", [LONG, SHORT], ((1 + 5 + 2 + 3) / 4 + (3 + 2) / 2) / 2),
        ("pooled", [LONG, SHORT], (12 + 6) / 6),
        ("deepspec", [LONG, SHORT], (12 + 5) / 6),
        ("deepspec", [LONG, BONUS], (12 + 5) / 6),
        ("pooled", [LONG, BONUS], (12 + 5) / 6),
        ("sglang_request", [LONG, SHORT], (12 / 4 + 6 / 2) / 2),
        ("specforge_bench", [LONG, SHORT], (12 + 6) / (4 + 2)),
        ("zlab_2026_04", [LONG, SINGLE], 3.0),
        ("sglang_request", [LONG, SINGLE], 3.0),
        ("pooled", [LONG, SINGLE], 3.0),
        ("specforge_bench", [LONG, SINGLE], (12 + 1) / 4),
    ],
)
def test_every_convention_on_the_same_rounds(name, walks, expected):
    assert CONVENTIONS[name].value(walks) == pytest.approx(expected)


# Rounds of the peers' own loops on tiny models: 40 tokens after a prompt of P, streak + 1 per round. z-lab's
# code of April 2026 lets the last round overshoot; `dflash` 0.1.0 of August cuts it at the end (or at the
# stop token, third case) and does not start a round from the last token. Source: golden runs in float32.
PEERS = [
    (1, 7, 41, [1, 1, 1, 7, 8, 8, 8, 8], [1, 1, 1, 7, 8, 8, 8, 5]),
    (5, 7, 45, [1, 1, 1, 1, 1, 8, 8, 8, 8, 7], [1, 1, 1, 1, 1, 8, 8, 8, 8, 2]),
    (5, 7, 26, [1, 1, 1, 1, 1, 8, 8], [1, 1, 1, 1, 1, 8, 7]),
    (1, 15, 41, [1, 1, 2, 16, 16, 16], [1, 1, 2, 16, 16, 3]),
    (33, 7, 73, [*[1] * 10, 4, 7, 5, 1, 3, 2, 2, 5, 2], [*[1] * 10, 4, 7, 5, 1, 3, 2, 2, 5]),
]


@pytest.mark.parametrize(("P", "depth", "T", "april", "august"), PEERS)
def test_the_walk_visits_the_rounds_of_the_peers_loops(P, depth, T, april, august):
    # Only the anchors that the peer visited carry its streaks; everywhere else the drafter is always right.
    anchors = np.arange(P, T - 1)
    visited = P + np.cumsum([0, *april[:-1]])[: len(august)]
    ranks = np.zeros((len(anchors), depth), dtype=np.int32)
    for anchor, length in zip(visited, april, strict=False):
        ranks[anchor - P, length - 1 :] = 7
    ranks[np.arange(1, depth + 1) > available(anchors, length=T, depth=depth)[:, None]] = NO_REFERENCE
    rounds = walk_blocks(CHAIN, Blocks(anchors, ranks, P, T))
    assert rounds.anchors.tolist() == visited.tolist()
    assert (rounds.streak[:-1] + 1).tolist() == april[: len(august) - 1]
    assert rounds.committed.tolist() == august
    assert CONVENTIONS["zlab_2026_08"].value([rounds]) == pytest.approx(sum(august) / len(august))


def test_conventions_differ_by_more_than_a_token_on_identical_rounds():
    easy, hard = response([4] * 2, 11), response([0] * 8, 10)
    assert CONVENTIONS["zlab_2026_04"].value([easy, hard]) == 3.0
    assert CONVENTIONS["pooled"].value([easy, hard]) == 1.8


@pytest.mark.parametrize("name", CONVENTIONS)
def test_without_a_round_there_is_no_number(name):
    assert CONVENTIONS[name].value([SINGLE]) is None
    assert CONVENTIONS[name].value([]) is None
