"""Every kernel compiles for an H200 (sm_90) with the tiles of training, within its registers and shared memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
KERNELS = Path(__file__).parents[2] / "src" / "nalora" / "kernels"
SHARED_BYTES = 227 * 1024  # of one program on an H200
# The backward tile up to a rank of 16 was the fastest of a sweep although it keeps a few of 255 registers in local
# memory: 80 bytes for SiLU and 120 for GELU with Triton 3.6, that of the sweep; 24 and 80 with 3.9.
BACKWARD_LOCAL_BYTES = 128


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What was compiled, by a program without Triton's interpreter and with an empty cache; about 20 s."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(SCRIPT)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def launched_kernels() -> set[str]:
    """Names of the functions that the source launches on a grid."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        source = path.read_text()
        jitted = set(re.findall(r"@triton\.jit\ndef (\w+)", source))
        found |= {name for name in re.findall(r"(\w+)\[.*\]\(", source) if name in jitted}
    return found


def test_every_launched_kernel_is_compiled(compiled):
    expected = launched_kernels()
    assert len(expected) >= 5
    assert {row["kernel"] for row in compiled} == expected


def test_programs_fit_into_shared_memory(compiled):
    assert max(row["shared_bytes"] for row in compiled) <= SHARED_BYTES


def test_training_in_bf16_keeps_its_values_in_registers(compiled):
    """Of tiles at the edge of a matrix and of float32, which training on a GPU rarely uses, nothing is asserted."""
    full = [row for row in compiled if "float32" not in row["case"] and "masked" not in row["case"]]
    tuned = [row for row in full if row["kernel"] == "_backward_kernel" and re.match(r"r=(8|16),", row["case"])]
    assert tuned
    assert max(row["local_bytes"] for row in tuned) <= BACKWARD_LOCAL_BYTES
    spilled = {(row["kernel"], row["case"]): row["local_bytes"] for row in full if row not in tuned}
    assert {name: number for name, number in spilled.items() if number} == {}


def test_a_kernel_that_cannot_be_compiled_is_an_error(tmp_path):
    """The script would not overlook it: here the device function of the activation has an unknown name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    program = (
        "import compile_for_hopper, triton\n"
        "from nalora.kernels.fused import gated\n"
        "gated.phi_and_derivative = None\n"
        "compile_for_hopper.main()\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "phi_and_derivative" in result.stderr
