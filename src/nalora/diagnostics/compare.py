"""Two states of a model over the same batches: how the gates of every block moved, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nalora.diagnostics.lockstep import Gates, Lockstep
from nalora.diagnostics.measures import Movement, Standing, movement, real_rows, rows_of, standing
from nalora.diagnostics.probe import Batch, on_device
from nalora.diagnostics.sites import GateSite

# Numbers of z that are looked at together: on a CPU what fits its cache, on a GPU what fills it.
_AT_ONCE = {"cpu": 1 << 18}
_AT_ONCE_ELSEWHERE = 1 << 22


@dataclass
class Comparison:
    """Sums over the tokens of all batches, by site; a site that no token reached is missing.

    Attributes:
        movements: from the first state to the second.
        standings: of the states that were asked for, by which one (0, 1).
        forward_passes: of either state, over one batch each.
    """

    movements: dict[int, Movement] = field(default_factory=dict)
    standings: dict[int, dict[int, Standing]] = field(default_factory=dict)
    forward_passes: int = 0


def compare(
    before: nn.Module,
    after: nn.Module,
    batches: Sequence[Batch],
    sites: Sequence[GateSite],
    *,
    stand: Collection[int] = (),
    histogram: Collection[int] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Run both states in lockstep.

    Args:
        before: the earlier state.
        after: the later one, another object of the same architecture.
        batches: the probe.
        sites: where the gates are.
        stand: the states (0: before, 1: after) whose regimes are counted.
        histogram: those among them whose z are binned too.
        progress: hears how many batches are done.
    """
    result = Comparison(standings={state: {} for state in stand})

    @torch.no_grad()
    def visit(site: int, gates: Sequence[Gates], mask: Tensor | None) -> None:
        z = [each.z for each in gates]
        where = sites[site]
        for rows in real_rows(z[0], mask, _AT_ONCE.get(z[0].device.type, _AT_ONCE_ELSEWHERE)):
            parts = [rows_of(each, rows) for each in z]
            _add(result.movements, site, movement(parts[0], parts[1], where.activation, where.thresholds))
            for state, sums in result.standings.items():
                _add(sums, site, standing(parts[state], where.thresholds, histogram=state in histogram))

    with Lockstep([before, after], sites) as lockstep:
        for done, batch in enumerate(batches, 1):
            lockstep.run(on_device(batch, before), visit)
            progress(done)
        result.forward_passes = lockstep.forward_passes
    return result


def _add(sums: dict[int, Movement] | dict[int, Standing], site: int, more: Movement | Standing) -> None:
    sums[site] = sums[site] + more if site in sums else more  # type: ignore[operator,assignment]
