"""What a measured acceptance would mean for speed under a cost model: a model, and shown as one.

Costs are in units of one decoding step of the target alone, which commits one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftgauge.acceptance import Policy


@dataclass(frozen=True)
class Costs:
    """What a round costs beside one target step: drafting a block, and verifying each drafted node.

    Both are parts of one decoding step of the target. The defaults are a drafter of a twentieth of the target and a
    verification that is limited by memory, where a node more costs next to nothing; measure your own.
    """

    draft: float = 0.05
    node: float = 0.002

    def of_round(self, nodes: int) -> float:
        """The cost of one round with so many drafted nodes.

        Example:
            `Costs(0.05, 0.002).of_round(15)` is 1.08.
        """
        return 1.0 + self.draft + self.node * nodes


@dataclass(frozen=True)
class Projection:
    """One policy under the model: drafted nodes in a round, tau pooled over rounds, and the speed-up."""

    label: str
    nodes: int
    tau: float
    speedup: float


def projections(summary: Mapping[str, Any], *, depth: int, costs: Costs) -> list[Projection]:
    """The speed-up of every policy that decodes: chains and trees, not coverages.

    Speed-up is pooled tau over the cost of a round: tokens committed, over the target steps that they cost.

    Args:
        summary: A run's `summary.json`.
        depth: Draft tokens of a block, which are the nodes of the chain.
        costs: The model.
    """
    found = []
    for slug, value in summary["policies"].items():
        policy, tau = Policy.parse(slug), value["tau_pooled"]["value"]
        if policy.kind == "coverage" or tau is None:
            continue
        nodes = policy.n or depth
        found.append(Projection(value["label"], nodes, tau, tau / costs.of_round(nodes)))
    return found
