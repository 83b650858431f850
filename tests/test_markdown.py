"""Runs as Markdown: the facts of the run, parsed back out of it; readable as text; hostile names stay text."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from draftgauge.cli import cli
from draftgauge.compare import compare_runs
from draftgauge.errors import RunError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.markdown import markdown
from draftgauge.report.text import WIDTH, interval, number, signed
from draftgauge.runs import Run
from tests import tiny

RENDER = MarkdownIt("commonmark").enable("table").render
HOSTILE = "<script>alert(1)</script> | `x` ``` **y** [z](http://e) \n# h\n- i @all \u202e"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("markdown")
    return evaluate_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, root=folder, name="full")


@pytest.fixture(scope="module")
def other(full: Run) -> Run:
    """The same drafter at another step, trained otherwise."""
    folder = full.path.parent
    state = tiny.weights()
    state["layers.0.mlp.down_proj.weight"] *= 0.3
    path = tiny.trainer_pt(folder / "step_7" / "checkpoint.pt", state, step=7, config=tiny.drafter_config())
    return evaluate_checkpoint(path, tiny.recording().path, root=folder, name="other")


@pytest.fixture(scope="module")
def walk(full: Run) -> Run:
    options = Options(anchors="walk", num_prompts=2)
    return evaluate_checkpoint(
        tiny.workshop() / "drafter", tiny.recording().path, options, root=full.path.parent, name="walk"
    )


def changed(run: Run, **values: Any) -> Run:
    return dataclasses.replace(run, summary={**copy.deepcopy(dict(run.summary)), **values})


def tables(text: str) -> list[list[list[str]]]:
    """Every table as a parser of Markdown sees it: rows of cells."""
    found = []
    for table in re.findall(r"<table>(.*?)</table>", RENDER(text), flags=re.DOTALL):
        rows = re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)
        found.append([re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows])
    return found


def table(text: str, first: str) -> dict[str, list[str]]:
    """The table whose first heading this is, by the first cell of its rows."""
    (found,) = [rows for rows in tables(text) if rows[0][0] == first]
    return {row[0]: row[1:] for row in found[1:]}


def test_the_policies_are_those_of_the_summary(full: Run) -> None:
    rows = next(t for t in tables(markdown([full])) if t[0][:2] == ["policy", "tau"])
    policies = full.summary["policies"]
    assert [row[0] for row in rows[1:]] == [policy["label"] for policy in policies.values()]
    for row, policy in zip(rows[1:], policies.values(), strict=True):
        tau, pooled = policy["tau_response"], policy["tau_pooled"]
        assert row[1:5] == [number(tau["value"]), interval(tau), number(pooled["value"]), interval(pooled)]


def test_the_headline_and_the_verdict_come_first(full: Run) -> None:
    tau = full.summary["policies"]["chain"]["tau_response"]
    first = re.sub(r"\s+", " ", "\n\n".join(markdown([full]).split("\n\n")[:3]))
    assert first.startswith("## `full` Controls: trusted: ")
    assert f"**{number(tau['value'])}** \\[{interval(tau)}\\] by response" in first


def test_depths_and_categories(full: Run) -> None:
    text = markdown([full])
    survival = full.summary["per_depth"]["survival"]
    assert {depth: row[1] for depth, row in table(text, "depth").items()} == {
        str(d): number(s) for d, s in enumerate(survival, 1)
    }
    reach = full.summary["per_depth"]["intervals"]["survival"][6]
    assert table(text, "depth")["7"][2] == f"{number(reach[0], 2)}, {number(reach[1], 2)}"
    curves = {name: value for name, value in full.summary["per_depth"].items() if name != "intervals"}
    assert table(markdown([changed(full, per_depth=curves)]), "depth")["7"][2] == "-"  # an earlier run
    assert table(text, "category")["<code>length 22</code>"][0] == "6.500"
    bare = {name: {**prompt, "category": None} for name, prompt in full.summary["prompts"].items()}
    assert "category" not in markdown([changed(full, prompts=bare)])


def test_every_caveat_stands_there_with_its_slug(full: Run) -> None:
    text = markdown([full])
    for caveat in full.summary["caveats"]:
        assert f"(`{caveat['slug']}`)" in text
    assert "No caveats." in markdown([changed(full, caveats=[])])


def test_a_run_that_is_not_trusted_says_so_first(full: Run) -> None:
    trust = copy.deepcopy(full.summary["trust"])
    trust["controls"][0] |= {"verdict": "failed", "measured": "3 values are NaN", "advice": "record it again"}
    trust |= {"trusted": False, "failed": [trust["controls"][0]["slug"]]}
    text = " ".join(markdown([changed(full, trust=trust)]).split("\n\n")[1].split())
    assert text.startswith("**Controls: NOT TRUSTED: ")
    assert text.endswith("Do not use these numbers.**")
    assert "measured: 3 values are NaN. record it again" in " ".join(
        markdown([changed(full, trust=trust)]).split()
    )
    old = {name: value for name, value in full.summary.items() if name != "trust"}
    assert "Controls were not run" in markdown([dataclasses.replace(full, summary=old)])


def test_a_run_on_walks_has_no_depths_and_says_why_it_has_no_interval(walk: Run) -> None:
    text = markdown([walk])
    assert "Acceptance per depth" not in text
    assert "fewer than 5 prompts" in text


def test_a_baseline_is_shown_as_paired_differences(other: Run, full: Run) -> None:
    text = markdown([other], baseline=full)
    said = compare_runs(other, full)["policies"]
    rows = table(text, "tau by response")
    for policy in said.values():
        tau = policy["tau_response"]
        row = rows[policy["label"]]
        assert row[:2] == [number(tau["baseline"]), number(tau["run"])]
        assert float(row[2]) == pytest.approx(tau["difference"]["value"], abs=5e-4)
        assert row[3] == interval(tau["difference"])
    assert len(table(text, "tau of the chain")) == len(full.summary["prompts"])
    assert "different: checkpoint" in text


def test_a_baseline_is_not_compared_with_itself_and_what_cannot_be_is_refused(full: Run) -> None:
    assert "paired" not in markdown([full], baseline=full)
    four = {**full.manifest["plan"]["wiring"], "block_size": 4}
    manifest = {**full.manifest, "plan": {**full.manifest["plan"], "wiring": four}}
    unlike = dataclasses.replace(full, path=full.path.with_name("four"), manifest=manifest)
    with pytest.raises(RunError, match="block size"):
        markdown([unlike], baseline=full)


def test_several_runs_are_a_table_in_the_order_given_and_the_last_in_full(full: Run, other: Run) -> None:
    text = markdown([other, full])
    rows = table(text, "run")
    assert list(rows) == ["<code>other</code>", "<code>full</code>"]
    assert [row[0] for row in rows.values()] == ["7", "-"]
    assert [row[-1] for row in rows.values()] == ["yes", "yes"]
    assert "## `full`" in text
    assert "## `other`" not in text
    assert "Compared" not in text


def test_several_runs_are_each_compared_with_the_baseline_but_not_it_with_itself(
    full: Run, other: Run
) -> None:
    text = markdown([full, other], baseline=full)
    (found,) = [rows for rows in tables(text) if rows[0][:2] == ["tau of the chain", "difference"]]
    assert [row[0] for row in found[1:]] == ["<code>other</code>"]
    paired = compare_runs(other, full)["policies"]["chain"]["tau_response"]
    assert found[1][1:] == [
        signed(paired["difference"]["value"]),
        interval(paired["difference"]),
        paired["verdict"],
    ]


def test_the_command_prints_it(full: Run, other: Run) -> None:
    asked = ["report", str(full.path), str(other.path), "--baseline", str(full.path), "--md"]
    result = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert result.stdout == markdown([full, other], baseline=full)


def test_everything_to_repeat_it_stands_at_the_end(full: Run) -> None:
    last = markdown([full]).partition("<summary>Provenance</summary>")[2]
    for said in (full.plan.checkpoint_digest, full.plan.recording_digest, full.manifest["plan_digest"]):
        assert said in last
    assert "torch 2" in last


def hostile(run: Run) -> Run:
    """The run, as if its prompts, categories, controls, paths and name were somebody's attempt."""
    summary = json.loads(json.dumps(run.summary))
    summary["prompts"] = {f"{HOSTILE} {i}": p for i, p in enumerate(summary["prompts"].values())}
    for prompt in summary["prompts"].values():
        prompt["category"] = HOSTILE
    for caveat in summary["caveats"]:
        caveat["text"] = f"of {HOSTILE}: {caveat['text']}"
    for control in summary["trust"]["controls"]:
        control |= {"verdict": "failed", "measured": HOSTILE, "advice": HOSTILE}
    summary["trust"] |= {"trusted": False, "failed": [c["slug"] for c in summary["trust"]["controls"]]}
    manifest = json.loads(json.dumps(run.manifest)) | {"argv": ["draftgauge", HOSTILE, "y" * 5000]}
    manifest["checkpoint"]["path"] = manifest["recording"]["prompts"] = f"/{HOSTILE}"
    return Run(run.path, manifest, summary)


