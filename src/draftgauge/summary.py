"""From the blocks of every prompt to the numbers of a run: estimates, curves, conventions, per prompt.

Arithmetic on counts alone; the unit is the prompt, or the conversation where prompts are its turns. The result is
the content of `summary.json`; every value that could not be computed is null with a reason beside it. Knows nothing
of files, models or rendering.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from draftgauge.acceptance import (
    CONVENTIONS,
    Blocks,
    Policy,
    Walk,
    all_anchor_counts,
    counts_of,
    per_depth,
    walk_blocks,
)
from draftgauge.stats import design_effect, mean, ratio


@dataclass(frozen=True)
class PromptBlocks:
    """One prompt's blocks, its category, and the digest of the reference that they were accepted against.

    `conversation` is the one that the prompt is a turn of: turns of a conversation are one unit.
    """

    category: str | None
    blocks: Blocks
    reference_sha256: str | None = None
    conversation: str | None = None


def summarise(
    prompts: Mapping[str, PromptBlocks], policies: Sequence[Policy], *, every_anchor: bool
) -> dict[str, Any]:
    """All numbers of a run.

    Args:
        prompts: Blocks by the prompt's id, in the order of the recording.
        policies: Which policies to report.
        every_anchor: Whether the blocks cover all anchors; means over anchors and depth curves need that.

    Example of the result: `{"policies": {"chain": {"tau_response": {"value": 1.71, "low": 1.6, ...}}}}`;
    `absent` maps the names of values that are null somewhere to the reason.
    """
    walks = {
        policy: {name: walk_blocks(policy, prompt.blocks) for name, prompt in prompts.items()}
        for policy in policies
    }
    by_policy = {
        policy.slug: _policy(policy, walks[policy], prompts, every_anchor=every_anchor) for policy in policies
    }
    curves = _depth_curves(prompts) if every_anchor else None
    return {
        "policies": by_policy,
        "per_depth": curves,
        "absent": _absent(by_policy.values(), curves),
        "prompts": {
            name: {
                "category": prompt.category,
                "conversation": prompt.conversation,
                "reference_sha256": prompt.reference_sha256,
                "prompt_tokens": prompt.blocks.prompt_tokens,
                "completion_tokens": prompt.blocks.length - prompt.blocks.prompt_tokens,
                "stopped": prompt.blocks.stopped,
                "policies": {
                    policy.slug: _prompt(
                        policy, walks[policy][name], prompt.blocks, every_anchor=every_anchor
                    )
                    for policy in policies
                },
            }
            for name, prompt in prompts.items()
        },
    }


def _policy(
    policy: Policy,
    walks: Mapping[str, Walk],
    prompts: Mapping[str, PromptBlocks],
    *,
    every_anchor: bool,
) -> dict[str, Any]:
    """One policy over all prompts: both tau, the streak, why rounds ended, every convention."""
    units = units_of({name: prompt.conversation for name, prompt in prompts.items()})
    counts = [reduce(add, (counts_of(walks[name]) for name in unit)) for unit in units]
    rounds = [c.rounds for c in counts]
    most = float(max((_most_accepted(policy, walk.depth) for walk in walks.values()), default=0))
    value: dict[str, Any] = {
        "label": policy.label,
        **_averaged("tau", [c.committed for c in counts], rounds, possible=(1.0, most + 1.0)),
        **_averaged("streak", [c.accepted for c in counts], rounds, possible=(0.0, most)),
        "design_effect": design_effect([np.concatenate([walks[n].streak for n in unit]) for unit in units]),
        "counts": asdict(reduce(add, counts)),
        "units": len(units),
        "conventions": {name: rule.value(list(walks.values())) for name, rule in CONVENTIONS.items()},
    }
    if every_anchor:
        sums = {name: all_anchor_counts(policy, prompt.blocks) for name, prompt in prompts.items()}
        accepted, anchors = ([sum(sums[name][i] for name in unit) for unit in units] for i in (0, 1))
        streak = ratio(accepted, anchors)
        value["all_anchor_streak"] = streak.within(0.0, most).as_dict()
    return value


def units_of(conversations: Mapping[str, str | None]) -> list[list[str]]:
    """The names that belong together, in their order: a prompt alone, or the turns of its conversation.

    Example:
        `{"a": None, "81/1": "81", "81/2": "81"}` gives `[["a"], ["81/1", "81/2"]]`.
    """
    units: dict[tuple[bool, str], list[str]] = {}
    for name, conversation in conversations.items():
        units.setdefault((conversation is not None, conversation or name), []).append(name)
    return list(units.values())


def _averaged(
    name: str, tokens: Sequence[int], rounds: Sequence[int], *, possible: tuple[float, float]
) -> dict[str, Any]:
    """Tokens per round both ways: the mean of the responses' own ratios, and pooled over all rounds."""
    own = [t / r for t, r in zip(tokens, rounds, strict=True) if r]
    return {
        f"{name}_response": mean(own).within(*possible).as_dict(),
        f"{name}_pooled": ratio(tokens, rounds).within(*possible).as_dict(),
    }


