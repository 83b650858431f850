"""What the terminal shows: 80 columns, no colour, and no number that rounding made up."""

import copy
import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgauge.acceptance import Blocks, Policy
from draftgauge.compare import compare_runs
from draftgauge.evaluate import evaluate_checkpoint
from draftgauge.inspection import inspect_checkpoint
from draftgauge.report.comparison import comparison_report
from draftgauge.report.terminal import (
    caveat_lines,
    checkpoint_report,
    recording_list,
    recording_report,
    run_list,
    run_report,
)
from draftgauge.runs import Run
from draftgauge.summary import PromptBlocks, summarise
from tests import tiny

LONG = "a-prompt-whose-name-somebody-generated-from-all-of-its-text-" * 3
BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MANY = (
    Policy("chain"),
    *(Policy("chain", n) for n in (2, 4)),
    *(Policy("ddtree", n) for n in BUDGETS),
    Policy("coverage", 4),
)


@cache
def real() -> Run:
    return evaluate_checkpoint(
        tiny.workshop() / "drafter", tiny.recording().path, root=tiny.workshop() / "runs"
    )


@cache
def wide() -> Run:
    """Two prompts, one with a very long name, 31 depths, 13 policies."""
    prompts = {}
    for name in (LONG, "b"):
        anchors = np.arange(1, 60)
        ranks = np.random.default_rng(len(name)).integers(0, 3, (59, 31)).astype(np.int32)
        beyond = anchors[:, None] + np.arange(1, 32) >= 61
        ranks[beyond] = 2**31 - 1
        order = ranks * 20 + 1 - ranks // 3
        known = {"order": order, "order_budget": 1024, "prompt_tokens": 1, "length": 61}
        blocks = Blocks(anchors=anchors, ranks=ranks, **known)
        prompts[name] = PromptBlocks(None, blocks)
    summary = summarise(prompts, MANY, every_anchor=True)
    beside = {key: real().summary[key] for key in ("reference", "caveats")}
    return Run(Path("runs") / f"step_4000-{LONG}", real().manifest, {**summary, **beside})


def unusual() -> Run:
    """What may be absent is: no interval, no curve, no mean over anchors, no step."""
    run = real()
    summary = copy.deepcopy(dict(run.summary))
    summary["per_depth"] = None
    for value in summary["policies"].values():
        value.pop("all_anchor_streak")
        for name in ("tau_response", "tau_pooled", "streak_response", "streak_pooled"):
            value[name] |= {"value": None, "low": None, "high": None, "reason": "nothing to divide by"}
    return Run(run.path, run.manifest, summary)


def inspected(folder: Path) -> dict[str, str]:
    bare = tiny.trainer_pt(folder / "step_7" / "checkpoint.pt", step=7)
    return {
        "directory": checkpoint_report(inspect_checkpoint(tiny.workshop() / "drafter")),
        "bare": checkpoint_report(inspect_checkpoint(bare)),
    }


def reports(folder: Path) -> dict[str, str]:
    return {
        "run": run_report(real()),
        "wide": run_report(wide()),
        "unusual": run_report(unusual()),
        "comparison": comparison_report(compare_runs(real(), real())),
        "wide comparison": comparison_report(compare_runs(wide(), wide())),
        "runs": run_list([real(), wide()]),
        "no runs": run_list([]),
        "recordings": recording_list([tiny.recording()]),
        "no recordings": recording_list([]),
        **inspected(folder),
    }


def test_every_report_fits_into_80_columns_without_colour(tmp_path: Path) -> None:
    for name, text in reports(tmp_path).items():
        assert "\x1b" not in text
        assert not text.endswith("\n")
        for line in text.splitlines():
            assert line == line.rstrip(), f"{name}: blanks at the end of {line!r}"
            one_name = len(line.split()) <= 2  # a long path or name stays whole, to be copied
            assert len(line) <= 80 or one_name, f"{name}: {line!r}"


