"""Sharded parameters are refused by name (the other refusals stand beside what they protect, in test_observer.py)."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import nalora
from nalora import NALoRAError


@pytest.fixture
def mesh(tmp_path):
    """A process group of one: enough for parameters to become shards of themselves."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded_by_fsdp2(model, mesh):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)


def sharded_by_tensor_parallelism(model, mesh):
    for layer in model.base_model.model.model.layers:
        parallelize_module(layer.mlp.up_proj, mesh, {"base_layer": ColwiseParallel()})


@pytest.mark.parametrize("shard", [sharded_by_fsdp2, sharded_by_tensor_parallelism])
def test_shards_are_refused_by_name(shard, mesh):
    model = tiny.llama(torch.float32)
    shard(model, mesh)
    with pytest.raises(NALoRAError, match=r"mlp\.(gate|up)_proj.*DTensor: tensor parallel or FSDP2"):
        nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
    assert not any("_Hook" in repr(hook) for module in model.modules() for hook in module._forward_hooks.values())