def _most_accepted(policy: Policy, depth: int) -> int:
    """The draft tokens that a round can accept at most; a tree of n nodes is at most n deep."""
    limit = policy.limit(depth)
    return min(limit, policy.n) if policy.kind == "ddtree" and policy.n is not None else limit


def _absent(policies: Iterable[Mapping[str, Any]], curves: Mapping[str, Any] | None) -> dict[str, str]:
    """Why values are null that carry no reason of their own."""
    absent = {}
    if curves is None:
        reason = "blocks were drafted only where the policies' walks go"
        absent = {"per_depth": reason, "all_anchor_streak": reason}
    elif None in curves["marginal"] or None in curves["conditional"]:
        absent["per_depth"] = "no anchor got to some depths, or had a reference token there"
    if any(policy["design_effect"] is None for policy in policies):
        absent["design_effect"] = "it needs 2 prompts, and rounds that do not all accept the same"
    return absent


def _depth_curves(prompts: Mapping[str, PromptBlocks]) -> dict[str, Any]:
    """Acceptance at each depth over all anchors of all prompts, with the counts that it rests on."""
    total = reduce(add, (per_depth(prompt.blocks) for prompt in prompts.values()))
    return {
        "marginal": total.marginal(),
        "survival": total.survival(),
        "conditional": total.conditional(),
        "eal_marginal": total.eal_marginal(),
        "anchors_marginal": list(total.anchors_marginal),
        "anchors_conditional": list(total.anchors_conditional),
        "hits": list(total.hits),
        "survived": list(total.survived),
        "intervals": _depth_intervals(prompts),
    }


def _depth_intervals(prompts: Mapping[str, PromptBlocks]) -> dict[str, list[list[float] | None]]:
    """The 95 % interval of each rate at each depth over prompts, [low, high]; None where there is none."""
    units = units_of({name: prompt.conversation for name, prompt in prompts.items()})
    found = [reduce(add, (per_depth(prompts[name].blocks) for name in unit)) for unit in units]
    curves = {
        "marginal": [(unit.hits, unit.anchors_marginal) for unit in found],
        "survival": [(unit.survived, unit.anchors_marginal) for unit in found],
        "conditional": [(unit.survived, unit.anchors_conditional) for unit in found],
    }
    return {
        name: [_reach([(part[d], whole[d]) for part, whole in counts]) for d in range(len(found[0].hits))]
        for name, counts in curves.items()
    }


def _reach(counts: Sequence[tuple[int, int]]) -> list[float] | None:
    """The interval of a share, over the units that have any anchor there."""
    known = [(part, whole) for part, whole in counts if whole]
    if not known:
        return None
    share = ratio([part for part, _ in known], [whole for _, whole in known]).within(0.0, 1.0)
    return None if share.low is None or share.high is None else [share.low, share.high]


def _prompt(policy: Policy, walk: Walk, blocks: Blocks, *, every_anchor: bool) -> dict[str, Any]:
    """One policy on one prompt: rates and the counts that they come from."""
    counts = counts_of(walk)
    value: dict[str, Any] = {
        "rounds": counts.rounds,
        "accepted": counts.accepted,
        "committed": counts.committed,
        "tau": counts.committed / counts.rounds if counts.rounds else None,
        "streak": counts.accepted / counts.rounds if counts.rounds else None,
    }
    if every_anchor:
        accepted, anchors = all_anchor_counts(policy, blocks)
        value["all_anchor_streak"] = accepted / anchors if anchors else None
        value["uncensored_anchors"] = anchors
    return value
