"""NA-LoRA written straight from the paper: a plain loop over a Llama's layers, no hooks, nothing of nalora."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TAU = 1.2784645427610738


def forward(model, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, and z and u of every layer, by calling the layers' parts one after the other."""
    llama = model.base_model.model.model
    hidden = llama.embed_tokens(ids)
    positions = llama.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
    zs, us = [], []
    for layer in llama.layers:
        attended, _ = layer.self_attn(
            layer.input_layernorm(hidden), position_embeddings=positions, attention_mask=causal
        )
        hidden = hidden + attended
        x = layer.post_attention_layernorm(hidden)
        z, u = layer.mlp.gate_proj(x), layer.mlp.up_proj(x)
        zs.append(z.detach())
        us.append(u.detach())
        hidden = hidden + layer.mlp.down_proj(z * torch.sigmoid(z) * u)
    return model.base_model.model.lm_head(llama.norm(hidden)), zs, us


def factors_of(linear, scale: float, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parameters of an adapter and the factors of their entries: the step scale, and for B also the channels' mask.

    GraLoRA's B is a list of blocks, each with the columns of its own channels; its hybrid part is a LoRA.
    """
    whole = torch.tensor(scale, dtype=torch.float64)
    if hasattr(linear, "lora_A"):
        return [(linear.lora_A["default"].weight, whole), (linear.lora_B["default"].weight, scale * mask[:, None])]
    stacked = linear.gralora_B["default"]
    factors = torch.empty(stacked.shape, dtype=torch.float64)
    channel = 0
    for block in range(stacked.shape[0]):
        for column in range(stacked.shape[2]):
            factors[block, :, column] = scale * mask[channel]
            channel += 1
    result = [(linear.gralora_A["default"], whole), (stacked, factors)]
    if linear.hybrid_r["default"]:
        result.append((linear.gralora_A_general["default"].weight, whole))
        result.append((linear.gralora_B_general["default"].weight, scale * mask[:, None]))
    return result


def train(model, optimizer, batches: list[Tensor], config, max_norm: float | None = 1.0) -> list[float]:
    """Train as the paper's algorithm says; `config` is read like a dictionary of its hyperparameters."""
    layers = model.base_model.model.model.layers
    masks = [torch.ones(layer.mlp.gate_proj.out_features, dtype=torch.float64) for layer in layers]
    scales = [dict.fromkeys(("gate", "up", "down"), 1.0) for _ in layers]
    losses = []
    for step, ids in enumerate(batches):
        logits, zs, us = forward(model, ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        todo = []
        for i, layer in enumerate(layers):
            z, u = zs[i].double(), us[i].double()
            sigma = torch.sigmoid(z)
            k = (sigma + z * sigma * (1 - sigma)).abs()
            if config["importance"] == "utility":
                k = k * u.abs()
            k = k.mean(dim=(0, 1))
            new = torch.sigmoid(config["sharpness"] * (k - torch.quantile(k, 1 - config["keep_ratio"])))
            if config["keep_ratio"] == 1:
                new = torch.ones_like(k)
            keep = 0.0 if config["start"] == "first" and step == 0 else config["mask_ema"]
            masks[i] = keep * masks[i] + (1 - keep) * new
            low, high = config["thresholds"] or (-TAU, TAU)
            p_pos = (z > high).double().mean().item()
            p_res = ((z >= low) & (z <= high)).double().mean().item()
            a = min(max(p_res - config["positive_penalty"] * p_pos, 0.0), 1.0)
            for name in scales[i]:
                p = config[name]
                wanted = min(max(1 + p["sensitivity"] * (2 * a - 1), p["low"]), p["high"])
                keep = 0.0 if config["start"] == "first" and step == 0 else config["scale_ema"]
                scales[i][name] = keep * scales[i][name] + (1 - keep) * wanted
            mask = masks[i] / masks[i].mean() if config["preserve_mean"] else masks[i]
            for name in ("gate", "up", "down"):
                linear = getattr(layer.mlp, f"{name}_proj")
                scale = scales[i][name] if config["scaling"] else 1.0
                rows = mask[:, None] if name == "gate" and config["mask"] else torch.ones(1, 1, dtype=torch.float64)
                todo += factors_of(linear, scale, rows.expand(linear.out_features, 1)[:, 0])
        parameters = [p for p in model.parameters() if p.requires_grad]
        if config["apply_to"] == "gradient":
            for parameter, factor in todo:
                parameter.grad *= factor.to(parameter)
        if max_norm is not None:
            total = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in parameters))
            for p in parameters:
                p.grad *= min(1.0, max_norm / (total + 1e-6))
        old = [parameter.detach().clone() for parameter, _ in todo]
        optimizer.step()
        if config["apply_to"] == "update":
            with torch.no_grad():
                for (parameter, factor), before in zip(todo, old, strict=True):
                    parameter.copy_(before + factor.to(parameter) * (parameter - before))
        optimizer.zero_grad()
    return losses
