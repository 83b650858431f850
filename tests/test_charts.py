"""What the charts of a report show is what the summary says, in the drawing and in the table behind it."""

import dataclasses
from typing import Any

import pytest

from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.charts import Chart, charts_of, series_charts
from draftgauge.report.speedup import Costs
from draftgauge.runs import Run
from tests import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    return evaluate_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, root=root)


@pytest.fixture(scope="module")
def charts(run: Run) -> dict[str, Chart]:
    return {chart.slug: chart for chart in charts_of(run, costs=Costs())}


def test_every_chart_has_a_table_and_a_sentence(charts: dict[str, Chart]) -> None:
    slugs = ["depth", "lengths", "budgets", "ends", "prompts", "categories", "places", "conventions", "speed"]
    assert list(charts) == slugs
    for chart in charts.values():
        assert chart.rows
        assert {len(row) for row in chart.rows} == {len(chart.head)}
        assert all(isinstance(row[0], str) for row in chart.rows)
        assert chart.note.endswith(".")


def test_tables_hold_the_summarys_own_numbers(run: Run, charts: dict[str, Chart]) -> None:
    policies, curve = run.summary["policies"], run.summary["per_depth"]
    assert [row[1] for row in charts["depth"].rows] == curve["marginal"]
    assert [list(row[2:4]) for row in charts["depth"].rows] == curve["intervals"]["marginal"]
    assert [row[7] for row in charts["depth"].rows] == curve["survival"]
    assert [row[1] for row in charts["lengths"].rows] == policies["chain"]["counts"]["accepted_histogram"]
    assert {row[0]: row[1] for row in charts["budgets"].rows} == {
        p["label"]: p["tau_response"]["value"] for p in policies.values()
    }
    assert {row[0]: row[1:] for row in charts["ends"].rows} == {
        p["label"]: tuple(
            p["counts"][name]
            for name in (
                "rounds",
                "ended_not_covered",
                "ended_not_selected",
                "ended_depth",
                "ended_reference",
            )
        )
        for p in policies.values()
    }
    assert {row[0]: row[2] for row in charts["prompts"].rows} == {
        name: p["policies"]["chain"]["tau"] for name, p in run.summary["prompts"].items()
    }
    assert {row[0]: row[1] for row in charts["conventions"].rows} == policies["chain"]["conventions"]


def test_intervals_of_the_depths_hold_their_values(run: Run) -> None:
    curve = run.summary["per_depth"]
    for kind in ("marginal", "survival", "conditional"):
        for value, interval in zip(curve[kind], curve["intervals"][kind], strict=True):
            assert interval is None or 0 <= interval[0] <= value <= interval[1] <= 1
    assert curve["intervals"]["marginal"][0] is not None


def test_the_shares_of_a_policy_are_all_of_its_rounds(charts: dict[str, Chart]) -> None:
    assert charts["ends"].spec is not None
    shares: dict[str, float] = {}
    for row in charts["ends"].spec["data"]["values"]:
        shares[row["y"]] = shares.get(row["y"], 0.0) + row["x"]
    assert all(total == pytest.approx(1) for total in shares.values())


def many(run: Run, count: int) -> Run:
    """The run with its first prompt so many times."""
    first = next(iter(run.summary["prompts"].values()))
    prompts = {f"prompt {i:03}": first for i in range(count)}
    return dataclasses.replace(run, summary={**run.summary, "prompts": prompts})


def test_of_many_prompts_the_extremes_are_drawn_and_all_are_in_the_table(run: Run) -> None:
    chart = next(c for c in charts_of(many(run, 500), costs=Costs()) if c.slug == "prompts")
    assert chart.spec is not None
    assert len(chart.spec["data"]["values"]) == 40
    assert len(chart.rows) == 500
    assert "Drawn are the 20 highest and lowest of 500" in chart.note


def at_step(run: Run, step: int | None) -> Run:
    checkpoint = {**run.manifest["checkpoint"], "step": step}
    return dataclasses.replace(run, manifest={**run.manifest, "checkpoint": checkpoint})


def test_a_series_is_in_the_order_of_its_steps(run: Run) -> None:
    tau, survival = series_charts([at_step(run, 200), at_step(run, 100)])
    assert tau.title == "Tau over step"
    assert [row[1] for row in tau.rows] == [100, 200]
    assert tau.rows[0][2] == run.summary["policies"]["chain"]["tau_response"]["value"]
    assert survival.head[1:] == tuple(f"depth {d}" for d in (1, 2, 4))


@pytest.mark.parametrize("steps", [(None, 100), (100, 100)])
def test_runs_without_a_step_of_their_own_stand_in_the_order_given(run: Run, steps: Any) -> None:
    tau, *_ = series_charts([at_step(run, step) for step in steps])
    assert tau.title == "Tau by run"
    assert "In the order given" in tau.note


def test_a_run_that_drafted_only_on_walks_has_no_curve_over_depth(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("walks")
    options = Options(anchors="walk", num_prompts=2)
    run = evaluate_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, options, root=root)
    assert "depth" not in {chart.slug for chart in charts_of(run, costs=Costs())}
    assert len(series_charts([run, run])) == 1
