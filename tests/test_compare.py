"""Two runs side by side: paired by prompt, refused where their numbers mean different things."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.acceptance import Blocks, Policy
from draftgauge.compare import compare_runs
from draftgauge.errors import RunError
from draftgauge.runs import Plan, Run
from draftgauge.summary import PromptBlocks, summarise
from tests.test_runs import PLAN

POLICIES = (Policy("chain"), Policy("coverage", 4))


def run(name: str, streaks: Mapping[str, list[int]], plan: Plan = PLAN, policies: Any = POLICIES) -> Run:
    """A run whose chain accepts `streaks` of each prompt's rounds, of 3 draft tokens each; coverage@4 all."""
    prompts = {}
    for prompt, accepted in streaks.items():
        ranks = np.zeros((sum(accepted) + len(accepted) + 2, 3), np.int32)
        anchor = 0
        for streak in accepted:
            ranks[anchor, streak:] = 2
            anchor += streak + 1
        ranks[anchor:] = 2
        length = 1 + len(ranks) + 1
        beyond = np.arange(1, len(ranks) + 1)[:, None] + np.arange(1, 4) >= length
        ranks[beyond] = 2**31 - 1
        anchors = np.arange(1, 1 + len(ranks))
        blocks = Blocks(anchors=anchors, ranks=ranks, prompt_tokens=1, length=length)
        prompts[prompt] = PromptBlocks(None, blocks)
    summary = summarise(prompts, policies, every_anchor=True)
    return Run(Path(name), {"plan": dataclasses.asdict(plan)}, {"version": 1, "caveats": [], **summary})


# Each prompt's chain ends with two rounds of streak 0, the last of which stands before the last token.
OURS = run("late", {"a": [3, 1], "b": [2], "c": [0]})
THEIRS = run("early", {"a": [0], "b": [2], "d": [1]})


def test_prompts_are_paired_and_those_of_one_run_left_out() -> None:
    value = compare_runs(OURS, THEIRS)
    assert (value["run"], value["baseline"]) == ("late", "early")
    assert value["prompts"] == ["a", "b"]
    assert value["dropped"] == {"c": "only in late", "d": "only in early"}
    assert value["dropped_policies"] == []


def test_differences_are_those_of_the_pairs() -> None:
    """a: rounds 4, 2, 1, 1 against 1, 1, 1; b: 3, 1, 1 on both sides; c and d count nowhere."""
    value = compare_runs(OURS, THEIRS)["policies"]["chain"]
    assert value["prompts"] == {
        "a": {"run": pytest.approx(8 / 4), "baseline": pytest.approx(3 / 3)},
        "b": {"run": pytest.approx(5 / 3), "baseline": pytest.approx(5 / 3)},
    }
    tau = value["tau_response"]
    assert tau["run"] == pytest.approx((2 + 5 / 3) / 2)
    assert tau["baseline"] == pytest.approx((1 + 5 / 3) / 2)
    assert tau["difference"]["value"] == pytest.approx(1 / 2)
    assert tau["difference"]["low"] is None
    assert tau["resolvable"] is None
    pooled = value["tau_pooled"]
    assert (pooled["run"], pooled["baseline"]) == (pytest.approx(13 / 7), pytest.approx(8 / 6))
    assert pooled["difference"]["value"] == pytest.approx(13 / 7 - 8 / 6)
    streak = value["streak_pooled"]
    assert (streak["run"], streak["baseline"]) == (pytest.approx(6 / 7), pytest.approx(2 / 6))


def test_the_order_of_the_runs_is_the_sign() -> None:
    ours = compare_runs(OURS, THEIRS)["policies"]["chain"]["tau_response"]["difference"]["value"]
    theirs = compare_runs(THEIRS, OURS)["policies"]["chain"]["tau_response"]["difference"]["value"]
    assert ours == pytest.approx(-theirs)
    assert ours > 0


