"""The processes that were launched together: which one this is, and what all of them know."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from nalora.errors import NALoRAError

_SILENCE = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out waiting")


class LostProcessError(NALoRAError):
    """Another process of the job does not answer any more."""


def meet(device: str) -> None:
    """Let processes that were launched together (torchrun) talk from here on, each on its own GPU.

    Before a model is loaded and a method starts: the Trainer would do it too late for both, and takes what it finds.

    Raises:
        NALoRAError: `accelerate launch` was asked for several processes and started one.
    """
    refuse_a_launch_of_one()
    if count() > 1 and not _talking():
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")


def refuse_a_launch_of_one() -> None:
    """Refuse to train alone where `accelerate launch` was asked for several processes.

    With --cpu, or on a machine with one GPU, it starts a single process whatever --num_processes says. All that is left
    of the number is the address at which processes would have met (MASTER_ADDR), without anyone to meet (WORLD_SIZE).

    Raises:
        NALoRAError: it names the command that starts several.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "WORLD_SIZE" not in os.environ:
        raise NALoRAError(
            "accelerate launch",
            found="one process, though several were asked for: with --cpu, or with one GPU, it starts no more",
            expected="all of them",
            fix="torchrun --nproc_per_node N -m nalora.cli train RUN.yaml, or `nalora train RUN.yaml` for one process",
        )


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
        raise RuntimeError("these processes have not met: call nalora.distributed.processes.meet first")
    add_up_in(None, tensor)
    return tensor


def are_several(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there is anybody else in the group to talk to; None: among all that talk to each other."""
    return _talking() and dist.get_world_size(group) > 1


def add_up_in(group: dist.ProcessGroup | None, *tensors: Tensor) -> None:
    """Sum each tensor over the processes of a group, in place; None: over all that talk to each other.

    Raises:
        NALoRAError: another process of the group has ended.
    """
    if not are_several(group):
        return
    try:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise NALoRAError(
            f"process {dist.get_rank()} of {dist.get_world_size()}",
            found=f"no answer from another process of this training: {str(error).splitlines()[0]}",
            expected="every process here, to add up what each of them has",
            fix="look for the process that ended first (killed, out of memory, its own error), then resume from the"
            " last checkpoint",
        ) from error


def any_of(holds: bool, device: torch.device | str = "cpu") -> bool:
    """Whether it holds on any process: an answer that all of them share."""
    return bool(add_up(torch.tensor(int(holds), device=device))) if count() > 1 else holds


def of_first(number: int, device: torch.device | str = "cpu") -> int:
    """The first process's number, on all of them."""
    return int(add_up(torch.tensor(number if is_first_process() else 0, device=device)))


def wait_for_all() -> None:
    """Go on when all have come here."""
    if _talking():
        dist.barrier()


@contextlib.contextmanager
def a_lost_one_is_named(step: Callable[[], int]) -> Iterator[None]:
    """Say in one sentence that another process is gone, in place of what the network layer says about it.

    Args:
        step: at which optimizer step this process is.

    Raises:
        LostProcessError: another process does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if count() == 1 or not (_is_silence(error) or _is_silence(error.__cause__)):
            raise
        raise LostProcessError(
            f"process {rank()} of {count()}",
            found=f"that another process of the job was lost after step {step()}",
            expected="all of them to the end",
            fix="launch it again with --resume, on as many processes as there are now",
        ) from error


def _is_silence(error: BaseException | None) -> bool:
    """Whether nobody answers, as gloo says in a plain RuntimeError and NCCL in exceptions of its own."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(words in said for words in _SILENCE)
    )


def _talking() -> bool:
    return dist.is_available() and dist.is_initialized()
