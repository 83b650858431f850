"""The model of speed: its formula, and which policies it is told of."""

import pytest

from draftgauge.report.speedup import Costs, projections

SUMMARY = {
    "policies": {
        "chain": {"label": "chain", "tau_pooled": {"value": 2.0}},
        "chain4": {"label": "chain(4)", "tau_pooled": {"value": 1.5}},
        "ddtree16": {"label": "DDTree(16)", "tau_pooled": {"value": None}},
        "ddtree64": {"label": "DDTree(64)", "tau_pooled": {"value": 3.0}},
        "coverage4": {"label": "coverage@4", "tau_pooled": {"value": 4.0}},
    }
}


def test_a_round_costs_a_target_step_the_draft_and_its_nodes() -> None:
    assert Costs(0.05, 0.002).of_round(15) == pytest.approx(1.08)
    assert Costs(0.0, 0.0).of_round(64) == 1.0


def test_only_what_decodes_and_has_a_tau_is_projected() -> None:
    found = {p.label: p for p in projections(SUMMARY, depth=7, costs=Costs(0.1, 0.01))}
    assert found.keys() == {"chain", "chain(4)", "DDTree(64)"}
    assert (found["chain"].nodes, found["chain(4)"].nodes, found["DDTree(64)"].nodes) == (7, 4, 64)
    assert found["chain"].speedup == pytest.approx(2.0 / 1.17)
    assert found["DDTree(64)"].speedup == pytest.approx(3.0 / 1.74)
