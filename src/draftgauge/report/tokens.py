"""A completion token by token: how one policy's walk won each, and what the drafter had put first there.

Everything comes from what the run keeps; the tokens themselves from the recording that it measured, if that is
still at hand. Plain data: whoever shows it escapes it. Knows nothing of pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from draftgauge.acceptance import NO_REFERENCE, UNREACHABLE, Blocks, Policy, Walk, walk_blocks
from draftgauge.errors import CheckpointError, RecordingError, RunError
from draftgauge.recording import open_recording, reference_digest
from draftgauge.report.tokentext import Texts, texts_of, without_texts
from draftgauge.runs import Run

#: How many of the drafter's first choices are shown for a token.
CHOICES = 5
#: Why a round ended, beside `covered(rank)`: the words of `Token.missed`.
NOT_COVERED, OUTSIDE = "not covered", "outside the drafter's vocabulary"
DEPTH, END_OF_TEXT = "depth", "end of text"


@dataclass(frozen=True)
class Choice:
    """One token that the drafter proposed, and the probability that it gave it."""

    text: str
    probability: float


@dataclass(frozen=True)
class Token:
    """One token of a sequence, and how it was won.

    Attributes:
        position: Where it stands in the sequence, counted from 0.
        text: What it says; everything unseen in it is spelled out.
        kind: `prompt`; `first`, which the target's prefill gives; `accepted` from the draft; `bonus`, which the
            target adds where a round ends; `tail`, which lies behind what was measured.
        depth: At which depth of its round it was accepted; None for the other kinds.
        round: The round that committed it, counted from 0.
        missed: On the last token of a round, why the round ended there: `not covered`, `covered, rank r`, `outside
            the drafter's vocabulary`, `depth` or `end of text`. It is a bonus token unless the text ended first.
        rank: Where the drafter had put it, 0 its first choice; None where it did not draft, or cannot say it.
        probability: What the drafter gave it; None as for `rank`.
        choices: What the drafter had put first there, the best first.
    """

    position: int
    text: str
    kind: str
    depth: int | None = None
    round: int | None = None
    missed: str | None = None
    rank: int | None = None
    probability: float | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class TokenView:
    """One prompt and its completion under one policy; `reason` says why there are no tokens, or ids for texts."""

    prompt: str
    policy: str
    tokens: tuple[Token, ...]
    reason: str | None


@dataclass(frozen=True, eq=False)
class Drafts:
    """What a run keeps of one prompt's blocks: ranks and tree positions, and the first choices at each depth.

    `log_probs` are those of the reference tokens, NaN where the drafter has none.
    """

    blocks: Blocks
    log_probs: Float32[np.ndarray, "A D"]
    top_ids: Int32[np.ndarray, "A D K"]
    top_log_probs: Float32[np.ndarray, "A D K"]

    def choices(self, row: int, depth: int, *, texts: Texts) -> tuple[Choice, ...]:
        """The drafter's first choices at a depth of a block, the best first."""
        ids, log_probs = self.top_ids[row, depth - 1].tolist(), self.top_log_probs[row, depth - 1].tolist()
        return tuple(
            Choice(texts.label(token), min(1.0, math.exp(log_prob)))
            for token, log_prob in zip(ids, log_probs, strict=True)
        )

    def probability(self, row: int, depth: int) -> float | None:
        """What the drafter gave the reference token at a depth of a block; None where it did not."""
        log_prob = float(self.log_probs[row, depth - 1]) if depth <= self.blocks.depth else math.nan
        return None if math.isnan(log_prob) else min(1.0, math.exp(log_prob))


@dataclass(frozen=True, eq=False)
class Reference:
    """The tokens that a prompt was measured on, None if they are not at hand, and how they are said."""

    tokens: Int32[np.ndarray, " T"] | None
    texts: Texts


def token_view(run: Run, prompt: str, *, policy: str = "chain") -> TokenView:
    """How every token of a prompt's completion was won under `policy`.

    Raises:
        RunError: The run has no such prompt.
        InputError: The policy is not known, or was not measured.
    """
    drafts = drafts_of(run, prompt)
    walk = walk_blocks(Policy.parse(policy), drafts.blocks)
    reference = reference_of(run, prompt)
    ids, texts = reference.tokens, reference.texts
    tokens: list[Token] = []
    if ids is not None:
        P, T = drafts.blocks.prompt_tokens, drafts.blocks.length
        said = [texts.running(int(token)) for token in ids]
        tokens = [Token(position, said[position], "prompt") for position in range(P)]
        tokens.append(Token(P, said[P], "first"))
        tokens += _committed(walk, drafts, said=said, texts=texts)
        tokens += [Token(position, said[position], "tail") for position in range(T, len(said))]
    return TokenView(prompt, policy, tuple(tokens), texts.reason)


