"""Decodes online with a drafter, greedily and losslessly: the second witness that replay is compared with.

A round drafts one block at the anchor, lets the target verify the chain or the tree in a single pass, and
commits the drafted path that the target would have taken, plus the target's own next token. The target's
cache and the drafter's context only ever grow by what was committed, with the features that the verifying
pass itself produced. The chain is verified as a tree with one branch, so there is one loop.

Knows nothing of recordings or ranks, and shares no code with `replay`.

Letters: D depth, V entries of the drafter's vocabulary, K list length, N drafted nodes, R rows of a pass of
the target (when verifying, the anchor's and one per node), W entries of its vocabulary, F features per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor

from draftgauge.acceptance import Policy
from draftgauge.drafters import Context, Drafter
from draftgauge.errors import CheckpointError, InputError, PromptError, TargetError
from draftgauge.target import Target, tapped, until_stop
from draftgauge.tree import expand


@dataclass(frozen=True)
class Nodes:
    """What one round drafts, parents before their children; a chain is a tree with one branch.

    `depths` are 1-based; `parents` are 0 for the anchor and j + 1 for node j.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One round: `accepted` drafted tokens and `committed` tokens, both cut at the end of the sequence.

    The gaps say what would overturn it: `draft_gap`, the smallest difference between the drafter's
    log-probabilities that decided what it drafted of the committed path; `target_gap`, the smallest between
    the target's two best logits along that path. Within rounding, it is a near-tie. Infinite where nothing
    competes.
    """

    anchor: int
    accepted: int
    committed: int
    nodes: Nodes
    draft_gap: float
    target_gap: float


@dataclass(frozen=True)
class Decoded:
    """A prompt with its completion, which is the target's own greedy text, and the rounds that made it.

    The completion's first token comes from the prompt's pass and belongs to no round.
    """

    tokens: list[int]
    rounds: tuple[Round, ...]


@torch.inference_mode()
def decode(
    target: Target, drafter: Drafter, *, prompt_ids: Sequence[int], policy: Policy, max_new_tokens: int
) -> Decoded:
    """The target's greedy completion of a prompt, decoded with a drafter, and the rounds that it took.

    The completion ends with its first stop token or after `max_new_tokens`. Blocks near the end are drafted
    in full like all others; only what is accepted is cut.

    Raises:
        InputError: The policy is not one that can be decoded, or no token may be generated.
        PromptError: The prompt is empty.
        TargetError: The target does not have the drafter's taps, or attends otherwise than in full.
        CheckpointError: The drafter's output is not finite.

    Example:
        A drafter that is always right, with D = 7: 17 new tokens are the prompt pass's and two rounds of
        `accepted` 7, `committed` 8.
    """
    _check(target, drafter, prompt_ids=prompt_ids, policy=policy, max_new_tokens=max_new_tokens)
    stops, end = target.stop_token_ids, len(prompt_ids) + max_new_tokens
    tokens, rounds = list(prompt_ids), []
    with tapped(target, drafter.wiring.taps) as caught:
        prompt_pass = target.model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        cache = prompt_pass.past_key_values
        context = drafter.context(_features(target, drafter, caught))
        tokens.append(int(prompt_pass.logits[0, -1].argmax()))
        while len(tokens) < end and tokens[-1] not in stops:
            anchor = len(tokens) - 1
            block = _draft(drafter, context, anchor, tokens[anchor])
            proposal = _tree(block, policy.n or 0) if policy.kind == "ddtree" else _chain(block, policy)
            logits = _verify(target, cache, tokens[anchor], proposal.nodes)
            path, following = _accept(proposal.nodes, logits.argmax(dim=1).tolist())
            committed = until_stop(following[: end - len(tokens)], stops)
            rounds.append(_round(anchor, committed, path, block, proposal, logits))
            tokens += committed
            _keep(cache, anchor, path)
            seen = _features(target, drafter, caught)[path]
            context = context.extended(drafter.context(seen, first_position=anchor))
    return Decoded(tokens, tuple(rounds))


def _check(
    target: Target, drafter: Drafter, *, prompt_ids: Sequence[int], policy: Policy, max_new_tokens: int
) -> None:
    if policy.kind == "coverage":
        raise InputError(
            f"{policy.label} is a ceiling that nothing decodes; expected chain, chainN or ddtreeN"
        )
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
    if not prompt_ids:
        raise PromptError("the prompt has no tokens, so there is nothing to complete; give prompt_ids")
    layers, taps = len(target.decoder.layers), drafter.wiring.taps
    if max(taps) >= layers:
        raise TargetError(
            f"the drafter reads taps {list(taps)}, the target {target.path} has layers 0 to {layers - 1}; "
            "give the target that the drafter was trained for"
        )
    kinds = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention"}:
        # The one prepared mask would be applied to every layer, whatever its kind.
        raise TargetError(
            f"the target {target.path} has {', '.join(sorted(kinds))} layers; a verifying pass is implemented "
            "for full attention: measure this target by replay alone"
        )


def _features(target: Target, drafter: Drafter, caught: Mapping[int, Tensor]) -> Float[Tensor, "R F"]:
    """What the drafter reads of the latest pass."""
    last = len(target.decoder.layers) - 1
    normed = {last} if drafter.wiring.tap_after_final_norm else set()
    states = [
        target.decoder.norm(caught[tap]) if tap in normed else caught[tap] for tap in drafter.wiring.taps
    ]
    return torch.cat(states, dim=-1).to(drafter.ends.head.dtype)


@dataclass(frozen=True)
class _Block:
    """The drafter's logits at one anchor, over token ids in ascending order."""

    ids: Int[Tensor, " V"]
    logits: Float[Tensor, "D V"]

    def best(self, width: int) -> tuple[Int64[np.ndarray, "D K"], Float32[np.ndarray, "D K"]]:
        """Ids and log-probabilities of the first choices at every depth; equal logits by token id."""
        width, lists = min(width, len(self.ids)), []
        for row in self.logits:
            among = (row >= row.topk(width).values[-1]).nonzero()[:, 0]
            lists.append(among[row[among].sort(descending=True, stable=True).indices[:width]])
        first = torch.stack(lists)
        return self.ids[first].numpy(), (self.logits.gather(1, first) - self._norm).numpy()

    def log_prob(self, token: int, *, depth: int) -> float:
        """Log-probability of a token at a 1-based depth; minus infinity outside the vocabulary."""
        entry = (self.ids == token).nonzero()
        return float((self.logits - self._norm)[depth - 1, entry[0, 0]]) if len(entry) else -math.inf

    @property
    def _norm(self) -> Float[Tensor, "D 1"]:
        return self.logits.logsumexp(dim=1, keepdim=True)


