"""What the user states beside what the file says, and which of its tensors that leaves unused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.checkpoint import Checkpoint, open_checkpoint
from draftgauge.errors import WiringError
from draftgauge.stated import Stated, overridden, unused_tensors, used_wiring, wiring_of
from tests import tiny

#: What a file without a config does not say.
UNSAID: dict[str, Any] = {
    "taps": [1, 3],
    "block_size": 8,
    "mask_token_id": 255,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_dims": 16,
    "layer_types": ["full_attention", "full_attention"],
    "predicts_from_anchor": False,
    "num_target_layers": 6,
}


@pytest.fixture(scope="module")
def described() -> Checkpoint:
    return open_checkpoint(tiny.workshop() / "drafter")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny.trainer_pt(tmp_path_factory.mktemp("bare") / "checkpoint.pt"))


def test_the_file_and_the_user_give_the_same_function(described: Checkpoint, bare: Checkpoint) -> None:
    theirs = wiring_of(bare, Stated(UNSAID, "--wiring mine.toml"))
    ours = wiring_of(described)
    assert dataclasses.replace(theirs, vocab_size=ours.vocab_size) == ours
    assert theirs.provenance["rope_theta"] == "--wiring mine.toml: rope_theta"
    assert theirs.provenance["hidden_size"] == "shape of norm.weight"
    assert ours.provenance["rope_theta"] == "config.json: rope_theta"


@pytest.mark.parametrize("field", sorted(UNSAID))
def test_what_nobody_says_is_asked_for_with_the_line_that_states_it(bare: Checkpoint, field: str) -> None:
    said = {name: value for name, value in UNSAID.items() if name != field}
    with pytest.raises(WiringError, match=f"--wiring FILE.toml:\n  {field} = "):
        wiring_of(bare, Stated(said))


def test_an_option_comes_before_the_file_and_is_its_own_source(bare: Checkpoint) -> None:
    stated = Stated(UNSAID, "--wiring mine.toml", options={"taps": (0, 2), "mask_token_id": 7})
    wiring = wiring_of(bare, stated)
    assert (wiring.taps, wiring.mask_token_id) == ((0, 2), 7)
    assert wiring.provenance["taps"] == "--taps"
    assert wiring.provenance["mask_token_id"] == "--mask-token-id"
    assert wiring.provenance["block_size"] == "--wiring mine.toml: block_size"


@pytest.mark.parametrize(
    ("block_size", "trained", "used", "source"),
    [
        (None, 8, 8, "config.json: block_size"),
        (8, 8, 8, "config.json: block_size"),
        (4, 8, 4, "--block-size (trained: 8)"),
        (16, 8, 16, "--block-size (trained: 8)"),
    ],
)
def test_a_block_size_to_use_does_not_change_the_trained_one(
    described: Checkpoint, block_size: int | None, trained: int, used: int, source: str
) -> None:
    stated = Stated(block_size=block_size)
    wiring = wiring_of(described, stated)
    assert wiring.block_size == trained
    measured = used_wiring(wiring, stated)
    assert (measured.block_size, measured.depth) == (used, used - 1)
    assert measured.provenance["block_size"] == source
    assert dataclasses.replace(measured, block_size=trained) == wiring


def test_a_block_that_drafts_nothing_is_refused(described: Checkpoint) -> None:
    with pytest.raises(WiringError, match="block_size 1 drafts nothing"):
        used_wiring(wiring_of(described), Stated(block_size=1))


def test_a_block_size_to_use_is_the_trained_one_where_nobody_says_another(bare: Checkpoint) -> None:
    said = {name: value for name, value in UNSAID.items() if name != "block_size"}
    wiring = wiring_of(bare, Stated(said, block_size=4))
    assert (wiring.block_size, wiring.provenance["block_size"]) == (4, "--block-size")
    with pytest.raises(
        WiringError
    ) as caught:  # everything else is still asked for, and the block size is not
        wiring_of(bare, Stated(block_size=4))
    assert "  rope_theta = " in str(caught.value)
    assert "  block_size = " not in str(caught.value)


def test_an_unknown_field_is_named_with_those_that_are_known(bare: Checkpoint) -> None:
    with pytest.raises(
        WiringError, match=r"--wiring x.toml: unknown wiring field\(s\) rope_base; known: taps, "
    ):
        wiring_of(bare, Stated({**UNSAID, "rope_base": 10000.0}, "--wiring x.toml"))


def test_tensors_that_take_no_part_are_listed_with_the_reason(tmp_path: Path) -> None:
    extra = {"verifier_norm.weight": torch.ones(64), "embed_tokens.weight": torch.ones(256, 64)}
    checkpoint = open_checkpoint(tiny.trainer_pt(tmp_path / "c.pt", tiny.weights() | extra))
    own = wiring_of(checkpoint, Stated(UNSAID))
    targets = wiring_of(checkpoint, Stated({**UNSAID, "embedding": "target"}))
    verifier = {"verifier_norm.weight": "not part of the drafter's function: the verifier's own"}
    assert unused_tensors(checkpoint, own) == verifier
    unread = {"embed_tokens.weight": "the wiring does not read it"}
    assert unused_tensors(checkpoint, targets) == verifier | unread


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5000.0}, {"rope_theta": (10000.0, 5000.0)}),
        ({"rope_theta": 10000.0}, {}),  # as the file says
        ({"tap_after_final_norm": False}, {}),  # a default of the format, which nobody stated
        ({"taps": [0, 2]}, {"taps": ((1, 3), (0, 2))}),
    ],
)
def test_what_is_stated_against_the_files_own_word_is_told(
    described: Checkpoint, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    stated = Stated(wiring=given)
    assert overridden(described, stated, wiring=wiring_of(described, stated)) == expected
