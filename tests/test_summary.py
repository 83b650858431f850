"""From blocks that fit on a page to a run's numbers, worked out by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from draftgauge.acceptance import NO_REFERENCE, Blocks, Policy
from draftgauge.summary import PromptBlocks, summarise, units_of

X = int(NO_REFERENCE)
CHAIN, CHAIN1, WIDE = Policy("chain"), Policy("chain", 1), Policy("coverage", 4)
POLICIES = (CHAIN, CHAIN1, WIDE)


def blocks(ranks: list[list[int]], *, prompt: int = 2, stopped: bool = False) -> Blocks:
    """All anchors of a sequence, one row of ranks each."""
    anchors = np.arange(prompt, prompt + len(ranks))
    return Blocks(
        anchors=anchors,
        ranks=np.array(ranks, np.int32),
        prompt_tokens=prompt,
        length=prompt + len(ranks) + 1,
        stopped=stopped,
    )


# Two depths, P = 2. "a" has T = 6 and anchors 2, 3, 4; the chain accepts 2 (anchor 2), then stands at T-1.
A = blocks([[0, 0], [3, 0], [0, X]])
# "b" has T = 7 and anchors 2 to 5: 0 at 2, 1 at 3, then the last token at 5.
B = blocks([[3, 0], [0, 9], [0, 0], [3, X]], stopped=True)
PROMPTS = {"a": PromptBlocks("easy", A, reference_sha256="5e6f"), "b": PromptBlocks(None, B)}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summarise(PROMPTS, POLICIES, every_anchor=True)


def test_the_chain_walks_its_own_path(summary: dict[str, Any]) -> None:
    """a: anchor 2 (streak 2), done at 5. b: anchors 2 (0), 3 (1), 5 (0)."""
    value = summary["policies"]["chain"]
    assert value["label"] == "chain"
    assert value["tau_response"]["value"] == pytest.approx((3 / 1 + 4 / 3) / 2)
    assert value["tau_pooled"]["value"] == pytest.approx(7 / 4)
    assert value["streak_response"]["value"] == pytest.approx((2 / 1 + 1 / 3) / 2)
    assert value["streak_pooled"]["value"] == pytest.approx(3 / 4)
    counts = value["counts"]
    assert (counts["prompts"], counts["rounds"], counts["accepted"], counts["committed"]) == (2, 4, 3, 7)
    assert counts["accepted_histogram"] == (2, 1, 1)
    assert counts["ended_not_covered"] + counts["ended_depth"] == 4


def test_every_policy_has_its_own_walk(summary: dict[str, Any]) -> None:
    """chain(1): a at 2 (1), 4 (1, the last token); b at 2 (0), 3 (1), 5 (0)."""
    rounds = {slug: value["counts"]["rounds"] for slug, value in summary["policies"].items()}
    accepted = {slug: value["counts"]["accepted"] for slug, value in summary["policies"].items()}
    assert rounds == {"chain": 4, "chain1": 5, "coverage4": 3}
    assert accepted == {"chain": 3, "chain1": 3, "coverage4": 5}


def test_means_over_anchors_leave_out_the_censored(summary: dict[str, Any]) -> None:
    """Anchor 4 of a accepts its one token, the last: who knows how many it would have. b has none such."""
    chain = summary["policies"]["chain"]["all_anchor_streak"]
    assert chain["value"] == pytest.approx((2 + 0 + 0 + 1 + 2 + 0) / 6)
    assert summary["prompts"]["a"]["policies"]["chain"]["all_anchor_streak"] == pytest.approx(1.0)
    assert summary["prompts"]["a"]["policies"]["chain"]["uncensored_anchors"] == 2
    assert summary["prompts"]["b"]["policies"]["chain"]["uncensored_anchors"] == 4


def test_curves_rest_on_their_counts(summary: dict[str, Any]) -> None:
    curves = summary["per_depth"]
    assert curves["anchors_marginal"] == [7, 5]
    assert curves["hits"] == [4, 4]
    assert curves["marginal"] == [pytest.approx(4 / 7), pytest.approx(4 / 5)]
    assert curves["survived"] == [4, 2]
    assert curves["survival"] == [pytest.approx(4 / 7), pytest.approx(2 / 5)]
    assert curves["anchors_conditional"] == [7, 3]
    assert curves["conditional"] == [pytest.approx(4 / 7), pytest.approx(2 / 3)]
    assert curves["eal_marginal"] == pytest.approx(4 / 7 + 4 / 7 * 4 / 5)


def test_each_prompt_has_its_own_lines(summary: dict[str, Any]) -> None:
    assert list(summary["prompts"]) == ["a", "b"]
    a, b = summary["prompts"].values()
    assert (a["reference_sha256"], b["reference_sha256"]) == ("5e6f", None)
    assert (a["category"], a["prompt_tokens"], a["completion_tokens"], a["stopped"]) == ("easy", 2, 4, False)
    assert (b["category"], b["prompt_tokens"], b["completion_tokens"], b["stopped"]) == (None, 2, 5, True)
    assert a["policies"]["chain"]["tau"] == 3.0
    assert b["policies"]["chain"]["tau"] == pytest.approx(4 / 3)


def test_the_whole_is_the_sum_of_its_shards(summary: dict[str, Any]) -> None:
    shards = [summarise({name: PROMPTS[name]}, POLICIES, every_anchor=True) for name in PROMPTS]
    for slug, value in summary["policies"].items():
        for name, total in value["counts"].items():
            parts = [shard["policies"][slug]["counts"][name] for shard in shards]
            if name == "accepted_histogram":
                assert total == tuple(map(sum, zip(*parts, strict=True)))
            else:
                assert total == sum(parts)
        merged = {name: shard["prompts"][name] for shard in shards for name in shard["prompts"]}
        assert merged == summary["prompts"]


def test_the_turns_of_a_conversation_are_one_unit() -> None:
    """Five conversations of two turns, a and b: 3 rounds and 1, 7 tokens; not ten."""
    alone = {
        f"{i}/{turn}": prompt for i in range(5) for turn, prompt in ((1, PROMPTS["a"]), (2, PROMPTS["b"]))
    }
    turns = {name: dataclasses.replace(p, conversation=name[0]) for name, p in alone.items()}
    value = summarise(turns, (CHAIN,), every_anchor=True)["policies"]["chain"]
    assert value["units"] == 5
    assert value["tau_response"]["value"] == pytest.approx(7 / 4)
    assert value["tau_response"]["n"] == 5
    assert value["all_anchor_streak"]["n"] == 5
    apart = summarise(alone, (CHAIN,), every_anchor=True)["policies"]["chain"]
    assert apart["units"] == apart["tau_response"]["n"] == 10
    assert apart["tau_response"]["value"] == pytest.approx((3 + 4 / 3) / 2)
    assert apart["counts"] == value["counts"]


def test_a_prompt_named_as_a_conversation_is_not_one_of_its_turns() -> None:
    assert units_of({"81": None, "81/1": "81", "b": None, "81/2": "81"}) == [["81"], ["81/1", "81/2"], ["b"]]


def test_two_prompts_carry_no_interval_and_say_why(summary: dict[str, Any]) -> None:
    for value in summary["policies"].values():
        for name in ("tau_response", "tau_pooled", "streak_response", "streak_pooled", "all_anchor_streak"):
            assert value[name]["low"] is None
            assert value[name]["high"] is None
            assert "fewer than 5 prompts" in value[name]["reason"]


def test_conventions_differ_on_the_same_rounds(summary: dict[str, Any]) -> None:
    """a: rounds of 3; b: 1, 2, 1. Completions of 4 and 5 tokens in 1 and 3 rounds."""
    assert summary["policies"]["chain"]["conventions"] == {
        "zlab_2026_04": pytest.approx((3 + 4 / 3) / 2),
        "ddtree": pytest.approx((3 + 4 / 3) / 2),
        "zlab_2026_08": pytest.approx((3 + 4 / 3) / 2),
        "pooled": pytest.approx(7 / 4),
        "deepspec": pytest.approx(7 / 4),
        "sglang_request": pytest.approx((4 / 1 + 5 / 3) / 2),
        "specforge_bench": pytest.approx(9 / 4),
    }


def test_walks_alone_give_no_curve_and_no_mean_over_anchors(summary: dict[str, Any]) -> None:
    """The chain and coverage@4 visit 2 of a and 2, 3, 5 of b."""
    walked = {
        "a": PromptBlocks("easy", dataclasses.replace(A, anchors=A.anchors[:1], ranks=A.ranks[:1])),
        "b": PromptBlocks(
            None, dataclasses.replace(B, anchors=B.anchors[[0, 1, 3]], ranks=B.ranks[[0, 1, 3]])
        ),
    }
    value = summarise(walked, (CHAIN,), every_anchor=False)
    assert value["per_depth"] is None
    assert value["absent"].keys() == {"per_depth", "all_anchor_streak"}
    assert "all_anchor_streak" not in value["policies"]["chain"]
    whole = summary["policies"]["chain"]
    assert value["policies"]["chain"] == {k: v for k, v in whole.items() if k != "all_anchor_streak"}


def test_what_is_null_has_a_reason() -> None:
    """One prompt, one round: no design effect; no anchor with a second token: no curve at depth 2."""
    value = summarise({"a": PromptBlocks(None, blocks([[0, X]]))}, (CHAIN,), every_anchor=True)
    assert value["per_depth"]["marginal"] == [1.0, None]
    assert value["per_depth"]["eal_marginal"] is None
    assert value["policies"]["chain"]["design_effect"] is None
    assert value["policies"]["chain"]["all_anchor_streak"]["value"] is None
    assert value["prompts"]["a"]["policies"]["chain"]["all_anchor_streak"] is None
    assert value["absent"].keys() == {"per_depth", "design_effect"}


def test_nothing_is_absent_where_everything_is_known(summary: dict[str, Any]) -> None:
    assert summary["absent"] == {}


def hits(text: str) -> PromptBlocks:
    """One prompt: at each anchor the first draft token is right (1) or wrong (0), and the second is wrong."""
    drawn = blocks([[0 if hit == "1" else 9, 9] for hit in text[:-1]] + [[9, X]])
    order = np.where(drawn.ranks == 0, 1, NO_REFERENCE).astype(np.int32)
    return PromptBlocks(None, dataclasses.replace(drawn, order=order, order_budget=1))


@pytest.mark.parametrize("policy", [CHAIN1, Policy("ddtree", 1)], ids=lambda policy: policy.slug)
def test_no_interval_reaches_beyond_the_possible(policy: Policy) -> None:
    """Five prompts accept nearly nothing, or a token in nearly every round; both policies accept one at most."""
    little = ["0" * 12] * 2 + ["1" + "0" * 11] * 2 + ["1010" + "0" * 8]
    much = ["10" * 6] * 2 + ["10" * 5 + "00"] * 2 + ["10" * 4 + "0000"]
    for texts, end in ((little, "low"), (much, "high")):
        prompts = {str(i): hits(text) for i, text in enumerate(texts)}
        value = summarise(prompts, (policy,), every_anchor=True)["policies"][policy.slug]
        for name, least in (("tau", 1), ("streak", 0)):
            for estimate in (value[f"{name}_response"], value[f"{name}_pooled"]):
                assert estimate["low"] < estimate["value"] < estimate["high"]
                assert estimate[end] == {"low": least, "high": least + 1}[end]
                assert estimate["method"].endswith(f"; cut to the possible {least} to {least + 1}")
        assert 0 <= value["all_anchor_streak"]["low"] < value["all_anchor_streak"]["high"] <= 1


def test_the_chain_may_accept_its_whole_depth() -> None:
    """Of two draft tokens the second is never right here: its tau may be 3, and that of five prompts is below 2."""
    much = ["10" * 6] * 2 + ["10" * 5 + "00"] * 2 + ["10" * 4 + "0000"]
    prompts = {str(i): hits(text) for i, text in enumerate(much)}
    value = summarise(prompts, (CHAIN,), every_anchor=True)["policies"]["chain"]["tau_response"]
    assert 2 < value["high"] < 3
    assert "cut" not in value["method"]