def _draft(drafter: Drafter, context: Context, anchor: int, token: int) -> _Block:
    """The block drafted at the anchor, whose own feature does not exist yet."""
    assert context.length == anchor
    hidden = drafter.draft(context, anchors=torch.tensor([anchor]), anchor_tokens=torch.tensor([token]))
    logits = drafter.logits(hidden[0]).float()
    if not bool(logits.logsumexp(dim=1).isfinite().all()):
        raise CheckpointError(
            f"the drafter's output at anchor {anchor} is not finite ({hidden.dtype}); try --dtype float32, "
            "then check the checkpoint"
        )
    ids = drafter.ends.target_ids
    ids = torch.arange(logits.shape[1]) if ids is None else ids
    by_id = ids.argsort()
    return _Block(ids[by_id], logits[:, by_id])


@dataclass(frozen=True)
class _Proposal:
    """Nodes, and how narrowly they were chosen, in log-probability.

    `leads` of every node over what would be drafted in its stead; `bars`, what a further child of every row
    would have needed to be drafted.
    """

    nodes: Nodes
    leads: Float[np.ndarray, " N"]
    bars: Float[np.ndarray, " R"]


def _chain(block: _Block, policy: Policy) -> _Proposal:
    """The first choice at every depth, as far as the policy verifies them."""
    ids, log_probs = block.best(2)
    length = policy.limit(len(ids))
    first, second = log_probs[:length, 0], log_probs[:length, 1]
    nodes = Nodes(tuple(ids[:length, 0].tolist()), tuple(range(1, length + 1)), tuple(range(length)))
    return _Proposal(nodes, leads=first - second, bars=np.append(first, np.inf))


