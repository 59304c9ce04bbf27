"""Nothing is silently uncontrolled: what hides a gate, or changes the model underneath, is named or handled."""

from __future__ import annotations

import copy
import pickle

import accelerate
import pytest
import tiny
import torch
from architectures import dense_gpt_oss
from torch.nn import functional
from torch.optim import LBFGS, SGD, AdamW

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.kernels.statistics import reference


def attached(model=None, optimizer=None, **settings):
    model = model or tiny.llama()
    optimizer = optimizer or SGD(tiny.trainable(model), lr=0.1)
    return model, optimizer, nalora.attach(model, optimizer, NALoRAConfig(**settings))


def step(model, optimizer, seed=0):
    tiny.sum_loss(model, tiny.tokens(seed=seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fused_lora_mlp(mlp):
    """What Unsloth and Axolotl's lora_mlp_kernel do: read the weights, never call the layers."""

    def linear(layer, x):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return x @ layer.base_layer.weight.T + layer.scaling["default"] * (x @ a.T) @ b.T

    def forward(x):
        return linear(mlp.down_proj, functional.silu(linear(mlp.gate_proj, x)) * linear(mlp.up_proj, x))

    mlp.forward = forward


def test_kernels_that_hide_the_gate_are_an_error_that_names_the_switch():
    model, optimizer, _ = attached()
    fused_lora_mlp(model.base_model.model.model.layers[1].mlp)
    tiny.sum_loss(model, tiny.tokens()).backward()
    before = tiny.adapter_state(model)
    with pytest.raises(NALoRAError, match=r"layers\.1\.mlp\.gate_proj.*saw no token.*lora_mlp_kernel: false"):
        optimizer.step()
    assert tiny.largest_difference(before, tiny.adapter_state(model)) == 0


def test_kernels_that_hid_the_gate_before_attach_are_an_error_too():
    model = tiny.llama()
    for layer in model.base_model.model.model.layers:
        fused_lora_mlp(layer.mlp)
    with pytest.raises(NALoRAError, match="fused kernel"):
        attached(model)


def test_a_model_compiled_and_called_before_attach_is_an_error():
    torch._dynamo.reset()
    model = tiny.llama(torch.float32)
    compiled = torch.compile(model, backend="eager")
    tiny.sum_loss(compiled, tiny.tokens())
    optimizer = SGD(tiny.trainable(model), lr=0.1)
    nalora.attach(compiled, optimizer)
    tiny.sum_loss(compiled, tiny.tokens()).backward()
    with pytest.raises(NALoRAError, match=r"torch\.compiler\.reset"):
        optimizer.step()


def test_training_in_evaluation_mode_is_an_error():
    model, optimizer, _ = attached()
    model.eval()
    tiny.sum_loss(model, tiny.tokens()).backward()
    with pytest.raises(NALoRAError, match=r"model\.train\(\) mode"):
        optimizer.step()


def test_applying_in_the_middle_of_an_accumulation_is_an_error():
    model, _, controller = attached()
    tiny.sum_loss(model, tiny.tokens()).backward()
    controller.apply()
    with pytest.raises(NALoRAError, match="another forward pass after the control was applied"):
        tiny.sum_loss(model, tiny.tokens(seed=1))


def test_merged_adapters_are_an_error_and_unmerging_continues():
    model, optimizer, _ = attached()
    step(model, optimizer)
    model.merge_adapter()
    with pytest.raises(NALoRAError, match="merged adapters"):
        optimizer.step()
    model.unmerge_adapter()
    step(model, optimizer, seed=1)


@pytest.mark.parametrize("merge", ["before", "after"])
def test_merged_adapters_are_an_error_where_something_else_is_trained(merge):
    model = tiny.llama()
    model.get_output_embeddings().weight.requires_grad_(True)
    optimizer = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    if merge == "before":
        model.merge_adapter()
    nalora.attach(model, optimizer)
    if merge == "after":
        model.merge_adapter()
    with pytest.raises(NALoRAError, match="merged adapters in a training pass"):
        step(model, optimizer)
    model.unmerge_adapter()
    step(model, optimizer, seed=1)


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_steps_of_another_optimizer_are_an_error_and_binding_it_continues(apply_to):
    model, _, controller = attached(apply_to=apply_to)
    rebuilt = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    step(model, rebuilt)
    step(model, rebuilt)
    with pytest.raises(NALoRAError, match=r"another optimizer.*controller\.bind"):
        step(model, rebuilt)
    controller.bind(rebuilt)
    for seed in range(3):
        step(model, rebuilt, seed=seed)
    assert controller.metrics()["mask_mean"] < 1


def test_a_state_that_is_loaded_between_backward_and_step_is_no_error():
    model, optimizer, controller = attached()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    for seed in range(3):
        tiny.sum_loss(model, tiny.tokens(seed=seed)).backward()
        model.load_state_dict(state)
        step(model, optimizer, seed=seed)
    assert controller.metrics()["mask_mean"] < 1


def test_adapters_that_are_all_frozen_are_an_error():
    model = tiny.llama()
    optimizer = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(NALoRAError, match="all frozen"):
        nalora.attach(model, optimizer)


def test_an_unloaded_model_is_an_error():
    model, optimizer, _ = attached()
    base = model.unload()
    base(input_ids=tiny.tokens())
    with pytest.raises(NALoRAError, match="unloaded or replaced since attach"):
        optimizer.step()


def test_lora_parameters_missing_from_the_optimizer():
    model = tiny.llama()
    rest = [p for n, p in model.named_parameters() if p.requires_grad and "layers.1.mlp.gate_proj.lora_B" not in n]
    with pytest.raises(NALoRAError, match=r"layers\.1\.mlp\.gate_proj\.lora_B\.default\.weight.*is not in SGD"):
        attached(model, SGD(rest, lr=0.1))
    _leaves_no_trace(model)


def test_optimizer_in_backward_is_found_by_the_parameters_it_took():
    model = tiny.llama()
    for parameter in tiny.trainable(model):
        own = SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())
    with pytest.raises(NALoRAError, match="do not step parameters inside backward"):
        attached(model, SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def _leaves_no_trace(model):
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_a_refused_attach_leaves_model_and_optimizer_as_they_were():
    model = tiny.llama()
    refused = LBFGS(tiny.trainable(model))
    with pytest.raises(NALoRAError, match="LBFGS"):
        attached(model, refused)
    _leaves_no_trace(model)
    assert "zero_grad" not in vars(refused)
    assert not refused._optimizer_step_pre_hooks


def test_detach_leaves_no_trace():
    model, optimizer, controller = attached()
    step(model, optimizer)
    controller.detach()
    _leaves_no_trace(model)
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    plain = copy.deepcopy(model)
    step(model, optimizer)
    step(plain, SGD(tiny.trainable(plain), lr=0.1))
    assert tiny.largest_difference(tiny.adapter_state(plain), tiny.adapter_state(model)) == 0


def test_two_controllers_on_one_model_are_refused():
    model, optimizer, _ = attached()
    with pytest.raises(NALoRAError, match="another controller observes already"):
        attached(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "settings", "config", "named"),
    [
        ("DeepSpeedZeroOptimizer_Stage3", {}, {}, "DeepSpeedZeroOptimizer_Stage3"),
        ("BF16_Optimizer", {}, {}, "BF16_Optimizer"),
        ("DeepSpeedZeroOptimizer", {}, {"apply_to": "update"}, "master copy"),
        ("DeepSpeedZeroOptimizer", {"cpu_offload": True}, {}, "offload_optimizer"),
        ("DeepSpeedZeroOptimizer", {"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps > 1"),
    ],
)
def test_deepspeed_is_refused_by_name_where_the_control_would_be_lost(kind, settings, config, named):
    """What works is in integrations/test_deepspeed.py, which needs DeepSpeed."""
    given = {"cpu_offload": False, "gradient_accumulation_steps": 1} | settings
    optimizer = type(kind, (), given | {"__module__": "deepspeed.runtime"})()
    model = tiny.llama()
    with pytest.raises(NALoRAError, match=named):
        nalora.attach(model, optimizer, NALoRAConfig(**config))
    _leaves_no_trace(model)


def test_foreign_optimizers_are_refused_by_name():
    model = tiny.llama()
    with pytest.raises(NALoRAError, match=r"builtins\.object.*torch\.optim\.Optimizer"):
        nalora.attach(model, object())
    _leaves_no_trace(model)


def test_schedule_free_optimizers_are_refused_by_name():
    class AdamWScheduleFree(SGD):
        pass

    AdamWScheduleFree.__module__ = "schedulefree.adamw_schedulefree"
    model = tiny.llama()
    with pytest.raises(NALoRAError, match="AdamWScheduleFree, which trains at one point"):
        nalora.attach(model, AdamWScheduleFree(tiny.trainable(model), lr=0.1))


def test_unknown_kernels_are_refused():
    model = tiny.llama()
    with pytest.raises(NALoRAError, match="kernels"):
        nalora.attach(model, SGD(tiny.trainable(model)), kernels="turbo")


def test_accelerates_optimizer_is_looked_through():
    plain_model, plain_optimizer, _ = attached()
    model = tiny.llama()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, SGD(tiny.trainable(model), lr=0.1))
    nalora.attach(model, optimizer)
    for seed in range(3):
        step(plain_model, plain_optimizer, seed)
        accelerator.backward(tiny.sum_loss(model, tiny.tokens(seed=seed)))
        optimizer.step()
        optimizer.zero_grad()
    assert tiny.largest_difference(tiny.adapter_state(plain_model), tiny.adapter_state(model)) == 0


def test_a_deep_copy_and_a_pickle_carry_no_live_controller():
    model, _, controller = attached()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.train()
        tiny.sum_loss(twin, tiny.tokens()).backward()
        assert controller._window.groups[0].tokens.tolist() == [0, 0]
        own = SGD(tiny.trainable(twin), lr=0.1)
        nalora.attach(twin, own).detach()


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_gates_skip_that_block_alone_and_are_counted(apply_to, poison):
    model, optimizer, controller = attached(apply_to=apply_to)
    step(model, optimizer)
    before = controller.state_dict()["tensors"]
    gate = model.base_model.model.model.layers[1].mlp.gate_proj

    def poisoned(module, args, output):
        # A value no gradient flows through, so that only the statistics see it.
        return output + torch.where(torch.arange(output.shape[-1]) == 3, poison, 0.0)

    handle = gate.register_forward_hook(poisoned, prepend=True)
    model(input_ids=tiny.tokens(seed=1))
    handle.remove()
    tiny.sum_loss(model, tiny.tokens(seed=1)).backward()
    optimizer.step()
    after = controller.state_dict()["tensors"]
    name = controller.plan.blocks[1].block.name
    for field in ("mask", "scales", "updates"):
        assert torch.equal(before[f"{name}/{field}"], after[f"{name}/{field}"])
    assert after[f"{name}/skipped"] == 1
    assert controller.metrics()["skipped_updates"] == 1
    other = controller.plan.blocks[0].block.name
    assert not torch.equal(before[f"{other}/mask"], after[f"{other}/mask"])
    optimizer.zero_grad()
    step(model, optimizer, seed=2)
    assert controller.metrics()["skipped_updates"] == 1
    assert all(torch.isfinite(t).all() for t in controller.state_dict()["tensors"].values())


def test_a_batch_with_no_token_is_skipped_and_counted():
    model, optimizer, controller = attached()
    step(model, optimizer)
    before = controller.state_dict()["tensors"]
    ids = tiny.tokens()
    model(input_ids=ids, attention_mask=torch.zeros_like(ids)).logits.sum().backward()
    optimizer.step()
    after = controller.state_dict()["tensors"]
    assert controller.metrics()["skipped_updates"] == 2
    assert all(torch.equal(before[key], after[key]) for key in before if not key.endswith("/skipped"))


def test_bf16_models_keep_statistics_and_averages_in_float32():
    model = tiny.llama(torch.bfloat16)
    model, optimizer, controller = attached(model)
    step(model, optimizer)
    group = controller._window.groups[0]
    assert {group.stacked.sensitivity.dtype, group.mask.dtype, group.scales.dtype} == {torch.float32}
    assert controller.metrics()["mask_mean"] < 1


def test_autocast_is_observed_as_it_runs():
    model, optimizer, controller = attached(tiny.llama(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        loss = tiny.sum_loss(model, tiny.tokens())
    loss.backward()
    assert controller._window.groups[0].tokens.tolist() == [48, 48]
    optimizer.step()
    assert controller.metrics()["skipped_updates"] == 0


def test_a_layer_called_twice_in_one_pass_counts_twice():
    """Weight sharing across depth: every call is a gate that is trained."""
    model = tiny.llama(layers=1)
    layers = model.base_model.model.model.layers
    layers.append(layers[0])
    model.base_model.model.model.config.num_hidden_layers = 2
    model, _, controller = attached(model)
    model(input_ids=tiny.tokens(), use_cache=False)
    assert controller._window.groups[0].tokens.tolist() == [96]


def test_moving_the_model_after_attach_is_an_error():
    _, _, controller = attached()
    with pytest.raises(NALoRAError, match="move the model first, then attach"):
        controller._observers[0].count(
            torch.zeros(2, 56, device="meta"), None, None, controller._observers[0].window.sums
        )


def test_adamw_gradient_space_keeps_a_finite_state_over_many_steps():
    model = tiny.llama(torch.float32)
    model, optimizer, controller = attached(model, AdamW(tiny.trainable(model), lr=1e-2))
    first = tiny.sum_loss(model, tiny.tokens()).item()
    optimizer.zero_grad()
    for _ in range(30):
        step(model, optimizer)
    assert tiny.sum_loss(model, tiny.tokens()).item() < 0.5 * first
    metrics = controller.metrics()
    assert 0.8 <= metrics["scale_gate"] <= 1.5
    assert 0 < metrics["mask_mean"] < 1


def test_observing_deciding_and_applying_never_wait_for_the_device(monkeypatch):
    """No value travels to the host: neither .item() nor a data-dependent shape, in either space."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waiting = {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
    }

    class NoWaiting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in waiting, func
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(reference, "_on_host", lambda z: False)
    for apply_to in ("gradient", "update"):
        for importance in ("derivative", "utility"):
            settings = dict(apply_to=apply_to, importance=importance, preserve_mean=True)
            model, _, controller = attached(**settings)
            mask = torch.ones(4, 12, dtype=torch.long)
            mask[0, 5:] = 0
            tiny.sum_loss(model, tiny.tokens(), mask).backward()
            with NoWaiting():
                for observer in controller._observers:
                    z = torch.randn(4, 12, 56, dtype=torch.float64)
                    observer.count(z, z if importance == "utility" else None, mask.bool(), observer.window.sums)
                controller._enter_step()
                controller._leave_step()


@pytest.mark.parametrize("importance", ["derivative", "utility"])
def test_a_million_tokens_leave_nothing_behind(importance):
    """One pass of a million tokens: z is gone as soon as the model lets go of it."""
    import gc
    import weakref

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    model = tiny.with_lora(torch.nn.Sequential(Gated()), target_modules=["gate", "up", "down"])
    _, _, controller = attached(model, importance=importance)
    seen = []
    for layer in ("gate", "up"):
        module = getattr(model.base_model.model[0], layer)
        module.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    output = model(torch.randn(1_000_000, 4))
    assert controller._window.groups[0].tokens.tolist() == [1_000_000]
    del output
    gc.collect()
    assert len(seen) == 2
    assert all(reference() is None for reference in seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantised_base_is_observed_with_its_adapter(kind):
    """The gate is the LoRA layer's output: quantised base plus adapter, reduced in float32."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    linear = bitsandbytes.nn.Linear4bit if kind == "4bit" else bitsandbytes.nn.Linear8bitLt

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
            for name, (inner, outer) in sizes.items():
                options = {"compute_dtype": torch.float32} if kind == "4bit" else {"has_fp16_weights": False}
                setattr(self, name, linear(inner, outer, bias=False, **options))

        def forward(self, x):
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    model = torch.nn.Sequential(Gated()).to("cpu")
    model = tiny.with_lora(model, target_modules=["gate", "up", "down"], lora_b=0.5)
    model, optimizer, controller = attached(model)
    outputs = []
    gate = model.base_model.model[0].gate
    gate.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    model(torch.randn(3, 5, 64)).square().sum().backward()
    exact = controller.plan.blocks[0].block.activation.derivative(outputs[0].double()).abs().sum((0, 1))
    torch.testing.assert_close(
        controller._window.groups[0].stacked.totals()[0][0].double(), exact, rtol=1e-5, atol=1e-5
    )
    assert controller._window.groups[0].stacked.sensitivity.dtype == torch.float32
    optimizer.step()
    assert controller.metrics()["mask_mean"] < 1


def test_the_utility_counts_the_constant_that_is_added_to_up():
    """gpt-oss multiplies by up + 1: the importance of a channel is E|φ′(z)|·|u + 1|."""
    torch.manual_seed(0)
    model = tiny.with_lora(dense_gpt_oss().double())
    seen = []
    layer = model.base_model.model.layers[0].gate_up_proj
    layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    _, _, controller = attached(model, importance="utility", regimes="derived")
    seen.clear()
    model(torch.randn(3, 5, 16, dtype=torch.float64)).sum().backward()
    (gate_up,) = seen
    z, u = gate_up[..., ::2].reshape(-1, 24).requires_grad_(), gate_up[..., 1::2].reshape(-1, 24)
    (derivative,) = torch.autograd.grad((z * torch.sigmoid(1.702 * z)).sum(), z)
    (group,) = controller._window.groups
    torch.testing.assert_close(group.sums(0).sensitivity.sum(0), (derivative.abs() * (u + 1).abs()).sum(0))
