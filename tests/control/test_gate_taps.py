"""The places where the gates of experts are seen: each value once, and the module restored and copied without them."""

from __future__ import annotations

import copy
import pickle

import pytest
import tiny_experts
import torch

from nalora.control.gate_taps import is_tapped, tap


@pytest.fixture
def experts():
    return tiny_experts.base("Mixtral").model.layers[0].mlp.experts


def call(experts, implementation):
    experts.config._experts_implementation_internal = implementation
    x = torch.randn(
        7, tiny_experts.SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    index = torch.arange(14).view(7, 2) % tiny_experts.EXPERTS
    return experts(x, index, torch.full((7, 2), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(("implementation", "calls", "whole"), [("batched_mm", 1, True), ("eager", 6, False)])
def test_every_output_is_seen_once(experts, implementation, calls, whole):
    expected = call(experts, implementation)
    seen = []
    taps = tap(experts, lambda output, both: seen.append((output.shape, both)))
    assert is_tapped(experts)
    assert torch.equal(call(experts, implementation), expected)
    assert [both for _, both in seen] == [whole] * calls
    assert sum(shape[0] for shape, _ in seen) == 14
    assert {shape[1] for shape, _ in seen} == {(2 if whole else 1) * tiny_experts.WIDTH}
    for handle in taps:
        handle.remove()
    call(experts, implementation)
    assert len(seen) == calls
    assert not is_tapped(experts)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_calls_its_own_method_and_shows_nothing(experts, copied):
    seen = []
    tap(experts, lambda output, both: seen.append(output))
    twin = copied(experts)
    with torch.no_grad():
        twin.gate_up_proj.zero_()
    for implementation in ("batched_mm", "eager"):
        assert not call(twin, implementation).any()
    assert not seen
    assert not is_tapped(twin)
