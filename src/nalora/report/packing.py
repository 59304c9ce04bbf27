"""Numbers in the page's data: few, small, and readable by JavaScript."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(values: Any) -> dict[str, Any]:
    """Return an array as little-endian float32 in base64; NaN means no value."""
    array = np.asarray(values, dtype="<f4")
    return {"f32": base64.b64encode(array.tobytes()).decode("ascii"), "shape": list(array.shape)}


def kept_rows(count: int, most: int) -> NDArray[np.int64]:
    """Return the rows to show of `count`: all, or evenly spaced ones with the first and the last."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def largest(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest values, in rising order."""
    return np.sort(np.argsort(-values, kind="stable")[:most])


def plain(value: float, digits: int = 6) -> float:
    """Return the value rounded; below 1e-12, the size of rounding errors, it is 0."""
    return 0.0 if abs(value) < 1e-12 else float(f"{value:.{digits}g}")


def finite(value: Any) -> Any:
    """Return a JSON value without NaN and infinities, which JavaScript cannot read; numbers have 6 digits."""
    if isinstance(value, float):
        return plain(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if isinstance(value, int | str | None) else str(value)
