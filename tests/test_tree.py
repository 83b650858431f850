"""The draft tree against a plain heap, every golden tree, and the invariants of measurement."""

import heapq
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgauge import acceptance
from draftgauge.errors import InputError
from draftgauge.tree import NOT_EXPANDED, expand, reference_order

GOLDEN = Path(__file__).parent / "golden_trees"
CASES = json.loads((GOLDEN / "manifest.json").read_text())["cases"]


def heap_expand(log_probs, budget):
    """The slow reference: the nodes' rank paths, best first, from Python's own heap."""
    depth, width = log_probs.shape[0], min(log_probs.shape[1], budget)
    heap, paths = [], []

    def offer(path):
        if len(path) <= depth and path[-1] < width:
            heapq.heappush(heap, (-sum(float(log_probs[d, r]) for d, r in enumerate(path)), path))

    offer((0,))
    while heap and len(paths) < budget:
        path = heapq.heappop(heap)[1]
        paths.append(path)
        offer((*path[:-1], path[-1] + 1))
        offer((*path, 0))
    return paths


def paths_of(tree):
    """The rank path of every node, which also checks that parents precede their children."""
    paths = [()]
    for rank, depth, parent in zip(tree.ranks, tree.depths, tree.parents, strict=True):
        paths.append((*paths[parent], int(rank)))
        assert len(paths[-1]) == depth
    return paths[1:]


@st.composite
def rows(draw, anchors=1):
    """Sorted rows of a few levels, so that scores tie exactly and some tokens are impossible."""
    depth, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    levels = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.375, -3.0, -np.inf])
    flat = draw(st.lists(levels, min_size=anchors * depth * width, max_size=anchors * depth * width))
    return -np.sort(-np.array(flat, dtype=np.float32).reshape(anchors, depth, width), axis=-1)


def test_a_tree_worked_out_by_hand():
    log_probs = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    tree = expand(log_probs, budget=8)
    # 0: .6   0-0: .54   1: .4   1-0: .36   0-1: .06   1-1: .04
    assert tree.ranks.tolist() == [0, 0, 1, 0, 1, 1]
    assert tree.depths.tolist() == [1, 2, 1, 2, 2, 2]
    assert tree.parents.tolist() == [0, 1, 0, 3, 1, 3]
    assert np.exp(tree.scores) == pytest.approx([0.6, 0.54, 0.4, 0.36, 0.06, 0.04])
    ranks = np.array([[0, 0], [1, 0], [0, 2]], dtype=np.int32)
    order = reference_order(np.stack([log_probs] * 3), ranks=ranks, budget=8)
    assert order.tolist() == [[1, 2], [3, 4], [1, NOT_EXPANDED]]


def test_exact_ties_go_to_the_smaller_path_a_prefix_first():
    tree = expand(np.zeros((2, 2), dtype=np.float32), budget=6)
    assert paths_of(tree) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


@settings(deadline=None)
@given(rows(), st.integers(0, 40))
def test_equals_the_plain_heap(log_probs, budget):
    tree = expand(log_probs[0], budget=budget)
    assert paths_of(tree) == heap_expand(log_probs[0], budget)
    scores = [np.float64(log_probs[0][np.arange(len(p)), list(p)]).sum() for p in paths_of(tree)]
    assert tree.scores == pytest.approx(scores)
    assert all(a >= b for a, b in pairwise(tree.scores))


@settings(deadline=None)
@given(rows(), st.integers(1, 40), st.integers(0, 40))
def test_the_tree_of_a_budget_is_the_beginning_of_any_larger_one(log_probs, larger, smaller):
    # The width shrinks with the budget; that never removes a node, as its better siblings come before it.
    small, large = expand(log_probs[0], budget=min(smaller, larger)), expand(log_probs[0], budget=larger)
    for name in ("ranks", "depths", "parents", "scores"):
        assert np.array_equal(getattr(small, name), getattr(large, name)[: len(small.ranks)])
    reachable = sum(min(log_probs.shape[2], larger) ** d for d in range(1, log_probs.shape[1] + 1))
    assert len(large.ranks) == min(larger, reachable)


@settings(deadline=None)
@given(rows(), st.integers(1, 40))
def test_siblings_come_in_the_order_of_their_ranks(log_probs, budget):
    paths = paths_of(expand(log_probs[0], budget=budget))
    for path in paths:
        if path[-1] > 0:
            assert paths.index((*path[:-1], path[-1] - 1)) < paths.index(path)


