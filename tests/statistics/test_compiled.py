"""The compiled engine agrees with float64, compiles once for all shapes, and falls back to the reference."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn
from torch._dynamo.utils import counters

import nalora
from nalora import activations
from nalora.kernels.statistics import Sums, choose, compiled, engines, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
THRESHOLDS = (-1.25, 1.375)  # values that bf16 holds exactly, so that counts must agree exactly
SHAPES = [(1, 1), (1, 130), (2, 1), (3, 5, 7), (33, 300), (2, 64, 128), (257, 65), (64, 64), (2048, 16)]
SILU = activations.get("silu")

pytestmark = pytest.mark.skipif(
    not engines.can_compile(DEVICE), reason="no compiler here: the reference serves, which has its own tests"
)


def sums(width: int, dtype: torch.dtype = torch.float32) -> Sums:
    return Sums.zeros(1, width, dtype, DEVICE).of_block(0)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def compare(z, activation, u=None, mask=None, tolerance=1e-6):
    exact, ours = sums(z.shape[-1], torch.float64), sums(z.shape[-1])
    reference.accumulate(exact, z, activation, THRESHOLDS, u, mask)
    compiled.accumulate(ours, z, activation, THRESHOLDS, u, mask)
    (k, regimes, tokens), (our_k, our_regimes, our_tokens) = exact.totals(), ours.totals()
    assert torch.equal(tokens, our_tokens)
    assert torch.equal(regimes, our_regimes)
    torch.testing.assert_close(our_k.double(), k, rtol=tolerance, atol=1e-6)


@pytest.fixture
def compilations():
    """Return the number of graphs that torch has compiled since the test began."""
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


@pytest.fixture
def afresh():
    """Start without kernels, and leave none behind."""
    compiled._kernel_for.cache_clear()
    yield
    compiled._kernel_for.cache_clear()


@pytest.fixture
def no_reference(monkeypatch):
    """Fail if the reference computes in place of the compiled engine."""

    def unexpected(*_):
        raise AssertionError("the reference was called")

    monkeypatch.setattr(compiled.reference, "accumulate", unexpected)


@pytest.mark.parametrize("activation", activations.KNOWN, ids=lambda a: a.name)
def test_float32_agrees_with_float64(activation):
    for shape in SHAPES:
        compare(3 * normal(*shape), activation)


def test_masks_utility_and_strided_views():
    fused, mask = normal(5, 9, 2 * 70), normal(5, 9, seed=2) > 0
    gate, up = fused[..., :70], fused[..., 70:]
    compare(gate, SILU)
    compare(gate, SILU, up, mask)
    compare(gate.contiguous(), SILU, up, mask)
    gate, up = fused[..., ::2], fused[..., 1::2]
    compare(gate, SILU, None, mask)
    compare(gate, SILU, up)
    compare(gate, SILU, up, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_within_a_thousandth(dtype):
    """Far in the negative tail too, where a sigmoid by tanh would lose all its digits."""
    for mean in (0, -5):
        compare((2 * normal(70, 200) + mean).to(dtype), SILU, tolerance=1e-3)


def test_float64_sums_are_float64():
    z = 3 * normal(300, 20).double()
    exact, ours = sums(20, torch.float64), sums(20, torch.float64)
    reference.accumulate(exact, z, SILU, THRESHOLDS)
    compiled.accumulate(ours, z, SILU, THRESHOLDS)
    torch.testing.assert_close(ours.sensitivity, exact.sensitivity, rtol=1e-12, atol=0)


def test_passes_add_up_and_repeat_to_the_bit_regardless_of_order(afresh, no_reference):
    """A resumed run compiles at another batch than the run it continues."""
    passes = [normal(length, 90) for length in (50, 1000, 7)]
    results = []
    for first in passes:
        compiled._kernel_for.cache_clear()
        compiled.accumulate(sums(90), first, SILU, THRESHOLDS)
        results.append(sums(90))
        for z in passes:
            compiled.accumulate(results[-1], z, SILU, THRESHOLDS)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
        assert result.totals()[2].item() == 1057


def test_slices_add_up_exactly(monkeypatch, no_reference):
    z = 2 * normal(1000, 30)
    whole, sliced = sums(30), sums(30)
    compiled.accumulate(whole, z, SILU, THRESHOLDS)
    monkeypatch.setattr(compiled, "_CPU_ELEMENTS", 7 * 30)
    monkeypatch.setattr(compiled, "_GPU_ELEMENTS", 7 * 30)
    compiled.accumulate(sliced, z, SILU, THRESHOLDS)
    assert torch.equal(whole.outside, sliced.outside)
    assert torch.equal(whole.tokens, sliced.tokens)
    torch.testing.assert_close(whole.sensitivity, sliced.sensitivity, rtol=1e-6, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["silu", "relu"])
def test_one_non_finite_value_poisons_its_channel(poison, name, no_reference):
    z = normal(40, 6)
    z[17, 3] = poison
    result = sums(6)
    compiled.accumulate(result, z, activations.get(name), THRESHOLDS)
    assert not torch.isfinite(result.totals()[0][3])


def test_what_pads_carry_does_not_matter_and_empty_batches_add_nothing():
    z, u = normal(8, 6), normal(8, 6, seed=2)
    mask = torch.arange(8, device=DEVICE) < 5
    clean, padded, empty = sums(6), sums(6), sums(6)
    compiled.accumulate(clean, z[:5], SILU, THRESHOLDS, u[:5])
    z[5:], u[5:] = float("nan"), float("inf")
    compiled.accumulate(padded, z, SILU, THRESHOLDS, u, mask)
    torch.testing.assert_close(padded.totals()[0], clean.totals()[0])
    assert torch.equal(padded.totals()[1], clean.totals()[1])
    compiled.accumulate(empty, z[:0], SILU, THRESHOLDS)
    compiled.accumulate(empty, z, SILU, THRESHOLDS, u, torch.zeros_like(mask))
    assert not any(each.any() for each in empty)


def test_thirty_blocks_of_any_shape_and_threshold_compile_once(afresh, compilations, no_reference):
    for block in range(30):
        z = normal(2 + block, 100 + block % 3)
        activation = activations.clamped(SILU, 7.0)  # one made for each block, as discovery does
        compiled.accumulate(sums(z.shape[-1]), z, activation, (-1.0 - block / 10, 1.0))
    compiled.accumulate(sums(101), normal(101, 101), activation, THRESHOLDS)  # no size stands for two
    assert compilations() == 1


class Steep(nn.Module):
    """An activation with parameters of its own."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope, device=DEVICE))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z * torch.sigmoid(self.slope * z)


