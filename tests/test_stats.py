"""Intervals and paired tests, against closed forms and simulation."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residualquant.repro.stats import (
    Pair,
    bootstrap_mean,
    holm,
    mcnemar_exact,
    mean_interval,
    noninferiority,
    paired_difference,
    paired_test,
    rounded_p,
    tost,
    wilson,
)


def test_wilson_of_a_textbook_case_and_its_ends():
    low, high = wilson(380, 500)
    assert (round(low, 4), round(high, 4)) == (0.7207, 0.7954)
    assert wilson(0, 8)[0] == 0 and wilson(8, 8)[1] == 1
    assert 0.3 < wilson(0, 8)[1] < 0.35


@pytest.mark.parametrize("correct, n", [(-1, 3), (4, 3), (0, 0)])
def test_wilson_refuses_nonsense(correct, n):
    with pytest.raises(ValueError, match=f"correct={correct} and n={n}"):
        wilson(correct, n)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_two_sided_binomial_tail(b, c):
    n, k = b + c, min(b, c)
    tail = sum(comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar_exact(Pair(b, c, n + 5)) == pytest.approx(min(1, 2 * tail))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 800)), min_size=2, max_size=8))
def test_pairs_weigh_the_same_in_the_test_and_in_its_interval(counts):
    pairs = [Pair(b, c, b + c + more + 1) for b, c, more in counts]
    _, low, high = paired_difference(*pairs)
    assert (paired_test(*pairs) < 0.05) == (not low <= 0 <= high)


def test_one_pair_is_tested_exactly():
    assert paired_test(Pair(9, 1, 70)) == mcnemar_exact(Pair(9, 1, 70)) == pytest.approx(22 / 1024)


def test_a_p_is_never_written_as_nothing():
    far = paired_test(*[Pair(2300, 0, 2400)] * 4)
    assert far == 0.0 and rounded_p(far) == 1e-300  # the normal tail underflows
    assert rounded_p(0.0123456) == 0.01235 and rounded_p(1.0) == 1.0


def test_a_pair_counts_common_problems():
    pair = Pair.of({"a": True, "b": True, "c": False, "d": True}, {"a": True, "b": False, "c": True, "e": True})
    assert pair == Pair(1, 1, 3) and pair.difference == 0


def test_a_pair_refuses_impossible_counts():
    with pytest.raises(ValueError, match="only_first=3"):
        Pair(3, 1, 3)


def test_eight_agreeing_problems_are_no_certainty():
    pair = Pair(0, 0, 8)
    assert tost(pair) > 0.3 and noninferiority(pair) > 0.3
    assert tost(Pair(0, 0, 2000)) < 1e-6
    assert tost(Pair(30, 20, 2000)) < 0.05 < tost(Pair(90, 20, 2000))
    assert noninferiority(Pair(90, 20, 2000)) < 1e-6 < 0.9 < noninferiority(Pair(20, 120, 2000))


def test_the_interval_of_a_difference_covers_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        kinds = rng.choice(4, size=200, p=[0.6, 0.15, 0.1, 0.15])
        b, c = int((kinds == 1).sum()), int((kinds == 2).sum())
        _, low, high = paired_difference(Pair(b, c, 200))
        hits += low <= 0.05 <= high
    assert 0.92 < hits / 600 < 0.98


def test_the_mean_of_one_task_is_wilsons_interval_and_of_four_is_narrower():
    mean, low, high = mean_interval([(70, 100)])
    assert mean == 0.7 and (low, high) == pytest.approx(wilson(70, 100))
    four = mean_interval([(70, 100), (90, 100), (50, 100), (10, 100)])
    assert four[0] == pytest.approx(0.55) and four[2] - four[1] < 0.6 * (high - low)
    with pytest.raises(ValueError):
        mean_interval([])


def test_the_interval_of_a_mean_covers_as_it_says():
    rng = np.random.default_rng(1)
    rates, sizes = [0.95, 0.6, 0.3, 0.8], [200, 200, 100, 100]
    hits = 0
    for _ in range(600):
        _, low, high = mean_interval([(int(rng.binomial(n, p)), n) for p, n in zip(rates, sizes)])
        hits += low <= np.mean(rates) <= high
    assert 0.925 < hits / 600 < 0.98


def test_holm_is_bonferroni_for_the_smallest_and_never_decreases():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_p_value_and_bonferroni(p_values):
    for p, corrected in zip(p_values, holm(p_values)):
        assert p <= corrected <= min(1.0, len(p_values) * p) or corrected == pytest.approx(min(1.0, len(p_values) * p))


def test_the_bootstrap_interval_is_that_of_a_mean_and_repeats():
    values = np.random.default_rng(1).normal(3, 2, size=400)
    mean, low, high = bootstrap_mean(values)
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert bootstrap_mean(values) == (mean, low, high)
    assert bootstrap_mean([5.0, 5.0]) == (5.0, 5.0, 5.0)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])