@settings(deadline=None)
@given(rows(anchors=3), st.integers(0, 40), st.data())
def test_reference_order_is_the_position_in_the_expansion(log_probs, budget, data):
    anchors, depth, width = log_probs.shape
    special = st.sampled_from([acceptance.UNREACHABLE, acceptance.NO_REFERENCE])
    rank = st.one_of(st.integers(0, width), special)
    ranks = np.array(data.draw(st.lists(rank, min_size=anchors * depth, max_size=anchors * depth)), np.int32)
    ranks = ranks.reshape(anchors, depth)
    order = reference_order(log_probs, ranks=ranks, budget=budget)
    for a in range(anchors):
        position = {path: i + 1 for i, path in enumerate(heap_expand(log_probs[a], budget))}
        prefixes = [tuple(ranks[a, : d + 1].tolist()) for d in range(depth)]
        assert order[a].tolist() == [position.get(prefix, NOT_EXPANDED) for prefix in prefixes]

    streaks = [acceptance.tree_streaks(order, budget=n) for n in range(budget + 1)]
    assert not streaks[0].any()
    for n, (smaller, larger) in enumerate(pairwise(streaks), start=1):
        assert (smaller <= larger).all()
        assert (larger <= acceptance.streaks(ranks, width=n)).all()
        assert np.array_equal(
            larger, acceptance.tree_streaks(reference_order(log_probs, ranks=ranks, budget=n), budget=n)
        )


def test_deep_and_wide_trees_equal_the_plain_heap():
    rng = np.random.default_rng(0)
    log_probs = -np.sort(rng.exponential(3, (4, 15, 300)).astype(np.float32), axis=-1)
    ranks = np.minimum(rng.geometric(0.5, (4, 15)) - 1, 299).astype(np.int32)
    order = reference_order(log_probs, ranks=ranks, budget=512)
    for a in range(4):
        paths = heap_expand(log_probs[a], 512)
        assert paths_of(expand(log_probs[a], budget=512)) == paths
        position = {path: i + 1 for i, path in enumerate(paths)}
        prefixes = [tuple(ranks[a, : d + 1].tolist()) for d in range(15)]
        assert order[a].tolist() == [position.get(prefix, NOT_EXPANDED) for prefix in prefixes]


def float32_log_softmax(logits):
    highest = logits.max(axis=-1, keepdims=True)
    return logits - (highest + np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True)))


def golden(case, budget):
    """The rows that a golden tree was expanded from, and its nodes as rank paths."""
    stored = np.load(GOLDEN / case["file"])
    ids = stored[f"{budget}_topk_token_ids"]
    rank_of = [{token: rank for rank, token in enumerate(row)} for row in ids.tolist()]
    nodes = (stored[f"{budget}_{name}"].tolist() for name in ("node_token_ids", "node_depths", "parents"))
    tokens, depths, parents = nodes
    paths = [()]
    for token, depth, parent in zip(tokens, depths, parents[1:], strict=True):
        paths.append((*paths[parent], rank_of[depth - 1][token]))
        assert len(paths[-1]) == depth
    return np.take_along_axis(float32_log_softmax(stored["logits"]), ids, axis=1), paths[1:]


@pytest.mark.parametrize("case", CASES, ids=[case["file"].removesuffix(".npz") for case in CASES])
def test_every_golden_tree_node_for_node(case):
    for budget, facts in case["budgets"].items():
        log_probs, expected = golden(case, budget)
        tree = expand(log_probs, budget=int(budget[1:]))
        assert len(tree.ranks) == facts["n_nodes"]
        if case["kind"] in ("bf16", "int_quantised"):
            assert_equal_but_for_near_ties(tree, expected, log_probs)
        else:
            assert paths_of(tree) == expected


def assert_equal_but_for_near_ties(tree, expected, log_probs):
    """Compare node for node, except that nodes within float32 rounding of each other may swap.

    Logits on a grid make sums that are equal on paper; which one is larger then hangs on the last bit of the
    rows' logsumexp, and that bit differs between exp routines. So a run of near-equal scores is compared as a
    set. The budget may cut the last run, of which only the scores are compared.
    """
    scores = [sum(float(log_probs[d, r]) for d, r in enumerate(path)) for path in expected]
    assert tree.scores == pytest.approx(scores, abs=1e-5)
    runs = [0, *(np.flatnonzero(-np.diff(tree.scores) > 1e-5) + 1).tolist()]
    for start, stop in pairwise(runs):
        assert sorted(paths_of(tree)[start:stop]) == sorted(expected[start:stop])


@pytest.mark.parametrize(
    ("row", "budget", "message"),
    [
        ([-1.0, -0.5], 4, "from high to low"),
        ([0.5, -0.5], 4, "from high to low"),
        ([np.nan, -0.5], 4, "from high to low"),
        ([-0.5, np.nan], 4, "from high to low"),
        ([-0.5, -1.0], -1, "budget of a draft tree is -1"),
    ],
)
def test_refuses_what_is_not_a_sorted_row_of_log_probabilities(row, budget, message):
    log_probs = np.array([row], dtype=np.float32)
    with pytest.raises(InputError, match=message):
        expand(log_probs, budget=budget)
    with pytest.raises(InputError, match=message):
        reference_order(log_probs[None], ranks=np.zeros((1, 1), dtype=np.int32), budget=budget)


def test_the_missing_position_is_the_rank_of_a_missing_reference():
    assert NOT_EXPANDED == acceptance.NO_REFERENCE