def words(text: str, start: str) -> list[str]:
    """The words of the one line that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start).split()


def test_a_run_shows_its_headline_and_every_policy() -> None:
    text, chain = run_report(real()), real().summary["policies"]["chain"]
    tau = chain["tau_response"]
    assert words(text, "  by response")[0] == f"{tau['value']:.3f}"
    assert f"[{tau['low']:.2f}, {tau['high']:.2f}]" in text
    assert words(text, "references  ")[-1] == "1.000"
    table = text.split("all anchors\n---")[1].split("\n\n")[0]
    for label in ("chain", "DDTree(4)", "DDTree(64)", "coverage@4", "coverage@8"):
        assert re.search(rf"^{re.escape(label)} +\d", table, flags=re.MULTILINE)


def test_tables_stand_in_columns() -> None:
    """Right-aligned numbers: where a heading ends, every cell of its column ends."""
    block = next(b for b in run_report(real()).split("\n\n") if b.startswith("policy "))
    head, rule, *rows = block.splitlines()[:8]
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", head)]
    assert set(rule) == {"-"}
    for row in rows:
        assert all(end <= len(row) and (end == len(row) or row[end] == " ") for end in ends[1:]), row


def test_all_depths_are_shown_however_many_there_are() -> None:
    for run in (real(), wide()):
        table = run_report(run).split("that got there\n")[1].split("eal_marginal")[0]
        depths = [int(line.split()[0]) for line in table.splitlines()[1:]]
        assert depths == list(range(1, len(run.summary["per_depth"]["marginal"]) + 1))


def test_depths_have_intervals_and_earlier_runs_none() -> None:
    low, high = real().summary["per_depth"]["intervals"]["survival"][6]
    assert f"{low:.2f}, {high:.2f}" in run_report(real())
    summary = copy.deepcopy(dict(real().summary))
    del summary["per_depth"]["intervals"]
    line = next(
        line
        for line in run_report(Run(real().path, real().manifest, summary)).splitlines()
        if line.startswith("7  ")
    )
    assert line.split()[3] == "-"


def test_tau_by_category_is_shown_where_prompts_have_one() -> None:
    assert words(run_report(real()), "length 22") == ["6.500", "-", "1"]
    assert "tau by category" not in run_report(wide())


def test_policies_that_do_not_fit_are_counted() -> None:
    text = run_report(wide())
    by_prompt = text.split("tau by prompt")[1]
    shown = by_prompt.splitlines()[0].split()
    (left,) = re.findall(r"\(more policies in --json: (\d+)\)", by_prompt.split("as counted by")[0])
    # Three chains and nine trees; the heading names the tokens and what stands in the second line of a label.
    assert len(shown) - 1 + int(left) == 12
    assert "coverage" not in by_prompt.split("\n\n")[0]


def test_a_long_name_stands_on_its_own_line_in_full() -> None:
    text = run_report(wide())
    pieces = re.split(r"\n", text.split("tau by prompt")[1])
    assert LONG in "".join(pieces[2:5])


def test_what_is_absent_is_a_dash_and_has_its_reason() -> None:
    text = run_report(unusual())
    assert words(text, "  by response") == ["-"]
    assert text.count("nothing to divide by") == 1
    rows = text.split("all anchors\n---")[1].splitlines()[1:9]
    assert all(row.split()[1:] == ["-"] * 5 for row in rows)
    assert "marginal" not in text


def test_few_prompts_have_no_interval_and_the_values_are_shown() -> None:
    text = run_report(wide())
    assert text.count("no interval is honest from fewer than 5 prompts") == 1
    assert "[" not in words(text, "  by response")


@pytest.mark.parametrize(
    ("ends", "shares"),
    [
        ((1000, 0, 0, 0), ["100%", "0%", "0%", "0%"]),
        ((999, 1, 0, 0), [">99%", "<1%", "0%", "0%"]),
        ((500, 250, 250, 0), ["50%", "25%", "25%", "0%"]),
    ],
)
def test_shares_are_never_rounded_to_none_or_all(ends: tuple[int, ...], shares: list[str]) -> None:
    run = real()
    summary = copy.deepcopy(dict(run.summary))
    names = ("ended_not_covered", "ended_not_selected", "ended_depth", "ended_reference")
    summary["policies"]["chain"]["counts"] |= {"rounds": 1000, **dict(zip(names, ends, strict=True))}
    table = run_report(Run(run.path, run.manifest, summary)).split("rounds end by")[1]
    assert words(table.split("\n\n")[0], "chain ") == ["1000", *shares]


def test_a_list_of_runs_has_a_line_for_each() -> None:
    text = run_list([real()])
    tau = real().summary["policies"]["chain"]["tau_response"]
    cells = words(text, real().name)
    assert cells[:2] == ["-", f"{tau['value']:.3f}"]
    assert cells[-3:] == ["6", "8", "1"]
    assert "draftgauge eval" in run_list([])


def test_a_recording_says_what_it_holds_and_what_failed() -> None:
    recording = tiny.recording()
    text = recording_report(recording)
    assert "6 prompt(s) of tiny.jsonl, 141 reference tokens, agreement 1.000" in text
    assert "target (Qwen3ForCausalLM), float32, taps 1, 3, 5, template chat" in text
    failed = dataclasses.replace(recording, failed={"seven": "the prompt is empty"})
    assert "! seven was not recorded: the prompt is empty" in recording_report(failed)
    assert "draftgauge record" in recording_list([])


def test_caveats_have_their_slugs_and_warnings_stand_out() -> None:
    found = [
        {"slug": "few-prompts", "severity": "warning", "text": "2 prompts."},
        {"slug": "walk-anchors", "severity": "note", "text": "Walked."},
    ]
    assert caveat_lines(found) == "! 2 prompts. [few-prompts]\n- Walked. [walk-anchors]"
    assert caveat_lines([]) == "no caveats"


def test_the_wiring_is_a_line_for_each_field_that_somebody_states(tmp_path: Path) -> None:
    text = inspected(tmp_path)["directory"]
    for field, value, source in (
        ("taps", "1, 3", "config.json: dflash_config.target_layer_ids"),
        ("block_size", "8", "config.json"),  # under the same name
        ("rope_theta", "10000.0", "config.json"),
        ("predicts_from_anchor", "false", "default of the z-lab format"),
    ):
        assert re.search(rf"^{field} +{re.escape(value)} +{re.escape(source)}$", text, flags=re.MULTILINE)
    assert "attention             2 x full, bidirectional in the block\n" in text
    assert "by default, as nothing says otherwise: family dflash, mask_embedding false," in text


def test_a_wiring_that_is_not_known_is_asked_for_line_by_line(tmp_path: Path) -> None:
    text = inspected(tmp_path)["bare"]
    assert "--wiring FILE.toml:\n  taps = [1, 10, 19, 27]  (or --taps 1,10,19,27)" in text
    assert "\n  rope_theta = 1000000.0" in text
    assert "training   step 7 (checkpoint.pt: step)" in text
    assert "also in the file: optimizer_state_dict" in text


def test_what_became_of_tensors_is_listed_in_short() -> None:
    use = {"stored": "x", "canonical": None, "status": "unused", "reason": "not of the drafter"}
    renamed = [
        {"stored": f"module.{i}", "canonical": str(i), "status": "renamed", "reason": ""} for i in range(10)
    ]
    value = inspect_checkpoint(tiny.workshop() / "drafter") | {
        "key_map": [*renamed, use],
        "problems": ["fc.weight: 1 value is NaN"],
        "opaque_classes": ["pkg.Config"],
    }
    lines = checkpoint_report(value).splitlines()
    assert "tensors: 10 renamed, 1 unused" in lines
    assert "  renamed module.7 -> 7" in lines
    assert "  and 2 more renamed (--json)" in lines
    assert "  unused x: not of the drafter" in lines
    assert "! fc.weight: 1 value is NaN" in lines
    assert "values of classes that are never loaded: pkg.Config" in lines


@pytest.mark.parametrize(("count", "rest"), [(40, False), (41, True)])
def test_many_prompts_are_counted_and_not_all_listed(count: int, rest: bool) -> None:
    run = real()
    one: Any = next(iter(run.summary["prompts"].values()))
    summary = {**run.summary, "prompts": {f"p{i}": one for i in range(count)}}
    text = run_report(Run(run.path, run.manifest, summary))
    assert ("(more prompts in --json: 1)" in text) == rest
    assert len(re.findall(r"^p\d+ ", text, flags=re.MULTILINE)) == 40
