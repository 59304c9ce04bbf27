"""Parameters that FSDP2 shards over processes (DTensors): the local part, the full tensor, and clipping.

FSDP2 shards a parameter by rows, its first dimension. Functions that return full tensors are collectives: every process
must call them in the same order. On plain tensors they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is distributed over processes."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, as a view that can be written to; a plain tensor is returned as it is."""
    if isinstance(tensor, DTensor):
        # Without gradients `to_local` is direct; `detach` goes through DTensor's dispatch, 30 µs for each call.
        with torch.no_grad():
            part: Tensor = tensor.to_local()
        return part
    return tensor


def own_rows(parameter: Tensor) -> slice:
    """Return the rows of a parameter that this process holds.

    Rows are sharded in blocks of ⌈rows / processes⌉, so the last process may hold fewer rows than the others, or none.
    """
    if isinstance(parameter, DTensor):
        mesh, rows = parameter.device_mesh, parameter.shape[0]
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard(0):
                block = -(-rows // mesh.size(dimension))
                first = min(block * mesh.get_local_rank(dimension), rows)
                return slice(first, min(first + block, rows))
    return slice(None)


def cuts_rows(parameter: Tensor) -> bool:
    """Return whether a parameter is sharded by another dimension than its first."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return any(placement.is_shard() and not placement.is_shard(0) for placement in placements)


def is_data_parallel(parameter: Tensor) -> bool:
    """Return whether a DTensor is placed as `fully_shard` places it: sharded, replicated, or replicated shards."""
    assert isinstance(parameter, DTensor)
    *outer, last = parameter.placements
    replicated = all(isinstance(placement, Replicate) for placement in outer)
    return replicated and len(outer) <= 1 and type(last) in (Shard, Replicate)


def is_offloaded(parameter: Tensor) -> bool:
    """Return whether a sharded parameter is on the CPU although its layer computes on another device."""
    return isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type


def sharing_processes(parameters: Iterable[tuple[str, Tensor]]) -> dist.ProcessGroup | None:
    """Return the group of the processes that train the named parameters together; None stands for all processes.

    For replicated shards (a mesh with two dimensions) it is the whole mesh: every process has tokens of its own.

    Raises:
        NALoRAError: the parameters belong to different groups.
    """
    meshes: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            meshes.setdefault(tuple(mesh.mesh.flatten().tolist()), (name, mesh))
    if len(meshes) > 1:
        (first, _), (other, _) = list(meshes.values())[:2]
        raise NALoRAError(
            other,
            found=f"a parameter sharded over other processes than {first}",
            expected="all FFN layers on one data-parallel mesh: their statistics are summed over it",
            fix="call fully_shard with the same mesh for every layer",
        )
    for ranks, (_, mesh) in meshes.items():
        if len(ranks) < dist.get_world_size():
            return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return None


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
    """Clip the gradients of plain and sharded parameters together, by the norm of all of them; return that norm.

    `torch.nn.utils.clip_grad_norm_` accepts either kind but no mixture, and returns a DTensor for sharded parameters.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(is_sharded(gradient) for gradient in gradients):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **options)
    foreach = options.get("foreach")
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(local(gradient))
    norms = [full_tensor(nn.utils.get_total_norm(same, norm_type, foreach=foreach)) for same in by_mesh.values()]
    total = nn.utils.get_total_norm(norms, norm_type, options.get("error_if_nonfinite", False))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # 10⁻⁶ as in torch
    for (device, _), parts in by_kind.items():
        torch._foreach_mul_(parts, factor.to(device))
    return total


def reshard(model: nn.Module) -> None:
    """Free the full parameters that FSDP2 keeps after a forward pass that no backward pass will follow."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor with the parts of all processes; gradients flow back to the parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a full tensor, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    # None: every process has the full tensor, so nothing is sent.
    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))


def zeros_like_shards(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros of a shape, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return like.new_zeros(tuple(shape))
    return distributed.zeros(tuple(shape), dtype=like.dtype, device_mesh=like.device_mesh, placements=like.placements)


def local_rows(stack: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of each matrix in a stack of full matrices (n × rows × columns)."""
    if not isinstance(like, DTensor):
        return stack
    return shard_like(stack.transpose(0, 1).contiguous(), like).transpose(0, 1)


def all_rows(stack: Tensor, like: Tensor) -> Tensor:
    """Return the full matrices from every process's rows of each: the inverse of `local_rows`."""
    if not isinstance(like, DTensor):
        return stack
    rows = stack.transpose(0, 1).contiguous()
    number, columns = rows.shape[1:]
    shape, stride = torch.Size((like.shape[0], number, columns)), (number * columns, columns, 1)
    sharded = DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    return sharded.full_tensor().transpose(0, 1)


def sum_over_shards(part: Tensor, like: Tensor) -> Tensor:
    """Return the sum over all processes that hold different rows of `like`."""
    if not isinstance(like, DTensor):
        return part
    placements = [Partial() if isinstance(placement, Shard) else placement for placement in like.placements]
    return DTensor.from_local(part, like.device_mesh, placements, run_check=False).full_tensor()


@torch.no_grad()
def gathered_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the full state of all trainable parameters and buffers on the first process's CPU.

    The result is None where nothing is sharded, and empty on other processes. Frozen parameters are left out: an
    adapter's file does not contain them, and a process may not have memory for all of them.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.requires_grad}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name not in frozen:
            full = full_tensor(tensor).detach()
            if is_first_process():
                state[name] = full.cpu()
    return state
