"""Replay against rounds that other code decoded, against a slow ranking, and against itself in pieces."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftgauge.acceptance import NO_REFERENCE, UNREACHABLE, Blocks, Policy, walk_blocks
from draftgauge.drafters import Context, Drafter, Ends, as_torch
from draftgauge.drafters.dflash import DFlash, RMSNorm
from draftgauge.errors import CheckpointError, RecordingError
from draftgauge.features import Recorded
from draftgauge.replay import TOP_LIST, Drafted, joined, replay, replay_walks
from draftgauge.target import load_target, observe
from draftgauge.tree import expand
from draftgauge.wiring import Wiring
from tests.golden import blocks_of, config_of, drafter_of, tensors_of, wiring_of

TinyTarget = Callable[..., Path]
E2E = Path(__file__).parent / "golden_e2e"
CASES = sorted(path.stem for path in E2E.glob("draft*.json"))
BUDGET = 256  # of the largest golden tree


def arrays_of(drafted: Drafted) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(drafted).items() if isinstance(value, np.ndarray)}


def assert_same(ours: Drafted, theirs: Drafted, *, atol: float = 2e-5) -> None:
    """Equal blocks: integers exactly, log-probabilities but for the last bits."""
    assert (ours.length, ours.order is None) == (theirs.length, theirs.order is None)
    for name, array in arrays_of(ours).items():
        np.testing.assert_allclose(array, arrays_of(theirs)[name], rtol=0, atol=atol, err_msg=name)


def chosen(drafted: Drafted, anchors: Sequence[int]) -> Drafted:
    """The blocks of some anchors."""
    rows = np.flatnonzero(np.isin(drafted.anchors, anchors))
    parts = {name: array[rows] for name, array in arrays_of(drafted).items()}
    return dataclasses.replace(drafted, **parts)


# --- rounds that other code decoded ----------------------------------------------------------------------


def recorded_of(case: dict[str, Any], folder: Path) -> Recorded:
    """What the target showed along its greedy text, as the drafter reads it: a last layer after the norm."""
    target, w = load_target(folder), wiring_of(case["draft"])
    tokens = case["target_greedy_ids"]
    seen = observe(target, tokens, taps=w.taps)
    norm = RMSNorm(64, eps=1e-6)
    norm.weight.data = target.decoder.norm.weight.data
    last = len(target.decoder.layers) - 1
    with torch.inference_mode():
        parts = [norm(part) if tap == last else part for tap, part in zip(w.taps, seen.taps, strict=True)]
    return Recorded(torch.tensor(tokens), len(case["prompt_ids"]), torch.cat(parts, dim=1))


@pytest.mark.parametrize("name", CASES)
def test_every_round_that_other_code_decoded(name: str, tiny_target: TinyTarget) -> None:
    case = json.loads((E2E / f"{name}.json").read_text())
    recorded = recorded_of(case, tiny_target(case["target"]))
    if case["stop_token_ids"]:  # decoding ended at the stop token, and so would the recording
        stop = case["target_greedy_ids"].index(case["stop_token_ids"][0], recorded.prompt_len)
        recorded = Recorded(recorded.tokens[: stop + 1], recorded.prompt_len, recorded.features[: stop + 1])
    drafter = drafter_of(case["draft"])
    drafted = replay(drafter, recorded, budget=BUDGET)
    blocks = Blocks(
        anchors=drafted.anchors,
        ranks=drafted.ranks,
        prompt_tokens=recorded.prompt_len,
        length=drafted.length,
        order=drafted.order,
        order_budget=BUDGET,
    )
    compared = 0
    rounds = {Policy("chain"): (case["zlab_head"]["acceptance_lengths"], set())}
    for budget, told in case["ddtree"].items():
        cut = set(told["rounds_with_truncated_block"])
        rounds[Policy("ddtree", int(budget))] = (told["acceptance_lengths"], cut)
    for policy, (lengths, cut) in rounds.items():
        walk = walk_blocks(policy, blocks)
        # Where the text ends within the block, decoding went on to tokens that are not recorded.
        whole = [i for i, room in enumerate(walk.room) if room >= drafter.wiring.block_size and i not in cut]
        assert [int(walk.streak[i]) + 1 for i in whole] == [lengths[i] for i in whole], policy
        compared += len(whole)
    assert compared >= 20


def test_the_rounds_of_dflash_0_1_until_its_blocks_get_short(tiny_target: TinyTarget) -> None:
    compared = 0
    for name in ("draftA8_P1", "draftA8_P33", "draftA8_P5"):
        case = json.loads((E2E / f"{name}.json").read_text())
        recorded = recorded_of(case, tiny_target(case["target"], folder=name))
        drafted = replay(drafter_of(case["draft"]), recorded, budget=0)
        blocks = Blocks(drafted.anchors, drafted.ranks, recorded.prompt_len, drafted.length)
        walk = walk_blocks(Policy("chain"), blocks)
        lengths = case["zlab_pypi_0.1.0"]["acceptance_lengths"]
        whole = [i for i, room in enumerate(walk.room) if room >= 8]
        assert [int(walk.streak[i]) + 1 for i in whole] == [lengths[i] for i in whole]
        compared += len(whole)
    assert compared >= 15


# --- ranking, against a slow one -------------------------------------------------------------------------


@dataclass
class Scripted:
    """A drafter whose logits at every anchor and depth are given; the hidden state says which row it is."""

    wiring: Wiring
    ends: Ends
    table: Tensor

    def context(self, features: Tensor, *, first_position: int = 0) -> Context:
        nothing = torch.zeros(1, len(features), 1)
        return Context((nothing,), (nothing,))

    def draft(
        self, context: Context, *, anchors: Tensor, anchor_tokens: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        depth = self.wiring.depth
        return (anchors[:, None] * depth + torch.arange(depth)).unsqueeze(-1).double()

    def logits(self, hidden: Tensor, *, rows: Tensor | slice = slice(None)) -> Tensor:
        return self.table[hidden[..., 0].long()][..., rows]


def scripted(table: Tensor, *, target_ids: Tensor | None = None) -> Scripted:
    """A drafter of depth 3 with `table` [anchor x depth, V] as its logits."""
    w = dataclasses.replace(wiring_of("draftC4"), taps=(0,), hidden_size=1, block_size=4)
    head = torch.zeros(table.shape[1], 1)
    return Scripted(w, Ends(torch.zeros(64, 1), head, target_ids), table)


def sequence(tokens: Sequence[int], prompt_len: int = 2) -> Recorded:
    return Recorded(torch.tensor(tokens), prompt_len, torch.zeros(len(tokens), 1))


def by_rank(logits: np.ndarray, ids: np.ndarray) -> list[int]:
    """The rows of one head in the drafter's order: larger logit first, equal ones by the target's id."""
    return sorted(range(len(logits)), key=lambda row: (-logits[row], ids[row]))


def slowly(drafter: Scripted, recorded: Recorded, *, budget: int) -> Drafted:
    """Ranks, lists and tree positions, one anchor and depth at a time."""
    w, length, size = drafter.wiring, len(recorded.tokens), drafter.table.shape[1]
    ids = np.arange(size) if drafter.ends.target_ids is None else drafter.ends.target_ids.numpy()
    anchors = range(recorded.prompt_len, length - 1)
    shape = (len(anchors), w.depth)
    ranks, log_probs = np.full(shape, NO_REFERENCE), np.full(shape, np.nan)
    top_ids = np.zeros((*shape, min(TOP_LIST, size)), np.int32)
    top_log_probs = np.zeros(top_ids.shape)
    order = np.full(shape, NO_REFERENCE)
    for i, anchor in enumerate(anchors):
        rows = []
        for d in range(w.depth):
            logits = drafter.table[anchor * w.depth + d].double().numpy()
            norm = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            best = by_rank(logits, ids)
            top_ids[i, d], top_log_probs[i, d] = ids[best[:TOP_LIST]], (logits - norm)[best[:TOP_LIST]]
            rows.append((logits - norm)[best])
            if anchor + d + 1 < length:
                reference = int(recorded.tokens[anchor + d + 1])
                place = [rank for rank, row in enumerate(best) if ids[row] == reference]
                ranks[i, d] = place[0] if place else UNREACHABLE
                log_probs[i, d] = (logits - norm)[best[place[0]]] if place else np.nan
        tree = expand(np.array(rows, np.float32), budget=budget)
        paths: list[tuple[int, ...]] = [()]
        for rank, parent in zip(tree.ranks, tree.parents, strict=True):
            paths.append((*paths[parent], int(rank)))
        for d in range(w.depth):
            if tuple(ranks[i, : d + 1]) in paths:
                order[i, d] = paths.index(tuple(ranks[i, : d + 1]))
    return Drafted(
        length=length,
        anchors=np.array(anchors, np.int32),
        ranks=ranks.astype(np.int32),
        order=order.astype(np.int32) if budget else None,
        log_probs=log_probs.astype(np.float32),
        top_ids=top_ids,
        top_log_probs=top_log_probs.astype(np.float32),
    )


def logits_with_ties(seed: int, levels: int, size: int) -> Tensor:
    """Logits as bfloat16 has them near its precision: few levels, so that most rows hold exact ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (12 * 3, size), generator=generator).float() / 4


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("budget", [0, 1, 4, 8, 9, 30])
@pytest.mark.parametrize(("levels", "size"), [(1, 12), (2, 12), (5, 12), (5, 40), (1000, 40), (3, 10)])
def test_ranks_lists_and_trees_with_exact_ties(levels: int, size: int, budget: int) -> None:
    drafter, recorded = scripted(logits_with_ties(levels, levels, size)), sequence(TEXT)
    assert_same(replay(drafter, recorded, budget=budget), slowly(drafter, recorded, budget=budget))


