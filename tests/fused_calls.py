"""Count the layers that each call of the fused LoRA function computes."""

from __future__ import annotations

from nalora.kernels.fused import linears


def counted(monkeypatch) -> list[int]:
    """Return a list to which every later call appends its number of layers."""
    sizes: list[int] = []
    apply = linears.LoRALinears.apply

    def counting(x, layers, *factors):
        sizes.append(len(layers))
        return apply(x, layers, *factors)

    monkeypatch.setattr(linears.LoRALinears, "apply", counting)
    return sizes
