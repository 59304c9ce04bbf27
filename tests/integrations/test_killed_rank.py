"""A rank that is killed in the middle of a step ends the whole job, with words that say what happened.

The ranks are processes of their own that run this file as a script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_as_two
from torch.optim import SGD

import nalora


def main(**where) -> None:
    """Rank 1 disappears after its backward pass, while rank 0 waits for its statistics."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120), **where)
    model = tiny.llama(torch.float32)
    optimizer = SGD(tiny.trainable(model), lr=0.1)
    nalora.attach(model, optimizer)
    for step in range(3):
        tiny.sum_loss(model, tiny.tokens(seed=step)).backward()
        if step == 1 and dist.get_rank() == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()


def test_the_survivor_reports_what_happened(tmp_path):
    """Without torchrun, which would end the survivor itself; within seconds, not after the group's 120 s."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        killed = ranks[1].wait(90)
        began = time.monotonic()
        _, said = ranks[0].communicate(timeout=60)
    finally:
        for each in ranks:
            each.kill()
    assert killed == -signal.SIGKILL
    assert time.monotonic() - began < 30
    assert ranks[0].returncode == 1
    assert "NALoRAError: process 0 of 2: found no answer from another process of this training" in said
    assert "resume from the last checkpoint" in said


@pytest.mark.slow
def test_torchrun_ends_the_rest():
    done = run_as_two(__file__, timeout=100)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        main(init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    else:
        main()