@pytest.mark.parametrize("budget", [0, 8, 30])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_a_pruned_vocabulary(levels: int, budget: int) -> None:
    # Rows of the head for 11 of the target's tokens; 1, 2 and 8 of the text are not among them.
    ids = torch.tensor([3, 4, 5, 6, 9, 12, 20, 33, 41, 50, 60])
    drafter = scripted(logits_with_ties(levels, levels, len(ids)), target_ids=ids)
    drafted = replay(drafter, sequence(TEXT), budget=budget)
    assert_same(drafted, slowly(drafter, sequence(TEXT), budget=budget))
    unreachable = {
        (a, d) for a in range(2, 11) for d in range(3) if a + d + 1 < 12 and TEXT[a + d + 1] in (1, 2, 8)
    }
    found = {
        (int(drafted.anchors[i]), int(d))
        for i, d in zip(*np.nonzero(drafted.ranks == UNREACHABLE), strict=True)
    }
    assert found == unreachable
    assert np.isnan(drafted.log_probs[drafted.ranks == UNREACHABLE]).all()


def test_a_vocabulary_smaller_than_the_list() -> None:
    drafter, recorded = scripted(logits_with_ties(0, 3, 5)), sequence([0, 1, 2, 3, 4, 0])
    drafted = replay(drafter, recorded, budget=30)
    assert drafted.top_ids.shape == drafted.top_log_probs.shape == (3, 3, 5)
    assert_same(drafted, slowly(drafter, recorded, budget=30))
    empty = replay(drafter, sequence([0, 1, 2]), budget=30)
    assert empty.top_ids.shape == empty.top_log_probs.shape == (0, 3, 5)


