"""Constructed cases for rules that choose a learning rate: the best rate is known, and so is every measure."""

from __future__ import annotations

import math

from nalora.studies.rate_rules import Case

GRID = tuple(1e-3 * 2 ** (index / 2) for index in range(10))
STEPS = 219
RANGE_STEPS = 300
GATE_MEASURES = ("flip", "D_sel", "kappa_drift", "severe")


def octaves(rate, best):
    return math.log2(rate / best)


def case(name="case", best=4e-3, *, moving=(), shift=0.0, curve=True, steps=STEPS):
    """A case whose final loss is lowest at `best`.

    Args:
        name: of the case.
        best: the rate with the lowest final loss; an early training loss is lowest `shift` octaves above it.
        moving: measures that reach 0.1 at the best rate of every case; the others reach 0.1 at 4e-3 whatever is best.
        shift: in octaves.
        curve: whether there is a range test; its loss is lowest `shift` octaves above the best rate.
        steps: of a whole run.
    """
    early = {}
    for rate in GRID:
        values = {f"loss@{step}": 1 + octaves(rate, best * 2**shift) ** 2 for step in (30, 60)}
        for measure in (*GATE_MEASURES, "update_to_weight", "rate_times_gradient", "gradient_growth"):
            reference = best if measure in moving else 4e-3
            values |= {f"{measure}@{step}": 0.1 * rate / reference for step in (30, 60)}
        early[rate] = values
    rates = [1e-4 * 1000 ** (index / (RANGE_STEPS - 1)) for index in range(RANGE_STEPS)]
    points = [(rate, 1 + octaves(rate, best * 2**shift) ** 2) for rate in rates] if curve else []
    losses = {rate: 0.6 + 0.01 * octaves(rate, best) ** 2 for rate in GRID}
    return Case(name, steps, losses, early, points)
