"""Gates: what can be asked, what passes, and that what cannot be decided does not."""

import json
from pathlib import Path

import pytest

from draftgauge.acceptance import Policy
from draftgauge.errors import InputError, RunError
from draftgauge.gates import judge, parse_gate
from draftgauge.runs import Run
from tests.test_compare import PLAN, run, stored_run

# Rounds of a accept 3, 1, 0, 0; of b 2, 0, 0; of c 0, 0, 0. tau: 8/4, 5/3 and 1, their mean 1.5556; pooled 16/10.
OURS = run("late", {"a": [3, 1], "b": [2], "c": [0]})
NAMES = tuple("abcdefgh")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tau>=2.0", ("chain", "tau", 2.0, ">=", None)),
        ("tau>=2", ("chain", "tau", 2.0, ">=", None)),
        ("tau > .5", ("chain", "tau", 0.5, ">", None)),
        (" streak < 0.5 ", ("chain", "streak", 0.5, "<", None)),
        ("all_anchor_streak<=1.", ("chain", "all_anchor_streak", 1.0, "<=", None)),
        ("ddtree16.tau_pooled > 2.5", ("ddtree16", "tau_pooled", 2.5, ">", None)),
        ("chain4.streak_pooled>=1", ("chain4", "streak_pooled", 1.0, ">=", None)),
        ("not worse than runs/a by 0.05", ("chain", "tau", 0.05, None, "runs/a")),
        ("not  worse than runs/one by one by 0.05", ("chain", "tau", 0.05, None, "runs/one by one")),
        ("ddtree4.streak not worse than R by 0", ("ddtree4", "streak", 0.0, None, "R")),
    ],
)
def test_a_gate_is_read(text: str, expected: tuple[str, str, float, str | None, str | None]) -> None:
    policy, quantity, bound, compares, baseline = expected
    gate = parse_gate(text)
    assert (gate.policy, gate.quantity, gate.bound) == (Policy.parse(policy), quantity, bound)
    assert (gate.compares, gate.baseline) == (compares, None if baseline is None else Path(baseline))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tau", "gate 'tau' is not understood; expected one as in \"tau>=2.0\""),
        ("", "is not understood"),
        ("tau>=x", "is not understood"),
        ("tau>=1.2.3", "is not understood"),
        ("tau>=nan", "is not understood"),
        ("tau>=-1", "is not understood"),
        ("tau=2", "is not understood"),
        ("tau>=2,0", "is not understood"),
        ("not worse than R", "is not understood"),
        ("speed>=2", "asks for 'speed', which is none of tau, tau_pooled, streak,"),
        ("tau_pooled not worse than R by 1", "paired by tau or streak, not by tau_pooled"),
        ("tree16.tau>=2", "gate 'tree16.tau>=2': Policy 'tree16' is not known"),
        ("ddtree0.tau>=2", "Policy 'ddtree0' is not known"),
    ],
)
def test_what_is_no_gate_is_explained(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_gate(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "passed", "said"),
    [
        ("tau>=1.55", True, "tau of the chain is 1.556"),
        ("tau>=1.56", False, "tau of the chain is 1.556"),
        ("tau>1.5555", True, "tau of the chain is 1.556"),
        (
            "tau>=1.556",
            False,
            "tau of the chain is 1.5556",
        ),  # 1.55555...: three decimals would look like a pass
        ("tau<1.56", True, "tau of the chain is 1.556"),
        ("tau_pooled>=1.6", True, "tau_pooled of the chain is 1.600"),
        ("tau_pooled>1.6", False, "tau_pooled of the chain is 1.600"),
        ("tau_pooled<=1.6", True, "tau_pooled of the chain is 1.600"),
        ("tau_pooled<1.6", False, "tau_pooled of the chain is 1.600"),
        ("streak_pooled<=0.6", True, "streak_pooled of the chain is 0.600"),
        ("coverage4.streak >= 2.7", False, "streak of the coverage@4 is 2.667"),  # 3, (3 + 1) / 2 and 3
    ],
)
def test_a_value_is_held_against_the_bound(text: str, passed: bool, said: str) -> None:
    judgement = judge(parse_gate(text), OURS)
    assert judgement.passed is passed
    assert judgement.verdict == ("passed" if passed else "FAILED")
    assert judgement.text.startswith(said)
    assert judgement.as_dict()["gate"] == text


def test_a_value_stands_with_its_interval_and_says_when_that_reaches_beyond() -> None:
    made = run("late", {name: [3, i % 4] for i, name in enumerate(NAMES)})
    tau = made.summary["policies"]["chain"]["tau_response"]
    judgement = judge(parse_gate(f"tau>={tau['low'] + 0.001:.6f}"), made)
    assert judgement.passed
    assert f"[{tau['low']:.2f}, {tau['high']:.2f}]; its interval reaches beyond" in judgement.text
    assert (judgement.value, judgement.low, judgement.high) == (tau["value"], tau["low"], tau["high"])
    assert "reaches" not in judge(parse_gate("tau>=0.5"), made).text


def test_what_was_not_measured_is_not_decided() -> None:
    made = run("walked", {"a": [1]})
    del made.summary["policies"]["chain"]["all_anchor_streak"]
    judgement = judge(parse_gate("all_anchor_streak>=0"), made)
    assert (judgement.passed, judgement.verdict) == (None, "NOT DECIDED")
    assert "was not measured: it needs --anchors all" in judgement.text