def test_a_head_without_rows_for_the_last_tokens_reaches_the_others() -> None:
    # The target's vocabulary is padded to 64, the drafter's own head has 10 rows.
    drafter, recorded = scripted(logits_with_ties(0, 100, 10)), sequence([3, 1, 4, 63, 5, 10, 9])
    drafted = replay(drafter, recorded, budget=4)
    assert_same(drafted, slowly(drafter, recorded, budget=4))
    assert (drafted.ranks == UNREACHABLE).tolist() == [
        [True, False, True],  # 63, 5, 10
        [False, True, False],  # 5, 10, 9
        [True, False, False],  # 10, 9
        [False, False, False],  # 9
    ]


def test_references_end_with_the_sequence() -> None:
    drafted = replay(scripted(logits_with_ties(0, 9, 12)), sequence([0, 1, 2, 3, 4, 5]), budget=4)
    assert drafted.anchors.tolist() == [2, 3, 4]
    assert (drafted.ranks == NO_REFERENCE).tolist() == [
        [False] * 3,
        [False, False, True],
        [False, True, True],
    ]
    assert np.isnan(drafted.log_probs).tolist() == (drafted.ranks == NO_REFERENCE).tolist()
    assert drafted.length == 6
    assert replay(scripted(logits_with_ties(0, 9, 12)), sequence([0, 1, 2, 3, 4, 5]), budget=0).order is None


