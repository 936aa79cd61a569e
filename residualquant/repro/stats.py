"""Intervals and paired tests for accuracies. Every comparison is per problem, on the same problems.

* ``wilson``: the interval of one accuracy.
* ``mcnemar_exact``: two-sided test that two methods solve equally many of the same problems; ``paired_test``: of one
  task or, every task weighing the same, of several.
* ``paired_difference``: the interval of a difference of accuracies; ``tost``: "the same, within 3 points".
* ``mean_interval``: the interval of an equal-weight mean over tasks; ``bootstrap_mean``: of a mean of other numbers.
* ``holm``: p-values of several tests that belong together; ``rounded_p``: one as it is written.

A ``Pair`` counts, over the problems both methods answered, those only the first solved (b) and only the second (c).
The paired interval adds half a count to each of the four cells (Agresti & Min, Statistics in Medicine 2005), so that
eight problems on which two methods agree do not pass for certainty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

MARGIN = 0.03
LEAST_P = 1e-300  # an upper bound of every p below it: doubles end soon after, and an extrapolated tail long before


@dataclass(frozen=True)
class Pair:
    """``only_first`` (b) and ``only_second`` (c) of ``n`` problems answered by both methods."""

    only_first: int
    only_second: int
    n: int

    def __post_init__(self) -> None:
        if min(self.only_first, self.only_second) < 0 or self.only_first + self.only_second > self.n:
            raise ValueError(f"a pair needs 0 <= only_first + only_second <= n, got {self}")

    @classmethod
    def of(cls, first: Mapping[str, bool], second: Mapping[str, bool]) -> Pair:
        """The pair of two {problem id: correct} maps, over the problems in both."""
        common = first.keys() & second.keys()
        only_first = sum(first[p] and not second[p] for p in common)
        return cls(only_first, sum(second[p] and not first[p] for p in common), len(common))

    @property
    def difference(self) -> float:
        """Accuracy of the first minus that of the second, as a fraction."""
        return (self.only_first - self.only_second) / self.n if self.n else float("nan")


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of ``correct`` out of ``n``, as fractions.

    Raises:
        ValueError: not 0 <= correct <= n, or n is 0.
    """
    from scipy.stats import binomtest

    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"need 0 <= correct <= n and n >= 1, got correct={correct} and n={n}")
    interval = binomtest(correct, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar_exact(pair: Pair) -> float:
    """Two-sided exact McNemar p of "equally many solved": discordant problems as fair coin tosses."""
    from scipy.stats import binomtest

    discordant = pair.only_first + pair.only_second
    return float(binomtest(pair.only_first, discordant).pvalue) if discordant else 1.0


def paired_test(*pairs: Pair) -> float:
    """Two-sided p of "equally accurate": the exact McNemar test of one pair, else the z test of the difference that
    :func:`paired_difference` gives, in which every pair weighs the same whatever its n."""
    from scipy.stats import norm

    if len(pairs) == 1:
        return mcnemar_exact(*pairs)
    centre, error = _adjusted(pairs)
    return float(2 * norm.sf(abs(centre) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests corrected after Holm (1979), in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def rounded_p(p: float) -> float:
    """``p`` to four digits and never 0: what is below ``LEAST_P`` is given as that."""
    return max(LEAST_P, float(f"{p:.4g}"))


def bootstrap_mean(
    values: Sequence[float], confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high) of ``values``: the percentile interval over ``draws`` resamples, the same for the same seed.

    Raises:
        ValueError: no values.
    """
    import numpy as np

    if not len(values):
        raise ValueError("the mean of no values was asked for")
    data = np.asarray(values, dtype=float)
    means = data[np.random.default_rng(seed).integers(len(data), size=(draws, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(data.mean()), float(low), float(high)


def _adjusted(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Equal-weight mean over ``pairs`` of the Agresti-Min difference, and its standard error."""
    if not pairs or any(p.n < 1 for p in pairs):
        raise ValueError(f"a paired comparison needs problems answered by both methods, got {list(pairs)}")
    estimate, variance = 0.0, 0.0
    for pair in pairs:
        b, c, n = pair.only_first + 0.5, pair.only_second + 0.5, pair.n + 2
        estimate += (b - c) / n
        variance += (b + c - (b - c) ** 2 / n) / n**2
    return estimate / len(pairs), sqrt(variance) / len(pairs)


def paired_difference(*pairs: Pair, confidence: float = 0.95) -> tuple[float, float, float]:
    """(difference, low, high) of first minus second, as fractions; several pairs: the equal-weight mean over them."""
    from scipy.stats import norm

    centre, error = _adjusted(pairs)
    reach = float(norm.ppf(0.5 + confidence / 2)) * error
    return sum(p.difference for p in pairs) / len(pairs), centre - reach, centre + reach


def noninferiority(*pairs: Pair, margin: float = MARGIN) -> float:
    """One-sided p of "the first is more than ``margin`` worse": small means not worse."""
    from scipy.stats import norm

    centre, error = _adjusted(pairs)
    return float(norm.sf((centre + margin) / error))


def tost(*pairs: Pair, margin: float = MARGIN) -> float:
    """Two one-sided tests: p of "the accuracies differ by more than ``margin``"; small means the same."""
    from scipy.stats import norm

    centre, error = _adjusted(pairs)
    return float(max(norm.sf((centre + margin) / error), norm.cdf((centre - margin) / error)))


def mean_interval(cells: Sequence[tuple[int, int]], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of the equal-weight mean of several accuracies, each (correct, n).

    The limits recover each task's variance from its Wilson limits (MOVER, Donner & Zou 2012), so one task gives
    Wilson's interval exactly: ``low = mean - sqrt(sum_t (p_t - low_t)^2) / tasks`` and alike above.
    """
    if not cells:
        raise ValueError("the mean of no accuracies was asked for")
    below = above = total = 0.0
    for correct, n in cells:
        low, high = wilson(correct, n, confidence)
        total += correct / n
        below += (correct / n - low) ** 2
        above += (high - correct / n) ** 2
    mean = total / len(cells)
    return mean, mean - sqrt(below) / len(cells), mean + sqrt(above) / len(cells)
