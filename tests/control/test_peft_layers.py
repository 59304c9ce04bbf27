"""GraLoRA under NA-LoRA: the gate's channels in its stacked blocks, exact against the straight-line reference."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import straight_line
import tiny
import torch
import transformers
from control.test_controller import BATCHES, train_plain, train_with_nalora
from installed import GRALORA
from torch.optim import AdamW

import nalora
from nalora import NALoRAConfig
from nalora.control.blocks import find_blocks
from nalora.control.peft_layers import active_adapters, all_adapters
from nalora.control.plan import make_plan
from nalora.control.window import StepWindow

pytestmark = GRALORA


def gralora(blocks=2, hybrid=0, **settings):
    return peft.GraloraConfig(
        r=4, alpha=8, gralora_k=blocks, hybrid_r=hybrid, target_modules="all-linear", **settings
    )  # fmt: skip


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
@pytest.mark.parametrize(
    ("blocks", "hybrid", "switch"), [(2, 0, {}), (4, 0, {}), (2, 2, {}), (2, 0, {"scaling": False}), (1, 0, {})]
)
def test_agrees_with_the_paper_for_20_steps_of_adamw_with_clipping(apply_to, blocks, hybrid, switch):
    config = NALoRAConfig(apply_to=apply_to, **switch)
    ours, reference, plain = (tiny.llama(config=gralora(blocks, hybrid)) for _ in range(3))
    settings = dict(lr=3e-3, weight_decay=0.1)
    losses = train_with_nalora(ours, AdamW(tiny.trainable(ours), **settings), BATCHES, config)
    expected = straight_line.train(
        reference, AdamW(tiny.trainable(reference), **settings), BATCHES, dataclasses.asdict(config)
    )
    assert losses == pytest.approx(expected, rel=1e-9)
    assert tiny.largest_difference(tiny.adapter_state(reference), tiny.adapter_state(ours)) < 1e-9
    train_plain(plain, AdamW(tiny.trainable(plain), **settings), BATCHES)
    assert tiny.largest_difference(tiny.adapter_state(plain), tiny.adapter_state(ours)) > 1e-7


def test_one_block_is_lora():
    """GraLoRA of one block has LoRA's factors, transposed: the same control gives the same adapter."""
    one, lora = tiny.llama(config=gralora(1)), tiny.llama()
    for block, plain in zip(layers(one), layers(lora), strict=True):
        (stacked,), (matrices,) = all_adapters(block), all_adapters(plain)
        stacked.a.data[0], stacked.b.data[0] = matrices.a.data.T, matrices.b.data.T
    for model in (one, lora):
        optimizer = AdamW(tiny.trainable(model), lr=3e-3)
        train_with_nalora(model, optimizer, BATCHES[:6], NALoRAConfig(apply_to="update"))
    for block, plain in zip(layers(one), layers(lora), strict=True):
        (stacked,), (matrices,) = active_adapters(block), active_adapters(plain)
        torch.testing.assert_close(stacked.a[0].T, matrices.a)
        torch.testing.assert_close(stacked.b[0].T, matrices.b)


def layers(model):
    return [module for module in model.modules() if next(all_adapters(module), None)]


def test_a_stopped_loop_continues_to_the_same_bits_and_peft_loads_the_adapter(tmp_path):
    def start():
        model = tiny.llama(torch.float32, config=gralora())
        optimizer = AdamW(tiny.trainable(model), lr=3e-3)
        return model, optimizer, nalora.attach(model, optimizer, NALoRAConfig(apply_to="update"))

    def train(model, optimizer, controller, steps):
        for step in steps:
            tiny.sum_loss(model, tiny.tokens(seed=step)).backward()
            controller.clip_grad_norm_(0.3)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, controller = start()
    train(model, optimizer, controller, range(2))
    controller.save(tmp_path)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "training.pt")
    train(model, optimizer, controller, range(2, 4))

    again, optimizer, controller = start()
    saved = torch.load(tmp_path / "training.pt")
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    controller.load(tmp_path)
    train(again, optimizer, controller, range(2, 4))
    assert tiny.largest_difference(tiny.adapter_state(model), tiny.adapter_state(again)) == 0

    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.llama(torch.float32).unload(), str(tmp_path))
    ids = tiny.tokens()
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_the_plan_has_the_blocks_of_lora():
    plans = [str(nalora.control.plan.make_plan(find_blocks(model), NALoRAConfig())) for model in models_of_both()]
    assert plans[0] == plans[1]


def models_of_both():
    return tiny.llama(), tiny.llama(config=gralora())


@pytest.mark.parametrize(("blocks", "read"), [(2, "gu"), (4, "ggguuu"), (3, "gsu"), (1, "s")])
def test_a_layer_with_gate_and_up_scales_the_columns_of_a_by_the_channels_they_reach(blocks, read):
    """g: these columns reach the gate alone, u: the up projection alone, s: both."""
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=12, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    lora = peft.GraloraConfig(r=12, gralora_k=blocks, target_modules=["gate_up_proj", "down_proj"])
    model = tiny.with_lora(transformers.Phi3ForCausalLM(config), config=lora)
    plan = make_plan(find_blocks(model), NALoRAConfig())
    window = StepWindow(plan.blocks)
    window.parameters.refresh()
    (group,) = window.groups
    decision = group.decide(NALoRAConfig())
    decision = decision._replace(mask=torch.rand(1, 24), scales=torch.tensor([[0.5, 1.0, 2.0]]))
    factors = {
        id(parameter): factor
        for control in window.parameters.controls([decision], preserve_mean=False)
        for parameter, factor in zip(control.parameters, control.expanded(control.parameters), strict=True)
    }
    (adapter,) = active_adapters(plan.blocks[0].block.gate.module)
    columns = torch.tensor([{"g": 0.5, "u": 1.0, "s": 0.75}[one] for one in read]).repeat_interleave(12 // len(read))
    torch.testing.assert_close(factors[id(adapter.a)], columns.expand(adapter.a.shape))
    rows = torch.cat([0.5 * decision.mask[0], torch.ones(24)]).view(blocks, 1, -1)
    torch.testing.assert_close(factors[id(adapter.b)], rows.expand(adapter.b.shape))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (peft.LoHaConfig(r=4, target_modules=["gate_proj"]), "loha"),
        (peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]), "ia3"),
        (peft.VeraConfig(r=4, target_modules=["gate_proj"]), "vera"),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "prompt_tuning"),
        (peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["gate_proj"]), "adalora"),
    ],
)
def test_other_tuners_are_refused_by_name(config, name):
    model = tiny.with_lora(tiny.llama().unload(), config=config)
    with pytest.raises(nalora.NALoRAError, match=rf"PEFT's '?{name}.*LoRA, rsLoRA, DoRA, PiSSA or GraLoRA"):
        nalora.attach(model, AdamW(tiny.trainable(model)))