@pytest.mark.parametrize("budget", [0, 4])
def test_a_completion_of_one_token_has_no_rounds(budget: int) -> None:
    drafted = replay(scripted(logits_with_ties(0, 9, 12)), sequence([0, 1, 2]), budget=budget)
    assert {name: array.shape for name, array in arrays_of(drafted).items()} == {
        "anchors": (0,),
        "ranks": (0, 3),
        "log_probs": (0, 3),
        "top_ids": (0, 3, TOP_LIST),
        "top_log_probs": (0, 3, TOP_LIST),
    } | ({"order": (0, 3)} if budget else {})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_output_that_is_not_finite_stops_the_replay(value: float) -> None:
    table = logits_with_ties(0, 9, 12)
    table[5 * 3 + 1, 7] = value
    with pytest.raises(
        CheckpointError, match=r"not finite in 1 of 27 rows \(torch.float64\); try --dtype float32"
    ):
        replay(scripted(table), sequence(TEXT), budget=4)


def test_weights_that_overflow_stop_the_replay() -> None:
    drafter = drafter_of("draftA8")
    drafter.norm.weight = torch.nn.Parameter(torch.full((64,), torch.inf), requires_grad=False)
    with pytest.raises(CheckpointError, match="not finite in"):
        replay(drafter, golden_sequence("draftA8"), budget=4)


# --- in pieces -------------------------------------------------------------------------------------------


def golden_sequence(name: str, prompt_len: int = 9) -> Recorded:
    blocks = blocks_of(name)
    tokens, features = (
        torch.from_numpy(blocks["token_ids"]).long(),
        torch.from_numpy(blocks["context_feature"]),
    )
    return Recorded(tokens, prompt_len, features)


def noise_sequence(drafter: DFlash, length: int, *, prompt_len: int, seed: int) -> Recorded:
    generator = torch.Generator().manual_seed(seed)
    width = len(drafter.wiring.taps) * drafter.wiring.hidden_size
    return Recorded(
        torch.randint(256, (length,), generator=generator),
        prompt_len,
        torch.randn(length, width, generator=generator),
    )


@pytest.mark.parametrize("name", ["draftA8", "draftB8"])
def test_chosen_anchors_are_drafted_as_among_all(name: str) -> None:
    drafter, recorded = drafter_of(name), golden_sequence(name)
    whole = replay(drafter, recorded, budget=16)
    assert whole.anchors.tolist() == list(range(9, 63))
    some = [9, 10, 31, 62]
    assert_same(replay(drafter, recorded, budget=16, anchors=torch.tensor(some)), chosen(whole, some))


def test_slices_of_anchors_meet_without_a_seam() -> None:
    drafter = drafter_of("draftA8")
    recorded = noise_sequence(drafter, 6000, prompt_len=10, seed=0)
    anchors = recorded.anchors[-260:]
    w = drafter.wiring
    # One layer's scores of these anchors, 4 bytes each, are more than a slice holds.
    assert 4 * w.num_heads * w.block_size * len(anchors) * 6000 > 1.4 * (1 << 27)
    whole = replay(drafter, recorded, budget=4, anchors=anchors)
    assert whole.anchors.tolist() == anchors.tolist()
    for some in (anchors[:2], anchors[160:190:7], anchors[-1:]):
        part = replay(drafter, recorded, budget=4, anchors=some)
        assert_same(part, chosen(whole, some.tolist()), atol=1e-4)


