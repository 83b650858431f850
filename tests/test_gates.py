"""Gates: what can be asked, what passes, and that what cannot be decided does not."""

from pathlib import Path

import pytest

from draftgauge.errors import InputError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.gates import judge, parse_gate
from draftgauge.runs import Run
from tests import planted
from tests.test_compare import run

OURS = run("late", {"a": [3, 1], "b": [2], "c": [0]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tau>=2.0", ("chain", "tau", 2.0, ">=", None)),
        (" streak < 0.5 ", ("chain", "streak", 0.5, "<", None)),
        ("ddtree16.tau_pooled > 2.5", ("ddtree16", "tau_pooled", 2.5, ">", None)),
        ("not worse than runs/a b by 0.05", ("chain", "tau", 0.05, None, Path("runs/a b"))),
        ("ddtree4.streak not worse than R by 0", ("ddtree4", "streak", 0.0, None, Path("R"))),
    ],
)
def test_gates_are_read(text: str, expected: tuple) -> None:
    gate = parse_gate(text)
    assert (gate.policy, gate.quantity, gate.bound, gate.compares, gate.baseline) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tau", "is not understood"),
        ("tau>=x", "is not understood"),
        ("tau>=1.2.3", "is no number"),
        ("speed>=2", "'speed' is not one of"),
        ("tau_pooled not worse than R by 1", "compared by tau or streak"),
        ("tree16.tau>=2", "tree16"),
    ],
)
def test_what_is_no_gate_is_explained(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_gate(text)


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("tau>=1.55", True),  # (8/4 + 5/3 + 1) / 3 = 1.5556
        ("tau>=1.56", False),
        ("tau<1.56", True),
        ("coverage4.streak >= 2", True),
        ("streak <= 0.1", False),
    ],
)
def test_a_level_is_compared_with_the_runs_value(text: str, passed: bool) -> None:
    judgement = judge(parse_gate(text), OURS)
    assert judgement.passed is passed
    assert judgement.as_dict()["gate"] == text


def test_a_policy_that_the_run_lacks_is_named() -> None:
    with pytest.raises(InputError, match="no policy 'ddtree64'; it has chain, coverage4"):
        judge(parse_gate("ddtree64.tau>=1"), OURS)


def test_what_was_not_measured_does_not_pass() -> None:
    made = run("walked", {"a": [1]})
    del made.summary["policies"]["chain"]["all_anchor_streak"]
    judgement = judge(parse_gate("all_anchor_streak>=0"), made)
    assert judgement.passed is False
    assert "is not known" in judgement.text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The right mask token, and the one beside it, on 8 prompts."""
    from draftgauge.stated import Stated

    root, pair = tmp_path_factory.mktemp("runs"), planted.shared_pair(0)
    wrong = Options(stated=Stated(wiring={"mask_token_id": 291}))
    return (
        evaluate_checkpoint(pair.checkpoint, pair.recording.path, root=root),
        evaluate_checkpoint(pair.checkpoint, pair.recording.path, wrong, root=root),
    )


def test_not_worse_means_that_a_loss_is_excluded(runs: tuple[Run, Run]) -> None:
    good, bad = runs
    better = judge(parse_gate(f"not worse than {bad.path} by 0.05"), good)
    assert better.passed
    assert "on 8 prompt(s)" in better.text
    worse = judge(parse_gate(f"not worse than {good.path} by 0.05"), bad)
    assert not worse.passed
    assert "a loss of more than 0.05 is not excluded" in worse.text
    assert judge(parse_gate(f"not worse than {good.path} by 5"), bad).passed


def test_a_run_is_not_worse_than_itself(runs: tuple[Run, Run]) -> None:
    assert judge(parse_gate(f"not worse than {runs[0].path} by 0.01"), runs[0]).passed


def test_too_few_prompts_decide_nothing(tmp_path: Path) -> None:
    pair = planted.shared_pair(0)
    from draftgauge.stated import Stated

    few = Options(num_prompts=3)
    wrong = Options(num_prompts=3, stated=Stated(wiring={"mask_token_id": 291}))
    good = evaluate_checkpoint(pair.checkpoint, pair.recording.path, few, root=tmp_path)
    bad = evaluate_checkpoint(pair.checkpoint, pair.recording.path, wrong, root=tmp_path)
    judgement = judge(parse_gate(f"not worse than {bad.path} by 0.05"), good)
    assert judgement.passed is False
    assert "cannot be decided" in judgement.text