def test_enough_pairs_have_an_interval_around_the_difference() -> None:
    names = [f"p{i}" for i in range(12)]
    late = run("late", {name: [3, i % 4] for i, name in enumerate(names)})
    early = run("early", {name: [1, i % 3] for i, name in enumerate(names)})
    tau = compare_runs(late, early)["policies"]["chain"]["tau_response"]
    assert tau["difference"]["low"] < tau["difference"]["value"] < tau["difference"]["high"]
    assert tau["resolvable"] > 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_digest": "0" * 64}, "target: t{16} in late, 0{16} in early"),
        ({"template": "raw"}, "template: chat in late, raw in early"),
        ({"max_blocks": 50}, "--max-blocks: None in late, 50 in early"),
        ({"wiring": {"block_size": 16, "predicts_from_anchor": False}}, "block size: 8 in late, 16 in early"),
        (
            {"wiring": {"block_size": 8, "predicts_from_anchor": True}},
            "anchor row: False in late, True in early",
        ),
    ],
    ids=["target", "template", "max-blocks", "block size", "anchor row"],
)
def test_runs_that_measure_different_things_are_refused_by_name(changes: dict[str, Any], word: str) -> None:
    plan = dataclasses.replace(PLAN, wiring={"block_size": 8, "predicts_from_anchor": False})
    ours, theirs = (
        run("late", {"a": [1]}, plan),
        run("early", {"a": [1]}, dataclasses.replace(plan, **changes)),
    )
    with pytest.raises(RunError, match=f"they differ in\n  {word}\nMeasure one of them"):
        compare_runs(ours, theirs)


def test_every_reason_to_refuse_is_named_at_once() -> None:
    plan = dataclasses.replace(PLAN, wiring={"block_size": 8, "predicts_from_anchor": False})
    other = dataclasses.replace(plan, template="raw", max_blocks=2)
    with pytest.raises(RunError, match=r"(?s)template: .*\n  --max-blocks: "):
        compare_runs(run("late", {"a": [1]}, plan), run("early", {"a": [1]}, other))


def identified(made: Run, **digests: str) -> Run:
    """The run with its prompts' references identified by content."""
    for name, digest in digests.items():
        made.summary["prompts"][name]["reference_sha256"] = digest
    return made


def test_two_recordings_are_compared_where_the_references_are_the_same() -> None:
    other = dataclasses.replace(PLAN, recording_digest="0" * 64)
    ours = identified(run("late", {"a": [1], "b": [1], "c": [2]}), a="1", b="2")
    theirs = identified(run("early", {"a": [0], "b": [0], "c": [2]}, other), a="1", b="3")
    value = compare_runs(ours, theirs)
    assert value["prompts"] == ["a"]
    assert "another in the two recordings" in value["dropped"]["b"]
    assert "before references were identified" in value["dropped"]["c"]
    assert value["different"]["recording"] == {"run": "r" * 64, "baseline": "0" * 64}


def test_no_prompt_in_common_is_a_reason_to_refuse() -> None:
    with pytest.raises(RunError, match="prompts: none has the same reference in both"):
        compare_runs(run("late", {"a": [1]}), run("early", {"b": [1]}))


def test_a_run_that_is_not_trusted_is_marked() -> None:
    ours = run("late", {"a": [1]})
    ours.summary["trust"] = {"trusted": False, "failed": ["context-zeroed"], "controls": []}
    assert compare_runs(ours, run("early", {"a": [1]}))["untrusted"] == {"late": ["context-zeroed"]}


@pytest.fixture
def plan() -> Plan:
    return dataclasses.replace(PLAN, wiring={"block_size": 8, "predicts_from_anchor": False, "num_layers": 2})


@pytest.mark.parametrize(
    ("changes", "different"),
    [
        ({}, {}),
        ({"checkpoint_digest": "0" * 64}, {"checkpoint": {"run": "c" * 64, "baseline": "0" * 64}}),
        ({"dtype": "bfloat16"}, {"compute dtype": {"run": "float32", "baseline": "bfloat16"}}),
        ({"anchors": "walk"}, {"anchors": {"run": "all", "baseline": "walk"}}),
        ({"instrument": "0.2.0"}, {"draftgauge version": {"run": "0.1.0", "baseline": "0.2.0"}}),
        ({"trained_block_size": 4}, {"trained block size": {"run": 8, "baseline": 4}}),
        (
            {"wiring": {"block_size": 8, "predicts_from_anchor": False, "num_layers": 5}},
            {"wiring: num_layers": {"run": 2, "baseline": 5}},
        ),
    ],
    ids=["nothing", "checkpoint", "dtype", "anchors", "version", "trained block size", "wiring"],
)
def test_what_may_differ_is_said(plan: Plan, changes: dict[str, Any], different: dict[str, Any]) -> None:
    ours = run("late", {"a": [1]}, plan)
    value = compare_runs(ours, run("early", {"a": [1]}, dataclasses.replace(plan, **changes)))
    assert value["different"] == different
    assert not set(value["same"]) & set(different)
    assert "recording" in value["same"]


def test_policies_of_one_run_are_left_out_and_named(plan: Plan) -> None:
    more = run("late", {"a": [1]}, plan, (*POLICIES, Policy("chain", 2)))
    value = compare_runs(more, run("early", {"a": [1]}, plan))
    assert list(value["policies"]) == ["chain", "coverage4"]
    assert value["dropped_policies"] == ["chain2"]
