"""Replay equals online decoding on the real target: our own loop, and the PyPI package `dflash`'s.

The demo's late checkpoint, its ten prompts, float32. A round may differ only where the two logits that decided
it are closer than float32 rounding; such a round is told apart by its gap, and none is expected.
"""

import json
from pathlib import Path

import pytest
import torch

from demo.run import LATE
from draftgauge.acceptance import Policy, walk_blocks
from draftgauge.checkpoint import Checkpoint, open_checkpoint
from draftgauge.decode import decode
from draftgauge.drafters import Drafter, as_torch
from draftgauge.measure import blocks_of, measure
from draftgauge.pairing import open_drafter
from draftgauge.prompts import read_prompts
from draftgauge.record import Request, record_target
from draftgauge.recording import Item, Recording
from draftgauge.stated import wiring_of
from draftgauge.target import load_target
from tests.conftest import ROOT

pytestmark = pytest.mark.real

NEW_TOKENS = 48
POLICIES = tuple(Policy.parse(slug) for slug in ("chain", "ddtree4", "ddtree8", "ddtree16", "ddtree64"))
#: Below this gap, in log-probability or logit, float32 rounding may decide otherwise.
NEAR_TIE = 2e-3


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(ROOT / LATE)


@pytest.fixture(scope="module")
def recording(
    smollm_path: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    request = Request(taps=wiring_of(checkpoint).taps, dtype="float32", max_new_tokens=NEW_TOKENS)
    root = tmp_path_factory.mktemp("recordings")
    return record_target(smollm_path, read_prompts("builtin:coding10"), request=request, root=root)


@pytest.fixture(scope="module")
def drafter(recording: Recording, checkpoint: Checkpoint) -> Drafter:
    return open_drafter(checkpoint, wiring_of(checkpoint), recording=recording, dtype="float32")


@pytest.fixture(scope="module")
def walks(recording: Recording, drafter: Drafter) -> dict[tuple[str, Policy], list[tuple[int, int]]]:
    """(anchor, accepted) of every round, by prompt and policy, from one replay."""
    found = {}
    for item, drafted in measure(drafter, recording, items=recording.items, policies=POLICIES):
        for policy in POLICIES:
            walk = walk_blocks(policy, blocks_of(drafted, item, policies=POLICIES))
            rounds = zip(walk.anchors.tolist(), walk.streak.tolist(), strict=True)
            found[item.id, policy] = list(rounds)
    return found


def tokens_of(recording: Recording, item: Item) -> list[int]:
    return as_torch(recording.tensors(item).tokens).tolist()


def test_references_are_the_targets_own(recording: Recording) -> None:
    assert len(recording.items) == 10
    assert not recording.failed
    assert recording.agreement == 1.0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.slug)
def test_rounds_equal_our_own_online_loop(policy, recording, drafter, walks, smollm_path) -> None:
    target = load_target(smollm_path, dtype="float32")
    compared = 0
    for item in recording.items:
        tokens = tokens_of(recording, item)
        online = decode(
            target,
            drafter,
            prompt_ids=tokens[: item.prompt_len],
            policy=policy,
            max_new_tokens=item.completion_len,
        )
        assert online.tokens == tokens, f"{item.id}: online decoding is not lossless"
        replayed = walks[item.id, policy]
        for mine, (anchor, accepted) in zip(online.rounds, replayed, strict=False):
            if (mine.anchor, mine.accepted) != (anchor, accepted):
                gap = min(mine.draft_gap, mine.target_gap)
                assert gap < NEAR_TIE, f"{item.id}, anchor {anchor}: online {mine}, replayed {accepted}"
                break  # from here on the two walk different anchors
            compared += 1
        else:
            assert len(online.rounds) == len(replayed)
    assert compared > 100


def exported(checkpoint: Checkpoint, folder: Path) -> Path:
    """The checkpoint as a z-lab directory, for the peer to load."""
    from safetensors.torch import save_file

    w = wiring_of(checkpoint)
    folder.mkdir()
    tensors = {name: as_torch(stored).float().clone() for name, stored in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": w.hidden_size,
        "intermediate_size": w.intermediate_size,
        "num_hidden_layers": w.num_layers,
        "num_attention_heads": w.num_heads,
        "num_key_value_heads": w.num_kv_heads,
        "head_dim": w.head_dim,
        "rms_norm_eps": w.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": w.rope_theta},
        "vocab_size": w.vocab_size,
        "num_target_layers": w.num_target_layers,
        "layer_types": ["full_attention"] * w.num_layers,
        "block_size": w.block_size,
        "dflash_config": {"mask_token_id": w.mask_token_id, "target_layer_ids": list(w.taps)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_rounds_equal_the_dflash_packages_online_loop(
    recording, checkpoint, walks, smollm_path, tmp_path
) -> None:
    from dflash.model import DFlashDraftModel, dflash_generate

    model = DFlashDraftModel.from_pretrained(exported(checkpoint, tmp_path / "zlab"), dtype=torch.float32)
    target = load_target(smollm_path, dtype="float32")
    block_size, compared, starts = wiring_of(checkpoint).block_size, 0, []

    def note_start(_module, _args, kwargs) -> None:
        starts.append(int(kwargs["position_ids"][0, 0]))  # a verifying pass begins at the round's anchor

    target.model.register_forward_pre_hook(note_start, with_kwargs=True)
    for item in recording.items:
        tokens = tokens_of(recording, item)
        starts.clear()
        out = dflash_generate(
            model.eval(),
            target.model,
            torch.tensor([tokens[: item.prompt_len]]),
            max_new_tokens=item.completion_len,
            stop_token_ids=list(target.stop_token_ids),
        )
        assert out[0].tolist() == tokens
        anchors = [anchor for anchor, _ in walks[item.id, Policy("chain")]]
        # Near the end the package drafts a shorter block, another function of the same weights; the first
        # pass is the prompt's.
        whole = [anchor for anchor in anchors if anchor + block_size <= item.length]
        assert starts[1 : len(whole) + 1] == whole, item.id
        compared += len(whole)
    assert compared > 100
