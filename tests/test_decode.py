"""The online loop against rounds that other code decoded, and against the target's own greedy text."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgauge.acceptance import Policy
from draftgauge.configs import read_wiring
from draftgauge.decode import Decoded, decode
from draftgauge.drafters import Context, Ends
from draftgauge.drafters.dflash import DFlash
from draftgauge.errors import CheckpointError, InputError, PromptError, TargetError
from draftgauge.target import Target, load_target
from draftgauge.wiring import Wiring
from tests.golden import MODELS, config_of, drafter_of, wiring_of

E2E = {
    path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "golden_e2e").glob("*.json")
}
SLIDING = E2E.pop("swa_pypi")
CASES = sorted(E2E)
TargetOf = Callable[..., Target]


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> TargetOf:
    """A tiny target by its name, its stop tokens, and what its config says beside the golden one."""

    @cache
    def load(name: str, stops: tuple[int, ...], **config: Any) -> Target:
        golden, folder = config_of(name), tmp_path_factory.mktemp(name)
        kind = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[golden["kind"]]
        described = {"model_type": golden["kind"], "architectures": [kind], "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(described | golden["config"] | config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops) or None}))
        shutil.copy(MODELS / f"{name}.safetensors", folder / "model.safetensors")
        return load_target(folder)

    return load


def reference_of(case: dict[str, Any]) -> list[int]:
    """The case's prompt and greedy text up to the first stop token."""
    tokens, prompt = case["target_greedy_ids"], len(case["prompt_ids"])
    stops = [i for i, t in enumerate(tokens) if i >= prompt and t in (case["stop_token_ids"] or ())]
    return tokens[: stops[0] + 1] if stops else tokens


def run(target_of: TargetOf, case: dict[str, Any], policy: str, drafter: Any = None) -> Decoded:
    return decode(
        target_of(case["target"], tuple(case["stop_token_ids"] or ())),
        drafter or drafter_of(case["draft"]),
        prompt_ids=case["prompt_ids"],
        policy=Policy.parse(policy),
        max_new_tokens=case["max_new_tokens"],
    )


def cut_at_end(lengths: Sequence[int], *, room: int) -> Iterator[tuple[int, int]]:
    """What golden rounds, which overshoot, accept and commit of a sequence with `room` tokens to come."""
    for length in lengths:
        if room > 0:
            yield min(length - 1, room), min(length, room)
        room -= length


def taken(decoded: Decoded) -> list[tuple[int, int]]:
    return [(r.accepted, r.committed) for r in decoded.rounds]


@pytest.mark.parametrize("name", CASES)
def test_chain_rounds_are_those_of_the_reference_loop(target_of: TargetOf, name: str) -> None:
    case = E2E[name]
    decoded, reference = run(target_of, case, "chain"), reference_of(case)
    room = len(reference) - len(case["prompt_ids"]) - 1
    assert decoded.tokens == reference
    assert taken(decoded) == list(cut_at_end(case["zlab_head"]["acceptance_lengths"], room=room))
    starts = [
        len(reference) - 1 - room + sum(c for _, c in taken(decoded)[:i]) for i in range(len(decoded.rounds))
    ]
    assert [r.anchor for r in decoded.rounds] == starts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", ["1", "2", "4", "8", "16", "64", "256"])
def test_tree_rounds_are_those_of_the_reference_loop(target_of: TargetOf, name: str, budget: str) -> None:
    case = E2E[name]
    golden = case["ddtree"][budget]
    decoded, reference = run(target_of, case, f"ddtree{budget}"), reference_of(case)
    assert decoded.tokens == reference
    expected = list(
        cut_at_end(golden["acceptance_lengths"], room=len(reference) - len(case["prompt_ids"]) - 1)
    )
    # Near the end the reference loop's block may be cut; from there on it drafts something else.
    whole = min(golden["rounds_with_truncated_block"], default=len(expected))
    assert taken(decoded)[:whole] == expected[:whole]
    assert whole < len(golden["acceptance_lengths"]) or len(decoded.rounds) == len(expected)


