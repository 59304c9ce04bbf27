"""Two processes with tokens of their own train as one process with all of them: under FSDP2 and under DDP.

The ranks are processes of their own that run this file as a script. On the CPU Accelerate would quietly take DDP, so
`fully_shard` is called here itself.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import peft
import pytest
import tiny
import tiny_experts
import torch
import torch.distributed as dist
import transformers
from ranks import results_of_two
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.models import versions

STEPS, HALF = 10, 5
MODELS = {
    # Nothing here divides by two: the second rank holds fewer rows than the first, and none of up's and down's A.
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, 57),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, 56),
    "gralora": (transformers.Phi3ForCausalLM, transformers.Phi3Config, 56),
}
CASES: dict[str, dict] = {
    "fsdp": {},
    "fsdp, update": {"space": "update"},
    "fsdp, fused gate_up": {"model": "phi3", "space": "update"},
    "fsdp, accumulated": {"accumulated": 2},
    # Its stacks of blocks are sharded between blocks; gate and up are one layer.
    **(
        {}
        if versions.is_older("peft", versions.TUNERS["gralora"])
        else {
            "fsdp, gralora": {"model": "gralora", "space": "update"},
            "ddp, gralora": {"wrap": "ddp", "model": "gralora"},
        }
    ),
    "fsdp, accumulated, update": {"accumulated": 2, "space": "update"},
    "fsdp, accumulated without reduction": {"accumulated": 2, "reduce_at_end": True},
    "fsdp, checkpointing": {"checkpointing": True, "space": "update"},
    "fsdp, not resharded": {"reshard": False},
    "fsdp, checkpointing, not resharded": {"reshard": False, "checkpointing": True},
    "fsdp, reentrant checkpointing": {"checkpointing": True, "reentrant": True, "space": "update"},
    "hsdp, replicas": {"mesh": (2, 1)},
    "hsdp, shards": {"mesh": (1, 2), "space": "update"},
    "fsdp, second dimension": {"dimension": 1, "space": "update"},
    "fsdp, attached before sharding and bound again": {"attach_first": True},
    "fsdp, experts, checkpointing": {"model": "mixtral", "space": "update", "checkpointing": True},
    "ddp, experts": {"wrap": "ddp", "model": "mixtral", "space": "update"},
    "ddp": {"wrap": "ddp"},
    "ddp, update": {"wrap": "ddp", "space": "update"},
    "ddp, accumulated": {"wrap": "ddp", "accumulated": 2},
}


def build(name: str, dtype=torch.float64) -> peft.PeftModel:
    if name == "mixtral":
        # Rows of 3 × 6 and of 40, and with so few tokens some expert has none on one rank or on both.
        return tiny_experts.adapted("Mixtral", "batched_mm", dtype)
    torch.manual_seed(0)
    model_class, config_class, width = MODELS[name]
    config = config_class(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if name == "gralora":
        blocks = peft.GraloraConfig(r=4, gralora_k=4, hybrid_r=2, target_modules="all-linear")
        return tiny.with_lora(model_class(config).to(dtype), config=blocks)
    pattern = {r".*(up|down)_proj": 1} if name == "llama" else {}
    return tiny.with_lora(model_class(config).to(dtype), r=3, rank_pattern=pattern)


def batch(step: int, micro: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Four padded sequences: the first two, which are the first rank's, have three times the tokens of the others."""
    seed = 10 * step + micro
    ids = tiny.tokens(4, 12, seed=seed)
    lengths = torch.tensor([12, 10 - seed % 3, 3 + seed % 2, 4])
    mask = (torch.arange(12) < lengths[:, None]).long()
    return (ids * mask)[rows], mask[rows]


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(model, reshard=True, mesh=None, dimension=0, policy=None, submesh=None):
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards"))
        mesh = mesh[submesh] if submesh else mesh

    def place(parameter):
        # Only what divides evenly can be cut anywhere but between rows.
        return Shard(dimension if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else 0)

    policy = policy or MixedPrecisionPolicy()
    settings = dict(mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=place, mp_policy=policy)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def set_up(
    model="llama",
    space="gradient",
    wrap="fsdp",
    checkpointing=False,
    reentrant=False,
    attach_first=False,
    **how,
):
    """(what is called, the PEFT model, optimizer, controller)."""
    model = build(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    called, config = model, NALoRAConfig(apply_to=space)
    controller = nalora.attach(model, AdamW(tiny.trainable(model), lr=1e-2), config) if attach_first else None
    if dist.is_initialized() and wrap == "fsdp":
        shard(model, **how)
    elif dist.is_initialized():
        called = DistributedDataParallel(model)
    optimizer = AdamW(tiny.trainable(model), lr=1e-2)
    if controller is None:
        controller = nalora.attach(called, optimizer, config)
    else:
        controller.bind(optimizer)
    return called, model, optimizer, controller


def train(called, model, optimizer, controller, steps=range(STEPS), accumulated=1, reduce_at_end=False):
    """The norms that clipping found."""
    norms = []
    for step in steps:
        for micro in range(accumulated):
            if reduce_at_end and dist.is_initialized():
                model.set_requires_gradient_sync(micro == accumulated - 1)
            # Sums over tokens; both wrappers average over ranks.
            (tiny.sum_loss(called, *batch(step, micro, my_rows())) * world()).backward()
        norms.append(controller.clip_grad_norm_(0.2))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def result(model, controller, norms) -> dict:
    parameters = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    return {"parameters": parameters, "state": controller.state_dict()["tensors"], "norms": norms}


def run(accumulated=1, reduce_at_end=False, **settings) -> dict:
    called, model, optimizer, controller = set_up(**settings)
    norms = train(called, model, optimizer, controller, accumulated=accumulated, reduce_at_end=reduce_at_end)
    return result(model, controller, norms)


def first_half(file: Path, **settings) -> None:
    """Train to the middle and write everything, whole."""
    called, model, optimizer, controller = set_up(space="update", **settings)
    train(called, model, optimizer, controller, range(HALF))
    parts = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    controller.save(file.parent)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(parts, file)
    if dist.is_initialized():
        dist.barrier()


def second_half(file: Path, **settings) -> dict:
    """Take up what `first_half` wrote, on however many processes."""
    called, model, optimizer, controller = set_up(space="update", **settings)
    weights, state = torch.load(file)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    controller.load(file.parent)
    return result(model, controller, train(called, model, optimizer, controller, range(HALF, STEPS)))


def my_rows() -> slice:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return slice(rank * 4 // world(), (rank + 1) * 4 // world())


def mixed_precision() -> dict:
    """What one step of bf16 arithmetic decides; under FSDP2 with parameters in float32 that are cast for it."""
    sharded = dist.is_initialized()
    model = build("llama", torch.float32)
    if sharded:
        shard(model, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    else:
        # FSDP2 casts parameters and leaves buffers alone.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer = AdamW(tiny.trainable(model), lr=1e-2)
    controller = nalora.attach(model, optimizer, NALoRAConfig(start="first"))
    tiny.sum_loss(model, *batch(0, 0, my_rows())).backward()
    optimizer.step()
    return {"state": controller.state_dict()["tensors"], "dtype": tiny.trainable(model)[0].dtype}


def loss_scaling(fused: bool) -> dict:
    """A scale at which both ranks' gradients overflow in the first of three steps."""
    model = build("llama", torch.float32)
    shard(model)
    optimizer = AdamW(tiny.trainable(model), lr=1e-2, fused=fused)
    controller = nalora.attach(model, optimizer, NALoRAConfig(apply_to="update"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(3):
        scaler.scale(tiny.sum_loss(model, *batch(step, 0, my_rows())) * world()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return controller.state_dict()["tensors"]


def by_itself(rank: int) -> dict:
    """One process's own training, on a mesh of itself alone where there are others: they must not hear of it."""
    model = build("llama")
    if dist.is_initialized():
        shard(model, mesh=(2, 1), submesh="shards")
    optimizer = AdamW(tiny.trainable(model), lr=1e-2)
    controller = nalora.attach(model, optimizer)
    for step in range(3):
        tiny.sum_loss(model, *batch(step, 0, slice(2 * rank, 2 * rank + 2))).backward()
        norm = controller.clip_grad_norm_(0.2)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, controller, [norm])


def sharded_after_attach(later: bool) -> str:
    """The error of a loop whose optimizer holds the parameters from before sharding."""
    model = build("llama")
    optimizer = AdamW(tiny.trainable(model), lr=1e-2)
    controller = nalora.attach(model, optimizer)
    shard(model)
    try:
        if later:
            controller.apply()
        tiny.sum_loss(model, *batch(0, 0, my_rows())).backward()
    except NALoRAError as error:
        return str(error)
    return "no error"


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {name: run(**settings) for name, settings in CASES.items()}
    found["mixed precision"] = mixed_precision()
    found["loss scaling"] = [loss_scaling(fused) for fused in (False, True)]
    found["by itself"] = by_itself(rank)
    found["errors"] = [sharded_after_attach(later) for later in (False, True)]
    found["one to two"] = second_half(folder / "one" / "training.pt")
    first_half(folder / "two" / "training.pt")
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The results of both ranks, from one launch, and the folder with what they wrote."""
    folder = tmp_path_factory.mktemp("fsdp2")
    for name in ("one", "two"):
        (folder / name).mkdir()
    first_half(folder / "one" / "training.pt")
    return *results_of_two(__file__, folder), folder


@functools.cache
def expected(**settings) -> dict:
    """One process with all the tokens."""
    return run(**settings)


def assert_near(expected: dict, found: dict, tolerance: float = 1e-9) -> None:
    assert tiny.largest_difference(expected["parameters"], found["parameters"]) < tolerance
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=0, atol=tolerance)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one(name, launched):
    """Parameters, masks, scales and gradient norms after 10 clipped steps, with 3 : 1 tokens on the two ranks."""
    first, second, _ = launched
    for part in ("parameters", "state"):
        for key, value in first[name][part].items():
            assert torch.equal(value, second[name][part][key]), key
    same = {key: value for key, value in CASES[name].items() if key in ("model", "space", "accumulated")}
    assert_near(expected(**same), first[name])


def test_statistics_of_bf16_arithmetic_on_float32_parameters(launched):
    first, second, _ = launched
    reference = mixed_precision()
    for found in (first["mixed precision"], second["mixed precision"]):
        assert found["dtype"] == torch.float32
        for key, value in reference["state"].items():
            torch.testing.assert_close(found["state"][key], value, rtol=0, atol=1e-6)


def test_an_overflow_is_forgotten_on_every_rank(launched):
    """torch decides for all ranks together whether a step is skipped, for fused optimizers on the device."""
    first, second, _ = launched
    for one, other in zip(first["loss scaling"], second["loss scaling"], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert {one[key].item() for key in one if key.endswith("/updates")} == {2}


def test_only_processes_of_the_mesh_are_added_up(launched):
    for rank in (0, 1):
        assert_near(by_itself(rank), launched[rank]["by itself"])


def test_sharding_after_attach_is_named(launched):
    """Seen by the first forward pass, or by the step: the optimizer would step parameters that are not used."""
    for found in launched[:2]:
        forward, step = found["errors"]
        assert "attach last, or call controller.bind" in forward
        assert "lora_" in step
        assert "that is not in" in step


def test_resuming_on_another_number_of_processes(launched):
    first, _, folder = launched
    whole_run = expected(space="update")
    halves = {"one to two": first["one to two"], "two to one": second_half(folder / "two" / "training.pt")}
    for found in halves.values():
        assert tiny.largest_difference(whole_run["parameters"], found["parameters"]) < 1e-9
        for key, value in whole_run["state"].items():
            torch.testing.assert_close(found["state"][key], value, rtol=0, atol=1e-9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
