"""Numbers as a page carries them: few, small, and such that JavaScript reads them."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(values: Any) -> dict[str, Any]:
    """An array as little-endian float32 in base64; NaN stands for nothing."""
    array = np.asarray(values, dtype="<f4")
    return {"f32": base64.b64encode(array.tobytes()).decode("ascii"), "shape": list(array.shape)}


def kept_rows(count: int, most: int) -> NDArray[np.int64]:
    """Which of `count` rows are shown: all, or evenly spread ones with the first and the last."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def largest(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """The places of the `most` largest values, in rising order."""
    if len(values) <= most:
        return np.arange(len(values))
    return np.sort(np.argsort(-values, kind="stable")[:most])


def plain(value: float, digits: int = 6) -> float:
    """Rounded; what rounding errors left of a zero is one."""
    return 0.0 if abs(value) < 1e-12 else float(f"{value:.{digits}g}")


def finite(value: Any) -> Any:
    """A JSON value without NaN and infinities, which JavaScript's reader refuses; numbers to 6 digits."""
    if isinstance(value, float):
        return plain(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value if isinstance(value, int | str | None) else str(value)
