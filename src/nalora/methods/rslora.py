"""rsLoRA: LoRA with the scaling s = α/√r, under which steps do not shrink as the rank grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter


@dataclass(frozen=True)
class RsLoRA(LoRA):
    """At r = 8 and α = 16 its s is 5.66 where LoRA's is 2: a learning rate tuned for the one is not the other's."""

    name = "rslora"
    title = "rsLoRA"
    reference = "Kalajdzievski 2023, arXiv 2312.03732"

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """LoRA's, with the other scaling."""
        return super().config_settings(adapter) | {"use_rslora": True}


METHODS = (RsLoRA,)
