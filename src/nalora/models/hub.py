"""Whether the model hub can be reached, which is checked once before a model is loaded from it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator

# The longest wait for a connection; TCP sends a lost packet again after 1 and after 3 s. HF_HUB_ETAG_TIMEOUT, which
# users of slow networks set, replaces it.
_CONNECT_S = 5.0
# When a connection that failed at once is tried again: a name server or a network that has just come back.
_AGAIN_AFTER_S = 1.0
# Exceptions of httpx (huggingface_hub 1) and of httpx2 (2).
_FAILED, _TIMED_OUT = "ConnectError", "ConnectTimeout"


@contextlib.contextmanager
def offline_if_unreachable(source: str) -> Iterator[None]:
    """Let a hub id be loaded from the cache alone, as HF_HUB_OFFLINE=1 does, if no connection to the hub can be made.

    huggingface_hub repeats the request for each file that is not in the cache, for 23 s, and a model has several.
    `local_files_only` is not enough: transformers searches for an adapter of the model without it.
    """
    from huggingface_hub import constants, is_offline_mode

    if os.path.exists(source) or is_offline_mode() or _is_reachable(constants.ENDPOINT):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


@functools.cache
def _is_reachable(endpoint: str) -> bool:
    """Return whether a connection to the hub can be made, through the proxy if there is one."""
    began = time.monotonic()
    failure = _connection_failure(endpoint)
    if failure == _FAILED and time.monotonic() - began < _AGAIN_AFTER_S:
        time.sleep(_AGAIN_AFTER_S)
        failure = _connection_failure(endpoint)
    return failure is None


def _connection_failure(endpoint: str) -> str | None:
    """Return why no connection can be made; None if there is one, even if the answer is late or an error."""
    from huggingface_hub import close_session, constants, get_session

    timeout = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else _CONNECT_S
    try:
        get_session().head(endpoint, timeout=timeout)
    except Exception as error:
        name = type(error).__name__
        if name not in (_FAILED, _TIMED_OUT):
            return None  # loading the model reports the problem, if it is one
        close_session()  # as huggingface_hub does: a session may be unusable after a TLS error
        return name
    return None
