"""The processes that were launched together: which one this is, and what all of them know."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor


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
    if _talking() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _talking() -> bool:
    return dist.is_available() and dist.is_initialized()