def _tree(block: _Block, budget: int) -> _Proposal:
    """The best `budget` nodes; one more is expanded, to see by how much the others lead."""
    ids, log_probs = block.best(budget + 1)
    tree = expand(log_probs, budget=budget + 1)
    ranks, depths, parents, scores = (
        x[:budget] for x in (tree.ranks, tree.depths, tree.parents, tree.scores)
    )
    runner_up = tree.scores[budget] if len(tree.scores) > budget else -np.inf
    nodes = Nodes(tuple(ids[depths - 1, ranks].tolist()), tuple(depths.tolist()), tuple(parents.tolist()))
    return _Proposal(nodes, leads=scores - runner_up, bars=scores[-1] - np.append(0.0, scores))


def _verify(target: Target, cache: Any, anchor_token: int, nodes: Nodes) -> Float[Tensor, "R W"]:
    """The target's logits after the anchor and after every node, each of which sees its own branch only."""
    past, dtype = cache.get_seq_length(), target.model.dtype
    branch = torch.eye(len(nodes.tokens) + 1, dtype=torch.bool)
    for row, parent in enumerate(nodes.parents, start=1):
        branch[row] |= branch[parent]
    # Additive, because eager attention adds what it is given.
    mask = torch.zeros(1, 1, len(branch), past + len(branch), dtype=dtype)
    mask[..., past:].masked_fill_(~branch, torch.finfo(dtype).min)
    logits: Tensor = target.model(
        torch.tensor([[anchor_token, *nodes.tokens]]),
        attention_mask=mask,
        position_ids=past + torch.tensor([[0, *nodes.depths]]),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]
    return logits


def _accept(nodes: Nodes, choices: Sequence[int]) -> tuple[list[int], list[int]]:
    """The anchor's row and the accepted nodes' rows, and the target's choice after each of them."""
    branches = enumerate(zip(nodes.parents, nodes.tokens, strict=True), start=1)
    child = {parent_and_token: row for row, parent_and_token in branches}
    path = [0]
    while (path[-1], choices[path[-1]]) in child:
        path.append(child[path[-1], choices[path[-1]]])
    return path, [choices[row] for row in path]


def _round(
    anchor: int,
    committed: Sequence[int],
    path: Sequence[int],
    block: _Block,
    proposal: _Proposal,
    logits: Float[Tensor, "R W"],
) -> Round:
    accepted = min(len(path) - 1, len(committed))
    gaps = [float(proposal.leads[row - 1]) for row in path[1 : accepted + 1]]
    if accepted < min(len(committed), len(block.logits)):
        missed = block.log_prob(committed[accepted], depth=accepted + 1)
        gaps.append(float(proposal.bars[path[accepted]]) - missed)
    best = logits[path[: len(committed)]].float().topk(2).values
    return Round(
        anchor=anchor,
        accepted=accepted,
        committed=len(committed),
        nodes=proposal.nodes,
        draft_gap=min(gaps, default=math.inf),
        target_gap=float((best[:, 0] - best[:, 1]).min()),
    )


def _keep(cache: Any, anchor: int, path: Sequence[int]) -> None:
    """Drops the refused nodes from the target's cache and moves the accepted ones up."""
    kept = torch.cat((torch.arange(anchor), anchor + torch.tensor(path)))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
