"""Fused layers compute the values, gradients and statistics of PEFT's, and are removed completely."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig, activations

gated = pytest.importorskip("nalora.kernels.fused.gated")
from nalora.kernels.fused.adapters import Adapters, cast  # noqa: E402
from nalora.kernels.fused.frozen import DenseWeight  # noqa: E402
from nalora.kernels.fused.lora_ffn import LoRAFFN, Weights  # noqa: E402
from nalora.kernels.fused.lora_linear import FrozenLinear, LoRALinears  # noqa: E402
from nalora.kernels.statistics.triton_activations import number_and_limit  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("activation", activations.KNOWN, ids=lambda a: a.name)
@pytest.mark.parametrize(("tokens", "width", "up_offset"), [(5, 7, 0.0), (37, 130, 1.0), (16, 64, 0.0)])
def test_gated_product_and_its_gradients(activation, tokens, width, up_offset):
    z, u, dh = (torch.randn(tokens, width, device=DEVICE) for _ in range(3))
    spec = gated.GateSpec(*number_and_limit(activation), -1.0, 1.0, up_offset, False)
    exact_z, exact_u = (each.double().requires_grad_() for each in (z, u))
    h = activation.phi(exact_z) * (exact_u + up_offset)
    h.backward(dh.double())
    x, b = torch.zeros(tokens, 1, device=DEVICE), torch.zeros(width, 1, device=DEVICE)
    nothing = gated.LowRank(x, x, b, b)
    assert relative(gated.forward(z, u, spec, nothing), h) < 1e-6
    grads = gated.backward(dh, z, u, spec, nothing, (x, b.T.contiguous()))
    assert relative(grads.z, exact_z.grad) < 2e-6
    assert relative(grads.u, exact_u.grad) < 1e-6


@pytest.mark.parametrize("rank", [1, 4, 20, 40])
@pytest.mark.parametrize(("tokens", "size", "width"), [(13, 24, 40), (32, 64, 64)])
def test_lora_ffn_against_autograd_in_float64(rank, tokens, size, width):
    shapes = [(rank, size), (width, rank), (rank, size), (width, rank), (rank, width), (size, rank)]
    factors = [torch.randn(shape, device=DEVICE) / 3 for shape in shapes]
    w_gate, w_up = (torch.randn(width, size, device=DEVICE) / 5 for _ in range(2))
    w_down = torch.randn(size, width, device=DEVICE) / 5
    x, dy = torch.randn(2, tokens, size, device=DEVICE), torch.randn(2, tokens, size, device=DEVICE)
    inputs = [each.clone().requires_grad_() for each in (x, *factors)]
    exact = [each.double().requires_grad_() for each in (x, *factors)]

    def ffn(x, a_gate, b_gate, a_up, b_up, a_down, b_down):
        z = x @ w_gate.double().T + 2.0 * (x @ a_gate.T) @ b_gate.T
        u = x @ w_up.double().T + 0.5 * (x @ a_up.T) @ b_up.T
        h = torch.nn.functional.silu(z) * u
        return h @ w_down.double().T + 1.5 * (h @ a_down.T) @ b_down.T

    a_gate, b_gate, a_up, b_up, a_down, b_down = factors
    made = cast(
        [Adapters((a_gate, a_up), (b_gate, b_up), (2.0, 0.5)), Adapters((a_down,), (b_down,), (1.5,))], torch.float32
    )
    weights = Weights(*map(DenseWeight, (w_gate.to, w_up.to, w_down.to)), 2.0, 0.5, 1.5, *made)
    spec = gated.GateSpec(0, float("inf"), -1.0, 1.0, 0.0, False)
    y = LoRAFFN.apply(inputs[0], weights, spec, None, None, *inputs[1:])
    expected = ffn(*exact)
    expected.backward(dy.double())
    assert relative(y, expected) < 1e-5
    # The last pass may write into what forward saved, the one before it may not.
    for retain in (True, False):
        y.backward(dy, retain_graph=retain)
        for ours, theirs in zip(inputs, exact, strict=True):
            assert relative(ours.grad, theirs.grad) < 1e-5
            ours.grad = None


@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients_take_no_memory_of_their_own_if_they_may_overwrite(overwrite):
    z, u, dh = (torch.randn(5, 7, device=DEVICE) for _ in range(3))
    spec = gated.GateSpec(0, float("inf"), -1.0, 1.0, 0.0, False)
    x, b = torch.zeros(5, 1, device=DEVICE), torch.zeros(7, 1, device=DEVICE)
    plain = gated.backward(dh.clone(), z, u.clone(), spec, gated.LowRank(x, x, b, b), (x, b.T.contiguous()))
    own_u = u.clone()
    grads = gated.backward(
        dh.clone(), z, own_u, spec, gated.LowRank(x, x, b, b), (x, b.T.contiguous()), overwrite=overwrite
    )
    assert (grads.u.data_ptr() == own_u.data_ptr()) is overwrite
    assert torch.equal(grads.z, plain.z)
    assert torch.equal(grads.u, plain.u)
    own_z, own_u = z.clone(), u.clone()
    dz, du, h = gated.backward_of_complete(dh.clone(), own_z, own_u, spec, overwrite=overwrite)
    assert [du.data_ptr() == own_u.data_ptr(), h.data_ptr() == own_z.data_ptr()] == [overwrite, overwrite]
    assert torch.equal(dz, plain.z)
    assert torch.equal(du, plain.u)
    assert torch.allclose(h, torch.nn.functional.silu(z) * u, rtol=1e-5, atol=1e-6)


def test_linear_layers_of_one_input_pass_gradcheck():
    """Layers of different widths and ranks, one with a bias; also where an output is never used."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    sizes = [(7, 2), (4, 3), (6, 1)]
    factors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for o, r in sizes for s in ((r, 5), (o, r))]
    weights = [torch.randn(o, 5, dtype=torch.float64) for o, _ in sizes]
    biases = [None, torch.randn(4, dtype=torch.float64), None]
    layers = tuple(
        FrozenLinear(DenseWeight(w.to), bias, 1.7 + i) for i, (w, bias) in enumerate(zip(weights, biases, strict=True))
    )

    def exact(x, *factors):
        return [
            x @ w.T + (1.7 + i) * (x @ a.T) @ b.T + (0 if bias is None else bias)
            for i, (w, bias, a, b) in enumerate(zip(weights, biases, factors[::2], factors[1::2], strict=True))
        ]

    def ours(x, *factors):
        with torch.no_grad():
            (made,) = cast([Adapters(factors[::2], factors[1::2], tuple(each.scaling for each in layers))], x.dtype)
        return LoRALinears.apply(x, layers, made, *factors)

    assert torch.autograd.gradcheck(ours, (x, *factors))
    assert torch.autograd.gradcheck(lambda x, *f: ours(x, *f)[::2], (x, *factors))
    for got, theirs in zip(ours(x, *factors), exact(x, *factors), strict=True):
        torch.testing.assert_close(got, theirs)


