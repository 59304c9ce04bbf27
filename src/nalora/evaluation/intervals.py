"""95 % confidence intervals of a share or a mean over examples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nalora.errors import NALoRAError


class Interval(NamedTuple):
    """The 95 % confidence interval of a measure."""

    low: float
    high: float


def wilson(successes: float, n: int, z: float = 1.959963984540054) -> Interval:
    """Return Wilson's binomial interval of a share, which has a width at 0 and 1 too; [0, 1] without examples."""
    if n == 0:
        return Interval(0.0, 1.0)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(
    n: int, measure: Callable[[Sequence[int]], dict[str, float]], draws: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """Return the percentile bootstrap intervals of measures over `n` examples; raise a NALoRAError if n is 0.

    `measure` returns the measures, by name, of the examples with these indices.
    """
    if n == 0:
        raise NALoRAError(
            "intervals",
            found="no examples",
            expected="at least one to draw from",
            fix="give a task with questions, or a larger limit or validation_size",
        )
    generator = random.Random(seed)
    samples = [measure(generator.choices(range(n), k=n)) for _ in range(draws)]
    intervals = {}
    for name in samples[0]:
        values = sorted(sample[name] for sample in samples)
        intervals[name] = Interval(values[round(0.025 * (draws - 1))], values[round(0.975 * (draws - 1))])
    return intervals