def test_hostile_text_stays_text(full: Run, other: Run) -> None:
    text = markdown([full, hostile(other)], baseline=hostile(full))
    assert "alert(1)" in text
    html = RENDER(text)
    assert "<script" not in html
    assert "<a " not in html
    assert not re.search(r"<h\d>(?!\d+ runs|<code>other</code>)", html)
    assert html.count("<pre>") == 0
    assert "\u202e" not in text
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1, rows
    known = {
        "h2",
        "p",
        "strong",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
        "details",
        "summary",
    }
    assert set(re.findall(r"<([a-z0-9]+)", html)) <= known
    assert html.count("<details>") == html.count("</details>") == text.count("\n<details>\n")


@pytest.mark.parametrize("which", ["full", "walk", "other"])
def test_it_is_readable_as_text(which: str, request: pytest.FixtureRequest, full: Run) -> None:
    text = markdown([request.getfixturevalue(which)], baseline=full)
    long = [line for line in text.splitlines() if len(line) > WIDTH]
    assert all(" " not in line.strip(" -`|") or "/" in line for line in long), long
    assert "\x1b" not in text


def test_a_long_list_of_prompts_ends_with_a_count(full: Run, other: Run) -> None:
    def many(run: Run) -> Run:
        (prompt, *_) = run.summary["prompts"].values()
        return changed(run, prompts={f"p{i}": prompt for i in range(50)})

    text = markdown([many(other)], baseline=many(full))
    assert "(more prompts in --json: 30)" in text
    assert len(table(text, "tau of the chain")) == 20


def test_a_checkpoint_that_was_edited_is_a_caveat(full: Run, tmp_path: Path) -> None:
    path = tiny.trainer_pt(tmp_path / "step_3" / "checkpoint.pt", step=3, config=tiny.drafter_config())
    run = evaluate_checkpoint(path, tiny.recording().path, Options(num_prompts=1), root=tmp_path, name="mine")
    (run.path / "checkpoint" / "checkpoint.pt").unlink()
    assert "(`checkpoint-changed`)" in markdown([run])