@pytest.mark.parametrize(
    ("name", "budget"), [("draftA8_P5_stop", "8"), ("draftB8_P1", "4"), ("draftA16_P5", "16")]
)
def test_trees_are_those_of_the_reference_loop_node_for_node(
    target_of: TargetOf, name: str, budget: str
) -> None:
    golden = E2E[name]["ddtree"][budget]
    whole = min(golden["rounds_with_truncated_block"], default=len(golden["round_trees"]))
    drafted = [r.nodes for r in run(target_of, E2E[name], f"ddtree{budget}").rounds][:whole]
    expected = golden["round_trees"][: len(drafted)]
    assert len(drafted) >= 7
    assert [list(nodes.tokens) for nodes in drafted] == [tree["node_token_ids"] for tree in expected]
    assert [list(nodes.depths) for nodes in drafted] == [tree["node_depths"] for tree in expected]
    assert [[-1, *nodes.parents] for nodes in drafted] == [tree["parents"] for tree in expected]


def wired(wiring: Wiring, drafter: DFlash) -> DFlash:
    """The drafter's weights as another function."""
    other = DFlash(wiring, drafter.ends)
    other.load_state_dict(drafter.state_dict())
    return other


@pytest.mark.parametrize("name", sorted(SLIDING))
def test_sliding_rounds_are_those_of_the_reference_loop(target_of: TargetOf, name: str) -> None:
    golden, draft = SLIDING[name], name.partition("_")[0]
    plain, overrides = drafter_of(draft), golden["config_overrides"]
    layers = {key: overrides[key] for key in ("layer_types", "sliding_window")}
    config = {"rope_theta": 10000.0, **config_of(draft)["config"], **overrides}
    wiring = read_wiring(
        config=config,
        config_source="config.json",
        shapes={key: tuple(value.shape) for key, value in plain.state_dict().items()},
        given={} if "is_causal" in overrides else {"convention": "zlab_2026_08", **layers},
    )
    case = {"target": "targetA", "stop_token_ids": None, "max_new_tokens": 40, **golden}
    decoded = run(target_of, case, "chain", wired(wiring, plain))
    assert decoded.tokens == golden["output_ids"]
    room = len(decoded.tokens) - len(golden["prompt_ids"]) - 1
    # The reference loop drafts a shorter block once a whole one does not fit.
    whole = sum(len(decoded.tokens) - 1 - r.anchor >= wiring.block_size for r in decoded.rounds)
    assert whole >= 5
    expected = list(cut_at_end(golden["acceptance_lengths"], room=room))
    assert taken(decoded)[:whole] == expected[:whole]


def test_a_shorter_chain_verifies_the_head_of_the_same_blocks(target_of: TargetOf) -> None:
    case = E2E["draftA8_P5"]
    full, short = run(target_of, case, "chain"), run(target_of, case, "chain3")
    assert short.tokens == full.tokens
    by_anchor = {r.anchor: r for r in full.rounds}
    shared = [(r, by_anchor[r.anchor]) for r in short.rounds if r.anchor in by_anchor]
    assert any(longer.accepted > 3 for _, longer in shared)
    for shorter, longer in shared:
        assert shorter.nodes.tokens == longer.nodes.tokens[:3]
        assert shorter.accepted == min(longer.accepted, 3)


UNTRAINED = {
    "as z-lab's": {},
    "predicting from the anchor": {"predicts_from_anchor": True},
    "mask embedding": {"mask_embedding": True, "mask_token_id": None},
    "taps the embedding, last layer before the norm": {"taps": (5, -1), "tap_after_final_norm": False},
    "half the vocabulary": {"head": "own", "vocabulary_map": "absolute"},
}


@pytest.mark.parametrize("policy", ["chain", "chain2", "ddtree9"])
@pytest.mark.parametrize("fields", UNTRAINED.values(), ids=UNTRAINED.keys())
def test_output_is_the_targets_whatever_the_drafter(
    target_of: TargetOf, fields: dict[str, Any], policy: str
) -> None:
    case, ends = E2E["draftA8_P33"], drafter_of("draftA8").ends
    if "vocabulary_map" in fields:
        ids = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:128]
        ends = Ends(ends.embedding, ends.head[ids], ids)
    torch.manual_seed(0)
    drafter = DFlash(dataclasses.replace(wiring_of("draftA8"), **fields), ends)
    decoded = run(target_of, case, policy, drafter)
    assert decoded.tokens == case["target_greedy_ids"]
    drafted = {token for r in decoded.rounds for token in r.nodes.tokens}
    assert ends.target_ids is None or drafted <= set(ends.target_ids.tolist())
    depths = {max(r.nodes.depths) for r in decoded.rounds}
    assert max(depths) <= (8 if "predicts_from_anchor" in fields else 7)
    assert policy != "chain" or depths == {drafter.wiring.depth}


