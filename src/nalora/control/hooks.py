"""Follow somebody else's object without subclassing it, and leave its copies alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(
    owner: Any,
    method: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    result: Callable[[Any], None] | None = None,
) -> Callable[[], None]:
    """Run `before` or `after` with the arguments of every call of ``owner.method``, and `result` with what it returns.

    What this returns puts the method back.
    """
    original = getattr(owner, method)
    was_own = method in vars(owner)

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        returned = original(*args, **kwargs)
        if result is not None:
            result(returned)
        if after is not None:
            after(*args, **kwargs)
        return returned

    setattr(owner, method, followed)

    def put_back() -> None:
        if was_own:
            setattr(owner, method, original)
        else:
            delattr(owner, method)

    return put_back


def inert_hook() -> Callable[..., None]:
    """What a deep copy or a pickle of a model carries in place of a live hook."""
    return _ignore


def _ignore(*_: Any) -> None:
    """Do nothing."""
