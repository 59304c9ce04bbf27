"""How surely two means over seeds differ: Student's interval of the difference, for the few seeds that runs have.

A bootstrap has too little to draw from: of three normal values its 95 % interval holds the mean 73 % of the time, of
five 86 %. Student's t is made for such samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import fmean, variance

from nalora.evaluation.intervals import Interval


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """The 95 % interval of mean(first) − mean(second), both given as seed → value.

    Paired where both have the same seeds, for these share data order and initialisation; else Welch's, which allows
    unequal spreads and counts. None where no interval can be had: fewer than two seeds, or no spread to judge by.
    """
    if min(len(first), len(second)) < 2:
        return None
    if first.keys() == second.keys():
        gaps = [first[seed] - second[seed] for seed in first]
        error = math.sqrt(variance(gaps) / len(gaps))
        freedom = len(gaps) - 1.0
    else:
        parts = [variance(each.values()) / len(each) for each in (first, second)]
        error = math.sqrt(sum(parts))
        spread = sum(p * p / (len(each) - 1) for p, each in zip(parts, (first, second), strict=True))
        freedom = sum(parts) ** 2 / spread if spread else 0.0
    gap = fmean(first.values()) - fmean(second.values())
    # A spread of rounding error says that the measure is too coarse to show its own, not that the gap is certain.
    if error <= 1e-12 * max(map(abs, (*first.values(), *second.values()))):
        return None
    half = student_quantile(freedom) * error
    return Interval(gap - half, gap + half)


@lru_cache(maxsize=1024)
def student_quantile(freedom: float) -> float:
    """The t with P(|T| < t) = 0.95 for Student's T; `freedom` is at least 1 and need not be whole.

    With t = √ν·tan θ the density is proportional to cos^(ν−1) θ, which Simpson's rule integrates to 1e-9.
    """
    factor = 2 / math.sqrt(math.pi) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    steps = 100

    def inside(angle: float) -> float:
        heights = [math.pow(math.cos(angle * i / steps), freedom - 1) for i in range(steps + 1)]
        weighted = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return factor * weighted * angle / (3 * steps)

    low, high = 0.0, math.atan(12.71 / math.sqrt(freedom))  # 12.706 at one degree of freedom, less at more
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
