"""The measurement without a file: all anchors or walks, and the ten lines that a training loop needs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftgauge as dg
from draftgauge.acceptance import NO_REFERENCE, UNREACHABLE, Blocks, Policy, walk_blocks
from draftgauge.drafters.dflash import DFlash, Ends
from draftgauge.errors import InputError, RecordingError
from draftgauge.features import as_torch
from draftgauge.measure import (
    ALWAYS,
    DEFAULT_POLICIES,
    blocks_of,
    columns_of,
    measure,
    tree_budget,
    vocabulary_misses,
)
from draftgauge.replay import Drafted
from draftgauge.summary import PromptBlocks, summarise
from tests import tiny
from tests.golden import drafter_of, wiring_of

POLICIES = (*DEFAULT_POLICIES, Policy("chain", 2), Policy("ddtree", 1024), *ALWAYS)


def measured(policies: tuple[Policy, ...] = POLICIES, **how: Any) -> dict[str, tuple[Any, Drafted]]:
    recording = tiny.recording()
    drafter = how.pop("drafter", None) or drafter_of("draftA8")
    found = measure(drafter, recording, items=recording.items, policies=policies, **how)
    return {item.id: (item, drafted) for item, drafted in found}


@pytest.mark.parametrize(
    ("slugs", "budget"),
    [("chain", 0), ("coverage4 chain2", 0), ("ddtree16 chain ddtree4", 16), ("ddtree1024", 1024)],
)
def test_the_largest_tree_answers_every_budget(slugs: str, budget: int) -> None:
    assert tree_budget([Policy.parse(slug) for slug in slugs.split()]) == budget


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy("ddtree", 1025), r"DDTree\(1025\) is too large: --budgets go up to 1024"),
        (Policy("ddtree", 0), "'ddtree0' is not known"),
        (Policy("chain", -1), "'chain-1' is not known"),
        (Policy("coverage", 0), "'coverage0' is not known"),
        (Policy("ddtree"), "'ddtree' is not known"),
    ],
    ids=lambda value: value.slug if isinstance(value, Policy) else "",
)
def test_an_impossible_policy_is_refused(policy: Policy, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tree_budget([Policy("chain"), policy])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_blocks": 0}, "max_blocks is 0; expected 1 or more"),
        ({"anchors": "some"}, "anchors 'some' are not known; expected all or walk"),
        ({"policies": (Policy("ddtree", 0),)}, "'ddtree0' is not known"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measured(**how)


def test_walks_draft_exactly_where_the_policies_go_and_the_same_blocks() -> None:
    everywhere, walked = measured(), measured(anchors="walk")
    assert walked.keys() == everywhere.keys()
    for name, (item, drafted) in walked.items():
        whole = everywhere[name][1]
        blocks = blocks_of(whole, item, policies=POLICIES)
        visited = {int(a) for policy in POLICIES for a in walk_blocks(policy, blocks).anchors}
        assert drafted.anchors.tolist() == sorted(visited)
        rows = np.searchsorted(whole.anchors, drafted.anchors)
        np.testing.assert_array_equal(drafted.ranks, whole.ranks[rows])
        np.testing.assert_array_equal(drafted.order, whole.order[rows])
        np.testing.assert_array_equal(drafted.top_ids, whole.top_ids[rows])
        np.testing.assert_allclose(drafted.log_probs, whole.log_probs[rows], atol=1e-4)


@pytest.mark.parametrize("anchors", ["all", "walk"])
def test_max_blocks_cuts_every_sequence(anchors: str) -> None:
    for item, drafted in measured(anchors=anchors, max_blocks=3).values():
        assert drafted.length == item.prompt_len + 4
        assert set(drafted.anchors.tolist()) <= set(range(item.prompt_len, item.prompt_len + 3))
        assert (drafted.ranks[drafted.anchors == item.prompt_len + 2, 1:] == NO_REFERENCE).all()


@pytest.mark.parametrize("max_blocks", [None, 3])
def test_a_reference_that_is_cut_short_does_not_end_with_its_stop_token(max_blocks: int | None) -> None:
    stops = {
        name: blocks_of(drafted, item, policies=POLICIES).stopped
        for name, (item, drafted) in measured(max_blocks=max_blocks).items()
    }
    expected = {item.id: item.stopped and max_blocks is None for item in tiny.recording().items}
    assert stops == expected
    assert any(item.stopped for item in tiny.recording().items)


def test_without_trees_nothing_is_expanded() -> None:
    chain = (Policy("chain"),)
    for item, drafted in measured(chain).values():
        assert drafted.order is None
        assert "tree_position" not in columns_of(
            drafted, blocks_of(drafted, item, policies=chain), policies=chain
        )


def test_the_drafters_dtype_is_computed_in() -> None:
    wide, narrow = drafter_of("draftA8"), drafter_of("draftA8").to(torch.bfloat16)
    narrow.ends = Ends(*(end.to(torch.bfloat16) for end in (wide.ends.embedding, wide.ends.head)))
    ours, theirs = measured(drafter=wide), measured(drafter=narrow)
    gap = max(np.nanmax(abs(ours[name][1].log_probs - theirs[name][1].log_probs)) for name in ours)
    assert 1e-4 < gap < 1  # the same drafter, with other last bits


def test_a_damaged_item_is_not_measured(tmp_path: Path) -> None:
    recording = tiny.copied_recording(tmp_path / "copy")
    path = recording.path / recording.items[2].file
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    found = measure(drafter_of("draftA8"), recording, items=recording.items, policies=(Policy("chain"),))
    assert [next(found)[0].id, next(found)[0].id] == ["one", "five"]
    with pytest.raises(RecordingError, match="damaged or edited"):
        next(found)


def test_vocabulary_misses_count_each_token_once() -> None:
    """P = 2, T = 7, D = 2: anchors 2 and 3 draft for tokens 3, 4 and 4, 5; anchor 5 for 6 alone."""
    ranks = np.array([[0, UNREACHABLE], [UNREACHABLE, 3], [0, NO_REFERENCE]], np.int32)
    blocks = Blocks(anchors=np.array([2, 3, 5]), ranks=ranks, prompt_tokens=2, length=7)
    assert vocabulary_misses(blocks) == (4, 1)


def test_columns_hold_everything_that_can_be_counted_again() -> None:
    policies = (Policy("chain"), Policy("ddtree", 4), Policy("coverage", 8))
    item, drafted = measured(policies)["five"]
    columns = columns_of(drafted, blocks_of(drafted, item, policies=policies), policies=policies)
    shapes = {name: column.shape for name, column in columns.items()}
    lists = {"rank": (20, 7), "tree_position": (20, 7), "log_prob": (20, 7)}
    tops = {"top_id": (20, 7, 8), "top_log_prob": (20, 7, 8)}
    singles = ["anchor", "available", "streak_chain", "streak_ddtree4", "streak_coverage8"]
    assert shapes == {**lists, **tops, **dict.fromkeys(singles, (20,))}
    assert columns["available"].tolist() == [min(7, 25 - a) for a in range(5, 25)]


def test_ten_lines_measure_the_model_of_a_training_loop() -> None:
    recording = tiny.recording()
    ends = Ends(as_torch(recording.end("embedding")), as_torch(recording.end("head")))
    model = DFlash(wiring_of("draftA8"), ends)  # training: gradients on, weights its own
    model.load_state_dict(tiny.weights())
    policies = (Policy("chain"), Policy("ddtree", 16))

    drafted = measure(model, recording, items=recording.items, policies=policies)
    blocks = {
        item.id: PromptBlocks(item.category, blocks_of(d, item, policies=policies)) for item, d in drafted
    }
    tau = summarise(blocks, policies, every_anchor=True)["policies"]["ddtree16"]["tau_response"]

    run = dg.evaluate_checkpoint(tiny.workshop() / "drafter", recording.path, root=tiny.workshop() / "runs")
    assert tau == run.summary["policies"]["ddtree16"]["tau_response"]
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
