"""The processes of a distributed training: rank, number of processes, and sums over all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from nalora.errors import NALoRAError

_LOST_CONNECTION = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out waiting")


class LostProcessError(NALoRAError):
    """Another process of the training no longer responds."""


def init_process_group(device: str) -> None:
    """Initialise torch.distributed for processes that were launched together (torchrun), each on its own GPU.

    The Trainer initialises it too late for loading models and for methods that start from data; it reuses this group.

    Raises:
        NALoRAError: `accelerate launch` started one process in place of several.
    """
    check_launch()
    if count() > 1 and not _is_initialised():
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")


def check_launch() -> None:
    """Refuse to train in a single process where `accelerate launch` should have started several.

    With --cpu, or on a machine with one GPU, it starts one process whatever --num_processes is. The only trace of the
    option is that MASTER_ADDR is set while WORLD_SIZE is not.

    Raises:
        NALoRAError: with the command that starts several processes.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "WORLD_SIZE" not in os.environ:
        raise NALoRAError(
            "accelerate launch",
            found="one process in place of several: with --cpu, or with one GPU, it starts only one",
            expected="as many processes as --num_processes",
            fix="torchrun --nproc_per_node N -m nalora.cli train RUN.yaml, or `nalora train RUN.yaml` for one process",
        )


def is_first_process() -> bool:
    """Return whether this is the process that writes files."""
    return rank() == 0


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if _is_initialised() else int(os.environ.get("RANK", "0"))


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if _is_initialised() else int(os.environ.get("WORLD_SIZE", "1"))


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Sum the tensor over all processes, in place, and return it."""
    if count() > 1 and not _is_initialised():
        raise RuntimeError("call nalora.distributed.processes.init_process_group first")
    sum_in_group(None, tensor)
    return tensor


def has_several(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group has more than one process; None stands for all processes."""
    return _is_initialised() and dist.get_world_size(group) > 1


def sum_in_group(group: dist.ProcessGroup | None, *tensors: Tensor) -> None:
    """Sum each tensor over the processes of a group, in place; None stands for all processes.

    Raises:
        NALoRAError: another process of the group has ended.
    """
    if not has_several(group):
        return
    try:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise NALoRAError(
            f"process {dist.get_rank()} of {dist.get_world_size()}",
            found=f"no answer from another process of this training: {str(error).splitlines()[0]}",
            expected="every process, to sum the tensors of all of them",
            fix="find the process that ended first (killed, out of memory, its own error), then resume from the"
            " last checkpoint",
        ) from error


def any_process(holds: bool, device: torch.device | str = "cpu") -> bool:
    """Return, on every process, whether a condition holds on any of them."""
    return bool(sum_over_processes(torch.tensor(int(holds), device=device))) if count() > 1 else holds


def broadcast_from_first(number: int, device: torch.device | str = "cpu") -> int:
    """Return, on every process, the first process's number."""
    return int(sum_over_processes(torch.tensor(number if is_first_process() else 0, device=device)))


def barrier() -> None:
    """Wait until all processes have called this."""
    if _is_initialised():
        dist.barrier()


@contextlib.contextmanager
def report_lost_process(step: Callable[[], int]) -> Iterator[None]:
    """Replace the network layer's errors by one sentence when another process is lost; `step` returns the step.

    Raises:
        LostProcessError: another process no longer responds.
    """
    try:
        yield
    except RuntimeError as error:
        if count() == 1 or not (_is_lost_connection(error) or _is_lost_connection(error.__cause__)):
            raise
        raise LostProcessError(
            f"process {rank()} of {count()}",
            found=f"that another process of the job was lost after step {step()}",
            expected="all processes until the end of training",
            fix="launch it again with --resume, on as many processes as there are now",
        ) from error


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return whether a process did not respond: gloo raises a plain RuntimeError, NCCL a DistError."""
    message = str(error).lower()
    is_plain = type(error) is RuntimeError
    return isinstance(error, dist.DistError) or (is_plain and any(words in message for words in _LOST_CONNECTION))


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
