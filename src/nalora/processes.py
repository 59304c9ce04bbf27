"""The processes that were launched together: which one this is, and what all of them know."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from nalora.errors import NALoRAError


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
    add_up_in(None, tensor)
    return tensor


def add_up_in(group: dist.ProcessGroup | None, *tensors: Tensor) -> None:
    """Sum each tensor over the processes of a group, in place; None: over all that talk to each other.

    Raises:
        NALoRAError: another process of the group has ended.
    """
    if not _talking() or dist.get_world_size(group) == 1:
        return
    try:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise NALoRAError(
            f"process {dist.get_rank()} of {dist.get_world_size()}",
            found=f"no answer from another process of this training: {str(error).splitlines()[0]}",
            expected="every process at this step, to add up what its gates saw",
            fix="look for the process that ended first (killed, out of memory, its own error), then resume from the"
            " last checkpoint",
        ) from error


def _talking() -> bool:
    return dist.is_available() and dist.is_initialized()
