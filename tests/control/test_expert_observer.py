"""Experts against the straight-line reference, and results that do not depend on how their tokens reach them."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import tiny
import tiny_experts
import torch
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.control import expert_observer
from nalora.kernels.statistics import by_expert

STEPS = 5
SWITCHES = {
    "both": {},
    "utility": {"importance": "utility"},
    "first": {"start": "first"},
    "other-numbers": {"keep_ratio": 0.55, "sharpness": 5.0, "mask_ema": 0.5, "scale_ema": 0.2},
}
# So few tokens that in some steps some experts have none.
BATCHES = [tiny.tokens(1, 5, seed=step) for step in range(20)]
QUICK = [
    ("Qwen3Moe", "grouped_mm", "both", "gradient"),
    ("Mixtral", "eager", "utility", "update"),
    ("GptOss", "batched_mm", "first", "update"),
]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(
        tiny_experts.ARCHITECTURES, tiny_experts.IMPLEMENTATIONS, SWITCHES, ("gradient", "update")
    )
]


@pytest.fixture(autouse=True)
def grouped_products_in_float64(monkeypatch):
    tiny_experts.allow_float64(monkeypatch)


def train(model, batches, config, *, controller=None, optimizer=None, micro=1):
    """Train with NA-LoRA, each batch in `micro` passes; `batches` are pairs of tokens and mask, or tokens."""
    optimizer = optimizer or AdamW(tiny.trainable(model), lr=3e-3, weight_decay=0.1)
    controller = controller or nalora.attach(model, optimizer, config)
    counted = []
    for batch in batches:
        ids, mask = batch if isinstance(batch, tuple) else (batch, None)
        masks = [None] * micro if mask is None else mask.chunk(micro)
        for part, part_mask in zip(ids.chunk(micro), masks, strict=True):
            tiny.sum_loss(model, part, part_mask).backward()
        counted += [group.tokens.clone() for group in controller._window.groups]
        controller.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return controller, counted


def assert_same(one, other, tolerance=1e-9):
    """Adapters, averages and the tokens of every expert are the same."""
    (model, (controller, counted)), (model2, (controller2, counted2)) = one, other
    assert tiny.largest_difference(tiny.adapter_state(model), tiny.adapter_state(model2)) < tolerance
    states = [
        {k: v.double() for k, v in c.state_dict()["tensors"].items() if v.any()} for c in (controller, controller2)
    ]
    assert tiny.largest_difference(*states) < tolerance
    assert all(torch.equal(a, b) for a, b in zip(counted, counted2, strict=True))


@pytest.mark.parametrize(("architecture", "implementation", "switch", "apply_to"), CASES)
def test_agrees_with_the_paper_for_20_steps_of_adamw_with_clipping(architecture, implementation, switch, apply_to):
    regimes = "derived" if architecture == "GptOss" else "paper"
    config = NALoRAConfig(apply_to=apply_to, regimes=regimes, **SWITCHES[switch])
    ours = tiny_experts.adapted(architecture, implementation)
    reference = tiny_experts.adapted(architecture)
    settings = dict(lr=3e-3, weight_decay=0.1)
    optimizer = AdamW(tiny.trainable(ours), **settings)
    controller = nalora.attach(ours, optimizer, config)
    for ids in BATCHES:
        logits = ours(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer = AdamW(tiny.trainable(reference), **settings)
    updates = tiny_experts.train(reference, optimizer, BATCHES, dataclasses.asdict(config))
    assert tiny.largest_difference(tiny.adapter_state(reference), tiny.adapter_state(ours)) < 1e-9
    assert 0 < min(updates.values()) < len(BATCHES), "some expert had no token in some step"
    assert controller.metrics()["skipped_updates"] == 0


def test_every_control_changes_the_experts():
    def trained(**settings):
        model = tiny_experts.adapted("Mixtral", "grouped_mm")
        train(model, BATCHES[:STEPS], NALoRAConfig(**settings))
        return tiny.adapter_state(model)

    both, mask, scaling = trained(), trained(scaling=False), trained(mask=False)
    neither = trained(mask=False, scaling=False)
    for other in (mask, scaling, neither):
        assert tiny.largest_difference(both, other) > 1e-4
    assert tiny.largest_difference(mask, neither) > 1e-4
    assert tiny.largest_difference(scaling, neither) > 1e-4


def padded(step: int, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    ids, lengths = tiny.tokens(4, 7, seed=step), (7, 2, 5, 4)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(0, length) if side == "right" else slice(7 - length, None)] = 1
    return ids * mask, mask


@pytest.mark.parametrize("architecture", tiny_experts.ARCHITECTURES)
def test_all_implementations_count_the_same_tokens(architecture):
    """With padding, whose rows lie elsewhere in each of them."""
    results = []
    for implementation in tiny_experts.IMPLEMENTATIONS:
        model = tiny_experts.adapted(architecture, implementation)
        config = NALoRAConfig(apply_to="update", importance="utility")
        results.append((model, train(model, [padded(step) for step in range(STEPS)], config)))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    tokens = results[0][1][1][-1]
    assert tokens.sum() == 18 * (2 if architecture != "Qwen3Moe" else 1) * tiny_experts.TOP


@pytest.mark.parametrize("implementation", tiny_experts.IMPLEMENTATIONS)
def test_accumulation_and_padding(implementation):
    def run(batches, micro=1):
        model = tiny_experts.adapted("Qwen3Moe", implementation)
        return model, train(model, batches, NALoRAConfig(apply_to="update"), micro=micro)

    whole = [tiny.tokens(4, 6, seed=step) for step in range(STEPS)]
    assert_same(run(whole), run(whole, micro=4))
    # A row of its own, without padding, as one of four micro-batches.
    batches = [padded(step) for step in range(STEPS)]
    model = tiny_experts.adapted("Qwen3Moe", implementation)
    optimizer = AdamW(tiny.trainable(model), lr=3e-3, weight_decay=0.1)
    controller, counted = nalora.attach(model, optimizer, NALoRAConfig(apply_to="update")), []
    for ids, mask in batches:
        for row, length in zip(ids, mask.sum(1).tolist(), strict=True):
            tiny.sum_loss(model, row[None, :length]).backward()
        counted += [group.tokens.clone() for group in controller._window.groups]
        controller.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(run(batches), (model, (controller, counted)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_checkpointing_counts_each_token_once(implementation, reentrant):
    def run(checkpointing):
        model = tiny_experts.adapted("GptOss", implementation)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model, train(model, [padded(step) for step in range(STEPS)], NALoRAConfig(regimes="derived"))

    assert_same(run(False), run(True))


@pytest.mark.parametrize("implementation", tiny_experts.IMPLEMENTATIONS)
def test_passes_without_training_are_not_observed(implementation):
    model = tiny_experts.adapted("Mixtral", implementation)
    controller = nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    ids = tiny.tokens()
    with torch.no_grad():
        model(input_ids=ids)
    with model.disable_adapter():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids)
    assert not any(group.tokens.any() for group in controller._window.groups)
    model.train()
    model(input_ids=ids)
    assert sum(group.tokens.sum() for group in controller._window.groups) == 2 * ids.numel() * tiny_experts.TOP


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_resuming_after_any_step_is_bit_exact(apply_to, tmp_path):
    config, batches = NALoRAConfig(apply_to=apply_to, start="first"), BATCHES[:STEPS]

    def start():
        model = tiny_experts.adapted("Qwen3Moe", "grouped_mm", torch.float32)
        optimizer = AdamW(tiny.trainable(model), lr=3e-3)
        return model, optimizer, nalora.attach(model, optimizer, config)

    model, optimizer, controller = start()
    for step, batch in enumerate(batches):
        train(model, [batch], config, controller=controller, optimizer=optimizer)
        controller.save(tmp_path / str(step))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / str(step) / "training.pt")
    expected, state = tiny.adapter_state(model), controller.state_dict()["tensors"]
    for step in range(STEPS - 1):
        model, optimizer, controller = start()
        for part, saved in zip((model, optimizer), torch.load(tmp_path / str(step) / "training.pt"), strict=True):
            part.load_state_dict(saved)
        controller.load(tmp_path / str(step))
        train(model, batches[step + 1 :], config, controller=controller, optimizer=optimizer)
        assert tiny.largest_difference(expected, tiny.adapter_state(model)) == 0
        assert all(torch.equal(value, state[key]) for key, value in controller.state_dict()["tensors"].items())


def test_an_expert_without_tokens_keeps_its_averages():
    model = tiny_experts.adapted("Mixtral", "grouped_mm")
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    controller = nalora.attach(model, optimizer, NALoRAConfig(apply_to="update"))
    train(model, BATCHES[:3], None, controller=controller, optimizer=optimizer)
    (group,) = controller._window.groups
    before = {name: getattr(group, name).clone() for name in ("mask", "scales", "updates", "score")}
    tiny.sum_loss(model, tiny.tokens(1, 2, seed=9)).backward()
    idle = group.tokens == 0
    assert idle.any()
    assert not idle.all()
    optimizer.step()
    for name, values in before.items():
        assert torch.equal(values[idle], getattr(group, name)[idle])
    assert torch.equal(before["updates"] + 1, group.updates + idle)
    assert not group.skipped.any()


def test_a_gate_that_is_not_finite_skips_its_expert_alone():
    model = tiny_experts.adapted("Mixtral", "grouped_mm")
    optimizer = SGD(tiny.trainable(model), lr=0.0)
    controller = nalora.attach(model, optimizer)
    model.base_model.model.model.layers[1].mlp.experts.get_base_layer().gate_up_proj.data[2, 0] = torch.inf
    model(input_ids=tiny.tokens()).logits.sum().backward()
    optimizer.step()
    (group,) = controller._window.groups
    assert group.skipped.nonzero().flatten().tolist() == [tiny_experts.EXPERTS + 2]
    assert controller.metrics(per_block=True)["base_model.model.model.layers.1.mlp.experts/skipped_updates"] == 1


def test_the_implementation_may_change_during_training():
    batches = [padded(step) for step in range(4)]
    model = tiny_experts.adapted("Mixtral", "eager")
    optimizer = AdamW(tiny.trainable(model), lr=3e-3, weight_decay=0.1)
    controller, counted = nalora.attach(model, optimizer), []
    for implementation, batch in zip(("eager", "grouped_mm", "batched_mm", "eager"), batches, strict=True):
        model.base_model.model.set_experts_implementation(implementation)
        counted += train(model, [batch], None, controller=controller, optimizer=optimizer)[1]
    other = tiny_experts.adapted("Mixtral", "eager")
    assert_same((model, (controller, counted)), (other, train(other, batches, None)))


def hidden_gates(self, hidden_states, top_k_index, top_k_weights):
    """Experts whose kernel computes the activation itself, as hub kernels do."""
    weight = self.gate_up_proj[top_k_index]
    gate, up = torch.einsum("th,tkoh->tko", hidden_states, weight).chunk(2, dim=-1)
    out = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, self.down_proj[top_k_index])
    return (out * top_k_weights[..., None]).sum(1).to(hidden_states)


def test_gates_that_a_kernel_hides_are_an_error(monkeypatch):
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "hidden", hidden_gates)
    model = tiny_experts.adapted("Mixtral", "eager")
    model.base_model.model.config._experts_implementation_internal = "hidden"
    with pytest.raises(NALoRAError, match=r"gates are not seen in this implementation.*set_experts_implementation"):
        nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    model.base_model.model.set_experts_implementation("eager")
    controller = nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    model.base_model.model.config._experts_implementation_internal = "hidden"
    with pytest.raises(NALoRAError, match="experts_implementation='hidden'"):
        model(input_ids=tiny.tokens())
    controller.detach()
    model(input_ids=tiny.tokens())


def test_one_controller_which_copies_do_not_carry_and_detach_removes():
    model = tiny_experts.adapted("Mixtral", "grouped_mm")
    expected = model(input_ids=tiny.tokens()).logits
    controller = nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    with pytest.raises(NALoRAError, match="another controller observes already"):
        nalora.attach(model, SGD(tiny.trainable(model), lr=0.1))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=tiny.tokens()).logits, expected)
    (group,) = controller._window.groups
    assert not group.tokens.any()
    twin_controller = nalora.attach(twin, SGD(tiny.trainable(twin), lr=0.1))
    twin(input_ids=tiny.tokens())
    assert twin_controller._window.groups[0].tokens.any()
    assert not group.tokens.any()
    controller.detach()
    assert torch.equal(model(input_ids=tiny.tokens()).logits, expected)
    assert not group.tokens.any()
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    assert "_apply_gate" not in vars(experts)
    assert not [*experts._forward_hooks, *experts._forward_pre_hooks, *experts.act_fn._forward_pre_hooks]


def test_torch_grouped_products_in_float32():
    results = []
    for implementation in ("eager", "grouped_mm"):
        model = tiny_experts.adapted("Mixtral", implementation, torch.float32)
        results.append((model, train(model, [padded(step) for step in range(STEPS)], NALoRAConfig())))
    assert_same(*results, tolerance=1e-4)


def device_path(monkeypatch) -> None:
    """Add up as on a device: in segments, where the CPU would go expert by expert."""

    def add(accumulate, sums, experts, z, *arguments):
        ends = torch.searchsorted(experts, torch.arange(len(sums.tokens) + 1))
        by_expert.add_segments(sums, ends, z, *arguments)

    monkeypatch.setattr(expert_observer, "accumulate_by_expert", add)


def test_a_device_counts_what_a_cpu_counts(monkeypatch):
    def run():
        model = tiny_experts.adapted("GptOss", "eager")
        config = NALoRAConfig(importance="utility", regimes="derived")
        return model, train(model, [padded(step) for step in range(STEPS)], config)

    expected = run()
    device_path(monkeypatch)
    assert_same(expected, run())


@pytest.mark.parametrize("implementation", tiny_experts.IMPLEMENTATIONS)
def test_observing_does_not_wait_for_the_device(implementation, monkeypatch):
    """It adds nothing that reads a value on the host to what the implementation itself reads."""
    device_path(monkeypatch)
    waiting = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    class Waiting(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func in waiting
            return func(*args, **(kwargs or {}))

    def waits(attached):
        model = tiny_experts.adapted("Mixtral", implementation, torch.float32)
        if attached:
            nalora.attach(model, SGD(tiny.trainable(model), lr=0.1), NALoRAConfig(importance="utility"))
        ids, mask = padded(0)
        with Waiting() as mode:
            model(input_ids=ids, attention_mask=mask)
        return mode.number

    assert waits(attached=True) == waits(attached=False)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", tiny_experts.IMPLEMENTATIONS)
def test_compiled_models_count_the_same_tokens(implementation):
    """PEFT's wrappers of parameters break the graph, in which the hooks are then ordinary Python."""

    def run(compiled):
        model = tiny_experts.adapted("Mixtral", implementation)
        optimizer = SGD(tiny.trainable(model), lr=0.1)
        controller, counted = nalora.attach(model, optimizer), []
        called = torch.compile(model, backend="eager") if compiled else model
        for step in range(3):
            tiny.sum_loss(called, *padded(step)).backward()
            counted += [group.tokens.clone() for group in controller._window.groups]
            optimizer.step()
            optimizer.zero_grad()
        return model, (controller, counted)

    assert_same(run(False), run(True))
    torch.compiler.reset()
