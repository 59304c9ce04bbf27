"""Where an adapter put its capacity: the size of its update s·B·A, by layer and by gate channel, never built whole."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nalora.models.peft_names import in_base
from nalora.report.data import RunData, layer_labels

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True)
class Capacity:
    """Norms of the update of every adapted module.

    Attributes:
        modules: ‖s·B·A‖ (Frobenius) by module name, in the file's order.
        rows: ‖(s·B·A)_c‖ of every output row c, by module name.
    """

    modules: dict[str, float]
    rows: dict[str, NDArray[np.float64]]

    def layers(self) -> dict[str, dict[str, str]]:
        """The modules by layer, told by the first number in a module's name, and by what follows that number."""
        layers: dict[str, dict[str, str]] = {}
        for module in self.modules:
            parts = module.split(".")
            end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
            layers.setdefault(".".join(parts[:end]), {})[".".join(parts[end:])] = module
        return layers

    def layer_norms(self) -> tuple[list[str], list[float]]:
        """The label of every layer, and the norm over its modules."""
        layers = self.layers()
        alone = [name.rpartition(".")[2] or "all" for name in layers]
        norms = [math.hypot(*(self.modules[name] for name in modules.values())) for modules in layers.values()]
        return layer_labels(list(layers)) if len(layers) > 1 else alone, norms

    def of_block(self, block: str) -> dict[str, str]:
        """The adapted modules of an FFN block, by the last part of their name."""
        place = in_base(block)
        return {name.rpartition(".")[2]: name for name in self.modules if name.startswith(f"{place}.")}


def read_capacity(run: RunData) -> tuple[Capacity | None, str]:
    """The norms of a run's adapter and what a reader must know of them; None with the reason where there are none."""
    folder = run.path / "adapter"
    if not (folder / "adapter_model.safetensors").is_file():
        if (run.path / "model").is_dir() or run.method == "full":
            return None, "This run trained the model itself; there is no adapter whose update could be measured."
        return None, "No adapter was saved yet, so the size of its update is not known."
    from safetensors import SafetensorError

    try:
        measured, config = _measure(folder)
        dora = "DoRA also rescales every column; only its s·B·A is measured here." if config.get("use_dora") else ""
        return measured, dora
    except (AttributeError, ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        return None, f"The adapter cannot be read ({type(error).__name__}), so the size of its update is not known."


def _measure(folder: Path) -> tuple[Capacity, dict[str, Any]]:
    from safetensors import safe_open

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    modules: dict[str, float] = {}
    rows: dict[str, NDArray[np.float64]] = {}
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        names = set(file.keys())
        for name in sorted(names, key=_natural):
            found = _FACTOR.fullmatch(name)
            if found is None or found["factor"] != "B":
                continue
            partner = re.sub(r"\.lora_B(?=\.)", ".lora_A", name)
            if partner not in names:
                raise KeyError(partner)
            module = in_base(found["module"])
            B, A = file.get_tensor(name), file.get_tensor(partner)
            norms = scaling(config, module, A.shape[0]) * row_norms(B.flatten(1), A.flatten(1))
            rows[module] = norms.numpy()
            modules[module] = float(norms.square().sum().sqrt())
    if not modules:
        raise ValueError("an adapter without lora_A and lora_B")
    return Capacity(modules, rows), config


def row_norms(B: Tensor, A: Tensor) -> Tensor:
    """‖(B·A)_c‖ for every row c, from diag(B (A Aᵀ) Bᵀ): r² numbers per row instead of the width of A."""
    B, A = B.double(), A.double()
    return ((B @ (A @ A.T)) * B).sum(1).clamp(min=0).sqrt()


def scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """s as PEFT computes it: α/r, or α/√r; r and α of this module where a pattern names it."""
    r = int(_by_pattern(config.get("rank_pattern"), module, config.get("r", rank)))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", r)))
    return alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r


def _by_pattern(pattern: dict[str, Any] | None, module: str, otherwise: Any) -> Any:
    """PEFT's rule: the first key that the module's name ends with, as a regular expression."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _natural(name: str) -> list[Any]:
    """Sorts layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
