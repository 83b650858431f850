"""Two runs side by side: paired by prompt, refused where their numbers mean different things."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.acceptance import Blocks, Policy
from draftgauge.compare import compare_runs
from draftgauge.errors import RunError
from draftgauge.runs import BLOCKS, SUMMARY, BlockWriter, Plan, Run, new_run, open_run
from draftgauge.store import write_json
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


def stored_run(path: Path, made: Run) -> Run:
    """The run, on disk."""
    with new_run(path, made.plan, facts={}, checkpoint=()) as folder:
        with BlockWriter(folder / BLOCKS) as writer:
            writer.write("a", {"anchor": np.array([1], np.int32)})
        write_json(folder / SUMMARY, made.summary)
    return open_run(path)


def identified(made: Run, **digests: str) -> Run:
    """The run with its prompts' references identified by content."""
    for name, digest in digests.items():
        made.summary["prompts"][name]["reference_sha256"] = digest
    return made


# Each prompt's chain ends with two rounds of streak 0, the last of which stands before the last token.
OURS = run("late", {"a": [3, 1], "b": [2], "c": [0]})
THEIRS = run("early", {"a": [0], "b": [2], "d": [1]})


def test_prompts_are_paired_and_those_of_one_run_left_out() -> None:
    value = compare_runs(OURS, THEIRS)
    assert (value["run"], value["baseline"]) == ("late", "early")
    assert value["prompts"] == ["a", "b"]
    assert value["dropped"] == {"c": "only in late", "d": "only in early"}
    assert value["dropped_policies"] == {}
    assert not {"prompts", "references"} & value["same"].keys()


def test_the_turns_of_a_conversation_are_compared_as_one() -> None:
    """a and b are turns: 4 tokens and 2 in 2 rounds and 1 against 1 and 3 in 1 and 1, then two of one each."""
    ours, theirs = (
        run(name, streaks) for name, streaks in (("x", {"a": [3], "b": [1]}), ("y", {"a": [0], "b": [1]}))
    )
    for made in (ours, theirs):
        for prompt in made.summary["prompts"].values():
            prompt["conversation"] = "talk"
    value = compare_runs(ours, theirs)["policies"]["chain"]
    # Each prompt's chain ends with two more rounds of one token.
    assert value["tau_response"]["run"] == pytest.approx((4 + 2 + 4) / 6)
    assert value["tau_response"]["baseline"] == pytest.approx((1 + 2 + 4) / 6)
    assert value["tau_response"]["difference"]["n"] == 1
    assert value["prompts"]["a"] == {"run": pytest.approx(6 / 3), "baseline": pytest.approx(3 / 3)}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    ours, theirs = (
        dataclasses.replace(made, path=tmp_path / folder / "mine")
        for made, folder in ((OURS, "ours"), (THEIRS, "theirs"))
    )
    value = compare_runs(ours, theirs)
    assert (value["run"], value["baseline"]) == (str(ours.path), str(theirs.path))
    assert value["dropped"] == {"c": f"only in {ours.path}", "d": f"only in {theirs.path}"}


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
    ("ours", "theirs", "verdict"),
    [
        ([3, 3, 2, 3, 3, 3], [0, 1, 0, 0, 1, 0], "higher"),
        ([0, 1, 0, 0, 1, 0], [3, 3, 2, 3, 3, 3], "lower"),
        ([3, 0, 2, 1, 3, 0], [0, 3, 1, 2, 1, 2], "not resolved"),
        ([3, 0, 2, 1, 3, 0], [3, 0, 2, 1, 3, 0], "equal"),
        ([3, 3], [0, 0], "undecided"),
        ([3, 0], [0, 3], "undecided"),  # cancelled, not equal
        ([2] * 6, [1] * 6, "undecided"),  # all prompts differ alike: nothing says how far that would carry
    ],
)
def test_the_verdict_is_what_the_interval_says(ours: list[int], theirs: list[int], verdict: str) -> None:
    late, early = (
        run(n, {f"p{i}": [s] for i, s in enumerate(side)}) for n, side in (("l", ours), ("e", theirs))
    )
    assert compare_runs(late, early)["policies"]["chain"]["tau_response"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "words", "advice"),
    [
        (
            {"target_digest": "0" * 64},
            "target: t{16} in late, 0{16} in early",
            "No option makes the target equal",
        ),
        ({"template": "raw"}, "template: chat in late, raw in early", "eval CHECKPOINT --like early`$"),
        ({"max_blocks": 50}, "--max-blocks: no limit in late, 50 in early", "Measure one as the other was"),
        (
            {"wiring": {"block_size": 16, "predicts_from_anchor": False}},
            "block size: 8 in late, 16 in early",
            "--like early`, or with `--block-size 16`$",
        ),
        (
            {"wiring": {"block_size": 8, "predicts_from_anchor": True}},
            "anchor row: re-reads the anchor in late, predicts in early",
            "No option makes the anchor row equal",
        ),
    ],
    ids=["target", "template", "max-blocks", "block size", "anchor row"],
)
def test_runs_that_measure_different_things_are_refused_by_name(
    changes: dict[str, Any], words: str, advice: str
) -> None:
    ours, theirs = run("late", {"a": [1]}), run("early", {"a": [1]}, dataclasses.replace(PLAN, **changes))
    with pytest.raises(RunError, match=f"they differ in\n  {words}\n(?s:.*){advice}"):
        compare_runs(ours, theirs)


