"""PiSSA: for W = U·S·Vᵀ, B = U_r·√(S_r/s) and A = √(S_r/s)·V_rᵀ are trained, and the rest of W is frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from nalora.methods import initial_factors
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.method import Adapter, Start, check_settings
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class PiSSA(LoRA):
    """The adapter starts as the best rank-r approximation of W.

    Args:
        iterations: iterations of a randomised decomposition, which takes seconds where the exact one takes minutes (16
            are close to exact); 0 selects the exact decomposition.
    """

    name = "pissa"
    title = "PiSSA"
    reference = "Meng et al. 2024, arXiv 2404.02948"

    iterations: int = 0

    def __post_init__(self) -> None:
        check_settings(self, ("iterations", self.iterations >= 0, "0 or more (0 is the exact decomposition)"))

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Decompose every layer's weight, or restore the start of a resumed run.

        Raises NALoRAError for a base that cannot be changed.
        """
        initial_factors.check_movable_base(model, self.name)
        if initial_factors.restore(model, start.folder):
            return
        layers = list(lora_layers(model))
        how = f"pissa_niter_{self.iterations}" if self.iterations else "pissa"
        for done, (_, layer) in enumerate(layers, 1):
            layer.pissa_init(ADAPTER, how)
            start.report("decomposing weights", done, len(layers))
        initial_factors.keep(model, start.folder)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write an adapter of rank 2r for the stock base."""
        initial_factors.save_relative_to_stock(model, folder)


METHODS = (PiSSA,)
