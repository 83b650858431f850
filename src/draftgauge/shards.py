"""Divides a measurement into shards, and measures one of them with nothing but what a `Task` names.

A shard is a few prompts, in the recording's order. Where the borders lie depends on the prompts alone, and a shard's
blocks on nothing outside it: so it makes no difference which process measures it, or on how many.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from draftgauge import acceptance
from draftgauge.acceptance import Policy
from draftgauge.checkpoint import digest
from draftgauge.drafters import DFlash
from draftgauge.errors import CheckpointError, RecordingError
from draftgauge.measure import SIDE_BY_SIDE, blocks_of, columns_of, measure, tree_budget
from draftgauge.pairing import Pair, open_drafter, open_pair
from draftgauge.parts import packed
from draftgauge.recording import Item, Recording
from draftgauge.runs import Plan, flat_lists
from draftgauge.stated import Stated

#: Where blocks are drafted at all anchors, a shard has at least so many.
_ANCHORS_PER_SHARD = 256


@dataclass(frozen=True)
class Shard:
    """Some prompts of a plan, by id; `index` counts the shards."""

    index: int
    prompts: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """What all shards of one measurement have in common; who has the two paths and this can measure any of them.

    `threads` of the matrix library per worker; None for the library's own choice.
    """

    checkpoint: Path
    recording: Path
    stated: Stated
    state_dict: str | None
    plan: Plan
    threads: int | None = None

    def __hash__(self) -> int:
        return hash((self.plan.digest, self.checkpoint, self.recording, self.threads))


def shards_of(items: Sequence[Item], plan: Plan) -> list[Shard]:
    """The shards of a plan over its items: prompts that walk side by side, or enough of them to be worth a file."""
    found: list[Shard] = []
    prompts: list[str] = []
    anchors = 0
    for item in items:
        prompts.append(item.id)
        anchors += min(item.completion_len, plan.max_blocks or item.completion_len)
        full = len(prompts) == SIDE_BY_SIDE if plan.anchors == "walk" else anchors >= _ANCHORS_PER_SHARD
        if full:
            found.append(Shard(len(found), tuple(prompts)))
            prompts, anchors = [], 0
    return [*found, Shard(len(found), tuple(prompts))] if prompts else found


def measure_shard(task: Task, shard: Shard) -> bytes:
    """The blocks of a shard's prompts, as a Parquet file; opens what the task names once per process.

    Raises:
        CheckpointError: The checkpoint is not the one that was planned with.
        RecordingError: The recording is not, or is damaged.
    """
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    pair, drafter = _opened(task)
    return blocks_of_shard(pair, drafter, shard=shard, plan=task.plan)


@functools.lru_cache(maxsize=1)
def _opened(task: Task) -> tuple[Pair, DFlash]:
    pair = open_pair(task.checkpoint, task.recording, stated=task.stated, state_dict=task.state_dict)
    if digest(pair.checkpoint) != task.plan.checkpoint_digest:
        raise CheckpointError(
            f"{task.checkpoint} is not the checkpoint that was planned with: measure it again"
        )
    if pair.recording.digest != task.plan.recording_digest:
        raise RecordingError(f"{task.recording} is not the recording that was planned with: measure again")
    return pair, open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype=task.plan.dtype)


def blocks_of_shard(pair: Pair, drafter: DFlash, *, shard: Shard, plan: Plan) -> bytes:
    """The blocks of a shard's prompts, as a Parquet file with a row group for each prompt, in their order."""
    policies = [Policy.parse(slug) for slug in plan.policies]
    drafts = measure(
        drafter,
        pair.recording,
        items=[pair.recording.item(prompt) for prompt in shard.prompts],
        policies=policies,
        anchors=plan.anchors,
        max_blocks=plan.max_blocks,
    )
    found = {
        item.id: columns_of(drafted, blocks_of(drafted, item, policies=policies), policies=policies)
        for item, drafted in drafts
    }
    return packed({prompt: found[prompt] for prompt in shard.prompts})


def blocks_in(
    table: pa.Table, shard: Shard, *, recording: Recording, plan: Plan
) -> Iterator[tuple[Item, pa.Table, acceptance.Blocks]]:
    """The rows of every prompt of a measured shard, and its blocks as acceptance counts them."""
    budget = tree_budget([Policy.parse(slug) for slug in plan.policies])
    for prompt in shard.prompts:
        item, rows = recording.item(prompt), table.filter(pc.equal(table["prompt"], prompt))
        length = item.length_within(plan.max_blocks)
        yield (
            item,
            rows,
            acceptance.Blocks(
                anchors=rows["anchor"].to_numpy(),
                ranks=flat_lists(rows["rank"]),
                prompt_tokens=item.prompt_len,
                length=length,
                stopped=item.stopped and length == item.length,
                order=flat_lists(rows["tree_position"]) if budget else None,
                order_budget=budget,
            ),
        )