@pytest.mark.parametrize("policy", ["chain", "ddtree8"])
def test_the_order_of_a_pruned_head_does_not_matter(target_of: TargetOf, policy: str) -> None:
    case, plain = E2E["draftA8_P5"], drafter_of("draftA8")
    ids = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    shuffled = DFlash(plain.wiring, Ends(plain.ends.embedding, plain.ends.head[ids], ids))
    shuffled.load_state_dict(plain.state_dict())
    ours, theirs = run(target_of, case, policy, shuffled), run(target_of, case, policy)
    assert [r.nodes for r in ours.rounds] == [r.nodes for r in theirs.rounds]
    assert taken(ours) == taken(theirs)


@pytest.mark.parametrize("policy", ["chain", "ddtree16"])
def test_eager_attention_takes_the_same_rounds(target_of: TargetOf, policy: str) -> None:
    case = E2E["draftA8_P5"]
    target = target_of("targetA", (), of_its_own="eager")
    target.model.set_attn_implementation("eager")
    eager = decode(
        target,
        drafter_of("draftA8"),
        prompt_ids=case["prompt_ids"],
        policy=Policy.parse(policy),
        max_new_tokens=40,
    )
    assert taken(eager) == taken(run(target_of, case, policy))


def test_every_position_passes_through_the_target_once_per_round_that_drafts_it(target_of: TargetOf) -> None:
    case, rows = E2E["draftA8_P5"], []
    embedding = target_of("targetA", ()).model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].shape[1]))
    decoded = run(target_of, case, "ddtree4")
    handle.remove()
    assert rows == [len(case["prompt_ids"])] + [1 + 4] * len(decoded.rounds)


