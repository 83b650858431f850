"""Replays a drafter over a recording's items, and turns the blocks into what acceptance counts.

The whole measurement without a file: `evaluate` adds the checkpoint and the run directory around it, and a
training loop can call it with the drafter at hand. Knows nothing of checkpoints or runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from draftgauge import acceptance
from draftgauge.acceptance import Policy
from draftgauge.drafters import Drafter
from draftgauge.errors import InputError
from draftgauge.features import read_item
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, Recording, verify_items
from draftgauge.replay import Drafted, replay, replay_walks

#: What is reported unless the caller asks for other policies. The two coverages are always reported.
DEFAULT_POLICIES = (Policy("chain"), *(Policy("ddtree", budget) for budget in (4, 8, 16, 32, 64)))
ALWAYS = (Policy("coverage", 4), Policy("coverage", 8))
MAX_BUDGET = 1024
#: At which anchors blocks are drafted.
ANCHORS = ("all", "walk")
#: Prompts that walk side by side: every pass reads the drafter's weights once for all of them, and every block
#: attends over the contexts of all, so more would cost more than they save.
SIDE_BY_SIDE = 8


def tree_budget(policies: Sequence[Policy]) -> int:
    """Nodes of the largest tree that the policies ask for; 0 for none.

    Raises:
        InputError: A tree is larger than `MAX_BUDGET`, or a policy's number is missing or below 1.
    """
    sound = [Policy.parse(policy.slug) for policy in policies]
    budget = max((policy.n or 0 for policy in sound if policy.kind == "ddtree"), default=0)
    if budget > MAX_BUDGET:
        raise InputError(f"DDTree({budget}) is too large: --budgets go up to {MAX_BUDGET}")
    return budget


def require_measurable(policies: Sequence[Policy], *, anchors: str, max_blocks: int | None) -> None:
    """Makes sure that what is asked for can be measured.

    Raises:
        InputError: As `tree_budget`; or `anchors` is not one of `ANCHORS`, or `max_blocks` below 1.
    """
    tree_budget(policies)
    if anchors not in ANCHORS:
        raise InputError(f"anchors {anchors!r} are not known; expected {' or '.join(ANCHORS)}")
    if max_blocks is not None and max_blocks < 1:
        raise InputError(f"max_blocks is {max_blocks}; expected 1 or more, or none for no limit")


def measure(
    drafter: Drafter,
    recording: Recording,
    *,
    items: Sequence[Item],
    policies: Sequence[Policy],
    anchors: str = "all",
    max_blocks: int | None = None,
    progress: Progress = silent,
) -> Iterator[tuple[Item, Drafted]]:
    """Replays the drafter on every item: at all anchors, or only where the policies' walks go.

    This is the whole measurement; `evaluate` adds files around it. In a training loop, call it with the
    drafter at hand and pass what it yields to `blocks_of` and `summary.summarise`. Computes in the dtype of
    the drafter's embedding. Items come in their order, with `anchors="walk"` as their walks end.

    Raises:
        InputError: As `require_measurable`.
        RecordingError: An item is damaged, or a tap was not recorded.
    """
    require_measurable(policies, anchors=anchors, max_blocks=max_blocks)
    budget = tree_budget(policies)
    compute = drafter.ends.embedding.dtype
    if anchors == "walk":
        groups = [items[start : start + SIDE_BY_SIDE] for start in range(0, len(items), SIDE_BY_SIDE)]
        walked = (
            found
            for group in groups
            for found in _walk(drafter, recording, group, policies=policies, max_blocks=max_blocks)
        )
        yield from progress(walked, label="evaluate", total=len(items), unit="prompt")
        return
    checked = verify_items(recording, items)
    for item in progress(checked, label="evaluate", total=len(items), unit="prompt"):
        recorded = read_item(recording, item, wiring=drafter.wiring, dtype=compute, max_blocks=max_blocks)
        yield item, replay(drafter, recorded, budget=budget)


def _walk(
    drafter: Drafter,
    recording: Recording,
    items: Sequence[Item],
    *,
    policies: Sequence[Policy],
    max_blocks: int | None,
) -> Iterator[tuple[Item, Drafted]]:
    """Drafts only where the policies' walks go, the items side by side."""
    compute = drafter.ends.embedding.dtype
    sequences = [
        read_item(recording, item, wiring=drafter.wiring, dtype=compute, max_blocks=max_blocks)
        for item in verify_items(recording, items)
    ]

    def wanted(i: int, drafted: Drafted | None) -> list[int]:
        return _next_anchors(items[i], len(sequences[i].tokens), drafted, policies)

    for i, drafted in replay_walks(drafter, sequences, budget=tree_budget(policies), next_anchors=wanted):
        yield items[i], drafted


def blocks_of(drafted: Drafted, item: Item, *, policies: Sequence[Policy]) -> acceptance.Blocks:
    """A sequence's drafted blocks as acceptance counts them."""
    return acceptance.Blocks(
        anchors=drafted.anchors,
        ranks=drafted.ranks,
        prompt_tokens=item.prompt_len,
        length=drafted.length,
        stopped=item.stopped and drafted.length == item.length,
        order=drafted.order,
        order_budget=tree_budget(policies),
    )


def _next_anchors(item: Item, length: int, drafted: Drafted | None, policies: Sequence[Policy]) -> list[int]:
    """Where the policies' walks stand: the anchors that they need and that are not drafted yet."""
    if length < item.prompt_len + 2:
        return []
    if drafted is None:
        return [item.prompt_len]
    done = {int(anchor): i for i, anchor in enumerate(drafted.anchors)}
    needed = set()
    for policy in policies:
        streak = acceptance.policy_streaks(policy, ranks=drafted.ranks, order=drafted.order)
        anchor = item.prompt_len
        while anchor in done:
            anchor += int(streak[done[anchor]]) + 1
        if anchor <= length - 2:
            needed.add(anchor)
    return sorted(needed)


def vocabulary_misses(blocks: acceptance.Blocks) -> tuple[int, int]:
    """How many reference tokens some block was drafted for, and how many of them no block can contain.

    Example:
        A walk over 40 tokens that drafts for 35 of them, of which a pruned vocabulary lacks one: (35, 1).
    """
    positions = blocks.anchors[:, None] + np.arange(1, blocks.depth + 1)
    drafted_for = np.unique(positions[blocks.ranks != acceptance.NO_REFERENCE])
    lacking = np.unique(positions[blocks.ranks == acceptance.UNREACHABLE])
    return len(drafted_for), len(lacking)


def columns_of(drafted: Drafted, blocks: acceptance.Blocks, *, policies: Sequence[Policy]) -> dict[str, Any]:
    """The columns of blocks.parquet for one prompt."""
    columns: dict[str, Any] = {"anchor": drafted.anchors, "rank": drafted.ranks}
    if drafted.order is not None:
        columns["tree_position"] = drafted.order
    columns |= {
        "log_prob": drafted.log_probs,
        "top_id": drafted.top_ids,
        "top_log_prob": drafted.top_log_probs,
        "available": blocks.available.astype("int32"),
    }
    for policy in policies:
        columns[f"streak_{policy.slug}"] = acceptance.policy_streaks(
            policy, ranks=drafted.ranks, order=drafted.order
        )
    return columns
