"""The main path on tiny models, its numbers counted again from blocks.parquet in slow plain Python."""

import dataclasses
import heapq
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from draftgauge.acceptance import Policy
from draftgauge.errors import CheckpointError, InputError, RecordingError, RunError, WiringError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.record import Request, record_target
from draftgauge.recording import Recording
from draftgauge.runs import Run, list_runs
from draftgauge.stated import Stated
from tests import tiny

NONE = 2**31 - 1
BUDGETS = (4, 8, 16, 64, 256, 1024)
SLUGS = ("chain", "chain2", "chain5", *(f"ddtree{n}" for n in BUDGETS), "coverage2")
POLICIES = tuple(Policy.parse(slug) for slug in SLUGS)
REPORTED = {*SLUGS, "coverage4", "coverage8"}


@cache
def recorded(drafter: str) -> Recording:
    if drafter == "draftA8":
        return tiny.recording()
    target = tiny.target_dir(tiny.workshop() / "targetC", "targetC")
    request = Request(taps=(1, 3), max_new_tokens=tiny.NEW_TOKENS)
    return record_target(target, tiny.prompt_set(), request=request, root=tiny.workshop() / "recordings")


@cache
def checkpoint(drafter: str) -> Path:
    folder = tiny.workshop() / "evaluated" / drafter
    return folder if folder.exists() else tiny.drafter_dir(folder, drafter)


@cache
def run_of(drafter: str, **options: Any) -> Run:
    asked = Options(policies=POLICIES, **options)
    return evaluate_checkpoint(
        checkpoint(drafter), recorded(drafter).path, asked, root=tiny.workshop() / "all runs"
    )


# --- the slow reference -------------------------------------------------------------------------------


