"""The processes that were launched together: which one this is, and what all of them know."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def meet(device: str) -> None:
    """Let processes that were launched together (torchrun) talk from here on, each on its own GPU.

    Before a model is loaded and a method starts: the Trainer would do it too late for both, and takes what it finds.
    """
    if count() > 1 and not _talking():
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")


def is_first_process() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if _talking() else int(os.environ.get("RANK", "0"))


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _talking() else int(os.environ.get("WORLD_SIZE", "1"))


def add_up(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place; the tensor itself where there is only one."""
    if count() > 1 and not _talking():
        raise RuntimeError("these processes have not met: call nalora.processes.meet first")
    if _talking() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _talking() -> bool:
    return dist.is_available() and dist.is_initialized()