def test_a_custom_activation_compiles_once_for_all_its_instances(afresh, compilations):
    z, layers = normal(50, 40), [Steep(1.0 + 0.5 * n) for n in range(10)]
    for layer in layers:
        compare(z, activations.get(layer), tolerance=1e-5)
    assert compilations() == 1
    with torch.no_grad():
        layers[0].slope.mul_(3)  # a training step: the kernel must not use the old value
    compare(z, activations.get(layers[0]), tolerance=1e-5)


def test_namesakes_are_distinguished(afresh):
    for slope in (1.0, 3.0):
        compare(normal(50, 40), activations.get(lambda z, slope=slope: z * torch.sigmoid(slope * z)), tolerance=1e-5)


def test_what_cannot_be_compiled_is_always_computed_by_the_reference(afresh):
    def by_value(z):
        return z * torch.sigmoid(z) if z.max().item() > 0 else z * 0

    activation = activations.get(by_value)
    compare(normal(50, 40), activation)
    kernel = compiled._kernel_for(plain_kind(activation))
    assert not kernel.ways
    kernel.compiled = pytest.fail
    compare(normal(50, 40), activation)


def plain_kind(activation):
    z = normal(50, 40)
    return compiled._Kind.of(activation, sums(40), z, None, None, "whole")


def test_a_failing_compiler_is_no_error(afresh, monkeypatch):
    calls = []

    def broken(*_):
        calls.append(1)
        raise RuntimeError("no headers")

    monkeypatch.setattr(compiled.torch, "compile", lambda *_, **__: broken)
    for _ in range(3):
        compare(normal(50, 40), SILU)
    assert len(calls) == 2  # φ′ as given and the gradient of φ, at the first batch alone