def test_slices_of_rows_meet_without_a_seam() -> None:
    drafter, recorded = drafter_of("draftA8"), golden_sequence("draftA8")
    wide = torch.cat((drafter.ends.head, torch.randn(70_000, 64, generator=torch.Generator().manual_seed(0))))
    drafter.ends = dataclasses.replace(drafter.ends, head=wide)
    rows = len(recorded.anchors) * drafter.wiring.depth
    assert rows > 1.4 * (1 << 26) / (4 * len(wide))  # more logits than a slice holds
    whole = replay(drafter, recorded, budget=4)
    parts = [replay(drafter, recorded, budget=4, anchors=anchors) for anchors in recorded.anchors.split(20)]
    assert_same(joined(parts), whole, atol=1e-4)


@pytest.mark.parametrize("name", ["draftA8", "draftA16"])
def test_what_the_target_showed_at_the_anchor_and_later_is_not_read(name: str) -> None:
    drafter, recorded = drafter_of(name), golden_sequence(name)
    whole = replay(drafter, recorded, budget=16)
    for anchor in (9, 30, 61):
        features = recorded.features.clone()
        features[anchor:] = torch.randn(features[anchor:].shape, generator=torch.Generator().manual_seed(0))
        blind = replay(drafter, dataclasses.replace(recorded, features=features), budget=16)
        until = list(range(9, anchor + 1))
        assert_same(chosen(blind, until), chosen(whole, until), atol=0)
        # The next anchor does read this one's features, so that the check above could fail.
        following = [anchor + 1]
        assert not np.allclose(
            chosen(blind, following).log_probs, chosen(whole, following).log_probs, atol=1e-3, equal_nan=True
        )


def test_parts_are_joined_in_the_order_of_their_anchors() -> None:
    drafter, recorded = drafter_of("draftA8"), golden_sequence("draftA8")
    whole = replay(drafter, recorded, budget=8)
    parts = [
        chosen(whole, list(range(20, 63))),
        chosen(whole, [9, 11, 13]),
        chosen(whole, [10, 12, *range(14, 20)]),
    ]
    assert_same(joined(parts), whole, atol=0)


@pytest.mark.parametrize("width", [127, 64, 192])
def test_features_of_other_taps_are_refused(width: int) -> None:
    recorded = golden_sequence("draftA8")
    short = Recorded(recorded.tokens, recorded.prompt_len, torch.zeros(64, width))
    with pytest.raises(RecordingError) as caught:
        replay(drafter_of("draftA8"), short, budget=0)
    assert f"the features are [64, {width}], expected [64, 128]" in str(caught.value)
    with pytest.raises(RecordingError, match="the features are"):
        next(replay_walks(drafter_of("draftA8"), [recorded, short], budget=0, next_anchors=lambda *_: []))


# --- walks side by side ----------------------------------------------------------------------------------


def chain_walk(sequences: Sequence[Recorded]) -> Callable[[int, Drafted | None], list[int]]:
    """Where the chain's walk goes next."""

    def next_anchors(i: int, drafted: Drafted | None) -> list[int]:
        anchor = sequences[i].prompt_len
        if drafted is not None:
            hits = np.cumprod(drafted.ranks[-1] == 0).sum()
            anchor = int(drafted.anchors[-1] + hits) + 1
        return [anchor] if anchor <= len(sequences[i].tokens) - 2 else []

    return next_anchors


def sequences_for(drafter: DFlash) -> list[Recorded]:
    """Sequences of different lengths, one of them without a round, with references that are sometimes hit."""
    sequences = [
        noise_sequence(drafter, n, prompt_len=p, seed=n) for n, p in ((40, 3), (12, 5), (9, 8), (70, 50))
    ]
    for recorded in sequences:
        for anchor in range(recorded.prompt_len, len(recorded.tokens) - 3, 4):
            first = replay(drafter, recorded, budget=0, anchors=torch.tensor([anchor])).top_ids[0, :2, 0]
            recorded.tokens[anchor + 1 : anchor + 3] = torch.from_numpy(first).long()
    return sequences


