"""Two models over batches: the same sums however tokens are batched, padded or placed, for every kind of FFN."""

from __future__ import annotations

import copy

import peft
import pytest
import tiny
import torch
import transformers

from nalora.diagnostics.dynamics import compare
from nalora.diagnostics.sites import find_sites
from nalora.distributed.wrappers import base_of

LENGTHS = (9, 4, 7, 1, 12, 5)


def changed(model, by=0.3):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in other.named_parameters():
        if "lora_B" in name:
            parameter.data += by * torch.randn(parameter.shape, generator=generator).to(parameter)
    return other


def rows():
    return [tiny.tokens(1, length, seed=length)[0] for length in LENGTHS]


def padded(sequences, side="right", extra=0):
    longest = max(map(len, sequences)) + extra
    ids, mask = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(2))
    for i, each in enumerate(sequences):
        place = slice(0, len(each)) if side == "right" else slice(longest - len(each), longest)
        ids[i, place], mask[i, place] = each, 1
    return {"input_ids": ids, "attention_mask": mask}


def measured(pair, batches):
    sites = find_sites(pair[0])
    found = compare(*pair, batches, sites, distributions=(0, 1), histograms=(1,))
    means = [found.movements[i].means() for i in range(len(sites))]
    return means, [found.distributions[1][i] for i in range(len(sites))], [found.movements[i].tokens for i in range(2)]


BATCHINGS = {
    "one by one": lambda each: [padded([row]) for row in each],
    "all at once": lambda each: [padded(each)],
    "in threes, with more pads": lambda each: [padded(each[:3], extra=5), padded(each[3:], extra=1)],
}


@pytest.mark.parametrize("how", BATCHINGS)
def test_sums_do_not_depend_on_batches_and_padding(how):
    first = tiny.llama(torch.float64)
    pair = (first, changed(first))
    reference, standing, tokens = measured(pair, BATCHINGS["one by one"](rows()))
    assert tokens == [sum(LENGTHS)] * 2
    means, again, counted = measured(pair, BATCHINGS[how](rows()))
    assert counted == tokens
    for one, other in zip(means, reference, strict=True):
        assert one == pytest.approx(other, rel=1e-10)
        assert one["flip"] > 0
    for one, other in zip(again, standing, strict=True):
        assert torch.equal(one.sums["regimes"], other.sums["regimes"])
        assert torch.equal(one.sums["histogram"], other.sums["histogram"])


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertModel(config)


def gemma():
    config = transformers.GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    return transformers.GemmaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "layer", "activation"),
    [(gpt2, "mlp.c_fc", "gelu_tanh"), (bert, "intermediate.dense", "gelu"), (gemma, "mlp.gate_proj", "gelu_tanh")],
)
def test_gelu_models_by_the_definitions(make, layer, activation):
    torch.manual_seed(0)
    base = make().double()
    # Gates spread over the regimes.
    for name, module in base.named_modules():
        if name.endswith(layer):
            module.weight.data *= 40
    model = tiny.with_lora(base, fan_in_fan_out=make is gpt2, lora_b=0.05).double()
    other = changed(model)
    batch = padded(rows())
    seen = []
    for each in (model, other):
        outputs = []
        hooks = [
            module.register_forward_hook(lambda m, a, out, kept=outputs: kept.append(out))
            for name, module in base_of(each).named_modules()
            if name.endswith(layer)
        ]
        with torch.no_grad():
            each.eval()(**batch)
        for hook in hooks:
            hook.remove()
        seen.append([out[batch["attention_mask"].bool()] for out in outputs])
    sites = find_sites(model)
    assert [site.activation.name for site in sites] == [activation] * 2
    found = compare(model, other, [batch], sites)
    for index, site in enumerate(sites):
        z, after = seen[0][index], seen[1][index]
        lower, upper = site.thresholds
        r, s = ((v > upper).int() - (v < lower).int() for v in (z, after))
        means = found.movements[index].means()
        act = site.activation
        assert means["D_sel"] == pytest.approx(float((act.selection(after) - act.selection(z)).abs().mean()))
        assert means["kappa_drift"] == pytest.approx(float((act.kappa(after) - act.kappa(z)).abs().mean()))
        assert means["flip"] == pytest.approx(float((r != s).double().mean()))
        assert means["flip"] > 0


def test_an_adapter_against_the_base_it_is_on():
    model = tiny.llama(torch.float32)
    off = copy.deepcopy(model)
    off.base_model.disable_adapter_layers()
    plain = tiny.llama(torch.float32).unload()
    assert not isinstance(plain, peft.PeftModel)
    sites = find_sites(plain)
    one = compare(off, model, [padded(rows())], sites).movements[1].means()
    other = compare(plain, model, [padded(rows())], sites).movements[1].means()
    assert one == pytest.approx(other, rel=1e-6)
    assert one["D_sel"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_finds_the_same():
    first = tiny.llama(torch.float64)
    pair = (first, changed(first))
    batches = [padded(rows())]
    here, standing, _ = measured(pair, batches)
    on_gpu = first.to("cuda")
    there, again, _ = measured((on_gpu, changed(on_gpu)), batches)
    for one, other in zip(here, there, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for one, other in zip(standing, again, strict=True):
        assert torch.equal(one.sums["histogram"], other.sums["histogram"].cpu())