def test_every_reason_to_refuse_is_named_at_once() -> None:
    other = dataclasses.replace(PLAN, template="raw", max_blocks=2)
    ours, theirs = run("late", {"a": [1]}), run("early", {"b": [1], "c": [1]}, other, (Policy("chain", 2),))
    with pytest.raises(
        RunError,
        match=r"template: .*\n  --max-blocks: .*\n"
        r"  prompts: none has the same reference in both \(1 in late, 2 in early\)\n"
        r"  policies: none was measured in both\n",
    ):
        compare_runs(ours, theirs)


# --- prompts by content ----------------------------------------------------------------------------------


def test_two_recordings_are_compared_where_the_references_are_the_same() -> None:
    other = dataclasses.replace(PLAN, recording_digest="0" * 64)
    ours = identified(run("late", {"a": [1], "b": [1], "c": [2]}), a="1", b="2")
    theirs = identified(run("early", {"a": [0], "b": [0], "c": [2]}, other), a="1", b="3")
    value = compare_runs(ours, theirs)
    assert value["prompts"] == ["a"]
    assert value["dropped"] == {
        "b": "its reference is another text in the two recordings",
        "c": "another recording, and one run is from before references were identified",
    }
    assert value["different"] == {"recording": {"run": "r" * 64, "baseline": "0" * 64}}
    assert "references" not in value["same"]


def test_one_recording_needs_no_digests() -> None:
    value = compare_runs(run("late", {"a": [1]}), run("early", {"a": [0]}))
    assert value["prompts"] == ["a"]
    assert value["same"]["references"] == "token for token"


def test_a_prompt_without_a_round_is_left_out() -> None:
    """Two tokens after the prompt: the first is the prefill's, and no anchor has a reference after it."""
    short = Blocks(anchors=np.array([], int), ranks=np.zeros((0, 3), np.int32), prompt_tokens=3, length=4)
    late, early = run("late", {"a": [1]}), run("early", {"a": [0]})
    for made in (late, early):
        summary = summarise({"short": PromptBlocks(None, short)}, POLICIES, every_anchor=True)
        made.summary["prompts"].update(summary["prompts"])
    value = compare_runs(late, early)
    assert value["prompts"] == ["a"]
    assert value["dropped"] == {"short": "its completion is too short for a round"}


# --- what is said ----------------------------------------------------------------------------------------


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
        ({"trained_block_size": None}, {"trained block size": {"run": 8, "baseline": "not known"}}),
        (
            {"wiring": {"block_size": 8, "predicts_from_anchor": False, "num_layers": 5}},
            {"wiring: num_layers": {"run": 2, "baseline": 5}},
        ),
        (
            {"wiring": {"block_size": 8, "predicts_from_anchor": False, "num_layers": 2, "rope_theta": 1e4}},
            {"wiring: rope_theta": {"run": None, "baseline": 1e4}},
        ),
    ],
    ids=["nothing", "checkpoint", "dtype", "anchors", "version", "trained block size", "wiring", "new field"],
)
def test_what_may_differ_is_said(plan: Plan, changes: dict[str, Any], different: dict[str, Any]) -> None:
    ours = run("late", {"a": [1]}, plan)
    value = compare_runs(ours, run("early", {"a": [1]}, dataclasses.replace(plan, **changes)))
    assert value["different"] == different
    assert not value["same"].keys() & different.keys()
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_what_is_the_same_is_said_with_its_value(plan: Plan) -> None:
    value = compare_runs(run("late", {"a": [1]}, plan), run("early", {"a": [0]}, plan))
    assert value["same"] == {
        "target": "t" * 64,
        "template": "chat",
        "block size": 8,
        "anchor row": "re-reads the anchor",
        "--max-blocks": "no limit",
        "temperature": "greedy",
        "recording": "r" * 64,
        "checkpoint": "c" * 64,
        "compute dtype": "float32",
        "anchors": "all",
        "draftgauge version": "0.1.0",
        "trained block size": 8,
        "prompts": 1,
        "references": "token for token",
        "policies": "chain, coverage4",
        "convention": "each value under its own name",
    }


def test_policies_of_one_run_are_left_out_and_named(plan: Plan) -> None:
    more = run("late", {"a": [1]}, plan, (*POLICIES, Policy("chain", 2)))
    value = compare_runs(more, run("early", {"a": [1]}, plan))
    assert list(value["policies"]) == ["chain", "coverage4"]
    assert value["dropped_policies"] == {"chain2": "only in late"}
    assert "policies" not in value["same"]


def test_whether_each_run_is_trusted_is_said() -> None:
    ours, theirs = run("late", {"a": [1]}), run("early", {"a": [1]})
    assert compare_runs(ours, theirs)["trust"]["run"] == {"trusted": None, "failed": []}
    ours.summary["trust"] = {"trusted": False, "failed": ["context-zeroed"], "controls": []}
    theirs.summary["trust"] = {"trusted": True, "failed": [], "controls": []}
    assert compare_runs(ours, theirs)["trust"] == {
        "run": {"trusted": False, "failed": ["context-zeroed"]},
        "baseline": {"trusted": True, "failed": []},
    }
