"""Estimates: values by hand, intervals by simulation, and reasons for everything that is absent."""

import json

import numpy as np
import pytest

from draftgauge.errors import InputError
from draftgauge.stats import (
    Estimate,
    design_effect,
    mean,
    paired_difference,
    paired_ratio_difference,
    ratio,
    resolvable_difference,
)

TWENTY = np.arange(20) % 7 + 1.0


@pytest.mark.parametrize(
    ("estimate", "value"),
    [
        (ratio([6, 2], [2, 2]), 2.0),
        (ratio([10, 1, 1], [1, 1, 2]), 3.0),
        (mean([10, 1, 1]), 4.0),
        (paired_difference([3, 5], [2, 2]), 2.0),
        (paired_ratio_difference([6, 2], [2, 2], [3, 3], [2, 4]), 1.0),
        (mean([0, 0]), 0.0),
    ],
)
def test_values_by_hand_and_no_interval_below_5_prompts(estimate, value):
    assert estimate.value == pytest.approx(value)
    assert (estimate.low, estimate.high) == (None, None)
    assert f"fewer than 5 prompts, and there are {estimate.n}" in estimate.reason


@pytest.mark.parametrize(
    ("estimate", "n", "reason"),
    [
        (ratio([], []), 0, "there is no prompt"),
        (mean([]), 0, "there is no prompt"),
        (ratio([1, 2], [0, 0]), 2, "nothing to divide by: 0 in all of 2 prompts"),
        (
            paired_ratio_difference([1, 2], [1, 1], [1, 2], [0, 0]),
            2,
            "nothing to divide by: 0 in all of 2 prompts",
        ),
    ],
)
def test_what_cannot_be_computed_is_absent_with_a_reason(estimate, n, reason):
    assert (estimate.value, estimate.low, estimate.high) == (None, None, None)
    assert (estimate.n, estimate.reason) == (n, reason)


@pytest.mark.parametrize(("n", "rough"), [(5, True), (19, True), (20, False)])
def test_the_method_says_when_an_interval_is_rough(n, rough):
    estimate = mean(TWENTY[:n])
    assert estimate.low < estimate.value < estimate.high
    assert estimate.method.endswith("; rough: fewer than 20 prompts") is rough
    assert (estimate.n, estimate.unit, estimate.reason) == (n, "prompt", None)


@pytest.mark.parametrize("values", [[4.2] * 30, [0.1 + 0.2] * 6, [1.0] * 29 + [2.0]])
def test_prompts_that_do_not_differ_have_no_interval(values):
    estimate = mean(values)
    assert estimate.value == pytest.approx(sum(values) / len(values))
    assert (estimate.low, estimate.high) == (None, None)
    assert estimate.reason == f"too few of the {len(values)} prompts differ from each other for an interval"


def test_a_prompt_without_rounds_is_no_obstacle():
    estimate = ratio([*TWENTY, 0], [*np.ones(20), 0])
    assert estimate.value == pytest.approx(TWENTY.mean())
    assert estimate.low < estimate.value < estimate.high


def test_estimates_are_deterministic_and_plain():
    first, again, other = mean(TWENTY), mean(TWENTY), mean(TWENTY, seed=1)
    assert first == again
    assert first.low != other.low
    assert first.low == pytest.approx(other.low, abs=0.15)
    assert Estimate(**json.loads(json.dumps(first.as_dict()))) == first


def test_a_mean_is_a_ratio_over_ones_for_levels_and_for_differences():
    ones, b = np.ones(20), np.sqrt(TWENTY)
    assert ratio(TWENTY, ones).low == mean(TWENTY).low
    pooled, paired = paired_ratio_difference(TWENTY, ones, b, ones), paired_difference(TWENTY, b)
    assert (pooled.low, pooled.high) == pytest.approx((paired.low, paired.high))


def test_the_interval_of_a_level_leans_with_the_prompts_and_that_of_a_difference_does_not():
    skewed = np.exp(np.linspace(-2, 2, 25))
    level, difference = mean(skewed), paired_difference(skewed, np.zeros(25))
    assert level.high - level.value > 1.3 * (level.value - level.low)
    assert difference.high - difference.value == pytest.approx(difference.value - difference.low)