def notable_prompts(run: Run) -> tuple[str, ...]:
    """Up to three prompts that are worth a look: those of the chain's best, median and worst tau."""
    measured = {
        name: prompt["policies"]["chain"]["tau"]
        for name, prompt in run.summary["prompts"].items()
        if "chain" in prompt["policies"] and prompt["policies"]["chain"]["tau"] is not None
    }
    names = sorted(measured, key=lambda name: -measured[name])
    places = (0, (len(names) - 1) // 2, len(names) - 1) if names else ()
    return tuple(dict.fromkeys(names[place] for place in places))


def drafts_of(run: Run, prompt: str) -> Drafts:
    """What the run keeps of one prompt's blocks; no other prompt's are read.

    Raises:
        RunError: The run has no such prompt.
    """
    if prompt not in run.summary["prompts"]:
        named = ", ".join(run.plan.prompts[:8]) + ", ..." * (len(run.plan.prompts) > 8)
        raise RunError(f"run {run.name} has no prompt {prompt!r}; it measured {named}")
    said = run.summary["prompts"][prompt]
    trees = [policy.n or 0 for policy in map(Policy.parse, run.plan.policies) if policy.kind == "ddtree"]
    columns = ["anchor", "rank", "log_prob", "top_id", "top_log_prob"] + ["tree_position"] * bool(trees)
    table = run.blocks(columns, prompt=prompt)
    depth = table.schema.field("rank").type.list_size
    flat = {name: _flat(table, name) for name in columns}
    lists = (len(flat["anchor"]), depth, -1 if len(flat["anchor"]) else 0)
    return Drafts(
        Blocks(
            anchors=flat["anchor"],
            ranks=flat["rank"].reshape(-1, depth),
            prompt_tokens=said["prompt_tokens"],
            length=said["prompt_tokens"] + said["completion_tokens"],
            stopped=said["stopped"],
            order=flat["tree_position"].reshape(-1, depth) if trees else None,
            order_budget=max(trees, default=0),
        ),
        log_probs=flat["log_prob"].reshape(-1, depth),
        top_ids=flat["top_id"].reshape(lists),
        top_log_probs=flat["top_log_prob"].reshape(lists),
    )


def _flat(table: Any, name: str) -> Any:
    """A column as one array, its lists one behind the other."""
    column = table.column(name).combine_chunks()
    return np.asarray(column if name == "anchor" else column.flatten())


def reference_of(run: Run, prompt: str) -> Reference:
    """The tokens that the prompt was measured on, from the recording, if it is at hand and still that one."""
    path = Path(run.manifest["recording"]["path"])
    try:
        recording = open_recording(path)
        if recording.digest != run.plan.recording_digest:
            return Reference(None, without_texts(f"the recording at {path} is not the one that was measured"))
        item, said = recording.item(prompt), run.summary["prompts"][prompt].get("reference_sha256")
        if said is None:
            return Reference(None, without_texts("the run does not say which tokens it was measured on"))
        if reference_digest(recording, item) != said:
            changed = f"the recording at {path} has other tokens for this prompt than were measured"
            return Reference(None, without_texts(changed))
        content = b"".join(recording.tensors(item).tokens.blocks())
    except (RecordingError, CheckpointError, OSError) as exc:
        return Reference(None, without_texts(f"the recording that was measured is not at hand: {exc}"))
    return Reference(np.frombuffer(content, "<i4").astype(np.int32), texts_of(recording))


def ended(walk: Walk, number: int) -> str:
    """Why a round of a walk ended: the words of `Token.missed`; counted as `acceptance.counts_of` does."""
    policy, rank = walk.policy, int(walk.missed_rank[number])
    if walk.streak[number] == policy.limit(walk.depth):
        return DEPTH
    if rank == NO_REFERENCE:
        return END_OF_TEXT
    if rank == UNREACHABLE:
        return OUTSIDE
    width = 1 if policy.kind == "chain" else policy.n or 1
    return NOT_COVERED if rank >= width else covered(rank)


def covered(rank: int) -> str:
    """Why a round ended at a token that was wide enough for the tree, and not selected into it."""
    return f"covered, rank {rank}"


def _committed(walk: Walk, drafts: Drafts, *, said: list[str], texts: Texts) -> Iterator[Token]:
    """The tokens that the rounds of a walk commit, in order."""
    rows = np.searchsorted(drafts.blocks.anchors, walk.anchors)
    for number, (anchor, row) in enumerate(zip(walk.anchors.tolist(), rows.tolist(), strict=True)):
        streak, committed = int(walk.streak[number]), int(walk.committed[number])
        for depth in range(1, committed + 1):
            drafted, accepted = depth <= walk.depth, depth <= streak
            rank = int(drafts.blocks.ranks[row, depth - 1]) if drafted else int(UNREACHABLE)
            yield Token(
                position=anchor + depth,
                text=said[anchor + depth],
                kind="accepted" if accepted else "bonus",
                depth=depth if accepted else None,
                round=number,
                missed=ended(walk, number) if depth == committed else None,
                rank=rank if rank < UNREACHABLE else None,
                probability=drafts.probability(row, depth),
                choices=drafts.choices(row, depth, texts=texts)[:CHOICES] if drafted else (),
            )
