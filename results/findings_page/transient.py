"""How long a mask on the gradient slows a channel under Adam: the mask's average and Adam's second moment.

Adam divides a constant factor out of the gradient, so a mask in gradient space acts only while its moments remember
gradients with another mask. The mask starts at 1 and its moving average settles within about 50 steps, but the second
moment remembers those first gradients for 1/(1 − β₂) = 1,000 steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

MASK_EMA = 0.9
BETAS = (0.9, 0.999)


def mask_values(settled: float, decay: float = MASK_EMA) -> Iterator[float]:
    """Return the mask of a channel step by step: it starts at 1, and every new value is `settled`."""
    mask = 1.0
    while True:
        mask = decay * mask + (1 - decay) * settled
        yield mask


def pace(settled: float, steps: int, betas: tuple[float, float] = BETAS) -> list[float]:
    """Return the channel's steps under Adam divided by LoRA's, for a constant gradient."""
    paces = []
    first = second = 0.0
    for step, gradient in enumerate(itertools.islice(mask_values(settled), steps), 1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        paces.append(first / (1 - betas[0] ** step) / math.sqrt(second / (1 - betas[1] ** step)))
    return paces


def transient() -> list[str]:
    """Return a table of the pace of channels whose mask settles at different values."""
    marks = (50, 219, 500, 3000)
    lines = [
        "| mask settles at | " + " | ".join(f"step {step:,}" for step in marks) + " | mean of 219 | mean of 300 |"
        " mean of 3,000 | 95 % reached at step |",
        "|---|" + "---|" * (len(marks) + 4),
    ]
    for settled in (0.1, 0.373, 0.7):
        paces = pace(settled, 10_000)
        slowest = paces.index(min(paces))
        reached = next(step for step, value in enumerate(paces[slowest:], slowest + 1) if value >= 0.95)
        shown = [paces[step - 1] for step in marks] + [statistics.fmean(paces[:count]) for count in (219, 300, 3000)]
        lines.append(
            f"| {settled:g} | {' | '.join(f'{value:.0%}'.replace('%', ' %') for value in shown)} | {reached:,} |"
        )
    return lines