def test_pairing_removes_what_both_sides_share():
    easy = np.linspace(1, 9, 30)  # prompts differ a lot, the two drafters by about 0.1
    gain = 0.1 + 0.02 * np.sin(np.arange(30.0))
    paired = paired_difference(easy + gain, easy)
    assert 0.08 < paired.low < paired.high < 0.12
    assert mean(easy).high - mean(easy).low > 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ratio([1, 2], [1]), "2 prompts stand against 1"),
        (lambda: paired_difference([1], [1, 2]), "1 prompts stand against 2"),
        (lambda: paired_ratio_difference([1], [1], [1, 2], [1, 2]), "1 prompts stand against 2"),
        (lambda: mean([1, float("nan")]), "not a finite number"),
        (lambda: ratio([1, 1], [1, float("inf")]), "not a finite number"),
        (lambda: ratio([1, 1], [1, -1]), "A denominator is -1"),
    ],
)
def test_refuses_what_is_not_one_number_per_prompt(call, message):
    with pytest.raises(InputError, match=message):
        call()


def prompts_of_rounds(generator, n):
    """n prompts of 10..60 rounds; each prompt has its own acceptance rate, which its rounds share."""
    rates = generator.beta(2, 1.5, n)
    return [
        np.minimum(generator.geometric(1 - rate, generator.integers(10, 61)), 8).astype(float)
        for rate in rates
    ]


def test_95_percent_intervals_cover_95_percent_and_intervals_over_blocks_do_not():
    generator = np.random.default_rng(20)
    population = prompts_of_rounds(generator, 20_000)
    tokens, rounds = np.array([p.sum() for p in population]), np.array([p.size for p in population])
    own = tokens / rounds
    squares = np.array([(p**2).sum() for p in population])
    pooled, per_prompt, trials = tokens.sum() / rounds.sum(), own.mean(), 400
    covered = np.zeros(4)
    for _ in range(trials):
        chosen = generator.integers(0, len(population), 24)
        by_ratio, by_mean = ratio(tokens[chosen], rounds[chosen]), mean(own[chosen])
        difference = paired_difference(generator.standard_t(4, 24), np.zeros(24))
        blocks = rounds[chosen].sum()
        variance = squares[chosen].sum() / blocks - by_ratio.value**2
        covered += [
            by_ratio.low <= pooled <= by_ratio.high,
            by_mean.low <= per_prompt <= by_mean.high,
            difference.low <= 0 <= difference.high,
            abs(by_ratio.value - pooled) <= 1.96 * np.sqrt(variance / blocks),
        ]
    # 400 trials know a coverage of 95 % to 1.1 points.
    assert covered[:3] / trials == pytest.approx(0.95, abs=0.03)
    assert covered[3] / trials < 0.6


def test_design_effect():
    generator = np.random.default_rng(0)
    independent = generator.normal(size=(500, 4))
    assert design_effect(list(independent)) == pytest.approx(1, abs=0.15)
    assert design_effect([np.repeat(row[:1], 4) for row in independent]) == pytest.approx(4, rel=0.01)
    # By hand: means 0 and 2, pooled 1; between prompts 2 * (2**2 + 2**2) / 4**2 = 1, independent (4/3)/4 = 1/3.
    assert design_effect([[0, 0], [2, 2]]) == pytest.approx(3)


@pytest.mark.parametrize("groups", [[], [[1.0, 2.0]], [[1.0, 2.0], []], [[1.0], [1.0]], [[0.0], [0.0, 0.0]]])
def test_no_design_effect_without_prompts_that_differ(groups):
    assert design_effect(groups) is None


def test_resolvable_difference():
    # Spread 1 in 100 prompts: (1.9842 + 0.8453) / 10, from a table of t with 99 degrees of freedom.
    values = np.tile([-1.0, 1.0], 50) * np.sqrt(99 / 100)
    assert resolvable_difference(values) == pytest.approx(0.28295, abs=1e-4)
    assert resolvable_difference([1.0, 2.0, 3.0, 4.0]) is None
    assert resolvable_difference([0.3] * 10) is None


def test_the_resolvable_difference_is_found_four_times_in_five():
    generator = np.random.default_rng(0)
    found, trials, n = 0, 2000, 20
    true = resolvable_difference(np.tile([-1.0, 1.0], 10) * np.sqrt(19 / 20))
    samples = generator.normal(true, 1, (trials, n))
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / np.sqrt(n))
    found = (abs(t) > 2.0930).mean()
    assert found == pytest.approx(0.80, abs=0.03)
