"""Mean gradients of full weights: autograd's, however rows are split, taken in groups, kept by content.

The ranks are processes of their own that run this file as a script.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from gradient_models import (
    PREFIX,
    autograd_gradients,
    batches_of,
    collated,
    in_4_bits,
    keep_all,
    layers_of,
    llama,
    rows,
    start_on,
    wrapped,
)
from ranks import results_of_two
from torch import nn

import nalora
from nalora.distributed import processes
from nalora.methods import gradients
from nalora.methods.gradients import grouped, reduce_mean_gradients
from nalora.methods.method import Start

GIB = 2**30


def collect(model, start, batches=3, reduce=keep_all, key=(), memory=4.0):
    found = reduce_mean_gradients(model, start, batches, reduce, dict(key), memory)
    return {name: parts["gradient"] for name, parts in found.items()}


def passes(model):
    """Grows by one with each forward pass of the model."""
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


def agree(one, other, rtol=1e-5):
    # transformers takes norms and the loss in float32 even of a float64 model, so nothing agrees to more than 1e-7.
    assert one.keys() == other.keys()
    for name in one:
        distance = (one[name].double() - other[name].double()).norm() / other[name].double().norm()
        assert distance < rtol, (name, distance)


# -- what they are


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_they_are_autograds_over_all_tokens(dtype, rtol):
    data = rows()
    exact = llama()
    exact.load_state_dict({k: v.to(dtype).to(torch.float64) for k, v in exact.state_dict().items()})
    expected = autograd_gradients(exact.double(), data)
    found = collect(wrapped(llama(dtype=dtype)), start_on(data))
    assert all(g.dtype == (dtype if dtype == torch.float64 else torch.float32) for g in found.values())
    agree(found, expected, rtol)


@pytest.mark.parametrize(("size", "pad"), [(1, 0), (2, 3), (6, 0), (12, 1)])
def test_splitting_and_padding_change_nothing(size, pad):
    data = rows()
    expected = collect(wrapped(llama(dtype=torch.float64)), start_on(data))
    start = start_on(data, size, pad)
    agree(collect(wrapped(llama(dtype=torch.float64)), start, len(data) // size), expected, 1e-6)


def test_adapters_and_dropout_do_not_act():
    data = rows()
    expected = autograd_gradients(llama(dtype=torch.float64), data)
    model = wrapped(llama(dtype=torch.float64, dropout=0.4), lora_dropout=0.5, init_lora_weights=False).train()
    agree(collect(model, start_on(data)), expected, 1e-6)


def test_an_encoder_decoders_labels_are_not_shifted():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_ff=24, d_kv=4, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    asked = torch.randint(1, 40, (4, 7))
    labels = torch.randint(1, 40, (4, 6))
    # Three rows have five targets more than the fourth: a mean over batches would be another one.
    labels[3, 1:] = -100
    model(input_ids=asked, labels=labels).loss.backward()
    expected = {
        PREFIX + name: module.weight.grad.clone()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    start = Start(batches=lambda n: [{"input_ids": asked[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2)])
    agree(collect(wrapped(model), start, 2), expected, 1e-6)


class Pictures(nn.Module):
    """One label a row, as image classifiers have, and a layer whose weight lies the other way around."""

    def __init__(self):
        super().__init__()
        self.first, self.last = transformers.pytorch_utils.Conv1D(6, 5), nn.Linear(6, 3)

    def forward(self, pixel_values, labels=None):
        logits = self.last(torch.tanh(self.first(pixel_values)))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return transformers.modeling_outputs.ImageClassifierOutput(loss=loss, logits=logits)


def test_image_classifiers_have_one_label_a_row():
    torch.manual_seed(0)
    model, pixels, labels = Pictures().double(), torch.randn(7, 5).double(), torch.randint(0, 3, (7,))
    model(pixels, labels).loss.backward()
    expected = {PREFIX + "first": model.first.weight.grad.T.clone(), PREFIX + "last": model.last.weight.grad.clone()}
    split = [{"pixel_values": pixels[:5], "labels": labels[:5]}, {"pixel_values": pixels[5:], "labels": labels[5:]}]
    model = wrapped(model, ["first", "last"], r=2, fan_in_fan_out=True)
    agree(collect(model, Start(batches=lambda n: split), 2), expected, 1e-6)


def test_a_layer_used_twice_has_the_sum_of_both():
    class Twice(Pictures):
        def forward(self, pixel_values, labels=None):
            inner = torch.tanh(self.same(torch.tanh(self.same(pixel_values))))
            loss = nn.functional.cross_entropy(self.last(inner), labels)
            return transformers.modeling_outputs.ImageClassifierOutput(loss=loss)

        def __init__(self):
            super().__init__()
            self.same, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    torch.manual_seed(0)
    model, pixels, labels = Twice().double(), torch.randn(7, 5).double(), torch.randint(0, 3, (7,))
    model(pixels, labels).loss.backward()
    expected = {PREFIX + name: getattr(model, name).weight.grad.clone() for name in ("same", "last")}
    start = Start(batches=lambda n: [{"pixel_values": pixels, "labels": labels}])
    agree(collect(wrapped(model, ["same", "last"], r=2), start, 1), expected, 1e-6)


def test_of_a_base_in_4_bits(tmp_path):
    data = rows()
    model, dense = in_4_bits(llama(hidden=32), tmp_path)
    model = wrapped(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    agree(collect(model, start_on(data)), autograd_gradients(dense, data), 1e-4)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- how they are taken


def test_accumulators_of_one_group_at_a_time_are_alive():
    model = wrapped(llama(6))
    shapes = {(each.out_features, each.in_features) for each in layers_of(model).values()}
    own = {id(each) for each in model.parameters()}
    sizes = {name: 4 * each.out_features * each.in_features for name, each in layers_of(model).items()}
    limit = sum(sizes.values()) // 5
    alive = []

    def look(*_):
        found = [
            each for each in gc.get_objects()
            if isinstance(each, torch.Tensor) and tuple(each.shape) in shapes and id(each) not in own
        ]  # fmt: skip
        alive.append(sum(4 * each.numel() for each in found))

    def reduce(name, layer, gradient):
        look()
        return {"norm": gradient.norm()}

    model.register_forward_pre_hook(look)
    gc.freeze()  # what was there before need not be looked through, sixty times
    reduce_mean_gradients(model, start_on(rows()), 3, reduce, {}, limit / GIB)
    gc.unfreeze()
    groups = grouped(sizes, limit)
    assert len(groups) > 4
    assert len(alive) == 3 * len(groups) + len(sizes)
    assert 0 < max(alive) <= max(sum(sizes[name] for name in group) for group in groups) <= limit


@pytest.mark.parametrize(
    ("layers", "limit", "groups"), [(210, 4 * GIB, 2), (210, 1, 8), (2, 1, 2), (1, 1, 1), (3, 1, 3)]
)
def test_groups_are_at_least_two_and_at_most_eight(layers, limit, groups):
    made = grouped({f"{i}": 100 + i % 3 for i in range(layers)}, limit)
    assert [name for group in made for name in group] == [f"{i}" for i in range(layers)]
    assert len(made) == pytest.approx(groups, abs=1 if layers > 3 else 0)
    assert len(made) <= gradients.MOST_GROUPS
    assert layers == 1 or len(made) >= 2


def test_groups_of_a_7b_model_fit_in_4_gib():
    # Llama-2-7B: q, k, v, o of 4096² and three of 4096 × 11008, 32 times.
    sizes = {f"{i}.{j}": 4 * 4096 * (4096 if j < 4 else 11008) for i in range(32) for j in range(7)}
    made = grouped(sizes, 4 * GIB)
    assert max(sum(sizes[name] for name in group) for group in made) <= 4 * GIB
    assert len(made) * 8 <= 64


def test_a_model_of_30_layers_takes_at_most_64_passes_and_reports_how_far_it_is():
    model = wrapped(llama(30, hidden=8), r=2)
    seen, heard = passes(model), []
    start = start_on(rows(8), 1, report=lambda *said: heard.append(said))
    collect(model, start, 8, memory=1e-7)
    assert len(seen) == heard[-1][2] <= 64
    assert heard == [("gradients", done, len(seen)) for done in range(1, len(seen) + 1)]


def test_nothing_below_the_lowest_layer_of_a_group_is_gone_back_through():
    model = wrapped(llama(4), ["down_proj"])
    backward = []
    for index, layer in enumerate(model.base_model.model.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=index: (out.requires_grad and backward.append(i)) or None)
    reduce_mean_gradients(model, start_on(rows()), 1, keep_all, {})
    # Layers 0 and 1 are one group, 2 and 3 the other: in its pass the graph starts at 2.
    assert backward == [0, 1, 2, 3, 2, 3]


def test_the_model_is_left_as_it_was():
    model = wrapped(llama(dropout=0.1), lora_dropout=0.1).train()
    layers = layers_of(model)
    next(iter(layers.values())).lora_A["default"].weight.requires_grad_(False)
    model.base_model.model.lm_head.eval()
    model.config.use_cache = True
    torch.manual_seed(11)

    def state():
        return (
            {name: (p.requires_grad, p.grad, id(p)) for name, p in model.named_parameters()},
            [(module.training, len(module._forward_hooks), len(module._backward_hooks)) for module in model.modules()],
            [layer.disable_adapters for layer in layers.values()],
            model.config.use_cache,
            torch.get_rng_state().tolist(),
        )

    before, weights = state(), {name: each.clone() for name, each in model.state_dict().items()}
    collect(model, start_on(rows()))
    assert state() == before

    def fails(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, start_on(rows()), reduce=fails)
    assert state() == before
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())


# -- what is kept


def test_a_second_call_runs_no_pass(tmp_path):
    model = wrapped()
    seen, heard = passes(model), []
    start = start_on(rows(), cache=tmp_path / "new", report=lambda *said: heard.append(said))
    first = collect(model, start)
    count = len(seen)
    second = collect(model, start)
    assert len(seen) == count > 0
    assert heard[-1] == ("cached gradients", 1, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(list((tmp_path / "new").iterdir())) == 1
    # Adapters do not act, so another draw of them finds the same.
    other = wrapped(init_lora_weights=False)
    seen = passes(other)
    collect(other, start)
    assert not seen


def _weights(model, start):
    model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.data[0, 0] += 1e-3


def _head(model, start):
    model.base_model.model.lm_head.weight.data[0, 0] += 1e-3


def _config(model, start):
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize("change", [_weights, _head, _config])
def test_another_model_misses(tmp_path, change):
    model = wrapped()
    seen = passes(model)
    start = start_on(rows(), cache=tmp_path)
    collect(model, start)
    count = len(seen)
    change(model, start)
    collect(model, start)
    assert len(seen) == 2 * count
    assert len(list(tmp_path.iterdir())) == 2


def test_other_batches_settings_or_layers_miss(tmp_path):
    model = wrapped()
    seen = passes(model)
    calls = [
        (start_on(rows(), cache=tmp_path), 3, {"rank": 4}),
        (start_on(rows(seed=1), cache=tmp_path), 3, {"rank": 4}),
        (start_on(rows(), cache=tmp_path), 2, {"rank": 4}),
        (start_on(rows(), cache=tmp_path), 3, {"rank": 5}),
    ]
    for number, (start, batches, key) in enumerate(calls, 1):
        count = len(seen)
        collect(model, start, batches, key=key)
        assert len(seen) > count
        assert len(list(tmp_path.iterdir())) == number
    other = wrapped(target_modules=["q_proj"])
    seen = passes(other)
    collect(other, calls[0][0], 3, key={"rank": 4})
    assert seen


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    model = wrapped()
    seen = passes(model)
    start = start_on(rows(), cache=tmp_path)
    first = collect(model, start)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "emptied":
        content = bytearray()
    else:
        content[-5] ^= 64
    file.write_bytes(content)
    count = len(seen)
    second = collect(model, start)
    assert len(seen) == 2 * count
    assert all(torch.equal(first[name], second[name]) for name in first)
    collect(model, start)
    assert len(seen) == 2 * count


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert collect(wrapped(), start_on(rows(), cache=tmp_path / "file"))


# -- what is refused


def test_a_layer_that_gets_no_gradient_is_named():
    class Unused(Pictures):
        def forward(self, pixel_values, labels=None):
            self.first(pixel_values)
            logits = self.last(torch.tanh(pixel_values[:, :1].expand(-1, 6)))
            loss = nn.functional.cross_entropy(logits, labels)
            return transformers.modeling_outputs.ImageClassifierOutput(loss=loss)

    model = wrapped(Unused(), ["first", "last"], r=2, fan_in_fan_out=True)
    batch = {"pixel_values": torch.randn(4, 5), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(nalora.NALoRAError, match=r"model\.first: found no gradient: it is zero everywhere"):
        collect(model, Start(batches=lambda n: [batch]), 1)


def test_a_gradient_that_is_not_finite_is_named():
    model = wrapped()
    model.base_model.model.model.layers[1].mlp.down_proj.base_layer.weight.data[0, 0] = float("nan")
    with pytest.raises(nalora.NALoRAError, match="a gradient that is not finite"):
        collect(model, start_on(rows()))


def test_batches_without_labels_or_tokens():
    unlabelled = {name: each for name, each in collated(rows(4)).items() if name != "labels"}
    with pytest.raises(nalora.NALoRAError, match="a batch of input_ids, attention_mask"):
        collect(wrapped(), Start(batches=lambda n: [unlabelled]), 1)
    with pytest.raises(nalora.NALoRAError, match="without any label token"):
        collect(wrapped(), Start(), 1)
    # The first label of a decoder's row is predicted by nothing: a batch of nothing else has no loss, not a NaN.
    bare = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([[5, -100, -100]] * 2)}
    data = rows()
    good = batches_of(data, 4)
    agree(
        collect(wrapped(), Start(batches=lambda n: [bare, *good(n - 1)]), 4), collect(wrapped(), start_on(data)), 1e-6
    )


def test_an_embedding_is_refused():
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]))
    with pytest.raises(nalora.NALoRAError, match="embed_tokens: found an adapter on Embedding"):
        collect(model, start_on(rows()))


# -- several processes


def test_two_processes_are_one(tmp_path):
    first, second = results_of_two(__file__, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    agree(first, collect(wrapped(llama(dtype=torch.float64)), start_on(rows(12), 4)), 1e-6)
    assert len(list((tmp_path / "cache").iterdir())) == 1


if __name__ == "__main__":
    processes.init_process_group("cpu")
    folder, rank = Path(sys.argv[1]), processes.rank()
    model = wrapped(llama(dtype=torch.float64))
    seen = passes(model)
    # Of each batch of four rows every other one; the processes' batches differ in tokens.
    share = [row for start in range(0, 12, 4) for row in rows(12)[start + rank : start + 4 : 2]]
    start = start_on(share, 2, cache=folder / "cache")
    found = collect(model, start)
    count = len(seen)
    again = collect(model, start)
    assert len(seen) == count
    assert all(torch.equal(found[name], again[name]) for name in found)
    torch.save(found, folder / f"rank-{rank}.pt")
