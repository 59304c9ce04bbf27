"""The cache of keys and values, which transformers keeps by default: it is for generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Switch the cache off for a while. With one, transformers does not keep packed examples apart."""
    config: Any = getattr(model, "config", None)
    caching = getattr(config, "use_cache", None)
    if not caching:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = caching
