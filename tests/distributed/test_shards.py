"""Every process of an FSDP2 training multiplies its own rows by their own factors, however the rows are dealt out.

A fake process group lets one process play each rank in turn; real ones talk in integrations/test_fsdp2.py.
"""

from __future__ import annotations

import contextlib

import pytest
import tiny
import tiny_experts
import torch
import torch.distributed as dist
from architectures import architecture, dense_gpt_oss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.control.apply import multiply_gradients, multiply_updates, snapshot
from nalora.distributed.shards import local, sharing_processes


@contextlib.contextmanager
def rank_of(rank, ranks):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gpt_oss():
    torch.manual_seed(0)
    return dense_gpt_oss()


MODELS = {
    "gate and up": lambda: tiny.llama(torch.float32),
    "halves": lambda: tiny.with_lora(architecture("Phi3")),
    "interleaved": lambda: tiny.with_lora(gpt_oss()),
    "experts": lambda: tiny_experts.adapted("GptOss", dtype=torch.float32),
}


def multiplied(build, space, mesh=None) -> dict[str, torch.Tensor]:
    """What gradients or updates of ones become, this rank's part of every parameter."""
    model = build()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")) if mesh else None)
    trained = tiny.trainable(model)
    controller = nalora.attach(model, torch.optim.SGD(trained, lr=1.0), NALoRAConfig(regimes="derived"))
    generator = torch.Generator().manual_seed(3)
    for group in controller._window.groups:
        group.mask.copy_(torch.rand(group.mask.shape, generator=generator))
        group.scales.copy_(1 + torch.rand(group.scales.shape, generator=generator))
    decisions = [group.decide(controller.config) for group in controller._window.groups]
    controls = controller._window.parameters.controls(decisions, preserve_mean=False)
    with torch.no_grad():
        for each in trained:
            each.zero_()
            each.grad = torch.ones_like(each)
        before = snapshot(controls)
        if space == "gradient":
            multiply_gradients(controls)
        else:
            for each in trained:
                each.add_(1)
            multiply_updates(controls, before)
    parts = {
        name: local(p.grad if space == "gradient" else p) for name, p in model.named_parameters() if p.requires_grad
    }
    return {name: part.clone() for name, part in parts.items()}


@pytest.mark.parametrize("space", ["gradient", "update"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_make_up_the_whole(name, ranks, space):
    """3 and 5 ranks cut between the halves of a fused layer; of 64 some hold no row at all."""
    whole = multiplied(MODELS[name], space)
    parts = []
    for rank in range(ranks) if ranks < 10 else (0, 1, 30, 55, 56, 63):
        with rank_of(rank, ranks):
            parts.append(multiplied(MODELS[name], space))
    for key, expected in whole.items():
        if ranks < 10:
            assert torch.equal(torch.cat([part[key] for part in parts]), expected)
        else:
            rows = -(-len(expected) // ranks)
            for rank, part in zip((0, 1, 30, 55, 56, 63), parts, strict=True):
                assert torch.equal(part[key], expected[rank * rows : (rank + 1) * rows])
    assert any(len(each.unique()) > 20 for each in whole.values()), "the masks were not there to be cut"


def test_replicas_of_shards_hold_what_their_place_among_the_shards_says():
    """The fifth of six ranks: the second shard of three, in the second replica."""
    whole = multiplied(MODELS["halves"], "gradient")
    with rank_of(4, 6):
        for key, part in multiplied(MODELS["halves"], "gradient", mesh=(2, 3)).items():
            rows = -(-len(whole[key]) // 3)
            assert torch.equal(part, whole[key][rows : 2 * rows])


@pytest.mark.parametrize(
    ("mesh", "names", "expected"),
    [
        ((8,), None, None),
        ((2, 4), None, None),
        ((4, 2), ("shards",), [6, 7]),
        ((2, 2, 2), ("b", "shards"), [4, 5, 6, 7]),
    ],
)
def test_statistics_are_added_over_the_whole_mesh_and_no_further(mesh, names, expected):
    """None: over every process."""
    with rank_of(7, 8):
        dimensions = ("a", "b", "shards")[-len(mesh) :]
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=dimensions)
        model = tiny.llama(torch.float32)
        fully_shard(model, mesh=devices[names] if names else devices)
        group = sharing_processes(model.named_parameters())
        assert (None if group is None else dist.get_process_group_ranks(group)) == expected


@pytest.mark.parametrize("space", ["gradient", "update"])
def test_nothing_waits_for_the_device(space):
    """Deciding, multiplying and clipping shards does not synchronise with the host."""
    waiting = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}

    class NoWaiting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in waiting, func
            return func(*args, **(kwargs or {}))

    with rank_of(1, 3):
        model = tiny.llama(torch.float32)
        fully_shard(model)
        trained = tiny.trainable(model)
        controller = nalora.attach(model, torch.optim.SGD(trained, lr=0.1), NALoRAConfig(apply_to=space))
        for each in trained:
            each.grad = torch.ones_like(each)
        with NoWaiting():
            norm = controller.clip_grad_norm_(1.0)
            controller._enter_step()
            controller._leave_step()
        assert type(norm) is torch.Tensor


def test_experts_are_sharded_by_rows_alone():
    """The columns of their B belong to experts, so another dimension has other factors."""
    with rank_of(0, 2):
        model = MODELS["experts"]()
        fully_shard(model, shard_placement_fn=lambda parameter: Shard(int(parameter.shape[-1] == 18)))
        with pytest.raises(NALoRAError, match="experts.* sharded by their second dimension"):
            nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
