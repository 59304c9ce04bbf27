"""A test file that runs itself as two processes which talk to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def run_as_two(script: str, *arguments: object, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess:
    """Run a file under torchrun on this machine and wait for its end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **variables}
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(Path(script).resolve()), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def results_of_two(script: str, folder: Path, **variables: str) -> list:
    """What each of the two left in the folder, as rank-0.pt and rank-1.pt."""
    done = run_as_two(script, folder, **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
