"""The per-channel measures of a diagnosis, where it was asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nalora.report.data import RunData

Measures = dict[str, NDArray[np.float64]]


def read_channels(run: RunData, blocks: Sequence[str]) -> list[Measures] | None:
    """For every block its measures as [intervals, channels]; None where there are none."""
    name = (run.diagnosis or {}).get("channels")
    if not isinstance(name, str) or not (run.path / name).is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(run.path / name)
    except (SafetensorError, OSError, ValueError):
        run.notices.append(f"{name} is damaged and was left out.")
        return None
    found: list[Measures] = [{} for _ in blocks]
    places = {block: i for i, block in enumerate(blocks)}
    for key, tensor in tensors.items():
        block, _, measure = key.rpartition("/" if "/" in key else ".")
        if block in places and tensor.ndim == 2:
            found[places[block]][measure] = tensor.astype(np.float64)
    return found if any(found) else None
