"""The norm of an adapter's update s·B·A, by layer and by gate channel, without computing the product."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nalora.models.peft_names import in_base
from nalora.report.naming import layer_labels

if TYPE_CHECKING:
    from nalora.report.data import RunData

_FACTOR = re.compile(r"(?P<module>.+)\.lora_B(?:\.[^.]+)?\.weight")


@dataclass(frozen=True)
class Capacity:
    """Norms of the update of every adapted module, by module name in the model's order."""

    modules: dict[str, float]  # ‖s·B·A‖ (Frobenius)
    rows: dict[str, NDArray[np.float64]]  # ‖(s·B·A)_c‖ of every output row c

    def layers(self) -> dict[str, dict[str, str]]:
        """Return the modules by layer, up to the first number in their names, and by the part that follows it."""
        layers: dict[str, dict[str, str]] = {}
        for module in self.modules:
            parts = module.split(".")
            end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
            layers.setdefault(".".join(parts[:end]), {})[".".join(parts[end:])] = module
        return layers

    def layer_norms(self) -> tuple[list[str], list[float]]:
        """Return the label of every layer and the norm over its modules."""
        layers = self.layers()
        labels = layer_labels(list(layers)) if len(layers) > 1 else [next(iter(layers)).rpartition(".")[2] or "all"]
        return labels, [math.hypot(*(self.modules[name] for name in names.values())) for names in layers.values()]

    def of_block(self, block: str) -> dict[str, str]:
        """Return the adapted modules of an FFN block by the last part of their name."""
        prefix = f"{in_base(block)}."
        return {name.rpartition(".")[2]: name for name in self.modules if name.startswith(prefix)}


def read_capacity(run: RunData) -> tuple[Capacity | None, str]:
    """Return the norms of a run's adapter and a remark on them; None and the reason where there are none."""
    folder = run.path / "adapter"
    if not (folder / "adapter_model.safetensors").is_file():
        if (run.path / "model").is_dir() or run.method == "full":
            return None, "This run trained the model itself; there is no adapter whose update could be measured."
        return None, "No adapter was saved yet, so the size of its update is not known."
    from safetensors import SafetensorError

    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        dora = "DoRA also rescales every column; only its s·B·A is measured here." if config.get("use_dora") else ""
        return _measure(folder / "adapter_model.safetensors", config), dora
    except (AttributeError, ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        return None, f"The adapter cannot be read ({type(error).__name__}), so the size of its update is not known."


def _measure(weights: Path, config: dict[str, Any]) -> Capacity:
    from safetensors import safe_open

    capacity = Capacity({}, {})
    with safe_open(str(weights), framework="pt") as file:
        for name in sorted(file.keys(), key=_natural):
            if (match := _FACTOR.fullmatch(name)) is None:
                continue
            module = in_base(match["module"])
            B, A = file.get_tensor(name), file.get_tensor(re.sub(r"\.lora_B(?=\.)", ".lora_A", name))
            norms = scaling(config, module, A.shape[0]) * row_norms(B.flatten(1), A.flatten(1))
            capacity.rows[module] = norms.numpy()
            capacity.modules[module] = float(norms.square().sum().sqrt())
    if not capacity.modules:
        raise ValueError("an adapter without lora_A and lora_B")
    return capacity


def row_norms(B: Tensor, A: Tensor) -> Tensor:
    """Return ‖(B·A)_c‖ for every row c, from diag(B (A Aᵀ) Bᵀ): r² numbers per row instead of the width of A."""
    B, A = B.double(), A.double()
    return ((B @ (A @ A.T)) * B).sum(1).clamp(min=0).sqrt()


def scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """Return s as PEFT computes it, α/r or α/√r, with the module's own r and α where a pattern names it."""
    r = int(_by_pattern(config.get("rank_pattern"), module, config.get("r", rank)))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", r)))
    return alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r


def _by_pattern(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first key that matches the end of the module's name, which is PEFT's rule."""
    matches = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)


def _natural(name: str) -> list[Any]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
