"""Loading a drafter: every tensor is used, every misfit is refused by name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftgauge.drafters import FAMILIES, Drafter, as_torch, load_drafter, rewired
from draftgauge.drafters.dflash import DFlash
from draftgauge.errors import FamilyError, WiringError
from draftgauge.tensorfile import StoredTensor, read_safetensors, write_safetensors
from draftgauge.wiring import Wiring, tensor_shapes
from tests.golden import blocks_of, config_of, drafter_of, logits_of, tensors_of, wiring_of

TARGET = tensors_of(config_of("draftA8")["target"])
EMBEDDING, HEAD = as_torch(TARGET["model.embed_tokens.weight"]), as_torch(TARGET["lm_head.weight"])
BLOCKS = blocks_of("draftA8")
NAMES = sorted(tensor_shapes(wiring_of("draftA8")))


def stored(path: Path, arrays: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The arrays as a checkpoint's tensors, beside those of the golden drafter."""
    write_safetensors(path / "more.safetensors", arrays)
    return tensors_of("draftA8") | read_safetensors(path / "more.safetensors")[0]


def load(tensors: Mapping[str, StoredTensor], wiring: Wiring | None = None, **options: Any) -> DFlash:
    ends = {"embedding": EMBEDDING, "head": HEAD}
    return load_drafter(wiring or wiring_of("draftA8"), tensors, **(ends | options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_drafter(family: str) -> None:
    w = dataclasses.replace(wiring_of("draftA8"), family=family)
    drafter = load_drafter(w, tensors_of("draftA8"), embedding=EMBEDDING, head=HEAD)
    assert isinstance(drafter, Drafter)
    assert drafter.wiring is w


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    w = dataclasses.replace(wiring_of("draftA8"), family="dspark")
    with pytest.raises(FamilyError, match="'dspark' is unknown; expected one of dflash"):
        load(tensors_of("draftA8"), w)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_that_is_loaded_is_used(name: str, tmp_path: Path) -> None:
    tensor = tensors_of("draftA8")[name]
    noise = np.random.default_rng(0).normal(size=tensor.shape).astype(np.float32)
    changed = load(stored(tmp_path, {name: tensor.to_float32() + noise}))
    assert not torch.allclose(logits_of(changed, BLOCKS), logits_of(drafter_of("draftA8"), BLOCKS), atol=1e-3)


def test_a_loaded_drafter_holds_the_files_values_and_does_not_train() -> None:
    drafter = load(tensors_of("draftA8"))
    state = drafter.state_dict()
    assert sorted(state) == NAMES
    assert all(
        np.array_equal(state[name].numpy(), tensors_of("draftA8")[name].to_float32()) for name in NAMES
    )
    assert not drafter.training
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_in_the_dtype_to_compute_in(dtype: torch.dtype) -> None:
    drafter = load(tensors_of("draftA8"), dtype=dtype)
    tensors = [*drafter.parameters(), drafter.ends.embedding, drafter.ends.head]
    assert {tensor.dtype for tensor in tensors} == {dtype}


def test_another_wiring_of_the_same_weights_copies_none_of_them() -> None:
    drafter = load(tensors_of("draftA8"))
    wiring = dataclasses.replace(drafter.wiring, block_size=4)
    other = rewired(drafter, wiring)
    places = [{n: t.data_ptr() for n, t in d.state_dict().items()} for d in (drafter, other)]
    assert places[0] == places[1]
    assert other.ends is drafter.ends
    fresh = load(tensors_of("draftA8"), wiring)
    features = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    anchors, tokens = torch.tensor([5, 9]), torch.tensor([7, 8])
    drafts = [d.draft(d.context(features), anchors=anchors, anchor_tokens=tokens) for d in (other, fresh)]
    assert drafts[0].shape[1] == 3
    assert torch.equal(*drafts)


def test_a_tied_end_is_converted_once() -> None:
    tensors, wiring = tensors_of("draftA8"), wiring_of("draftA8")
    tied = load_drafter(wiring, tensors, embedding=EMBEDDING, head=EMBEDDING, dtype=torch.bfloat16).ends
    assert tied.head is tied.embedding
    apart = load_drafter(wiring, tensors, embedding=EMBEDDING, head=HEAD, dtype=torch.bfloat16).ends
    assert not torch.equal(apart.head, apart.embedding)


def test_own_ends_take_the_place_of_the_targets(tmp_path: Path) -> None:
    tensors = stored(
        tmp_path, {"embed_tokens.weight": EMBEDDING.numpy() * 2, "lm_head.weight": HEAD.numpy() * 3}
    )
    ends = load(tensors, wiring_of("draftA8", embedding="own", head="own", vocabulary_map="none")).ends
    assert torch.equal(ends.embedding, EMBEDDING * 2)
    assert torch.equal(ends.head, HEAD * 3)
    borrowed = load(tensors).ends
    assert torch.equal(borrowed.embedding, EMBEDDING)
    assert torch.equal(borrowed.head, HEAD)


# d2t of a head of the rows for tokens 3, 0 and 200: as offsets from the row, or as ids.
@pytest.mark.parametrize(("read_as", "d2t"), [("offset", [3, -1, 198]), ("absolute", [3, 0, 200])])
def test_a_pruned_head_names_the_targets_tokens_in_their_order(
    read_as: str, d2t: list[int], tmp_path: Path
) -> None:
    tensors = stored(tmp_path, {"lm_head.weight": HEAD.numpy()[[3, 0, 200]], "d2t": np.array(d2t)})
    drafter = load(tensors, wiring_of("draftA8", head="own", vocabulary_map=read_as))
    assert drafter.ends.target_ids is not None
    assert drafter.ends.target_ids.tolist() == [0, 3, 200]
    whole = logits_of(drafter_of("draftA8"), BLOCKS)
    torch.testing.assert_close(logits_of(drafter, BLOCKS), whole[:, :, [0, 3, 200]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("read_as", "d2t", "message"),
    [
        ("absolute", [3, 0, 256], "d2t read as absolute names token 256 (least 0), the target has 256"),
        ("absolute", [3, -1, 200], "names token 200 (least -1)"),
        ("offset", [3, 0, 254], "d2t read as offset names token 256"),
        ("absolute", [3, 3, 200], "d2t read as absolute names a token twice"),
        ("absolute", [0, 0, 0], "d2t read as absolute names a token twice"),
        (
            "offset",
            [0, 0, 0],
            "d2t read as offset names the first 3 tokens in order, as a map that was never",
        ),
        ("absolute", [0, 1, 2], "names the first 3 tokens in order"),
        ("offset", [0, 5], "d2t names 2 tokens for the 3 rows of lm_head.weight"),
    ],
)
def test_a_vocabulary_map_that_cannot_be_meant_is_refused(
    read_as: str, d2t: list[int], message: str, tmp_path: Path
) -> None:
    tensors = stored(tmp_path, {"lm_head.weight": HEAD.numpy()[:3], "d2t": np.array(d2t)})
    with pytest.raises(WiringError) as caught:
        load(tensors, wiring_of("draftA8", head="own", vocabulary_map=read_as))
    assert message in str(caught.value)


def test_a_map_of_the_whole_vocabulary_may_be_in_order(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {"lm_head.weight": HEAD.numpy(), "d2t": np.zeros(256, np.int64)})
    drafter = load(tensors, wiring_of("draftA8", head="own", vocabulary_map="offset"))
    assert torch.equal(logits_of(drafter, BLOCKS), logits_of(drafter_of("draftA8"), BLOCKS))


def test_a_mask_token_outside_the_embedding_is_refused() -> None:
    with pytest.raises(WiringError, match="mask_token_id 256 is outside the embedding of 256 rows; state"):
        load(tensors_of("draftA8"), wiring_of("draftA8", mask_token_id=256))


def test_a_mask_token_that_a_mask_embedding_replaces_may_be_anything(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {"mask_embedding": EMBEDDING.numpy()[255]})
    w = dataclasses.replace(wiring_of("draftA8"), mask_embedding=True, mask_token_id=999)
    replaced = logits_of(load(tensors, w), BLOCKS)
    assert torch.equal(replaced, logits_of(drafter_of("draftA8"), BLOCKS))


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_the_ends_of_another_target_are_refused(end: str) -> None:
    with pytest.raises(WiringError, match=f"the {end} is 32 wide, the drafter's hidden_size is 64; give the"):
        load(tensors_of("draftA8"), **{end: torch.zeros(256, 32)})
