"""Parameters that are sharded in a way that NA-LoRA does not support are refused by name.

Other checks are tested in test_observer.py.
"""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import nalora
from nalora import NALoRAError


@pytest.fixture
def mesh(tmp_path):
    """A process group of one: enough for parameters to become shards of themselves."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


def tensor_parallel(model, mesh):
    for layer in model.base_model.model.model.layers:
        parallelize_module(layer.mlp.up_proj, mesh["tensor"], {"base_layer": ColwiseParallel()})
    return model


def tensor_parallel_and_fully_sharded(model, mesh):
    fully_shard(tensor_parallel(model, mesh), mesh=mesh["data"])
    return model


def fully_sharded_the_old_way(model, mesh):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shard", "named"),
    [
        (tensor_parallel, r"mlp\.up_proj\.base_layer\.weight: .*tensor parallelism \(DTensor"),
        (tensor_parallel_and_fully_sharded, r"mlp\.up_proj\.base_layer\.weight: .*tensor parallelism \(DTensor"),
        (fully_sharded_the_old_way, r"FSDP1 \(FullyShardedDataParallel\).*fully_shard"),
    ],
)
def test_shards_are_refused_by_name(shard, named, mesh):
    model = shard(tiny.llama(torch.float32), mesh)
    with pytest.raises(NALoRAError, match=named):
        nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
    assert not any("_Hook" in repr(hook) for module in model.modules() for hook in module._forward_hooks.values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda model, optimizer: (optimizer, model), "SGD in place of the model"),
        (
            lambda model, optimizer: (model, optimizer, {"apply_to": "update"}),
            r"found dict.*a NALoRAConfig",
        ),
    ],
)
def test_arguments_in_the_wrong_place_are_named(arguments, named):
    model = tiny.llama()
    with pytest.raises(NALoRAError, match=named):
        nalora.attach(*arguments(model, torch.optim.SGD(tiny.trainable(model), lr=0.1)))


def test_a_gate_that_gives_only_some_of_its_channels_is_refused():
    """As a tensor-parallel layer does whose weights are plain tensors."""
    model = tiny.llama(torch.float32)
    nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
    gate = model.base_model.model.model.layers[1].mlp.gate_proj
    gate.register_forward_hook(lambda module, args, output: output[..., :28], prepend=True)
    with pytest.raises(NALoRAError, match=r"layers\.1\.mlp\.gate_proj: found .*28 of 56 channels.*tensor parallel"):
        model(tiny.tokens())


def test_fully_sharded_models_are_not(mesh):
    model = tiny.llama(torch.float32)
    fully_shard(model, mesh=mesh["data"])
    nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1)).detach()
