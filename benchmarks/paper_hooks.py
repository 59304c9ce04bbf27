"""A literal implementation of the paper's appendix: forward hooks compute the statistics, gradient hooks multiply."""

from __future__ import annotations

import torch

TAU = 1.27846
PROJECTIONS = {"gate_proj": (0.40, 0.80, 1.50), "up_proj": (0.30, 0.80, 1.40), "down_proj": (0.20, 0.85, 1.30)}


class PaperHooks:
    def __init__(self, model: torch.nn.Module) -> None:
        self.handles = []
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                self.watch(module)

    def watch(self, mlp: torch.nn.Module) -> None:
        state = {"mask": None, **{name: None for name in PROJECTIONS}}

        def forward_hook(module, args, z):
            with torch.no_grad():
                s = torch.sigmoid(z)
                k = (s + z * s * (1 - s)).abs().float().mean(dim=(0, 1))
                new = torch.sigmoid(20.0 * (k - torch.quantile(k, 0.7)))
                state["mask"] = new if state["mask"] is None else 0.9 * state["mask"] + 0.1 * new
                p_res = (z.abs() <= TAU).float().mean()
                p_pos = (z > TAU).float().mean()
                a = (p_res - p_pos).clamp(0, 1)
                for name, (alpha, low, high) in PROJECTIONS.items():
                    scale = (1 + alpha * (2 * a - 1)).clamp(low, high)
                    state[name] = scale if state[name] is None else 0.95 * state[name] + 0.05 * scale

        self.handles.append(mlp.gate_proj.register_forward_hook(forward_hook))
        for name in PROJECTIONS:
            layer = getattr(mlp, name)
            for factor in (layer.lora_A, layer.lora_B):
                weight = factor["default"].weight
                self.handles.append(weight.register_hook(lambda grad, name=name: grad * state[name]))
        gate_b = mlp.gate_proj.lora_B["default"].weight
        self.handles.append(gate_b.register_hook(lambda grad: grad * state["mask"][:, None]))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
