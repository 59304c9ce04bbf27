"""Tile sizes of the fused gated kernels by rank: the fastest of a sweep, forward and backward.

python benchmarks/rank_tiles.py [--ranks 8 16 32 64 128] [--tokens 4096] [--width 14336] [--time-limit SECONDS]

The functions `forward` and `backward` of the module are called as training does, with their choice of a tile replaced.
Every tile's results are compared with those of the module's own tile before it is timed: a tile that computes
something else, or does not compile, is reported and left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import triton
from peers_page import TILES as QUESTION

from nalora import activations
from nalora.kernels.fused import gated
from nalora.kernels.statistics import Sums
from nalora.kernels.statistics.triton_activations import number_and_limit
from nalora.kernels.statistics.triton_engine import Tile

TOKENS, CHANNELS, WARPS, STAGES = (16, 32, 64, 128), (32, 64, 128), (2, 4, 8), (2, 3, 4)
# Relative; bf16 rounds to 2⁻⁹, and sums over tokens are added in another order.
TOLERANCE = 0.01


def tiles() -> list[Tile]:
    """Return all tiles that a program can hold: larger ones would keep more than 128 accumulators per thread."""
    every = (Tile(*sizes) for sizes in itertools.product(TOKENS, CHANNELS, WARPS, STAGES))
    return [tile for tile in every if tile.tokens * tile.channels <= 128 * 32 * tile.warps]


class Case:
    """Inputs of one rank, and the two functions to be timed."""

    def __init__(self, rank: int, tokens: int, width: int, device: str, dtype: torch.dtype) -> None:
        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device, dtype=dtype)

        self.z, self.u, self.dh = (random(tokens, width) for _ in range(3))
        # Stored side by side, as the fused FFN projects its input onto both adapters at once.
        x_gate, x_up = random(tokens, 2 * rank).split(rank, 1)
        self.low_rank = gated.LowRank(x_gate, x_up, random(width, rank) / rank, random(width, rank) / rank)
        self.down = random(tokens, rank), random(rank, width) / rank
        self.spec = gated.GateSpec(*number_and_limit(activations.get("silu")), -1.278, 1.278, 0.0, False)
        self.sums = Sums.zeros(1, width, torch.float32, torch.device(device)).of_block(0)

    def fits(self, tile: Tile, direction: str) -> bool:
        """Return whether each program of the forward has its own slot of the counts; it would write beyond them."""
        programs = triton.cdiv(self.z.shape[1], tile.channels)
        return direction == "backward" or programs <= self.sums.outside.shape[1]

    def forward(self) -> list[torch.Tensor]:
        return [gated.forward(self.z, self.u, self.spec, self.low_rank, self.sums)]

    def backward(self) -> list[torch.Tensor]:
        # `backward` overwrites the gradient of h.
        return list(gated.backward(self.dh.clone(), self.z, self.u, self.spec, self.low_rank, self.down))

    def backward_in_place(self) -> None:
        gated.backward(self.dh, self.z, self.u, self.spec, self.low_rank, self.down)


def same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all((a - b).float().norm() <= TOLERANCE * b.float().norm() for a, b in zip(ours, expected, strict=True))


def milliseconds(run: Callable[[], Any]) -> dict[str, float]:
    p20, p50, p80 = triton.testing.do_bench(run, warmup=5, rep=30, quantiles=(0.2, 0.5, 0.8))
    return {"p20": round(p20, 5), "p50": round(p50, 5), "p80": round(p80, 5)}


def sweep(case: Case, direction: str, limit: harness.TimeLimit, timed: bool = True) -> dict[Tile, dict[str, float]]:
    """Return the times of all tiles that compute the same as the module's own, that one first."""
    check = getattr(case, direction)
    timing = case.forward if direction == "forward" else case.backward_in_place
    own = gated.tile_of(direction, case.low_rank.b_gate.shape[1])
    expected = check()
    results: dict[Tile, dict[str, float]] = {}
    for tile in (own, *(tile for tile in tiles() if tile != own and case.fits(tile, direction))):
        if results and limit.reached():
            break
        with mock.patch.object(gated, "tile_of", lambda *_, tile=tile: tile):
            try:
                agrees = same(check(), expected)
            # Too large for the GPU's shared memory or registers, which is known only once it is compiled.
            except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError):
                continue
            if not agrees:
                print(f"{direction} {tile}: another result, left out", flush=True)
                continue
            results[tile] = milliseconds(timing) if timed else {"p50": 0.0}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=14336)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="shared equally by ranks and directions")
    parser.add_argument("--again", action="store_true", help="measure ranks that have rows, too")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("Triton's interpreter says nothing about time; unset TRITON_INTERPRET")
    share = None if args.time_limit is None else args.time_limit / (2 * len(args.ranks))
    for rank in args.ranks:
        case = Case(rank, args.tokens, args.width, "cuda", torch.bfloat16)
        for direction in ("forward", "backward"):
            setting = f"{direction}, r={rank}, {args.tokens} x {args.width} bf16"
            if not args.again and harness.measured(QUESTION, setting, args.rows):
                continue
            results = sweep(case, direction, harness.TimeLimit(share))
            own, fastest = next(iter(results)), min(results, key=lambda tile: results[tile]["p50"])
            print(f"{setting}: fastest {fastest} {1000 * results[fastest]['p50']:.1f} us, "
                  f"now {own} {1000 * results[own]['p50']:.1f} us, {len(results)} tiles", flush=True)  # fmt: skip
            harness.append(
                [{"question": QUESTION, "setting": setting, "variant": name, "unit": "ms", "samples": len(results),
                  "note": repr(tile), **results[tile]} for name, tile in (("now", own), ("fastest", fastest))],
                args.rows,
            )  # fmt: skip


if __name__ == "__main__":
    main()
