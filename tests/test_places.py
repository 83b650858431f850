"""Tau along the response, against a plain walk over the same blocks."""

import pytest

from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.places import EDGES, tau_by_place
from draftgauge.runs import Run
from tests import tiny


@pytest.fixture(scope="module", params=["all", "walk"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = Options(anchors=request.param)
    root = tmp_path_factory.mktemp("runs")
    return evaluate_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, options, root=root)


def test_the_rounds_of_every_stretch_are_those_of_the_walk(run: Run) -> None:
    rows = {(row["prompt"], row["anchor"]): row["streak_chain"] for row in run.blocks().to_pylist()}
    rounds, committed = dict.fromkeys(EDGES, 0), dict.fromkeys(EDGES, 0)
    for name, prompt in run.summary["prompts"].items():
        at = start = prompt["prompt_tokens"]
        last = start + prompt["completion_tokens"] - 1
        while at < last:
            edge = max(e for e in EDGES if e <= at - start)
            rounds[edge] += 1
            committed[edge] += min(rows[name, at] + 1, last - at)
            at += rows[name, at] + 1
    found = {place["from"]: place for place in tau_by_place(run)}
    assert {edge: place["rounds"] for edge, place in found.items()} == {e: n for e, n in rounds.items() if n}
    for edge, place in found.items():
        assert place["tau"]["value"] == pytest.approx(committed[edge] / rounds[edge])
    chain = run.summary["policies"]["chain"]["counts"]
    assert sum(place["rounds"] for place in found.values()) == chain["rounds"]
    assert [(p["from"], p["to"]) for p in found.values()] == [(0, 32), (32, 64)]
