"""Parameters of which a process holds a share (FSDP2's DTensors): put together, and taken apart again.

FSDP2 deals a parameter out by rows, the first dimension. Putting one together is a collective: every process has to
come by, in the same order. On a tensor that is not dealt out all of these do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed.tensor as distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from nalora.distributed.processes import is_first_process
from nalora.distributed.shards import local


def whole(tensor: Tensor) -> Tensor:
    """The tensor as one process would have it; gradients go back through it to the shares."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """What this process would hold of a tensor that all have whole, if it were dealt out as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    # None: everybody has it, so nothing is sent.
    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of this shape, dealt out as `like` is."""
    if not isinstance(like, DTensor):
        return like.new_zeros(tuple(shape))
    return distributed.zeros(tuple(shape), dtype=like.dtype, device_mesh=like.device_mesh, placements=like.placements)


def own_rows_of_each(stack: Tensor, like: Tensor) -> Tensor:
    """This process's rows of each of a stack of whole matrices (n × rows × columns)."""
    if not isinstance(like, DTensor):
        return stack
    return share(stack.transpose(0, 1).contiguous(), like).transpose(0, 1)


def all_rows(stack: Tensor, like: Tensor) -> Tensor:
    """The whole matrices again from every process's rows of each."""
    if not isinstance(like, DTensor):
        return stack
    rows = stack.transpose(0, 1).contiguous()
    number, columns = rows.shape[1:]
    dealt = DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((like.shape[0], number, columns)),
        stride=(number * columns, columns, 1),
    )
    return dealt.full_tensor().transpose(0, 1)


def summed_over_shares(part: Tensor, like: Tensor) -> Tensor:
    """The sum over all processes that hold different rows of `like`."""
    if not isinstance(like, DTensor):
        return part
    how = [Partial() if isinstance(each, Shard) else each for each in like.placements]
    return DTensor.from_local(part, like.device_mesh, how, run_check=False).full_tensor()


@torch.no_grad()
def gathered(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of all but frozen parameters, whole on the first process's CPU; None where nothing is dealt out.

    A frozen base is left out: an adapter's file does not hold it, and no process may have room for all of it.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name not in frozen:
            found = whole(tensor).detach()
            if is_first_process():
                state[name] = found.cpu()
    return state