@pytest.mark.parametrize("convention", [None, "speculators", "zlab_2026_08"])
def test_walks_side_by_side_draft_what_replay_drafts_there(convention: str | None) -> None:
    sliding = (
        {}
        if convention is None
        else {
            "convention": convention,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    drafter = drafter_of("draftA8", **sliding)
    sequences = sequences_for(drafter)
    ended = dict(replay_walks(drafter, sequences, budget=16, next_anchors=chain_walk(sequences)))
    assert set(ended) == {0, 1, 2, 3}
    assert ended[2].anchors.tolist() == []
    for i, recorded in enumerate(sequences):
        whole = replay(drafter, recorded, budget=16)
        assert_same(ended[i], chosen(whole, ended[i].anchors.tolist()))
        blocks = Blocks(whole.anchors, whole.ranks, recorded.prompt_len, whole.length)
        assert walk_blocks(Policy("chain"), blocks).anchors.tolist() == ended[i].anchors.tolist()
    streaks = [np.cumprod(d.ranks == 0, axis=1).sum(axis=1).max() for d in ended.values() if len(d.ranks)]
    assert max(streaks) >= 2  # walks that skip anchors


def test_several_anchors_of_one_sequence_are_drafted_in_one_pass() -> None:
    drafter = drafter_of("draftA8")
    sequences = sequences_for(drafter)
    wanted = {0: [[9, 5, 4], [3], []], 1: [[7], []], 2: [[]], 3: [[50, 60], [51, 68], []]}
    steps: dict[int, int] = dict.fromkeys(wanted, 0)

    def next_anchors(i: int, drafted: Drafted | None) -> list[int]:
        steps[i] += 1
        return wanted[i][steps[i] - 1]

    for i, drafted in replay_walks(drafter, sequences, budget=4, next_anchors=next_anchors):
        anchors = sorted(itertools.chain.from_iterable(wanted[i]))
        assert drafted.anchors.tolist() == anchors
        if anchors:
            assert_same(drafted, replay(drafter, sequences[i], budget=4, anchors=torch.tensor(anchors)))
    assert steps == {i: len(lists) for i, lists in wanted.items()}


def test_more_walks_than_fit_in_a_slice() -> None:
    drafter = drafter_of("draftA8")
    w, length = drafter.wiring, 3000
    sequences = [noise_sequence(drafter, length, prompt_len=10, seed=i) for i in range(3)]
    every = list(range(2900, 2955))
    assert 4 * w.num_heads * w.block_size * (3 * len(every)) * (3 * length) > 1.4 * (1 << 27)

    def next_anchors(i: int, drafted: Drafted | None) -> list[int]:
        return every if drafted is None else []

    ended = dict(replay_walks(drafter, sequences, budget=4, next_anchors=next_anchors))
    for i, recorded in enumerate(sequences):
        assert ended[i].anchors.tolist() == every
        some = every[10 * i :: 20]  # the middle sequence is drafted in two slices
        alone = replay(drafter, recorded, budget=4, anchors=torch.tensor(some))
        assert_same(chosen(ended[i], some), alone, atol=1e-4)


def test_bfloat16_is_replayed() -> None:
    name = "draftA8"
    target = tensors_of(config_of(name)["target"])
    ends = [as_torch(target[key]).bfloat16() for key in ("model.embed_tokens.weight", "lm_head.weight")]
    drafter = DFlash(wiring_of(name), Ends(*ends)).bfloat16().requires_grad_(False)
    drafter.load_state_dict({key: as_torch(stored) for key, stored in tensors_of(name).items()})
    recorded = golden_sequence(name)
    narrow = replay(drafter, dataclasses.replace(recorded, features=recorded.features.bfloat16()), budget=16)
    wide = replay(drafter_of(name), recorded, budget=16)
    assert narrow.log_probs.dtype == np.float32
    assert float((narrow.ranks == wide.ranks).mean()) > 0.8
    assert float(np.nanmean(np.abs(narrow.log_probs - wide.log_probs))) < 0.05


def test_a_drafter_is_what_replay_asks_for() -> None:
    assert isinstance(scripted(logits_with_ties(0, 3, 12)), Drafter)