FIRST_ROUND = {**E2E["draftA8_P5"], "max_new_tokens": 4}


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Drafts the scores [D, V] that its script has for the anchor."""

    script: Callable[[int], torch.Tensor]
    wiring: Wiring
    ends: Ends

    def context(self, features: torch.Tensor, *, first_position: int = 0) -> Context:
        nothing = torch.zeros(1, len(features), 1)
        return Context((nothing,), (nothing,))

    def draft(
        self,
        context: Context,
        *,
        anchors: torch.Tensor,
        anchor_tokens: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.script(int(anchors[0]))[None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def scores_of(*probabilities: dict[int, float]) -> torch.Tensor:
    scores = torch.full((len(probabilities), 256), -100.0)
    for row, entries in zip(scores, probabilities, strict=True):
        row[list(entries)] = torch.tensor(list(entries.values())).log()
    return scores


def scripted(script: Callable[[int], torch.Tensor], *, depth: int) -> ScriptedDrafter:
    wiring = dataclasses.replace(wiring_of("draftA8"), block_size=depth + 1)
    return ScriptedDrafter(script, wiring, drafter_of("draftA8").ends)


def fixed(*probabilities: dict[int, float]) -> ScriptedDrafter:
    return scripted(lambda _: scores_of(*probabilities), depth=len(probabilities))


@pytest.mark.parametrize(
    ("policy", "max_new_tokens", "rounds"),
    [
        ("chain", 17, [(7, 8), (7, 8)]),
        ("chain", 16, [(7, 8), (7, 7)]),
        ("chain", 21, [(7, 8), (7, 8), (4, 4)]),
        ("chain2", 9, [(2, 3), (2, 3), (2, 2)]),
        ("ddtree3", 9, [(3, 4), (3, 4)]),
        ("ddtree30", 17, [(7, 8), (7, 8)]),
    ],
)
def test_a_drafter_that_is_always_right(
    target_of: TargetOf, policy: str, max_new_tokens: int, rounds: list[tuple[int, int]]
) -> None:
    case = {**E2E["draftA8_P5"], "max_new_tokens": max_new_tokens}
    reference = [*case["target_greedy_ids"], *range(7)]
    oracle = scripted(
        lambda anchor: scores_of(*({t: 0.9, 0: 0.1} for t in reference[anchor + 1 :][:7])), depth=7
    )
    decoded = run(target_of, case, policy, oracle)
    assert taken(decoded) == rounds
    assert decoded.tokens == reference[: 5 + max_new_tokens]


@pytest.mark.parametrize(
    ("policy", "accepted", "odds"),
    [
        # After 144 the target says 195, then 95. Two depths of two tokens; the paths by probability are
        # 195 .6, 195-9 .42, 7 .4, 7-9 .28, 195-95 .18, 7-95 .12.
        ("chain", 1, 0.6 / 0.4),  # 195 over 7; 9 over 95 is clearer, .7 / .3
        ("chain1", 1, 0.6 / 0.4),
        ("ddtree1", 1, 0.6 / 0.42),  # 195 over the next node
        ("ddtree2", 1, 0.6 / 0.4),
        ("ddtree3", 1, 0.6 / 0.28),  # clearer: the last node over 195-95, .4 / .18
        ("ddtree4", 1, 0.28 / 0.18),  # the last node over 195-95
        ("ddtree5", 2, 0.18 / 0.12),  # 195-95 over the next node
    ],
)
def test_draft_gap_is_the_closest_decision(
    target_of: TargetOf, policy: str, accepted: int, odds: float
) -> None:
    drafter = fixed({195: 0.6, 7: 0.4}, {9: 0.7, 95: 0.3})
    first = run(target_of, FIRST_ROUND, policy, drafter).rounds[0]
    assert (first.anchor, first.accepted, first.committed) == (5, accepted, accepted + 1)
    assert first.draft_gap == pytest.approx(math.log(odds), abs=1e-5)


def test_draft_gap_of_what_was_narrowly_missed(target_of: TargetOf) -> None:
    drafter = fixed({195: 0.9, 7: 0.1}, {9: 0.51, 95: 0.49})
    first = run(target_of, FIRST_ROUND, "chain", drafter).rounds[0]
    assert first.draft_gap == pytest.approx(math.log(0.51 / 0.49), abs=1e-5)
    assert run(target_of, FIRST_ROUND, "chain1", drafter).rounds[0].draft_gap == pytest.approx(
        math.log(9), abs=1e-5
    )


def test_equal_scores_are_drafted_by_token_id(target_of: TargetOf) -> None:
    drafter = fixed({200: 0.25, 9: 0.25, 120: 0.25, 31: 0.25})
    first = run(target_of, FIRST_ROUND, "ddtree3", drafter).rounds[0]
    assert first.nodes.tokens == (9, 31, 120)
    assert run(target_of, FIRST_ROUND, "chain", drafter).rounds[0].nodes.tokens == (9,)


@pytest.mark.parametrize("policy", ["chain", "ddtree16"])
def test_target_gap_is_the_closest_choice_of_the_committed_tokens(target_of: TargetOf, policy: str) -> None:
    decoded = run(target_of, E2E["draftA8_P5"], policy)
    best = target_of("targetA", ()).model(torch.tensor([decoded.tokens])).logits[0].topk(2).values
    gap = (best[:, 0] - best[:, 1]).tolist()
    expected = [min(gap[r.anchor : r.anchor + r.committed]) for r in decoded.rounds]
    assert [r.target_gap for r in decoded.rounds] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("stops", "max_new_tokens"), [((), 1), ((144,), 40)])
def test_a_completion_that_the_prompt_pass_ends_has_no_rounds(
    target_of: TargetOf, stops: tuple[int, ...], max_new_tokens: int
) -> None:
    prompt = E2E["draftA8_P5"]["prompt_ids"]
    decoded = decode(
        target_of("targetA", stops),
        drafter_of("draftA8"),
        prompt_ids=prompt,
        policy=Policy("chain"),
        max_new_tokens=max_new_tokens,
    )
    assert decoded == Decoded([*prompt, 144], ())


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (InputError, "coverage@4 is a ceiling", {"policy": Policy("coverage", 4)}),
        (InputError, "max_new_tokens is 0", {"max_new_tokens": 0}),
        (PromptError, "no tokens", {"prompt_ids": []}),
        (TargetError, r"taps \[0, 2, 5\].*layers 0 to 3", {"target": "targetC", "drafter": "draftA16"}),
        (
            TargetError,
            "sliding_attention layers",
            {"layer_types": ("full_attention",) * 5 + ("sliding_attention",)},
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    target_of: TargetOf, error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 8, "layer_types": change.get("layer_types")}
    target = target_of(change.get("target", "targetA"), (), **(sliding if "layer_types" in change else {}))
    with pytest.raises(error, match=message):
        decode(
            target,
            drafter_of(change.get("drafter", "draftA8")),
            prompt_ids=change.get("prompt_ids", [25, 159]),
            policy=change.get("policy", Policy("chain")),
            max_new_tokens=change.get("max_new_tokens", 4),
        )


def test_a_drafter_that_is_not_finite_is_refused(target_of: TargetOf) -> None:
    drafter = fixed({195: math.nan, 7: 0.4})
    with pytest.raises(CheckpointError, match="anchor 5 is not finite"):
        run(target_of, E2E["draftA8_P5"], "chain", drafter)
