"""The three terms on real models: they sum to what the down projection is really handed, batch by batch or at once."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import transformers

from nalora import activations, equations
from nalora.diagnostics.decomposition import MismatchSums, States

SMALL = dict(vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=56, num_hidden_layers=2)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, initializer_range=0.1)


def phi3():
    config = transformers.Phi3Config(**SMALL, **HEADS, bos_token_id=1, eos_token_id=2, max_position_embeddings=128)
    return transformers.Phi3ForCausalLM(config), "silu", "gate_up_proj", None, "down_proj"


def llama():
    config = transformers.LlamaConfig(**SMALL, **HEADS, max_position_embeddings=128)
    return transformers.LlamaForCausalLM(config), "silu", "gate_proj", "up_proj", "down_proj"


def t5():
    config = transformers.T5Config(vocab_size=tiny.VOCABULARY, d_model=32, d_ff=56, d_kv=8, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel(config), "relu", "wi", None, "wo"


class Pair:
    """A LoRA model and a fully tuned copy of its base, with what passes through their first FFN."""

    def __init__(self, make, dtype):
        torch.manual_seed(0)
        base, activation, self.gate, self.up, self.down = make()
        target = copy.deepcopy(base)
        for parameter in target.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        self.activation = activations.get(activation)
        self.target, self.lora = target.to(dtype).eval(), tiny.with_lora(base.to(dtype)).eval()

    def pass_through(self, model, ids, mask=None):
        """z, u and the product that the down projection is handed."""
        seen, handles = {}, []

        def first(ending):
            return next(m for n, m in model.named_modules() if n.endswith(ending))

        for ending in filter(None, (self.gate, self.up)):
            keep = lambda m, a, output, ending=ending: seen.__setitem__(ending, output)  # noqa: E731
            handles.append(first(ending).register_forward_hook(keep))
        handles.append(first(self.down).register_forward_pre_hook(lambda m, args: seen.__setitem__("product", args[0])))
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)
        for handle in handles:
            handle.remove()
        z, u = seen[self.gate], seen[self.up] if self.up else None
        if self.gate == "gate_up_proj":
            z, u = z.chunk(2, dim=-1)
        return z, u, seen["product"]

    def states(self, ids, mask=None):
        z_target, u_target, product = self.pass_through(self.target, ids, mask)
        z_lora, u_lora, lora_product = self.pass_through(self.lora, ids, mask)
        return States(z_target, u_target, z_lora, u_lora), product - lora_product


def terms(states, activation):
    one = torch.ones_like(states.z_lora)
    known = States(*(one if each is None else each for each in states))
    return equations.mismatch_decomposition(*known, phi=activation.phi, selection=activation.selection)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("make", [llama, phi3, t5])
def test_the_terms_sum_to_what_the_down_projection_sees(make, dtype, tolerance):
    pair = Pair(make, dtype)
    states, true = pair.states(tiny.tokens())
    assert true.abs().max() > 1e-3
    assert (terms(states, pair.activation).total - true).abs().max() < tolerance * max(1, true.abs().max())
    sums = MismatchSums(56, pair.activation)
    sums.add(states)
    assert sums.total.item() == pytest.approx(true.double().square().sum().item(), rel=10 * tolerance)
    assert sums.actual.item() == pytest.approx(true.double().norm(dim=-1).sum().item(), rel=10 * tolerance)
    # Energies and twice the cross terms make up the whole.
    assert sums.products.sum().item() == pytest.approx(sums.total.item(), rel=1e-12)


@pytest.mark.parametrize("make", [llama, phi3, t5])
def test_the_sums_are_those_of_the_equations(make):
    pair = Pair(make, torch.float64)
    states, _ = pair.states(tiny.tokens())
    sums = MismatchSums(56, pair.activation)
    sums.add(states)
    flat = [term.flatten() for term in terms(states, pair.activation)]
    by_hand = torch.tensor([[float(a @ b) for a in flat] for b in flat], dtype=torch.float64)
    torch.testing.assert_close(sums.products, by_hand, rtol=1e-12, atol=1e-15)
    assert sums.channel_energy.sum().item() == pytest.approx(by_hand[1, 1].item(), rel=1e-12)
    slope = pair.activation.derivative(states.z_lora).abs().flatten(0, 1)
    torch.testing.assert_close(sums.derivative, slope.sum(0), rtol=1e-12, atol=0)
    z = states.z_lora.detach().flatten(0, 1).requires_grad_()
    (change,) = torch.autograd.grad(pair.activation.selection(z).sum(), z) if make is not t5 else (torch.zeros_like(z),)
    deciding = (change * z).abs().detach() * (1 if states.u_lora is None else states.u_lora.abs().flatten(0, 1))
    torch.testing.assert_close(sums.selection, deciding.sum(0), rtol=1e-10, atol=1e-12)
    if states.u_lora is None:
        assert sums.products[2].abs().sum() == 0, "without a view there is no view mismatch"
        assert torch.equal(sums.utility, sums.derivative)
    else:
        weighed = (slope * states.u_lora.abs().flatten(0, 1)).sum(0)
        torch.testing.assert_close(sums.utility, weighed, rtol=1e-12, atol=0)
        assert (sums.products.diagonal() > 0).all()


def test_batches_and_padding_change_nothing():
    pair = Pair(llama, torch.float64)
    ids = tiny.tokens(6, 10)
    whole, in_parts = MismatchSums(56, pair.activation), MismatchSums(56, pair.activation)
    whole.add(pair.states(ids)[0])
    for start, size, padding in ((0, 1, 0), (1, 3, 5), (4, 2, 2)):
        rows = ids[start : start + size]
        padded = torch.cat([rows, torch.zeros(size, padding, dtype=rows.dtype)], dim=1)
        mask = torch.cat([torch.ones_like(rows), torch.zeros(size, padding, dtype=rows.dtype)], dim=1)
        states, _ = pair.states(padded, mask)
        # Whatever a pad token carries must not be counted, NaN included.
        poisoned = [torch.where(mask[..., None].bool(), each, float("nan")) for each in states]
        in_parts.add(States(*poisoned), mask)
    assert whole.tokens == in_parts.tokens == 60
    for name in ("products", "total", "actual", "bound", "channel_energy", "derivative", "utility", "selection"):
        torch.testing.assert_close(getattr(in_parts, name), getattr(whole, name), rtol=1e-6, atol=1e-12, msg=name)


def test_many_tokens_are_taken_in_slices():
    activation, width = activations.get("silu"), 8
    states = States(*(torch.randn(70_000, width, dtype=torch.float64) for _ in range(4)))
    sums = MismatchSums(width, activation)
    sums.add(states)
    energies = torch.stack([term.square().sum() for term in terms(states, activation)])
    assert sums.tokens == 70_000
    torch.testing.assert_close(sums.products.diagonal(), energies, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "relu2", "mish"])
def test_the_bound_is_never_below_the_actual(name):
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-4, 1.0, 30.0):
        for gated in (True, False):
            base = torch.randn(2, 1, 24, generator=generator, dtype=torch.float64) * 3
            moved = base + scale * torch.randn(2, 40, 24, generator=generator, dtype=torch.float64)
            base = base.expand_as(moved)
            u = (moved[1], base[1]) if gated else (None, None)
            for token in range(40):
                sums = MismatchSums(24, activations.get(name))
                of_token = [None if x is None else x[token] for x in (moved[0], u[0], base[0], u[1])]
                sums.add(States(*of_token))
                assert sums.actual <= sums.bound * (1 + 1e-12)


def test_a_batch_of_padding_alone_adds_nothing():
    sums = MismatchSums(8, activations.get("silu"))
    sums.add(States(*(torch.randn(2, 5, 8) for _ in range(4))), torch.zeros(2, 5))
    assert sums.tokens == sums.total == sums.bound == sums.products.abs().sum() == 0


def test_identical_models_do_not_differ():
    pair = Pair(llama, torch.float32)
    z, u, _ = pair.pass_through(pair.lora, tiny.tokens())
    sums = MismatchSums(56, pair.activation)
    sums.add(States(z, u, z.clone(), u.clone()))
    assert sums.products.abs().sum() == sums.total == sums.actual == sums.bound == sums.channel_energy.sum() == 0
    assert sums.tokens == 48