def train(kernels, *, dtype=torch.float32, checkpointing=None, importance="derivative", steps=4, autocast=False):
    model = tiny.llama(dtype).to(DEVICE)
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    controller = nalora.attach(model, optimizer, NALoRAConfig(importance=importance), kernels=kernels)
    mask = torch.ones(4, 12, dtype=torch.long, device=DEVICE)
    mask[1, 7:] = 0
    losses, counted = [], []
    for step in range(steps):
        for half in range(2):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss = tiny.sum_loss(model, tiny.tokens(seed=2 * step + half).to(DEVICE), mask)
            loss.backward()
            losses.append(loss.item())
        counted.append(controller._window.groups[0].tokens.tolist())
        controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    metrics = controller.metrics()
    controller.detach()
    return tiny.adapter_state(model), losses, counted, metrics


@pytest.mark.parametrize("importance", ["derivative", "utility"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_training_is_that_of_pefts_layers(importance, checkpointing):
    plain = train("off", importance=importance)
    fused = train("fused", importance=importance, checkpointing=checkpointing)
    assert tiny.largest_difference(plain[0], fused[0]) < 2e-5
    assert plain[1] == pytest.approx(fused[1], rel=1e-5)
    assert plain[2] == fused[2] == [[86, 86]] * 4
    assert plain[3] == pytest.approx(fused[3], abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter multiplies bf16 as integers")
@pytest.mark.parametrize("setting", [{"dtype": torch.bfloat16}, {"autocast": True}], ids=["bf16", "autocast"])
@pytest.mark.parametrize("checkpointing", [None, False])
def test_half_precision_stays_within_rounding(setting, checkpointing):
    plain, fused = (train(each, steps=3, checkpointing=checkpointing, **setting) for each in ("off", "fused"))
    assert plain[1] == pytest.approx(fused[1], rel=2e-2)
    assert plain[2] == fused[2]


def test_detach_restores_the_model_s_own_layers():
    model = tiny.llama(torch.float32).to(DEVICE)
    optimizer = AdamW(tiny.trainable(model))
    controller = nalora.attach(model, optimizer, kernels="fused")
    fused = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(fused) == 2 + 8
    controller.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_calls_that_a_fused_layer_does_not_support_use_the_layer_s_own_forward():
    """Evaluation, disabled and merged adapters, dropout and DoRA give exactly PEFT's numbers."""
    ids = tiny.tokens().to(DEVICE)
    for extra in ({}, {"use_dora": True}, {"lora_dropout": 0.5}):
        model = tiny.llama(torch.float32, **extra).to(DEVICE)

        def outputs(model=model, extra=extra):
            torch.manual_seed(3)
            results = [model.train()(input_ids=ids).logits] if extra else []
            with torch.no_grad():
                results.append(model.eval()(input_ids=ids).logits)
            with model.disable_adapter():
                results.append(model.train()(input_ids=ids).logits)
            return results

        before = outputs()
        controller = nalora.attach(model.train(), AdamW(tiny.trainable(model)), kernels="fused")
        for ours, theirs in zip(outputs(), before, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        controller.detach()


def test_a_model_that_is_not_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny.llama(torch.float32)
    with pytest.raises(nalora.NALoRAError, match="a CUDA device for Triton"):
        nalora.attach(model, AdamW(tiny.trainable(model)), kernels="fused")
    assert not any(module._forward_hooks for module in model.modules())


def test_partial_adapters_and_plain_ffns_are_left_to_peft():
    from architectures import architecture

    for model in (tiny.llama(torch.float32, target_modules=["gate_proj"]), tiny.with_lora(architecture("OPT"))):
        model = model.to(DEVICE)
        controller = nalora.attach(model, AdamW(tiny.trainable(model)), kernels="fused")
        logits = model(input_ids=tiny.tokens().to(DEVICE)).logits
        logits.sum().backward()
        assert controller._window.groups[0].tokens.tolist() == [48, 48]
        controller.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="bitsandbytes computes 4-bit layers in half precision there")
def test_a_4_bit_base_is_dequantised_for_each_call():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, (inner, outer) in {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}.items():
                setattr(self, name, bitsandbytes.nn.Linear4bit(inner, outer, bias=False, compute_dtype=torch.float32))

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    model = tiny.with_lora(torch.nn.Sequential(Gated()).to("cpu"), target_modules=["gate", "up", "down"], lora_b=0.5)
    x = torch.randn(3, 5, 64)
    results = []
    for kernels in ("off", "fused"):
        controller = nalora.attach(model, AdamW(tiny.trainable(model)), kernels=kernels)
        assert ("forward" in vars(model.base_model.model[0])) == (kernels == "fused")
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in tiny.trainable(model))])
        controller.detach()
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
