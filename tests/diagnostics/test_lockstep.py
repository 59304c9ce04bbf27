"""Several models, one block at a time: what the visitor sees, what stays alive, and how it ends when it goes wrong."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import tiny
import tiny_experts
import torch
import transformers

import nalora
from nalora.diagnostics.lockstep import Lockstep
from nalora.diagnostics.sites import find_sites
from nalora.distributed.wrappers import base_of


def padded(batch=3, length=10):
    ids = tiny.tokens(batch, length)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def moved(model, by=0.1):
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "lora_B" in name:
            parameter.data += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return other


def seen_alone(model, batch, layer):
    """What a plain forward pass has at every module of that name."""
    outputs, handles = [], []
    for name, module in base_of(model).named_modules():
        if name.endswith(layer):
            handles.append(module.register_forward_hook(lambda m, a, out: outputs.append(out.detach().clone())))
    with torch.no_grad():
        model.eval()(**batch)
    for handle in handles:
        handle.remove()
    return outputs


def test_the_visitor_sees_each_block_of_every_model():
    first = tiny.llama(torch.float32)
    second = moved(first)
    batch, seen, masks = padded(), [], []

    def visit(site, gates, mask):
        seen.append((site, [(g.z.clone(), g.u.clone()) for g in gates]))
        masks.append(mask)

    with Lockstep([first, second], with_up=True) as lockstep:
        lockstep.run(batch, visit)
    assert [site for site, _ in seen] == [0, 1]
    for number, model in enumerate((first, second)):
        z, u = seen_alone(model, batch, "gate_proj"), seen_alone(model, batch, "up_proj")
        for block in range(2):
            assert torch.equal(seen[block][1][number][0], z[block])
            assert torch.equal(seen[block][1][number][1], u[block])
    assert not torch.equal(seen[0][1][0][0], seen[0][1][1][0])
    assert all(torch.equal(mask, batch["attention_mask"].bool()) for mask in masks)
    assert not any(module._forward_hooks for module in first.modules())


def test_plain_and_adapted_models_have_the_same_sites():
    adapted = tiny.llama(torch.float32)
    plain = tiny.llama(torch.float32).unload()
    ours, theirs = find_sites(adapted), find_sites(plain)
    assert [(s.name, s.gate, s.up, s.activation.name, s.width) for s in ours] == [
        (s.name, s.gate, s.up, s.activation.name, s.width) for s in theirs
    ]
    assert ours[0].name == "model.layers.0.mlp"
    # Also where the adapter is elsewhere.
    assert len(find_sites(tiny.llama(torch.float32, target_modules=["q_proj"]))) == 2
    zeros = copy.deepcopy(adapted)
    for name, parameter in zeros.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    differences = []
    with Lockstep([zeros, plain]) as lockstep:
        lockstep.run(padded(), lambda site, gates, mask: differences.append((gates[0].z - gates[1].z).abs().max()))
    assert max(differences) < 1e-6


def test_fused_gate_and_up_projections():
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config)
    batch, seen = padded(), []
    whole = seen_alone(model, batch, "gate_up_proj")
    with Lockstep([model], with_up=True) as lockstep:
        lockstep.run(batch, lambda site, gates, mask: seen.append(torch.cat(gates[0], -1)))
    assert len(seen) == 2
    assert all(torch.equal(one, other) for one, other in zip(seen, whole, strict=True))


@pytest.mark.parametrize("with_up", [False, True])
def test_never_more_than_one_block_of_each_model_is_alive(with_up):
    model = tiny.llama(torch.float32, layers=4)
    most, alive = 0, []

    def visit(site, gates, mask):
        nonlocal most, alive
        alive = [each for each in alive if each() is not None]
        tensors = [t for g in gates for t in g if t is not None]
        alive += [weakref.ref(t) for t in tensors]
        most = max(most, len({id(each()) for each in alive if isinstance(each(), torch.Tensor)}))

    gc.collect()
    with Lockstep([model, moved(model)], with_up=with_up) as lockstep:
        for _ in range(2):
            lockstep.run(padded(), visit)
    assert most == (4 if with_up else 2)
    gc.collect()
    assert not [each for each in alive if isinstance(each(), torch.Tensor)]


def test_what_follows_the_last_gate_is_computed_once_only():
    model = tiny.llama(torch.float32)
    heads = []
    base_of(model).lm_head.register_forward_hook(lambda *_: heads.append(1))
    with Lockstep([model, moved(model)]) as lockstep:
        for _ in range(3):
            lockstep.run(padded(), lambda *_: None)
        assert lockstep.forward_passes == 6
    # The first batch of the first model; its copy carries the hook too.
    assert len(heads) == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("nalora-")]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_one_model_ends_all_with_its_own_traceback(broken):
    first = tiny.llama(torch.float32)
    models = [first, moved(first)]

    def fail(*_):
        raise ZeroDivisionError("inside the second layer")

    base_of(models[broken]).model.layers[1].self_attn.register_forward_pre_hook(fail)
    with Lockstep(models) as lockstep:
        with pytest.raises(ZeroDivisionError, match="inside the second layer") as caught:
            lockstep.run(padded(), lambda *_: None)
        assert any(entry.name == "fail" for entry in caught.traceback)
    assert not [t for t in threading.enumerate() if t.name.startswith("nalora-")]
    assert models[0].training


def test_an_error_of_the_visitor_ends_all():
    model = tiny.llama(torch.float32)
    with Lockstep([model, moved(model)]) as lockstep:
        with pytest.raises(KeyError):
            lockstep.run(padded(), lambda *_: {}["nothing"])
        seen = []
        lockstep.run(padded(), lambda site, *_: seen.append(site))
        assert seen == [0, 1]


def test_models_of_different_shape_are_refused():
    small, large = tiny.llama(torch.float32), tiny.llama(torch.float32, layers=3)
    with pytest.raises(nalora.NALoRAError, match="one architecture"), Lockstep([large, small]):
        pass
    assert not any(module._forward_hooks for module in large.modules())
    with pytest.raises(nalora.NALoRAError, match="no FFN block|no LoRA"):
        find_sites(torch.nn.Sequential(torch.nn.Linear(4, 4)))


def test_gradients_are_off_in_every_thread_and_the_mode_is_restored():
    model = tiny.llama(torch.float32).train()
    modes = []
    with Lockstep([model]) as lockstep:
        lockstep.run(padded(), lambda site, gates, mask: modes.append((gates[0].z.requires_grad, model.training)))
    assert modes == [(False, False)] * 2
    assert model.training


@pytest.mark.filterwarnings("ignore")
def test_the_gates_of_experts_are_left_out():
    (site,) = find_sites(tiny_experts.base("Qwen3Moe"))
    assert site.gate == "model.layers.0.mlp.gate_proj"
    with pytest.raises(nalora.NALoRAError, match="no FFN block outside of experts"):
        find_sites(tiny_experts.base("Mixtral"))
