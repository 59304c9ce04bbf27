"""How sure a measured share or mean is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nalora.errors import NALoRAError


class Interval(NamedTuple):
    """The 95 % interval of a measure."""

    low: float
    high: float


def wilson(successes: float, n: int, z: float = 1.959963984540054) -> Interval:
    """The binomial interval of a share (Wilson's): right at 0 and 1 too, where the usual one has no width.

    Of nothing at all it is everything from 0 to 1.
    """
    if n == 0:
        return Interval(0.0, 1.0)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(
    n: int, measure: Callable[[Sequence[int]], dict[str, float]], draws: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """The percentile intervals of any measures over examples drawn again with replacement.

    Args:
        n: how many examples there are.
        measure: the measures, by name, of the examples with these indices.
        draws: how often.
        seed: the same intervals for the same seed.

    Raises:
        NALoRAError: there are none to draw from.
    """
    if n == 0:
        raise NALoRAError(
            "intervals",
            found="no examples",
            expected="at least one to draw from",
            fix="give a task with questions, or a larger limit or validation_size",
        )
    chance = random.Random(seed)
    drawn = [measure(chance.choices(range(n), k=n)) for _ in range(draws)]
    return {name: _percentiles(sorted(each[name] for each in drawn)) for name in drawn[0]}


def _percentiles(values: Sequence[float]) -> Interval:
    low, high = (values[round(q * (len(values) - 1))] for q in (0.025, 0.975))
    return Interval(low, high)
