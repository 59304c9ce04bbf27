"""Compile the kernels for sm_90 without a GPU, through the functions that launch them; print a JSON line for each.

A program of its own, since Triton decides when it is imported whether kernels are interpreted or compiled. Kernels are
built as for a launch with tensors in the given dtype, but not loaded and not launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nalora import activations
from nalora.kernels.fused import fp8, gated
from nalora.kernels.statistics import Sums, triton_engine
from nalora.kernels.statistics.triton_activations import NUMBERS, number_and_limit

WIDTH, HIDDEN = 14336, 4096  # of Llama-3.1-8B
UNEVEN = 1000  # not a multiple of a tile


class Hopper:
    """The driver of an H200 for the compiler alone."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers of a thread, and bytes of local memory, which hold what does not fit into registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": numbers["REG"], "local_bytes": numbers["STACK"] + numbers["LOCAL"]}


class Compiled:
    """Compiles in place of launching, and prints what was compiled under the name of the current case."""

    def __init__(self) -> None:
        self.case = ""
        self.launch = JITFunction.run

    def run(self, kernel: JITFunction, *arguments, grid, warmup, **options) -> None:
        built = self.launch(kernel, *arguments, grid=grid, warmup=True, **options)
        shared = {"shared_bytes": built.metadata.shared}
        row = {"kernel": kernel.fn.__name__, "case": self.case} | resources(built.asm["cubin"]) | shared
        print(json.dumps(row), flush=True)


def spec(name: str, *, utility: bool = False) -> gated.GateSpec:
    return gated.GateSpec(*number_and_limit(activations.get(name)), -1.278, 1.278, 0.0, utility)


def gated_case(compiled: Compiled, *, rank: int, name: str = "silu", dtype=torch.bfloat16, tokens: int = 64,
               width: int = WIDTH, counted: bool = False, masked: bool = False, together: bool = False):  # fmt: skip
    """Compile both directions of the gated FFN."""
    compiled.case = f"r={rank}, {name}, {str(dtype).removeprefix('torch.')}, {tokens} x {width}" + "".join(
        f", {word}" for word, on in (("counted", counted), ("masked", masked), ("FP8 base", together)) if on
    )
    z, u, dh = (torch.zeros(tokens, width, dtype=dtype) for _ in range(3))
    sums = Sums.zeros(1, width, torch.float32, torch.device("cpu")).of_block(0) if counted else None
    mask = torch.ones(tokens, dtype=torch.uint8) if masked else None
    low_rank = None
    if 0 < rank <= gated.MOST_IN_REGISTERS:
        x_gate, x_up = torch.zeros(tokens, 2 * rank, dtype=dtype).split(rank, 1)
        factors = (torch.zeros(width, rank, dtype=dtype) for _ in range(2))
        low_rank = gated.LowRank(x_gate, x_up, *factors)
    gated.forward(z, u, spec(name, utility=counted), low_rank, sums, mask)
    if low_rank is None:
        gated.backward_of_complete(dh, z, u, spec(name), together=together)
    else:
        down = torch.zeros(tokens, rank, dtype=dtype), torch.zeros(rank, width, dtype=dtype)
        gated.backward(dh, z, u, spec(name), low_rank, down, together=together)


def statistics_case(compiled: Compiled, *, name: str = "silu", dtype=torch.bfloat16, utility: bool = False,
                    masked: bool = False, tokens: int = 64, width: int = WIDTH):  # fmt: skip
    """Compile the statistics of a gate."""
    compiled.case = f"{name}, {str(dtype).removeprefix('torch.')}, {tokens} x {width}" + "".join(
        f", {word}" for word, on in (("utility", utility), ("masked", masked)) if on
    )
    z = torch.zeros(tokens, width, dtype=dtype)
    sums = Sums.zeros(1, width, torch.float32, torch.device("cpu")).of_block(0)
    mask = torch.ones(tokens, dtype=torch.bool) if masked else None
    triton_engine.accumulate(sums, z, activations.get(name), (-1.278, 1.278), z if utility else None, mask)


def fp8_case(compiled: Compiled, rows: int, columns: int, *, scaled: bool) -> None:
    """Compile the quantisation of activations, and of gradients if `scaled`."""
    compiled.case = f"{rows} x {columns}{', scaled' if scaled else ''}"
    scales = torch.zeros(columns) if scaled else None
    fp8.quantise_rows_by_triton(torch.zeros(rows, columns, dtype=torch.bfloat16), scales)


def main() -> None:
    driver.set_active(Hopper())
    compiled = Compiled()
    launch = mock.patch.object(JITFunction, "run", lambda kernel, *a, **k: compiled.run(kernel, *a, **k))
    # On a GPU, half-precision tensors use the hardware's approximate functions.
    approximate = mock.patch.object(triton_engine, "may_approximate", lambda z: z.dtype != torch.float32)
    with launch, approximate:
        for rank in (8, 16, 32, 128):
            gated_case(compiled, rank=rank)
            gated_case(compiled, rank=rank, counted=True)
        for rank in (8, 32):
            gated_case(compiled, rank=rank, counted=True, masked=True, width=UNEVEN, tokens=50)
        gated_case(compiled, rank=32, dtype=torch.float32, counted=True)
        gated_case(compiled, rank=8, together=True)
        gated_case(compiled, rank=128, together=True, counted=True)
        for name in NUMBERS:
            gated_case(compiled, rank=16, name=name)
            statistics_case(compiled, name=name)
        statistics_case(compiled, utility=True)
        statistics_case(compiled, masked=True, utility=True)
        statistics_case(compiled, dtype=torch.float32)
        statistics_case(compiled, width=UNEVEN, tokens=50)
        # x of attention and of down; dy of query, key and value together, of gate and up together.
        for columns, scaled in ((HIDDEN, False), (WIDTH, False), (HIDDEN, True), (6144, True), (2 * WIDTH, True)):
            fp8_case(compiled, 64, columns, scaled=scaled)
        compiled.case = "codes"
        codes = torch.zeros(256, HIDDEN, dtype=torch.float8_e4m3fn)
        fp8.transpose_by_triton(torch.empty(HIDDEN, 256, dtype=torch.float8_e4m3fn), codes)


if __name__ == "__main__":
    main()