def test_a_value_that_is_absent_is_not_decided_for_its_reason() -> None:
    made = run("late", {"a": [1]})
    made.summary["policies"]["chain"]["tau_response"] |= {"value": None, "reason": "there is no prompt"}
    judgement = judge(parse_gate("tau<9"), made)
    assert judgement.passed is None
    assert judgement.text == "tau of the chain is not known: there is no prompt"


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("ddtree64.tau>=1", "--budgets"),
        ("chain2.tau>=1", "--chain-lengths"),
        ("coverage2.streak>=1", "--coverage"),
    ],
)
def test_a_policy_that_the_run_lacks_is_named_with_the_option_that_measures_it(
    text: str, option: str
) -> None:
    with pytest.raises(
        InputError, match=rf"late has no \w+; it has chain, coverage4. Measure it with {option}"
    ):
        judge(parse_gate(text), OURS)


# --- against a baseline ----------------------------------------------------------------------------------


def both(folder: Path, ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> tuple[Run, str]:
    """A run, and the path of a baseline on disk."""
    return run("late", ours), str(stored_run(folder / "early", run("early", theirs)).path)


def prompts(*streaks: int) -> dict[str, list[int]]:
    """Prompts whose chain accepts so many in its first round and nothing in two more: tau 1 + streak / 3."""
    return {name: [streak] for name, streak in zip(NAMES, streaks, strict=False)}


@pytest.mark.parametrize(
    ("ours", "theirs", "margin", "passed", "words"),
    [
        # Each prompt wins 1/3 to 1: the interval lies above 0.
        (prompts(1, 2, 3, 3, 2, 1, 2, 3), prompts(0, 0, 0, 0, 1, 0, 0, 1), 0, True, ": +"),
        # Half of the prompts lose 1/3, half win 1/3.
        (
            prompts(1, 2, 1, 2, 1, 2, 1, 2),
            prompts(2, 1, 2, 1, 2, 1, 2, 1),
            0.05,
            False,
            "0.05 is not excluded",
        ),
        (prompts(1, 2, 1, 2, 1, 2, 1, 2), prompts(2, 1, 2, 1, 2, 1, 2, 1), 1.5, True, ": +0.000 [-"),
        (
            prompts(0, 0, 0, 0, 1, 0, 0, 1),
            prompts(1, 2, 3, 3, 2, 1, 2, 3),
            0.05,
            False,
            ", a loss of more than 0.05",
        ),
        (prompts(1, 2, 3, 0, 1, 2), prompts(1, 2, 3, 0, 1, 2), 0, True, ": the same on every prompt"),
        # Equal, but on too few prompts: nothing can be decided.
        (prompts(1, 2, 3, 0), prompts(1, 2, 3, 0), 0.05, None, "from fewer than 5 prompts, and there are 4"),
        (prompts(3, 3, 3, 3), prompts(0, 0, 0, 0), 0.05, None, "; measure on more prompts"),
        # A win and a loss cancel on two prompts: that is no equality.
        (prompts(1, 2), prompts(2, 1), 0.05, None, "decides nothing"),
    ],
    ids=["better", "open", "wide margin", "worse", "equal", "few and equal", "few and better", "cancelled"],
)
def test_not_worse_means_that_a_loss_is_excluded(
    ours: dict[str, list[int]],
    theirs: dict[str, list[int]],
    margin: float,
    passed: bool | None,
    words: str,
    tmp_path: Path,
) -> None:
    made, baseline = both(tmp_path, ours, theirs)
    judgement = judge(parse_gate(f"not worse than {baseline} by {margin}"), made)
    assert judgement.passed is passed, judgement.text
    assert f"tau of the chain against early on {len(ours)} prompt(s)" in judgement.text
    assert words in judgement.text
    mean = sum(o[0] - t[0] for o, t in zip(ours.values(), theirs.values(), strict=True)) / 3 / len(ours)
    assert judgement.value == pytest.approx(mean)
    json.dumps(judgement.as_dict(), allow_nan=False)


def test_the_policy_that_is_named_is_the_one_that_is_compared(tmp_path: Path) -> None:
    """The coverage accepts all on both sides, whatever the chain does."""
    made, baseline = both(tmp_path, prompts(0, 0, 0, 0, 0, 0), prompts(0, 0, 0, 0, 0, 0))
    judgement = judge(parse_gate(f"coverage4.streak not worse than {baseline} by 0.1"), made)
    assert judgement.passed
    assert "streak of the coverage@4 against early" in judgement.text


def test_a_baseline_without_the_policy_is_named(tmp_path: Path) -> None:
    made = run("late", {"a": [1]}, PLAN, (Policy("chain"), Policy("chain", 2)))
    baseline = stored_run(tmp_path / "early", run("early", {"a": [1]}))
    with pytest.raises(InputError, match="early has no chain2; it has chain, coverage4"):
        judge(parse_gate(f"chain2.tau not worse than {baseline.path} by 1"), made)


def test_a_baseline_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run\.json"):
        judge(parse_gate(f"not worse than {tmp_path} by 1"), OURS)


@pytest.mark.parametrize("untrusted", ["late", "early"])
def test_numbers_that_are_not_trusted_decide_nothing(untrusted: str, tmp_path: Path) -> None:
    better, worse = prompts(3, 3, 3, 2, 3, 3), prompts(0, 1, 0, 0, 0, 1)
    made, earlier = run("late", better), run("early", worse)
    failed = {"trusted": False, "failed": ["context-zeroed"], "controls": []}
    {"late": made, "early": earlier}[untrusted].summary["trust"] = failed
    baseline = stored_run(tmp_path / "early", earlier)
    judgement = judge(parse_gate(f"not worse than {baseline.path} by 0.05"), made)
    assert judgement.passed is None
    assert "is not trusted: context-zeroed failed" in judgement.text
    assert judge(parse_gate("tau>=1"), made).passed is (None if untrusted == "late" else True)
