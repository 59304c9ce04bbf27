"""LoRA on blocks: GraLoRA's function, LoRA's number of parameters, an ordinary adapter."""

from __future__ import annotations

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from installed import GRALORA
from methods.small import llama, tokens

import nalora
from nalora import methods
from nalora.methods.block_lora import block_masks
from nalora.methods.lora import lora_layers
from nalora.methods.method import Adapter, Start

RANK, ALPHA = 4, 8
# Without key and value projections, whose 8 outputs are fewer than the rank of four blocks.
ADAPTER = Adapter(rank=RANK, alpha=ALPHA, target_modules=["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])


def block_lora(blocks: int, **settings):
    return methods.get("block-lora")(blocks=blocks, **settings)


def prepared(blocks: int, seed: int = 0):
    return block_lora(blocks).prepare(llama(), ADAPTER, Start(seed=seed))


def randomise(model, blocks):
    """Put values into B, which starts at zero, inside its blocks."""
    generator = torch.Generator().manual_seed(7)
    for _, layer in lora_layers(model):
        _, writes = block_masks(layer.in_features, layer.out_features, RANK, blocks)
        B = layer.lora_B["default"].weight
        B.data.copy_(torch.randn(B.shape, generator=generator) * writes)


def gralora_of(model, blocks):
    """PEFT's GraLoRA with the same numbers."""
    method = methods.get("peft/gralora")(gralora_k=blocks)
    twin = method.prepare(llama(), ADAPTER, Start())
    sources = dict(lora_layers(model))
    share = RANK // blocks
    for name, layer in twin.named_modules():
        if not hasattr(layer, "gralora_A") or name not in sources:
            continue
        A, B = sources[name].lora_A["default"].weight, sources[name].lora_B["default"].weight
        width, height = layer.in_features // blocks, layer.out_features // blocks
        for j in range(blocks):  # input block
            layer.gralora_A["default"].data[j] = A[j * RANK : (j + 1) * RANK, j * width : (j + 1) * width].T
            for i in range(blocks):  # output block
                columns = B[i * height : (i + 1) * height, j * RANK + i * share : j * RANK + (i + 1) * share]
                layer.gralora_B["default"].data[i, j * share : (j + 1) * share] = columns.T
    return twin


@GRALORA
@pytest.mark.parametrize("blocks", [2, 4])
def test_it_computes_what_gralora_computes(blocks):
    model = prepared(blocks)
    randomise(model, blocks)
    twin = gralora_of(model, blocks)
    batch = tokens()
    loss, other = (each(input_ids=batch, labels=batch).loss for each in (model, twin))
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    loss.backward()
    other.backward()
    mine = torch.stack([p.grad.norm() for n, p in model.named_parameters() if "lora_" in n]).norm()
    theirs = torch.stack([p.grad.norm() for n, p in twin.named_parameters() if "gralora_" in n]).norm()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_it_trains_as_many_numbers_as_lora_and_what_it_reports_is_what_moves(blocks):
    method, model = block_lora(blocks), prepared(blocks)
    plain = methods.get("lora")().prepare(llama(), ADAPTER, Start())
    lora = methods.get("lora")().trainable_parameters(plain)
    assert method.trainable_parameters(model) == lora
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    randomise(model, blocks)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        model(input_ids=tokens(seed=step), labels=tokens(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = sum(int((p.detach() != before[n]).sum()) for n, p in model.named_parameters() if n in before)
    assert moved == lora


def test_the_update_has_more_rank_than_loras_by_the_number_of_blocks():
    model = prepared(2)
    randomise(model, 2)
    ranks = [int(torch.linalg.matrix_rank(layer.get_delta_weight("default"))) for _, layer in lora_layers(model)]
    assert max(ranks) == 2 * RANK


def test_one_block_is_lora_apart_from_its_draw():
    (_, layer), *_ = lora_layers(prepared(1))
    assert layer.r["default"] == RANK
    assert layer.scaling["default"] == ALPHA / RANK
    bound = layer.in_features**-0.5
    assert 0.9 * bound < layer.lora_A["default"].weight.abs().max() <= bound


@given(blocks=st.sampled_from([1, 2, 3, 4]), share=st.integers(1, 3), width=st.integers(1, 4), height=st.integers(1, 4))
def test_every_pair_of_blocks_gets_the_same_share_of_the_rank(blocks, share, width, height):
    reads, writes = block_masks(blocks * width, blocks * height, blocks * share, blocks)
    # Of each weight's entry: by how many components it can be reached.
    assert torch.equal(writes.int() @ reads.int(), torch.full((blocks * height, blocks * width), share))


def test_stock_peft_loads_what_it_saves(tmp_path):
    model = prepared(2)
    randomise(model, 2)
    block_lora(2).save(model, tmp_path)
    again = peft.PeftModel.from_pretrained(llama(), str(tmp_path))
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize(
    ("settings", "adapter", "words"),
    [
        ({"blocks": 3}, Adapter(rank=4), "rank 4"),
        ({"blocks": 5}, Adapter(rank=5), "a layer of 16 × 16"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(settings, adapter, words):
    with pytest.raises(nalora.NALoRAError, match=words):
        methods.get("block-lora")(**settings).prepare(llama(), adapter, Start())


def test_where_no_layer_can_be_cut_another_method_is_advised():
    """Three blocks divide the 24 channels of the FFN and not the 16 of the model: no layer is left to adapt."""
    with pytest.raises(nalora.NALoRAError, match="use another method"):
        block_lora(3).prepare(llama(), Adapter(rank=3, target_modules=["gate_proj", "down_proj"]), Start())


def test_no_block_is_refused():
    with pytest.raises(nalora.NALoRAError, match="blocks: found 0"):
        block_lora(0)
