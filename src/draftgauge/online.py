"""Decodes recorded prompts online and lays the rounds beside the replay's, one by one.

Greedy decoding visits the states that the replay visits, so each round is either the same, or decided by logits that
rounding can swap, or different: the gaps of the round tell the last two apart. Knows nothing of servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftgauge.acceptance import Policy, Walk
from draftgauge.decode import Decoded, decode
from draftgauge.drafters import Drafter
from draftgauge.features import as_torch
from draftgauge.progress import Progress, silent
from draftgauge.recording import Item, Recording
from draftgauge.target import NEAR_TIE_GAP, Target

#: A round as it is compared: its anchor, and the draft tokens that it accepted.
Rounds = list[tuple[int, int]]


@dataclass(frozen=True)
class Divergence:
    """Where a prompt's online decoding leaves the replay for the first time.

    `what` is `text` where the target committed another token than the reference, else `rounds`; `gap` is the smallest
    difference of logits or log-probabilities that decided the round, and `near_tie` whether rounding can swap that.
    """

    prompt: str
    policy: str
    what: str
    anchor: int
    replay: int | None
    online: int | None
    gap: float
    near_tie: bool


def witness_online(
    target: Target,
    drafter: Drafter,
    recording: Recording,
    *,
    walks: Mapping[Policy, Mapping[str, Walk]],
    progress: Progress = silent,
) -> dict[str, Any]:
    """The rounds of online decoding beside the replay's, for every policy and prompt of `walks`.

    Args:
        target: The recorded target.
        drafter: The drafter that was replayed.
        recording: Its items say the prompts and the references.
        walks: The replay's walks, by policy and prompt.
        progress: Shows the work.

    Raises:
        TargetError: The target does not have the drafter's taps, or attends otherwise than in full.

    Example of the result: `{"policies": {"chain": {"rounds": 40, "accepted": 61, "committed": 101, "same": 40,
    "compared": 40}}, "divergences": [], "prompts": 10, "lossless": 10}`.
    """
    near = max(NEAR_TIE_GAP[target.dtype], NEAR_TIE_GAP[str(drafter.ends.head.dtype).removeprefix("torch.")])
    work = [(policy, recording.item(name)) for policy, by_name in walks.items() for name in by_name]
    policies: dict[str, dict[str, int]] = {}
    divergences: list[Divergence] = []
    lossless: dict[str, bool] = {}
    for policy, item in progress(work, label="decode online", total=len(work), unit="prompt"):
        reference = as_torch(recording.tensors(item).tokens).tolist()
        decoded = decode(
            target,
            drafter,
            prompt_ids=reference[: item.prompt_len],
            policy=policy,
            max_new_tokens=item.completion_len,
        )
        ours = rounds_of(walks[policy][item.id])
        compared, same, found = _compared(ours, decoded, reference, item, policy=policy, near=near)
        divergences += [found] if found is not None else []
        lossless[item.id] = lossless.get(item.id, True) and decoded.tokens == reference
        counts = policies.setdefault(policy.slug, dict.fromkeys(_COUNTED, 0))
        theirs = decoded.rounds
        for name, value in (
            ("rounds", len(theirs)),
            ("accepted", sum(r.accepted for r in theirs)),
            ("committed", sum(r.committed for r in theirs)),
            ("compared", compared),
            ("same", same),
        ):
            counts[name] += value
    return {
        "dtype": target.dtype,
        "near_tie_gap": near,
        "policies": policies,
        "prompts": len(lossless),
        "lossless": sum(lossless.values()),
        "divergences": [asdict(divergence) for divergence in divergences],
    }


_COUNTED = ("rounds", "accepted", "committed", "compared", "same")


def rounds_of(walk: Walk) -> Rounds:
    """The rounds of a replay's walk.

    Example:
        `[(5, 2), (8, 0)]`.
    """
    return list(zip(walk.anchors.tolist(), walk.streak.tolist(), strict=True))


def _compared(
    ours: Rounds, decoded: Decoded, reference: Sequence[int], item: Item, *, policy: Policy, near: float
) -> tuple[int, int, Divergence | None]:
    """How many rounds were compared and are the same, and where the two part; after that they are not comparable."""
    theirs = [(round_.anchor, round_.accepted) for round_ in decoded.rounds]
    parts = _first_other(decoded.tokens, reference)
    for index, (mine, other) in enumerate(itertools.zip_longest(ours, theirs)):
        anchor = (mine or other or (item.prompt_len, 0))[0]
        gaps = decoded.rounds[index] if index < len(decoded.rounds) else None
        text = parts is not None and gaps is not None and parts <= anchor + gaps.committed
        if mine == other and not text:
            continue
        gap = 0.0 if gaps is None else gaps.target_gap if text else min(gaps.target_gap, gaps.draft_gap)
        divergence = Divergence(
            prompt=item.id,
            policy=policy.slug,
            what="text" if text else "rounds",
            anchor=anchor,
            replay=None if mine is None else mine[1],
            online=None if other is None else other[1],
            gap=gap,
            near_tie=gap < near,
        )
        return index + 1, index, divergence
    if parts is not None:  # the first token, which no round commits
        return (
            len(ours),
            len(ours),
            Divergence(item.id, policy.slug, "text", parts, None, None, float("inf"), near_tie=False),
        )
    return len(ours), len(ours), None


def _first_other(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position at which two texts differ; None for the same."""
    if list(tokens) == list(reference):
        return None
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, reference, strict=False))
    return sum(1 for _ in alike)
