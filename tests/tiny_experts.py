"""Small mixtures of experts with LoRA on their 3-D parameters, and NA-LoRA for them written as plain loops."""

from __future__ import annotations

import math

import peft
import tiny
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import moe

EXPERTS, TOP, WIDTH = 6, 2, 20
SIZES = dict(
    vocab_size=tiny.VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, num_experts_per_tok=TOP, initializer_range=0.3, pad_token_id=0, max_position_embeddings=128,
)  # fmt: skip
ARCHITECTURES = ("Qwen3Moe", "Mixtral", "GptOss")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
DENSE = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def base(architecture: str, implementation: str = "eager", dtype: torch.dtype = torch.float64, **settings) -> nn.Module:
    """The first layer of Qwen3-MoE is dense."""
    own = {
        "Qwen3Moe": dict(num_experts=EXPERTS, moe_intermediate_size=WIDTH, intermediate_size=32, mlp_only_layers=[0]),
        "Mixtral": dict(num_local_experts=EXPERTS, intermediate_size=WIDTH),
        "GptOss": dict(num_local_experts=EXPERTS, intermediate_size=WIDTH, swiglu_limit=2.5),
    }[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**SIZES | own | settings)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype)
    model.set_experts_implementation(implementation)
    for name, parameter in model.named_parameters():
        if "gate_up_proj" in name or "router.weight" in name:
            parameter.data = torch.randn(parameter.shape, dtype=dtype) * 0.7
        elif name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, dtype=dtype) * 0.3
    return model


def adapted(architecture: str, implementation: str = "eager", dtype: torch.dtype = torch.float64, **lora):
    parameters = PARAMETERS + (DENSE if architecture == "Qwen3Moe" else [])
    lora = dict(target_modules=["q_proj"], target_parameters=parameters) | lora
    return tiny.with_lora(base(architecture, implementation, dtype), r=3, lora_alpha=5, **lora)


def allow_float64(monkeypatch) -> None:
    """torch has no grouped product in float64; transformers then computes the same groups one after the other."""
    usable = moe._can_use_grouped_mm
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda x, w, offs: w.dtype != torch.float64 and usable(x, w, offs))


def forward(model, ids: Tensor) -> tuple[Tensor, list[dict[int, tuple[Tensor, Tensor]]]]:
    """Logits, and z and u of every layer by expert, each token on its own; a dense layer is expert 0."""
    inner = model.base_model.model.model
    hidden = inner.embed_tokens(ids)
    positions = inner.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
    gates = []
    for layer in inner.layers:
        normed = layer.input_layernorm(hidden)
        hidden = hidden + layer.self_attn(normed, position_embeddings=positions, attention_mask=causal)[0]
        x = layer.post_attention_layernorm(hidden).flatten(0, 1)
        y, seen = _ffn(layer.mlp, x)
        hidden = hidden + y.view(hidden.shape)
        gates.append(seen)
    return model.base_model.model.lm_head(inner.norm(hidden)), gates


def _ffn(mlp, x: Tensor) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    if not hasattr(mlp, "experts"):
        z, u = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(z * torch.sigmoid(z) * u), {0: (z.detach(), u.detach())}
    is_oss = hasattr(mlp, "router")
    _, weights, index = (mlp.router if is_oss else mlp.gate)(x)
    experts = mlp.experts.get_base_layer()
    y = torch.zeros_like(x)
    seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for token in range(len(x)):
        for rank in range(TOP):
            e = int(index[token, rank])
            both = x[token] @ _weight(mlp.experts.base_layer, e) + (experts.gate_up_proj_bias[e] if is_oss else 0)
            z, u = (both[::2], both[1::2]) if is_oss else both.chunk(2)
            if is_oss:
                c = z.clamp(max=2.5)
                h = c * torch.sigmoid(1.702 * c) * (u.clamp(-2.5, 2.5) + 1)
            else:
                h = z * torch.sigmoid(z) * u
            out = h @ _weight(mlp.experts, e) + (experts.down_proj_bias[e] if is_oss else 0)
            y = y.index_add(0, torch.tensor([token]), (weights[token, rank] * out)[None])
            for values, value in zip(seen.setdefault(e, ([], [])), (z, u + 1 if is_oss else u), strict=True):
                values.append(value.detach())
    return y, {e: (torch.stack(z), torch.stack(u)) for e, (z, u) in seen.items()}


def _weight(layer: peft.tuners.lora.layer.ParamWrapper, e: int) -> Tensor:
    """An expert's weight with its adapter, [in, out], by PEFT's layout: A expert by expert, B's columns alternating."""
    a, b, scaling = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    rank = a.shape[0] // EXPERTS
    own = layer.get_param()[e]
    delta = b[:, e::EXPERTS] @ a[e * rank : (e + 1) * rank]
    return own + scaling * delta.T if layer.get_base_layer().is_transposed else (own + scaling * delta).T