def test_a_failure_later_on_counts_every_token_once(afresh, monkeypatch):
    compare(normal(50, 40), SILU)
    kernel = compiled._kernel_for(plain_kind(SILU))
    kernel.compiled, works = failing_after(1, kernel.compiled), kernel.compiled
    monkeypatch.setattr(compiled, "_CPU_ELEMENTS", 400)
    monkeypatch.setattr(compiled, "_GPU_ELEMENTS", 400)
    compare(normal(50, 40), SILU)
    kernel.compiled = works


def failing_after(calls, function):
    left = [calls]

    def run(*args):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of luck")
        return function(*args)

    return run


def test_under_a_dispatch_mode_the_reference_serves_that_pass_alone(afresh, compilations):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        compare(normal(50, 40), SILU)
    assert compilations() == 0
    compare(normal(50, 40), SILU)
    assert compilations() == 1


def test_the_choice_of_engine(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(engines, "_has_cpp_compiler", lambda: True)
    assert choose(SILU, cpu, torch.float32, kernels="auto", channels=46080).name == "compiled"
    assert choose(SILU, cpu, torch.float32, kernels="auto", channels=112).name == "reference"
    assert choose(SILU, cpu, torch.float64, kernels="auto", channels=46080).name == "reference"
    assert choose(SILU, cpu, torch.float32, kernels="off", channels=46080).name == "reference"
    unknown = activations.get(lambda z: z * torch.sigmoid(3 * z))
    monkeypatch.setattr(engines, "has_triton", lambda: True)
    assert choose(unknown, torch.device("cuda"), torch.float32, kernels="auto", channels=46080).name == "compiled"
    monkeypatch.setattr(engines, "has_triton", lambda: False)
    assert choose(unknown, torch.device("cuda"), torch.float32, kernels="auto", channels=46080).name == "reference"


def test_a_machine_without_a_compiler_gets_the_reference(monkeypatch):
    monkeypatch.setattr(engines.shutil, "which", lambda _: None)
    engines._has_cpp_compiler.cache_clear()
    try:
        assert choose(SILU, torch.device("cpu"), torch.float32, kernels="auto", channels=46080).name == "reference"
    finally:
        engines._has_cpp_compiler.cache_clear()


def observed(kernels: str, checkpointing: bool | None = None, compile_model: bool = False):
    """The sums of one pass of a small model with its gradients, and the engine that took them."""
    model = tiny.llama(torch.float32).to(DEVICE)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    controller = nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1), kernels=kernels)
    forward = torch.compile(model, backend="aot_eager") if compile_model else model
    tiny.sum_loss(forward, tiny.tokens().to(DEVICE)).backward()
    return [group.stacked.totals() for group in controller._window.groups], controller.plan.statistics


@pytest.mark.parametrize(
    "setting",
    [{}, {"checkpointing": False}, {"checkpointing": True}, {"compile_model": True}],
    ids=["plain", "checkpointed", "reentrant", "compiled model"],
)
def test_a_model_is_observed_as_by_the_reference(setting, monkeypatch, afresh):
    """First compiled in a forward pass, in a backward pass, and inside a compiled model's operator."""
    monkeypatch.setattr(engines, "_CHANNELS_WORTH_COMPILING", 1)
    [(exact, regimes, tokens)], engine = observed("off")
    [(ours, our_regimes, our_tokens)], our_engine = observed("auto", **setting)
    assert engine == "reference"
    assert our_engine == ("compiled" if DEVICE.type == "cpu" else "triton")
    assert torch.equal(tokens, our_tokens)
    assert torch.equal(regimes, our_regimes)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
