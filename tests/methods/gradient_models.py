"""A small Llama, batches for it, and what autograd says of its weights."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from torch import nn

from nalora.methods.lora import lora_layers
from nalora.methods.method import Start

VOCABULARY = 48
PREFIX = "base_model.model."


def llama(layers: int = 2, dtype: torch.dtype = torch.float32, hidden: int = 24, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden + 16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15, attention_dropout=dropout,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def in_4_bits(model: nn.Module, folder) -> tuple[nn.Module, nn.Module]:
    """The model quantised, and with the numbers that this leaves it with; the test is skipped without bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    from peft.utils.integrations import dequantize_module_weight

    model.save_pretrained(folder)
    quantise = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantise, device_map={"": "cpu"}, dtype=torch.float32
    )
    for name, module in quantised.named_modules():
        if type(module).__name__ == "Linear4bit":
            model.get_submodule(name).weight.data = dequantize_module_weight(module).data
    return quantised, model


def wrapped(model: nn.Module | None = None, target_modules="all-linear", **lora) -> nn.Module:
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": target_modules} | lora)
    return peft.get_peft_model(llama() if model is None else model, config)


def rows(count: int = 12, seed: int = 0) -> list[list[int]]:
    """Of different lengths; the first three tokens of each are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 14, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def collated(some: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Padded to the longest, and by `pad` more."""
    longest = max(map(len, some)) + pad
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in some])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in some])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches_of(data: list[list[int]], size: int, pad: int = 0):
    def batches(n: int):
        yield from [collated(data[i * size : (i + 1) * size], pad) for i in range(n)]

    return batches


def start_on(data: list[list[int]], size: int = 4, pad: int = 0, **start) -> Start:
    return Start(batches=batches_of(data, size, pad), **start)


def autograd_gradients(model: nn.Module, data: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of the mean loss over all target tokens, one row after the other, by the names of a wrapped model's layers."""
    model.requires_grad_(True)
    model.zero_grad()
    losses = []
    for row in data:
        logits = model(torch.tensor([row])).logits[0]
        losses.append(
            nn.functional.cross_entropy(logits[2:-1].to(logits.dtype), torch.tensor(row[3:]), reduction="none")
        )
    torch.cat(losses).mean().backward()
    return {
        PREFIX + name: module.weight.grad.clone()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def keep_all(name, layer, gradient):
    """Of a gradient, everything."""
    return {"gradient": gradient.clone()}


def loss_of(model: nn.Module, data: list[list[int]]) -> torch.Tensor:
    return model(**collated(data)).loss


def train_on(model: nn.Module, data: list[list[int]], steps: int) -> None:
    """A few steps of AdamW on all rows at once."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()


def product(layer) -> torch.Tensor:
    """s·B·A."""
    return layer.scaling["default"] * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()


def layers_of(model: nn.Module) -> dict:
    return dict(lora_layers(model))
