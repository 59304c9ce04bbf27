"""The Triton engine against float64, over odd shapes; the same table runs on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from nalora import activations
from nalora.kernels.statistics import Sums, choose, reference

triton_engine = pytest.importorskip("nalora.kernels.statistics.triton_engine")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
THRESHOLDS = (-1.25, 1.375)  # values that bf16 holds exactly, so that counts must agree exactly
SHAPES = [(1, 1), (1, 130), (3, 5, 7), (33, 300), (2, 64, 128), (257, 65)]
if torch.cuda.is_available():
    SHAPES += [(4096, 14336), (1_000_000, 16), (16, 1024, 1536)]
ACTIVATIONS = [*activations.KNOWN, activations.clamped(activations.get("quick_gelu"), 7.0)]


def sums(width: int, dtype: torch.dtype, parts: int = 3) -> Sums:
    slots = -(-width // 64)
    return Sums(
        torch.zeros(parts, width, dtype=dtype, device=DEVICE),
        torch.zeros(parts, slots, 2, dtype=torch.int64, device=DEVICE),
        torch.zeros(parts, dtype=torch.int64, device=DEVICE),
    )


def compare(z, activation, u=None, mask=None, tolerance=1e-6):
    exact, ours = sums(z.shape[-1], torch.float64, parts=1), sums(z.shape[-1], torch.float32)
    reference.accumulate(exact, z, activation, THRESHOLDS, u, mask)
    triton_engine.accumulate(ours, z, activation, THRESHOLDS, u, mask)
    (k, regimes, tokens), (our_k, our_regimes, our_tokens) = exact.totals(), ours.totals()
    assert torch.equal(tokens, our_tokens)
    assert torch.equal(regimes, our_regimes)
    torch.testing.assert_close(our_k.double(), k, rtol=tolerance, atol=1e-6 * max(1, z.shape[0] ** 0.5))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_float32_agrees_with_float64(activation, shape, masked):
    generator = torch.Generator().manual_seed(1)
    z = (3 * torch.randn(shape, generator=generator)).to(DEVICE)
    mask = (torch.rand(shape[:-1], generator=generator) > 0.4).to(DEVICE) if masked else None
    compare(z, activation, mask=mask, tolerance=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, -5.0])
def test_half_precision_input_within_a_thousandth(dtype, mean):
    """Far in the negative tail too, where a sigmoid by tanh would lose all its digits."""
    z = (2 * torch.randn(70, 200) + mean).to(DEVICE, dtype)
    for activation in activations.KNOWN:
        compare(z, activation, tolerance=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_utility_and_strided_views(masked):
    fused = torch.randn(5, 9, 2 * 70, device=DEVICE)
    mask = torch.rand(5, 9, device=DEVICE) > 0.5 if masked else None
    for gate, up in ((slice(0, 70), slice(70, 140)), (slice(0, None, 2), slice(1, None, 2))):
        compare(fused[..., gate], activations.get("silu"), fused[..., up], mask)


def test_passes_add_up_and_repeat_to_the_bit():
    z = torch.randn(3, 50, 90, device=DEVICE)
    once, twice = sums(90, torch.float32), sums(90, torch.float32)
    for result in (once, twice):
        for part in z:
            triton_engine.accumulate(result, part, activations.get("silu"), THRESHOLDS)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert once.totals()[2].item() == 150


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_one_non_finite_value_poisons_its_channel(poison, activation):
    z = torch.randn(40, 6, device=DEVICE)
    z[17, 3] = poison
    result = sums(6, torch.float32)
    triton_engine.accumulate(result, z, activation, THRESHOLDS)
    assert not torch.isfinite(result.totals()[0][3])


def test_what_pads_carry_does_not_matter_and_empty_batches_add_nothing():
    z = torch.randn(8, 6, device=DEVICE)
    mask = torch.arange(8, device=DEVICE) < 5
    z[5:] = float("nan")
    padded, clean = sums(6, torch.float32), sums(6, torch.float32)
    triton_engine.accumulate(padded, z, activations.get("silu"), THRESHOLDS, None, mask)
    triton_engine.accumulate(clean, z[:5].contiguous(), activations.get("silu"), THRESHOLDS)
    torch.testing.assert_close(padded.totals()[0], clean.totals()[0])
    empty = sums(6, torch.float32)
    triton_engine.accumulate(empty, z[:0], activations.get("silu"), THRESHOLDS)
    triton_engine.accumulate(empty, z, activations.get("silu"), THRESHOLDS, None, torch.zeros_like(mask))
    assert not any(each.any() for each in empty)


def test_the_engine_is_chosen_by_device_activation_and_precision():
    silu, unknown = activations.get("silu"), activations.get(lambda z: z * torch.sigmoid(3 * z))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose(silu, cuda, torch.float32, kernels="auto").name == "triton"
    assert choose(silu, cuda, torch.float64, kernels="auto").name == "reference"
    assert choose(unknown, cuda, torch.float32, kernels="auto").name == "reference"
    assert choose(silu, cuda, torch.float32, kernels="off").name == "reference"
    assert choose(silu, cpu, torch.float32, kernels="auto").name == "reference"


def test_without_triton_the_reference_serves(monkeypatch):
    from nalora.kernels.statistics import engines

    monkeypatch.setattr(engines, "has_triton", lambda: False)
    assert choose(activations.get("silu"), torch.device("cuda"), torch.float32, kernels="auto").name == "reference"


def test_a_namesake_of_a_known_activation_has_no_kernel():
    def silu(z):
        return z * torch.sigmoid(2 * z)

    namesake = activations.get(silu)
    assert namesake.name == "silu"
    number_and_limit = pytest.importorskip("nalora.kernels.statistics.triton_activations").number_and_limit
    assert number_and_limit(namesake) is None
    assert number_and_limit(activations.clamped(namesake, 7.0)) is None
    assert number_and_limit(activations.clamped(activations.get("silu"), 7.0)) == (0, 7.0)
