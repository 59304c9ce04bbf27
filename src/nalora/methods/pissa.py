"""PiSSA: with W = U·S·Vᵀ, B = U_r·√(S_r/s) and A = √(S_r/s)·V_rᵀ learn, and the rest of W is frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from nalora.errors import require
from nalora.methods import moved_base
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class PiSSA(LoRA):
    """The adapter starts as the best approximation of W by rank r.

    Args:
        iterations: of a randomised decomposition, which takes seconds where the exact one takes minutes (16 come
            close); 0: the exact one.
    """

    name = "pissa"
    title = "PiSSA"
    reference = "Meng et al. 2024, arXiv 2404.02948"

    iterations: int = 0

    def __post_init__(self) -> None:
        require(self.iterations >= 0, "iterations", self.iterations, "0 or more", "0 is exact")

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Decompose every layer's weight, or take a resumed run's own start.

        Raises:
            NALoRAError: a base that cannot be moved.
        """
        moved_base.refuse_immovable_base(model, self.name)
        if moved_base.restore(model, start.folder):
            return
        layers = list(lora_layers(model))
        how = f"pissa_niter_{self.iterations}" if self.iterations else "pissa"
        for done, (_, layer) in enumerate(layers, 1):
            layer.pissa_init(ADAPTER, how)
            start.report("decomposing weights", done, len(layers))
        moved_base.keep(model, start.folder)

    def save(self, model: nn.Module, folder: Path) -> None:
        """An adapter of rank 2r for the stock base."""
        moved_base.save_relative_to_stock(model, folder)


METHODS = (PiSSA,)
