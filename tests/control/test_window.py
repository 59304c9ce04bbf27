"""Which forward passes an optimizer step counts: `StepWindow` and `GateWindow` without a controller around them."""

from __future__ import annotations

import gc
import weakref

import pytest
import tiny
import torch

from nalora import NALoRAConfig, NALoRAError
from nalora.control.blocks import find_blocks
from nalora.control.plan import make_plan
from nalora.control.window import StepWindow

CPU = torch.device("cpu")


@pytest.fixture
def model():
    return tiny.llama()


@pytest.fixture
def window(model):
    step = StepWindow(make_plan(find_blocks(model), NALoRAConfig()).blocks)
    step.parameters.refresh()
    return step


def backward(model, window):
    """A forward and a backward pass; the parameters' hooks are set as the controller sets them."""
    removers = [gate.watch(gate.block.gate.module.lora_B["default"].weight) for gate in window.gates]
    tiny.sum_loss(model, tiny.tokens()).backward()
    for remove in removers:
        remove()


def test_passes_accumulate_until_the_window_is_opened_again(model, window):
    gate = window.gates[0]
    assert gate.admits(CPU)
    assert gate.admits(CPU)
    assert gate.passes == 2
    window.open()
    assert gate.passes == 0


def test_zeroing_gradients_keeps_a_pass_that_has_had_no_backward_pass(model, window):
    gate = window.gates[0]
    gate.admits(CPU)
    window.open_after_zeroing()
    assert gate.passes == 1
    backward(model, window)
    window.open_after_zeroing()
    assert gate.passes == 0


def test_gradients_set_to_none_without_zero_grad_discard_their_passes(model, window):
    gate = window.gates[0]
    gate.admits(CPU)
    gate.sums.tokens.add_(5)
    backward(model, window)
    for parameter in model.parameters():
        parameter.grad = None
    assert gate.admits(CPU)
    assert gate.passes == 1
    assert gate.sums.tokens.sum() == 0


def test_the_second_step_of_another_optimizer_in_a_row_is_an_error(model, window):
    gate = window.gates[0]
    other = torch.optim.SGD(tiny.trainable(model), lr=0.1)
    gate.admits(CPU)
    backward(model, window)
    other.step()
    assert gate.admits(CPU), "a loaded state looks like one foreign step"
    backward(model, window)
    other.step()
    with pytest.raises(NALoRAError, match="another optimizer"):
        gate.admits(CPU)
    window.change_optimizer()
    assert gate.admits(CPU)


def test_a_pass_after_the_decision_is_an_error(model, window):
    window.decisions = []
    with pytest.raises(NALoRAError, match="after the control was applied"):
        window.gates[0].admits(CPU)


def test_a_pass_on_another_device_is_an_error(window):
    with pytest.raises(NALoRAError, match="gate outputs on meta"):
        window.gates[0].admits(torch.device("meta"))


def test_merged_adapters_are_an_error(model, window):
    model.merge_adapter()
    with pytest.raises(NALoRAError, match="merged adapters"):
        window.gates[0].admits(CPU)


def test_a_replayed_pass_counts_once_for_every_block(window):
    window.gates[0].admits(CPU)
    window.count_replay()
    window.count_replay()
    assert [gate.passes for gate in window.gates] == [1, 1]


def test_hooks_on_parameters_keep_no_window_alive(model):
    step = StepWindow(make_plan(find_blocks(model), NALoRAConfig()).blocks)
    step.gates[0].watch(step.gates[0].block.gate.module.lora_B["default"].weight)
    gone = weakref.ref(step.gates[0])
    del step
    gc.collect()
    assert gone() is None
    tiny.sum_loss(model, tiny.tokens()).backward()
