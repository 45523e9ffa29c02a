"""Means and ratios over the rounds of an interleaved run, with intervals, and how far two answers agree. Pure.

Systems are compared within each round, since a slow round is slow for all systems. One ratio is computed for each
round. The mean of the ratios' logarithms has a 95 % Student interval; mean and interval are then converted back.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from loadtest.estimates import Estimate

# 97.5 % quantiles of Student's distribution, for 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT_FROM_11 = 2.201  # also used for more degrees of freedom; the interval is then a little too wide


def geometric_mean(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of positive values with its 95 % interval, which is (0, inf) for a single value."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(mean), 0.0, math.inf)
    quantile = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else _STUDENT_FROM_11
    half = quantile * stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the ratio `above` ÷ `below`. Both sequences have one positive value for each round."""
    return geometric_mean([a / b for a, b in zip(above, below, strict=True)])


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens before the first difference of two answers."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
