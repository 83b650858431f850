"""The drafter families: one network each, in a literal table.

A family turns a wiring, mapped tensors and the two borrowed ends into something that drafts. Knows nothing
of recordings, ranks or runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftgauge.drafters.dflash import Context, DFlash, Ends
from draftgauge.errors import FamilyError, WiringError
from draftgauge.features import as_torch
from draftgauge.tensorfile import StoredTensor
from draftgauge.wiring import Wiring, tensor_shapes

# A float32 product of MKL otherwise depends in its last bits on the number of threads, and so on how many workers
# share a machine. Read at the first product of a process; it costs nothing that could be measured.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = ["FAMILIES", "Context", "DFlash", "Drafter", "Ends", "as_torch", "load_drafter", "rewired"]


@runtime_checkable  # for the tests, which check every annotation at every call
class Drafter(Protocol):
    """What replay, decoding and training need of a drafter. Letters as in `drafters.dflash`."""

    wiring: Wiring
    ends: Ends

    def context(self, features: Float[Tensor, "T F"], *, first_position: int = 0) -> Context:
        """What the drafter keeps of the target's features at consecutive positions."""

    def draft(
        self,
        context: Context,
        *,
        anchors: Int[Tensor, " A"],
        anchor_tokens: Int[Tensor, " A"],
        starts: Int[Tensor, " A"] | None = None,
    ) -> Float[Tensor, "A D H"]:
        """Final hidden states of one block per anchor."""

    def logits(
        self, hidden: Float[Tensor, "*lead H"], *, rows: Int[Tensor, " V"] | slice = slice(None)
    ) -> Float[Tensor, "*lead V"]:
        """Scores of the drafter's vocabulary, or of some rows of its head alone."""


FAMILIES: Mapping[str, Callable[[Wiring, Ends], DFlash]] = {"dflash": DFlash}


def load_drafter(
    wiring: Wiring,
    tensors: Mapping[str, StoredTensor],
    *,
    embedding: Tensor,
    head: Tensor,
    dtype: torch.dtype = torch.float32,
) -> DFlash:
    """The network that the wiring describes, holding the checkpoint's tensors, ready to draft.

    Args:
        wiring: Which function the weights are used in.
        tensors: The checkpoint's tensors by canonical name; each one that the wiring names must be there.
        embedding: The target's input embedding [V, H]; used unless the drafter has its own.
        head: The target's output head [V, H]; used unless the drafter has its own. Of a tied target the same tensor.
        dtype: The dtype to compute in. Tensors that are stored in it stay mapped.

    Raises:
        FamilyError: The wiring's family has no network.
        WiringError: The ends, the mask token or the vocabulary map do not fit the drafter.
    """
    if wiring.family not in FAMILIES:
        raise FamilyError(
            f"drafter family {wiring.family!r} is unknown; expected one of {', '.join(FAMILIES)}"
        )
    target_ids = _target_ids(wiring, tensors, vocabulary=len(head))
    embedding = as_torch(tensors["embed_tokens.weight"]) if wiring.embedding == "own" else embedding
    head = as_torch(tensors["lm_head.weight"]) if wiring.head == "own" else head
    if target_ids is not None:  # rows in the order of their tokens, so that equal logits rank by token id
        by_id = target_ids.argsort()
        head, target_ids = head[by_id], target_ids[by_id]
    tied = head is embedding  # one tensor is converted once
    embedding = embedding.to(dtype)
    ends = Ends(embedding, embedding if tied else head.to(dtype), target_ids)
    for name, end in (("embedding", ends.embedding), ("head", ends.head)):
        if end.shape[1] != wiring.hidden_size:
            raise WiringError(
                f"the {name} is {end.shape[1]} wide, the drafter's hidden_size is {wiring.hidden_size}; give the "
                "target that the drafter was trained for"
            )
    if (
        not wiring.mask_embedding
        and wiring.mask_token_id is not None
        and wiring.mask_token_id >= len(ends.embedding)
    ):
        raise WiringError(
            f"mask_token_id {wiring.mask_token_id} is outside the embedding of {len(ends.embedding)} rows; "
            "state another with --mask-token-id"
        )
    with torch.device("meta"):
        drafter = FAMILIES[wiring.family](wiring, ends)
    borrowed = {"embed_tokens.weight", "lm_head.weight", "d2t"}
    own = {name: as_torch(tensors[name]).to(dtype) for name in tensor_shapes(wiring) if name not in borrowed}
    drafter.load_state_dict(own, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)


def rewired(drafter: DFlash, wiring: Wiring) -> DFlash:
    """The same weights and ends in another wiring, without a copy.

    Args:
        drafter: The network.
        wiring: One that reads the same tensors, such as the same with another block size.
    """
    with torch.device("meta"):
        other = FAMILIES[wiring.family](wiring, drafter.ends)
    other.load_state_dict(drafter.state_dict(), strict=True, assign=True)
    return other.eval().requires_grad_(False)


def _target_ids(wiring: Wiring, tensors: Mapping[str, StoredTensor], *, vocabulary: int) -> Tensor | None:
    """The target's token id of every row of a pruned head; None where the head is the whole vocabulary."""
    if wiring.vocabulary_map == "none":
        return None
    stored, rows = as_torch(tensors["d2t"]).long(), tensors["lm_head.weight"].shape[0]
    first = torch.arange(len(stored))
    ids = stored + first if wiring.vocabulary_map == "offset" else stored
    if len(ids) != rows or not rows:
        raise WiringError(
            f"d2t names {len(ids)} tokens for the {rows} rows of lm_head.weight, expected one for each; they "
            "are not of the same save"
        )
    if not bool((ids >= 0).all() and (ids < vocabulary).all()):
        raise WiringError(
            f"d2t read as {wiring.vocabulary_map} names token {int(ids.max())} (least {int(ids.min())}), the "
            f"target has {vocabulary}; state vocabulary_map = 'offset' or 'absolute' with --wiring"
        )
    if len(ids.unique()) != len(ids):
        raise WiringError(
            f"d2t read as {wiring.vocabulary_map} names a token twice; state vocabulary_map = 'offset' or "
            "'absolute' with --wiring, and make sure that d2t was filled before it was saved"
        )
    if rows < vocabulary and torch.equal(ids, first):
        raise WiringError(
            f"d2t read as {wiring.vocabulary_map} names the first {rows} tokens in order, as a map that was "
            "never filled; save it again, or state vocabulary_map = 'none' with --wiring if it is meant"
        )
    return ids