def derivative(z: Tensor, slope: float, limit: float) -> Tensor:
    sigma = torch.sigmoid(slope * z)
    return torch.where(z > limit, 0.0, sigma + slope * z * sigma * (1 - sigma))


class Average:
    """Mask and step scales of one dense FFN or of one expert."""

    def __init__(self, width: int) -> None:
        self.mask, self.scales, self.updates = torch.ones(width, dtype=torch.float64), dict.fromkeys(ROLES, 1.0), 0

    def update(self, z: Tensor, u: Tensor, config, activation: tuple[float, float, float]) -> None:
        slope, limit, tau = activation
        k = derivative(z, slope, limit).abs() * (u.abs() if config["importance"] == "utility" else 1)
        k = k.mean(0)
        new = torch.sigmoid(config["sharpness"] * (k - torch.quantile(k, 1 - config["keep_ratio"])))
        first = config["start"] == "first" and self.updates == 0
        keep = 0.0 if first else config["mask_ema"]
        self.mask = keep * self.mask + (1 - keep) * new
        p_pos, p_res = ((z > tau).double().mean().item(), (z.abs() <= tau).double().mean().item())
        a = min(max(p_res - config["positive_penalty"] * p_pos, 0.0), 1.0)
        keep = 0.0 if first else config["scale_ema"]
        for role in ROLES:
            p = config[role]
            wanted = min(max(1 + p["sensitivity"] * (2 * a - 1), p["low"]), p["high"])
            self.scales[role] = keep * self.scales[role] + (1 - keep) * wanted
        self.updates += 1


ROLES = ("gate", "up", "down")
SILU, QUICK_GELU = (1.0, math.inf, 1.2784645427610738), (1.702, 2.5, 0.7511542551474)


def train(model, optimizer, batches: list[Tensor], config, max_norm: float = 1.0) -> dict[int, int]:
    """Train as the paper's algorithm says, each expert as an FFN of its own tokens; returns updates by expert."""
    layers = model.base_model.model.model.layers
    is_oss = hasattr(layers[-1].mlp, "router")
    averages: dict[tuple[int, int], Average] = {}
    for ids in batches:
        logits, gates = forward(model, ids)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        todo: list[tuple[nn.Parameter, Tensor]] = []
        for i, layer in enumerate(layers):
            dense = not hasattr(layer.mlp, "experts")
            width = layer.mlp.gate_proj.out_features if dense else WIDTH
            for e in range(1 if dense else EXPERTS):
                average = averages.setdefault((i, e), Average(width))
                if e in gates[i]:
                    average.update(*gates[i][e], config, QUICK_GELU if is_oss else SILU)
            todo += _factors(layer.mlp, [averages[i, e] for e in range(1 if dense else EXPERTS)], config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if config["apply_to"] == "gradient":
            for parameter, factor in todo:
                parameter.grad *= factor
        total = math.sqrt(sum((p.grad**2).sum().item() for p in parameters))
        for p in parameters:
            p.grad *= min(1.0, max_norm / (total + 1e-6))
        old = [parameter.detach().clone() for parameter, _ in todo]
        optimizer.step()
        if config["apply_to"] == "update":
            with torch.no_grad():
                for (parameter, factor), before in zip(todo, old, strict=True):
                    parameter.copy_(before + factor * (parameter - before))
        optimizer.zero_grad()
    return {e: average.updates for (i, e), average in averages.items() if i == 1}


def _factors(mlp, averages: list[Average], config) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter of the block with its factors, entry by entry."""
    if not hasattr(mlp, "experts"):
        (average,) = averages
        result = []
        for role in ROLES:
            layer = getattr(mlp, f"{role}_proj")
            scale = torch.tensor(average.scales[role], dtype=torch.float64)
            rows = average.mask[:, None] if role == "gate" else 1.0
            result += [(layer.lora_A["default"].weight, scale), (layer.lora_B["default"].weight, scale * rows)]
        return result
    down, both = mlp.experts, mlp.experts.base_layer
    result = []
    for layer in (both, down):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        of_a, of_b = torch.ones_like(a), torch.ones_like(b)
        rank = a.shape[0] // EXPERTS
        for e, average in enumerate(averages):
            gate, up, below = (average.scales[role] for role in ROLES)
            for j in range(rank):
                if layer is down:
                    of_a[e * rank + j] = of_b[:, j * EXPERTS + e] = below
                    continue
                of_a[e * rank + j] = (gate + up) / 2
                rows = (
                    (slice(0, None, 2), slice(1, None, 2))
                    if hasattr(mlp, "router")
                    else (slice(0, WIDTH), slice(WIDTH, None))
                )
                of_b[rows[0], j * EXPERTS + e] = average.mask * gate
                of_b[rows[1], j * EXPERTS + e] = up
        result += [(a, of_a), (b, of_b)]
    return result
