"""DoRA: W = μ ⊙ (W₀ + s·B·A)/‖W₀ + s·B·A‖, row by row; LoRA turns the rows and the vector μ sets their length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter


@dataclass(frozen=True)
class DoRA(LoRA):
    """μ starts at ‖W₀‖; the norm below it is not differentiated."""

    name = "dora"
    title = "DoRA"
    reference = "Liu et al. 2024, arXiv 2402.09353"

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """LoRA's, with a magnitude for every row."""
        return super().config_settings(adapter) | {"use_dora": True}


METHODS = (DoRA,)
