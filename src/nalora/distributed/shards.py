"""Parameters of which every process holds a part (FSDP2): which part it is, and who holds the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from nalora.errors import NALoRAError


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes share the tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part in this process's memory: a view to read and to write; a plain tensor is its own."""
    if isinstance(tensor, DTensor):
        # Without gradients it is handed out as it is; `detach` would go through DTensor's dispatch, 30 µs each time.
        with torch.no_grad():
            part: Tensor = tensor.to_local()
        return part
    return tensor


def own_rows(parameter: Tensor) -> slice:
    """Which rows of a parameter this process holds.

    Rows are dealt out in blocks of ⌈rows / processes⌉, so the last process may hold fewer than the others, or none.
    """
    if isinstance(parameter, DTensor):
        mesh, rows = parameter.device_mesh, parameter.shape[0]
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard(0):
                each = -(-rows // mesh.size(dimension))
                first = min(each * mesh.get_local_rank(dimension), rows)
                return slice(first, min(first + each, rows))
    return slice(None)


def is_data_parallel(parameter: Tensor) -> bool:
    """Whether a sharded parameter is placed as `fully_shard` alone places it: shards, replicas, replicas of shards."""
    assert isinstance(parameter, DTensor)
    *replicated, last = parameter.placements
    return (
        all(isinstance(each, Replicate) for each in replicated)
        and len(replicated) <= 1
        and type(last) in (Shard, Replicate)
    )


def is_offloaded(parameter: Tensor) -> bool:
    """Whether a sharded parameter waits on the host while its layer computes elsewhere."""
    return isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type


def sharing_processes(parameters: Iterable[tuple[str, Tensor]]) -> dist.ProcessGroup | None:
    """The group of all processes that train the named parameters together; None: every process there is.

    For replicas of shards (a mesh of two dimensions) that is the whole mesh: each process has tokens of its own.

    Raises:
        NALoRAError: the parameters belong to different groups.
    """
    meshes: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            meshes.setdefault(tuple(mesh.mesh.flatten().tolist()), (name, mesh))
    if not meshes:
        return None
    if len(meshes) > 1:
        (first, _), (other, _) = list(meshes.values())[:2]
        raise NALoRAError(
            other,
            found=f"a parameter shared by other processes than {first}",
            expected="all FFN layers on one data-parallel mesh: their statistics are added over it",
            fix="call fully_shard with the same mesh for every layer",
        )
    (ranks,) = meshes
    ((_, mesh),) = meshes.values()
    if len(ranks) == dist.get_world_size():
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for whole and shared parameters together, by the norm of all gradients.

    torch takes either kind, not both at once, and leaves its result as one process's share of it.
    """
    parameters = list(parameters)
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not any(is_sharded(each) for each in gradients):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **options)
    foreach = options.get("foreach")
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for each in gradients:
        by_mesh.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    norms = [nn.utils.get_total_norm(each, norm_type, foreach=foreach) for each in by_mesh.values()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    total = nn.utils.get_total_norm(whole, norm_type, options.get("error_if_nonfinite", False))
    # 10⁻⁶ as torch has it.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in gradients:
        by_kind.setdefault((each.device, each.dtype), []).append(local(each))
    for (device, _), parts in by_kind.items():
        torch._foreach_mul_(parts, factor.to(device))
    return total


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 keeps after a forward pass, for a backward pass that does not come."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
