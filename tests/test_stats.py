"""Estimates: values by hand, intervals by simulation, and reasons for everything that is absent."""

import json

import numpy as np
import pytest

from draftgauge.errors import InputError
from draftgauge.stats import (
    Change,
    Estimate,
    change,
    design_effect,
    holm,
    mean,
    outliers,
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


@pytest.mark.parametrize(
    ("bounds", "low", "high", "says"),
    [
        ((1.0, 8.0), 1.0, 1.22, "mean; cut to the possible 1 to 8"),
        ((0.0, 1.1), 0.97, 1.1, "mean; cut to the possible 0 to 1.1"),
        ((0.97, 1.22), 0.97, 1.22, "mean"),
    ],
)
def test_an_interval_is_cut_to_what_is_possible_and_says_so(bounds, low, high, says):
    estimate = Estimate(1.05, 0.97, 1.22, 20, "mean")
    assert estimate.within(*bounds) == Estimate(1.05, low, high, 20, says)


def test_what_has_no_interval_is_not_cut():
    few = mean([3.0, 9.0])
    assert few.within(0.0, 1.0) == few


def rounds_of(generator, rate, tokens):
    """What each round commits of a completion; the drafter is better and worse for eight tokens at a time."""
    rates = np.repeat((rate + generator.normal(0, 0.1, tokens // 8 + 1)).clip(0.02, 0.98), 8)[:tokens]
    committed = np.minimum(generator.geometric(1 - rates), 8)
    return committed[: 1 + np.searchsorted(committed.cumsum(), tokens)].astype(float)


def population(generator, rates):
    """Prompts of 32 to 512 tokens under two drafters, a rate for each: tokens and rounds of both, a's squares."""
    rows = []
    lengths = generator.lognormal(5, 0.6, len(rates)).clip(32, 512).astype(int)
    for rate, tokens in zip(rates, lengths, strict=True):
        a = rounds_of(generator, rate, tokens)
        b = rounds_of(generator, rate + generator.normal(-0.05, 0.05), tokens)
        rows.append((a.sum(), a.size, b.sum(), b.size, (a**2).sum()))
    return np.array(rows).T


def far_apart(generator):
    """Rates of prompts that are much alike, but for one in ten that is nearly always drafted right."""
    return np.where(generator.random(3000) < 0.1, 0.95, generator.beta(40, 45, 3000))


def covers(estimate, truth):
    return estimate.low <= truth <= estimate.high


def test_95_percent_intervals_cover_95_percent_and_intervals_over_rounds_do_not():
    generator = np.random.default_rng(20)
    tokens, rounds, tokens_b, rounds_b, squares = population(generator, generator.beta(5, 4, 3000))
    own, own_b = tokens / rounds, tokens_b / rounds_b
    pooled = tokens.sum() / rounds.sum()
    everywhere = []
    for n, trials in ((20, 400), (40, 240), (100, 120)):
        covered = []
        for chosen in generator.integers(0, tokens.size, (trials, n)):
            by_ratio = ratio(tokens[chosen], rounds[chosen])
            count = rounds[chosen].sum()
            naive = np.sqrt((squares[chosen].sum() / count - by_ratio.value**2) / count)
            paired = paired_difference(own[chosen], own_b[chosen])
            covered.append(
                [
                    covers(by_ratio, pooled),
                    covers(mean(own[chosen]), own.mean()),
                    covers(paired, (own - own_b).mean()),
                    abs(by_ratio.value - pooled) <= 1.96 * naive,
                ]
            )
        share = np.mean(covered, axis=0)
        # So few trials know a coverage of 95 % to 1.1, 1.4 and 2.0 points.
        assert share[:3] == pytest.approx(0.95, abs=0.04), n
        assert share[3] < 0.6, n
        everywhere += covered
    assert np.mean(everywhere, axis=0)[:3] == pytest.approx(0.95, abs=0.02)


def test_intervals_cover_pooled_differences_too():
    generator = np.random.default_rng(21)
    tokens, rounds, tokens_b, rounds_b, _ = population(generator, generator.beta(5, 4, 3000))
    truth = tokens.sum() / rounds.sum() - tokens_b.sum() / rounds_b.sum()
    covered = [
        covers(paired_ratio_difference(tokens[i], rounds[i], tokens_b[i], rounds_b[i]), truth)
        for i in generator.integers(0, tokens.size, (300, 20))
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)


def test_no_interval_knows_of_prompts_that_were_not_drawn():
    """Where one prompt in ten stands far above the rest: what `ROUGH_BELOW` and messages.md say of it."""
    generator = np.random.default_rng(22)
    tokens, rounds, *_ = population(generator, far_apart(generator))
    own = tokens / rounds
    found = []
    for chosen in generator.integers(0, own.size, (300, 20)):
        estimate = mean(own[chosen])
        found.append((covers(estimate, own.mean()), own[chosen].max() > 4))
    covered, drawn = np.array(found).T
    assert 0.84 < covered.mean() < 0.93
    assert covered[drawn].mean() > 0.9
    assert covered[~drawn].mean() < 0.1


@pytest.mark.parametrize(
    ("values", "found"),
    [
        # Logarithms to base 2: 1 1 0 2 5 off by 0 0 1 1 4; median 1, in 4 / (1 / 0.6745) = 2.7 deviations: near.
        ([2, 2, 1, 4, 32], []),
        # 1 1.1 0.9 1.2 4: off the median 1.1 by 0.1 0 0.2 0.1 2.9; median 0.1, so 19.6 deviations.
        ([2, 2**1.1, 2**0.9, 2**1.2, 16], [4]),
        ([0.1, 2, 2.1, 1.9, 2.2, 2, 9], [0, 6]),
        # More than half are equal. The mean deviation is ln 3 / 5, so 5 * 0.7979 = 4.0 deviations.
        ([2, 2, 2, 2, 6], [4]),
        # Of two among nine each is 9/2 * 0.7979 = 3.6 deviations off, of two among eight 3.2.
        ([2, 2, 2, 2, 2, 2, 2, 6, 6], [7, 8]),
        ([2, 2, 2, 2, 2, 2, 6, 6], []),
        # Far by their spread, and yet within a quarter of the others.
        ([2, 2, 2, 2, 2.4], []),
        ([2, 2, 2, 2, 2, 2, 2.6], [6]),
        ([0.1 + 0.2] * 5 + [0.3], []),
        ([3, 3, 3, 3, 3], []),
        ([1, 1, 1, 100], []),
        ([], []),
    ],
)
def test_outliers_by_hand(values, found):
    assert outliers(values) == found
    assert outliers([7 * value for value in values]) == found


def test_outliers_are_rarely_seen_where_there_are_none_and_mostly_where_they_are():
    generator = np.random.default_rng(0)

    def share(rates):
        tokens, rounds, *_ = population(generator, rates)
        return np.mean([bool(outliers((tokens / rounds)[i])) for i in generator.integers(0, 3000, (500, 20))])

    assert share(generator.beta(5, 4, 3000)) < 0.2
    assert share(far_apart(generator)) > 0.8  # 12 % of the samples hold none


@pytest.mark.parametrize("values", [[1, 2, 0, 2, 2], [2, -1.0], [float("nan"), 1.0]])
def test_outliers_are_looked_for_among_numbers_above_0(values):
    with pytest.raises(InputError, match="expected numbers above 0"):
        outliers(values)


@pytest.mark.parametrize(
    ("sums", "sizes", "value", "error"),
    [
        # Units off by -1, 1, 0, -2, 2 from -7 each: 10 squared in all; sqrt(10 / (5 * 4)) / 8.
        ([-8, -6, -7, -9, -5], [8] * 5, -0.875, np.sqrt(10 / 20) / 8),
        # 12 over 24 anchors: 0.5 each. Off by 2 - 1, 0 - 2, 4 - 2, 5 - 3, 1 - 4: 22 squared; mean size 24 / 5.
        ([2, 0, 4, 5, 1], [2, 4, 4, 6, 8], 0.5, np.sqrt(22 / 20) / 4.8),
        # One unit has no anchors. Off by 0.6, -1.4, 0.6, -1.4, 1.6, 0: 7.2 squared; mean size 5 / 6.
        ([1, -1, 1, -1, 2, 0], [1, 1, 1, 1, 1, 0], 0.4, np.sqrt(7.2 / 30) / (5 / 6)),
    ],
)
def test_change_by_hand(sums, sizes, value, error):
    found = change(sums, sizes)
    quantile = {5: 2.776445, 6: 2.570582}[len(sums)]  # from a table of t, 97.5 %, n - 1 degrees of freedom
    assert found.value == pytest.approx(value)
    assert found.high - found.value == pytest.approx(quantile * error, rel=1e-5)
    assert found.value - found.low == pytest.approx(quantile * error, rel=1e-5)
    assert (found.p < 0.05) == (abs(value) > quantile * error)
    assert found.n == len(sums)


def test_the_p_value_of_a_change_is_that_of_a_t_test():
    # 3 off its error of 1, 4 degrees of freedom: 0.03994, from a table of t.
    spread = np.sqrt(20 / 10) * np.array([-1.0, 1, 0, -2, 2])
    assert change(3 + spread, np.ones(5)).p == pytest.approx(0.03994, abs=1e-5)
    assert change(-3 + spread, np.ones(5)).p == pytest.approx(0.03994, abs=1e-5)


@pytest.mark.parametrize(
    ("sums", "sizes", "expected"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 1], Change(2.5, None, None, None, 4)),
        ([0] * 6, [3] * 6, Change(0.0, 0.0, 0.0, 1.0, 6)),
        ([-2, -4, -6, -2, -4], [1, 2, 3, 1, 2], Change(-2.0, -2.0, -2.0, 0.0, 5)),
    ],
)
def test_changes_that_need_no_interval_or_have_none(sums, sizes, expected):
    assert change(sums, sizes) == expected


@pytest.mark.parametrize(
    ("sums", "sizes", "message"),
    [
        ([], [], "There is no anchor to compare on"),
        ([0, 0], [0, 0], "There is no anchor to compare on"),
        ([1, 2], [1], "2 prompts stand against 1"),
        ([1, 2], [1, -1], "A denominator is -1"),
        ([1, float("nan")], [1, 1], "not a finite number"),
    ],
)
def test_a_change_needs_anchors(sums, sizes, message):
    with pytest.raises(InputError, match=message):
        change(sums, sizes)


def test_a_change_that_is_none_is_seldom_called_one_unless_anchors_are_taken_for_units():
    """32 stretches of 4 to 12 anchors; what changes at an anchor is half the stretch's own, half chance."""
    generator = np.random.default_rng(3)
    alarms = []
    for _ in range(500):
        sizes = generator.integers(4, 13, 32)
        stretch = np.repeat(np.arange(32), sizes)
        at_anchor = generator.normal(size=32)[stretch] + generator.normal(size=len(stretch))
        by_stretch = change(np.bincount(stretch, at_anchor), sizes)
        alarms.append((by_stretch.p < 0.05, change(at_anchor, np.ones(len(stretch))).p < 0.05))
    false, single = np.mean(alarms, axis=0)
    assert 0.03 < false < 0.07
    assert single > 0.3


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 * 0.01, then 2 * 0.03, and 1 * 0.04 is not below that
        ([0.03, 0.01, 0.04], [0.06, 0.03, 0.06]),
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
        ([0.001, 0.2, 0.5, 0.03], [0.004, 0.4, 0.5, 0.09]),
        ([0.4, 0.6, 1.0], [1.0, 1.0, 1.0]),
        ([0.0, 1.0], [0.0, 1.0]),
    ],
)
def test_holm_by_hand(p, adjusted):
    assert holm(p) == pytest.approx(adjusted)


def test_of_twenty_families_in_which_nothing_is_true_one_says_something():
    families = np.random.default_rng(0).random((2000, 12))
    assert np.mean([(holm(p) < 0.05).any() for p in families]) == pytest.approx(0.05, abs=0.015)
    assert (families < 0.05).any(axis=1).mean() > 0.4  # without the adjustment


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