def rows_of(run: Run) -> dict[str, dict[int, dict[str, Any]]]:
    """Per prompt and anchor, the row of blocks.parquet."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in run.blocks().to_pylist():
        rows.setdefault(row["prompt"], {})[row["anchor"]] = row
    return rows


def leading(accepted: Sequence[bool]) -> int:
    return next((d for d, yes in enumerate(accepted) if not yes), len(accepted))


def best_nodes(rows: Sequence[Sequence[float]], budget: int) -> set[tuple[int, ...]]:
    """The best paths of a draft tree, by a plain heap."""
    heap, best = [(-rows[0][0], (0,))], set()
    while heap and len(best) < budget:
        score, path = heapq.heappop(heap)
        best.add(path)
        d, r = len(path) - 1, path[-1]
        if r + 1 < min(len(rows[d]), budget):
            heapq.heappush(heap, (score + rows[d][r] - rows[d][r + 1], (*path[:-1], r + 1)))
        if d + 1 < len(rows):
            heapq.heappush(heap, (score - rows[d + 1][0], (*path, 0)))
    return best


def streak(slug: str, row: Mapping[str, Any]) -> int:
    policy, ranks = Policy.parse(slug), row["rank"]
    if policy.kind == "chain":
        return min(leading([r == 0 for r in ranks]), policy.n or len(ranks))
    if policy.kind == "coverage":
        return leading([r < policy.n for r in ranks])
    assert policy.n is not None
    if policy.n <= 8:  # the file keeps the eight best of every depth, which is all that such a tree can hold
        flat, depth = row["top_log_prob"], len(ranks)
        nodes = best_nodes([flat[8 * d : 8 * d + 8] for d in range(depth)], policy.n)
        return max((d for d in range(1, depth + 1) if tuple(ranks[:d]) in nodes), default=0)
    return leading([position <= policy.n for position in row["tree_position"]])


def walk(
    slug: str, rows: Mapping[int, Mapping[str, Any]], prompt_len: int, length: int
) -> list[dict[str, int]]:
    rounds, anchor = [], prompt_len
    while anchor <= length - 2:
        accepted = streak(slug, rows[anchor])
        rounds.append({"anchor": anchor, "accepted": accepted, "room": length - 1 - anchor})
        anchor += accepted + 1
    return rounds


def why(slug: str, row: Mapping[str, Any], accepted: int) -> str:
    policy, ranks = Policy.parse(slug), row["rank"]
    limit = min(policy.n, len(ranks)) if policy.kind == "chain" and policy.n else len(ranks)
    if accepted == limit:
        return "depth"
    if ranks[accepted] == NONE:
        return "reference"
    width = 1 if policy.kind == "chain" else policy.n
    return "not_covered" if ranks[accepted] >= width else "not_selected"


def conventions(walks: Sequence[list[dict[str, int]]], stops: Sequence[bool], tokens: Sequence[int]) -> Any:
    """The tables of measurement.md, one response after the other."""
    full = [[r["accepted"] + 1 for r in rounds] for rounds in walks]
    cut = [[min(r["accepted"] + 1, r["room"]) for r in rounds] for rounds in walks]
    # A response that ends with its stop token: the round that accepts it as a draft has no bonus.
    deep = [c if stopped else f for c, f, stopped in zip(cut, full, stops, strict=True)]
    count = sum(map(len, walks))
    return {
        "zlab_2026_04": fmean(map(fmean, full)),
        "ddtree": fmean(map(fmean, full)),
        "zlab_2026_08": fmean(map(fmean, cut)),
        "pooled": sum(map(sum, full)) / count,
        "deepspec": sum(map(sum, deep)) / count,
        "sglang_request": fmean(t / len(rounds) for t, rounds in zip(tokens, walks, strict=True)),
        "specforge_bench": sum(tokens) / count,
    }


# --- the numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", sorted(REPORTED))
@pytest.mark.parametrize("drafter", ["draftA8", "draftC4"])
def test_every_number_is_what_plain_counting_gives(drafter: str, slug: str) -> None:
    run, items = run_of(drafter), recorded(drafter).items
    rows = rows_of(run)
    walks = {item.id: walk(slug, rows[item.id], item.prompt_len, item.length) for item in items}
    value, prompts = run.summary["policies"][slug], run.summary["prompts"]

    committed = {n: sum(min(r["accepted"] + 1, r["room"]) for r in rounds) for n, rounds in walks.items()}
    accepted = {name: sum(r["accepted"] for r in rounds) for name, rounds in walks.items()}
    count = sum(map(len, walks.values()))
    assert value["tau_response"]["value"] == pytest.approx(fmean(committed[n] / len(walks[n]) for n in walks))
    assert value["tau_pooled"]["value"] == pytest.approx(sum(committed.values()) / count)
    assert value["streak_response"]["value"] == pytest.approx(
        fmean(accepted[n] / len(walks[n]) for n in walks)
    )
    assert value["streak_pooled"]["value"] == pytest.approx(sum(accepted.values()) / count)

    ends = [why(slug, rows[n][r["anchor"]], r["accepted"]) for n, rounds in walks.items() for r in rounds]
    streaks = [r["accepted"] for rounds in walks.values() for r in rounds]
    depth = len(rows["one"][1]["rank"])
    assert value["counts"] == {
        "prompts": len(items),
        "rounds": count,
        "accepted": sum(accepted.values()),
        "committed": sum(committed.values()),
        "completion_tokens": sum(item.completion_len for item in items),
        "accepted_histogram": [streaks.count(n) for n in range(depth + 1)],
        **{f"ended_{end}": ends.count(end) for end in ("not_covered", "not_selected", "depth", "reference")},
    }
    expected = conventions(
        list(walks.values()), [item.stopped for item in items], [item.completion_len for item in items]
    )
    assert value["conventions"] == pytest.approx(expected)
    # One piece equals the shards merged: the prompts' own counts add up to the totals.
    for name, total in (
        ("rounds", count),
        ("accepted", sum(streaks)),
        ("committed", sum(committed.values())),
    ):
        assert sum(prompt["policies"][slug][name] for prompt in prompts.values()) == total
    for name, rounds in walks.items():
        own = prompts[name]["policies"][slug]
        assert own["tau"] == pytest.approx(committed[name] / len(rounds))
        assert own["streak"] == pytest.approx(accepted[name] / len(rounds))


@pytest.mark.parametrize("slug", sorted(REPORTED))
@pytest.mark.parametrize("drafter", ["draftA8", "draftC4"])
def test_all_anchor_means_leave_out_what_the_text_ended(drafter: str, slug: str) -> None:
    run = run_of(drafter)
    sums, anchors = 0, 0
    for rows in rows_of(run).values():
        for row in rows.values():
            got = streak(slug, row)
            assert row[f"streak_{slug}"] == got
            if why(slug, row, got) != "reference":
                sums, anchors = sums + got, anchors + 1
    assert run.summary["policies"][slug]["all_anchor_streak"]["value"] == pytest.approx(sums / anchors)


@pytest.mark.parametrize("drafter", ["draftA8", "draftC4"])
def test_curves_are_what_plain_counting_gives(drafter: str) -> None:
    run = run_of(drafter)
    ranks = [row["rank"] for rows in rows_of(run).values() for row in rows.values()]
    curves, product, eal = run.summary["per_depth"], 1.0, 0.0
    for d in range(len(ranks[0])):
        known = [r for r in ranks if r[d] != NONE]
        entered = [r for r in known if all(rank == 0 for rank in r[:d])]
        survived = sum(r[d] == 0 for r in entered)
        marginal = sum(r[d] == 0 for r in known) / len(known)
        assert curves["marginal"][d] == pytest.approx(marginal)
        assert curves["survival"][d] == pytest.approx(survived / len(known))
        if entered:
            assert curves["conditional"][d] == pytest.approx(survived / len(entered))
        else:
            assert curves["conditional"][d] is None
            assert "per_depth" in run.summary["absent"]
        assert (curves["anchors_marginal"][d], curves["anchors_conditional"][d]) == (len(known), len(entered))
        product *= marginal
        eal += product
    assert curves["eal_marginal"] == pytest.approx(eal)


@pytest.mark.parametrize("drafter", ["draftA8", "draftC4"])
def test_walked_anchors_give_the_same_numbers(drafter: str) -> None:
    whole, walked = run_of(drafter).summary, run_of(drafter, anchors="walk").summary
    for slug, value in whole["policies"].items():
        theirs = {k: v for k, v in walked["policies"][slug].items() if k != "all_anchor_streak"}
        assert theirs == {k: v for k, v in value.items() if k != "all_anchor_streak"}
        assert walked["policies"][slug].get("all_anchor_streak") is None
    assert walked["per_depth"] is None
    assert walked["absent"]["per_depth"] == "blocks were drafted only where the policies' walks go"
    assert list(walked["prompts"]) == list(whole["prompts"])
    assert "walk-anchors" in slugs_of(walked)


def test_the_two_ceilings_are_always_reported() -> None:
    run = evaluate_checkpoint(
        checkpoint("draftA8"),
        recorded("draftA8").path,
        Options(policies=(Policy("chain"),)),
        root=tiny.workshop() / "runs",
    )
    assert list(run.summary["policies"]) == ["chain", "coverage4", "coverage8"]
    assert "tree_position" not in run.blocks().column_names


def test_what_the_recording_says_of_its_references_stands_in_every_run() -> None:
    reference = run_of("draftA8").summary["reference"]
    assert reference == {
        "tokens": 141,
        "agreed": 141,
        "near_ties": 0,
        "reference_agreement": 1.0,
        "worst_gap": 0.0,
    }


# --- quick runs ------------------------------------------------------------------------------------------


def slugs_of(summary: Mapping[str, Any]) -> set[str]:
    return {caveat["slug"] for caveat in summary["caveats"]}


QUICK: dict[str, tuple[dict[str, Any], set[str]]] = {
    "num-prompts": ({"num_prompts": 2}, {"prompts-incomplete", "few-prompts"}),
    "max-blocks": ({"max_blocks": 4}, {"anchors-limited"}),
    "block-size": ({"stated": Stated(block_size=4)}, {"block-size-differs"}),
}


@pytest.mark.parametrize("quick", QUICK)
def test_a_quick_run_stands_beside_the_full_one_and_says_that_it_is_quick(quick: str, tmp_path: Path) -> None:
    options, added = QUICK[quick]
    full = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, root=tmp_path)
    run = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, Options(**options), root=tmp_path)
    assert {run.name for run in list_runs(tmp_path)} == {full.name, run.name}
    assert full.name != run.name
    always = {"no-checksums", "conventions", "degenerate-references"}  # a random target's text soon loops
    assert slugs_of(full.summary) == always | {"rough-interval"}
    assert slugs_of(run.summary) >= added | {"no-checksums"}


def test_the_first_prompts_have_the_full_runs_numbers(tmp_path: Path) -> None:
    options = Options(policies=POLICIES, num_prompts=2)
    run = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, options, root=tmp_path)
    full = run_of("draftA8").summary["prompts"]
    assert list(run.summary["prompts"]) == ["one", "five"]
    for name, prompt in run.summary["prompts"].items():
        assert prompt["policies"] == {slug: full[name]["policies"][slug] for slug in prompt["policies"]}
    assert run.summary["policies"]["chain"]["tau_response"]["low"] is None


def test_max_blocks_measures_the_text_cut_after_the_last_anchor(tmp_path: Path) -> None:
    run = evaluate_checkpoint(
        checkpoint("draftA8"), tiny.recording().path, Options(max_blocks=4), root=tmp_path
    )
    full = rows_of(run_of("draftA8"))
    for item in tiny.recording().items:
        assert run.summary["prompts"][item.id]["completion_tokens"] == 5
        assert run.summary["prompts"][item.id]["stopped"] is False
        rows = rows_of(run)[item.id]
        assert list(rows) == list(range(item.prompt_len, item.prompt_len + 4))
        for anchor, row in rows.items():  # the same ranks, but for those beyond the cut
            seen = item.prompt_len + 4 - anchor
            assert row["rank"] == full[item.id][anchor]["rank"][:seen] + [NONE] * (7 - seen)


def test_a_smaller_block_is_drafted_anew(tmp_path: Path) -> None:
    run = evaluate_checkpoint(
        checkpoint("draftA8"), tiny.recording().path, Options(stated=Stated(block_size=4)), root=tmp_path
    )
    plan = run.plan
    assert (plan.wiring["block_size"], plan.trained_block_size) == (4, 8)
    full, small = rows_of(run_of("draftA8")), rows_of(run)
    pairs = [(row["top_id"], full[n][a]["top_id"][: 3 * 8]) for n in small for a, row in small[n].items()]
    assert all(len(ours) == 3 * 8 for ours, _ in pairs)
    assert any(
        ours != theirs for ours, theirs in pairs
    )  # a block cut short is not the prefix of the full one


# --- what a run is ---------------------------------------------------------------------------------------


def test_the_same_question_is_answered_once(tmp_path: Path) -> None:
    options = Options(policies=(Policy("chain"),), num_prompts=1)
    first = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, options, root=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, options, root=tmp_path)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_same_weights_in_another_container_are_the_same_question(tmp_path: Path) -> None:
    options = Options(policies=(Policy("chain"),), num_prompts=1)
    first = evaluate_checkpoint(checkpoint("draftA8"), tiny.recording().path, options, root=tmp_path / "runs")
    pt = tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", step=7, config=tiny.drafter_config())
    again = evaluate_checkpoint(pt, tiny.recording().path, options, root=tmp_path / "runs")
    assert again == first


def test_a_name_is_the_runs_own(tmp_path: Path) -> None:
    options = Options(policies=(Policy("chain"),), num_prompts=1)
    other = dataclasses.replace(options, num_prompts=2)
    path, recording = checkpoint("draftA8"), tiny.recording().path
    first = evaluate_checkpoint(path, recording, options, root=tmp_path, name="mine")
    assert first.path == tmp_path / "mine"
    assert evaluate_checkpoint(path, recording, options, root=tmp_path, name="mine") == first
    with pytest.raises(RunError, match=r"run mine: .*exists already and is never overwritten"):
        evaluate_checkpoint(path, recording, other, root=tmp_path, name="mine")
    assert evaluate_checkpoint(path, recording, options, root=tmp_path, name="again").name == "again"
    for name in ("a/b", "../mine", ".partial-1-mine", "", "."):
        with pytest.raises(RunError, match="cannot be called"):
            evaluate_checkpoint(path, recording, other, root=tmp_path, name=name)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("step_12/checkpoint.pt", "step_12"),
        ("run-step7/training_state.pt", "run-step7"),
        ("weights/late.pt", "late"),
    ],
)
def test_a_run_is_called_after_its_checkpoint(path: str, label: str, tmp_path: Path) -> None:
    place = tmp_path / path
    if place.suffix == ".pt":
        tiny.trainer_pt(place, config=tiny.drafter_config())
    else:
        tiny.drafter_dir(place)
    options = Options(policies=(Policy("chain"),), num_prompts=1)
    run = evaluate_checkpoint(place, tiny.recording().path, options, root=tmp_path / "runs")
    assert run.name == f"{label}-{run.plan.digest[:8]}"


def test_run_json_says_what_was_read(tmp_path: Path) -> None:
    pt = tiny.trainer_pt(tmp_path / "step_7" / "checkpoint.pt", step=7, config=tiny.drafter_config())
    options = Options(Stated(options={"mask_token_id": 255}), policies=(Policy("chain"),), num_prompts=1)
    run = evaluate_checkpoint(pt, tiny.recording().path, options, root=tmp_path / "runs")
    written = json.loads((run.path / "run.json").read_text())
    assert written["checkpoint"]["step"] == 7
    assert written["checkpoint"]["path"] == str(pt.resolve())
    assert written["provenance"]["mask_token_id"] == "--mask-token-id"
    assert written["recording"]["prompts"] == "tiny.jsonl"
    assert written["plan"]["recording_digest"] == tiny.recording().digest
    # All checksums were verified.
    expected = {"prompts-incomplete", "few-prompts", "controls-undecided", "conventions"}
    assert slugs_of(run.summary) == expected


def test_the_plan_holds_whatever_can_change_a_number() -> None:
    base = run_of("draftA8").plan
    assert base.digest == dataclasses.replace(base).digest
    changed = {
        "checkpoint_digest": "0" * 64,
        "recording_digest": "0" * 64,
        "wiring": {**base.wiring, "rope_theta": 1e6},
        "prompts": base.prompts[:1],
        "policies": base.policies[:1],
        "anchors": "walk",
        "dtype": "bfloat16",
        "max_blocks": 3,
        "trained_block_size": 16,
        "target_digest": "0" * 64,
        "template": "raw",
        "instrument": "9.9",
    }
    assert changed.keys() == {field.name for field in dataclasses.fields(base)}
    digests = {dataclasses.replace(base, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {base.digest}) == len(changed) + 1


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0; expected 1 or more"),
        ({"max_blocks": -1}, "max_blocks is -1; expected 1 or more"),
        ({"anchors": "some"}, "anchors 'some' are not known; expected all or walk"),
        ({"dtype": "float16"}, "dtype 'float16' is not computed in; expected float32, bfloat16 or auto"),
        ({"policies": (Policy("ddtree", 2048),)}, r"DDTree\(2048\) is too large"),
        ({"policies": (Policy("ddtree", 0),)}, "'ddtree0' is not known"),
    ],
    ids=str,
)
def test_options_that_measure_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options(**options)


def test_weights_that_cannot_be_a_drafters_leave_no_run(tmp_path: Path) -> None:
    state = tiny.weights()
    state["fc.weight"][0, 0] = torch.nan
    pt = tiny.trainer_pt(tmp_path / "nan.pt", state, config=tiny.drafter_config())
    with pytest.raises(CheckpointError, match=r"fc.weight: 1 of 8192 values are NaN or infinite"):
        evaluate_checkpoint(pt, tiny.recording().path, root=tmp_path / "runs")
    del state["layers.1.mlp.up_proj.weight"]
    pt = tiny.trainer_pt(tmp_path / "less.pt", state, config=tiny.drafter_config())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight is missing"):
        evaluate_checkpoint(pt, tiny.recording().path, root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_wiring_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    pt = tiny.trainer_pt(tmp_path / "bare.pt")
    with pytest.raises(WiringError, match=r"--taps 1,10,19,27"):
        evaluate_checkpoint(pt, tiny.recording().path, root=tmp_path / "runs")


def test_a_failure_on_the_way_leaves_nothing_behind(tmp_path: Path) -> None:
    recording = tiny.copied_recording(tmp_path / "copy")
    path = recording.path / recording.items[3].file
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(RecordingError, match="damaged or edited"):
        evaluate_checkpoint(checkpoint("draftA8"), recording.path, root=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_references_that_are_not_the_targets_own_are_counted(tmp_path: Path) -> None:
    foreign = Prompt("foreign", prompt_ids=(26,), completion_ids=(1, 2, 3, 4, 5, 6, 7, 8))
    prompts = PromptSet("foreign.jsonl", (foreign,))
    recording = record_target(
        tiny.workshop() / "target", prompts, request=Request(taps=(1, 3), max_new_tokens=8), root=tmp_path
    )
    run = evaluate_checkpoint(checkpoint("draftA8"), recording.path, root=tmp_path / "runs")
    reference = run.summary["reference"]
    assert reference["agreed"] < reference["tokens"] == 8
    assert reference["worst_gap"] > 1
    (caveat,) = [c for c in run.summary["caveats"] if c["slug"] == "reference-agreement"]
    assert caveat["severity"] == "warning"
    assert caveat["text"].startswith(f"{8 - reference['agreed']} of 8 reference tokens are not")


def test_a_pruned_vocabulary_says_which_references_it_can_never_reach(tmp_path: Path) -> None:
    """The head keeps the even tokens alone, and d2t says where they are: token i + d2t[i] = 2 i."""
    golden = tiny.recording().end("head")
    rows = torch.from_numpy(np.array(golden.mapped())).view(torch.float32).view(golden.shape)
    state = tiny.weights() | {"lm_head.weight": rows[::2].clone(), "d2t": torch.arange(128)}
    pt = tiny.trainer_pt(tmp_path / "pruned.pt", state, config=tiny.drafter_config())
    stated = Stated({"vocabulary_map": "offset"})
    run = evaluate_checkpoint(pt, tiny.recording().path, Options(stated), root=tmp_path / "runs")
    odd = {
        item.id: sum(
            int(token) % 2
            for token in np.array(tiny.recording().tensors(item).tokens.mapped()).view(np.int32)[
                item.prompt_len + 1 :
            ]
        )
        for item in tiny.recording().items
    }
    drafted = sum(item.completion_len - 1 for item in tiny.recording().items)
    (caveat,) = [c for c in run.summary["caveats"] if c["slug"] == "vocabulary-misses"]
    assert caveat["text"].startswith(f"{sum(odd.values())} of {drafted} reference tokens")
    ranks = [r for rows_ in rows_of(run).values() for row in rows_.values() for r in row["rank"]]
    assert 2**31 - 2 in ranks
