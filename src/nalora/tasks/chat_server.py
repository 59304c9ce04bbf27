"""One request to an OpenAI-compatible server, bounded in time and size whatever the server does.

A plain HTTP client waits anew for every byte and reads a reply of any length; this one gives up after a total time,
reads at most `LARGEST_REPLY` bytes and follows no redirection, which would carry the key to another server.
"""

from __future__ import annotations

import base64
import http.client
import json
import queue
import re
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from nalora.files.atomic import json_text

# 2,048 tokens are 10 KB.
LARGEST_REPLY = 4 << 20


class NoReplyError(Exception):
    """No whole reply came; the text says why."""


@dataclass(frozen=True)
class Reply:
    """What the server sent: `content` is not checked, and `retry_after` is in seconds."""

    status: int
    content: bytes
    retry_after: float | None = None

    def error_text(self) -> str:
        """The server's own words in a reply that is an error, on one line."""
        try:
            error = json.loads(self.content)["error"]
            text = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, RecursionError):
            text = self.content[:2_000].decode(errors="replace")
        return " ".join(str(text).split())[:300]


def send(url: str, path: str, key: str, body: Any = None, *, seconds: float) -> Reply:
    """The reply to a POST of the body as JSON, or to a GET where there is no body.

    Args:
        url: the server's base address; a user and password in it are sent in place of the key.
        path: after that address.
        key: sent as the bearer token.
        body: what `json` can write.
        seconds: the longest time until the reply is there as a whole.

    Raises:
        NoReplyError: no connection, silence, an endless or too long reply, or no HTTP.
    """
    try:
        request = _request(url, path, key, body)
    except ValueError as error:
        raise NoReplyError(str(error)) from None
    results: queue.SimpleQueue[Reply | NoReplyError] = queue.SimpleQueue()
    # In a thread that is left alone when its time is up: a server that sends a byte now and then resets every timeout
    # of a socket.
    threading.Thread(target=lambda: results.put(_exchange(request, seconds)), daemon=True).start()
    try:
        result = results.get(timeout=max(seconds, 0))
    except queue.Empty:
        result = NoReplyError(f"no whole reply after {seconds:.0f} s")
    if isinstance(result, NoReplyError):
        raise result
    return result


def _request(url: str, path: str, key: str, body: Any) -> urllib.request.Request:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an address that begins with http:// or https://")
    authorization = f"Bearer {key}"
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    address = without_secrets(url).rstrip("/") + path
    headers = {"Authorization": authorization, "Content-Type": "application/json", "User-Agent": "nalora"}
    return urllib.request.Request(address, None if body is None else json_text(body).encode(), headers)


def without_secrets(url: str) -> str:
    """The address without user, password and query, any of which may hold a key."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def masked(text: str, key: str) -> str:
    """The text without the key and without the parts of it that servers quote, as in `sk-proj-****1234`."""
    if not key:
        return text
    text = text.replace(key, "…")
    # Below this length its parts are parts of ordinary words.
    if len(key) < 8:
        return text
    parts = {key[:4], key[-4:], *(key[start : start + 6] for start in range(len(key) - 5))}
    word = re.compile(r"[^\s\"'`,;:()\[\]{}<>]+")
    return word.sub(lambda found: "…" if any(part in found[0] for part in parts) else found[0], text)


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _exchange(request: urllib.request.Request, seconds: float) -> Reply | NoReplyError:
    opener = urllib.request.build_opener(_NoRedirection(), urllib.request.HTTPSHandler(context=_certificates()))
    try:
        try:
            response = opener.open(request, timeout=max(seconds, 0.001))
        except urllib.error.HTTPError as error:
            response = error
        with response:
            content = response.read(LARGEST_REPLY + 1)
            status, after = response.status or 0, response.headers.get("Retry-After")
    except TimeoutError:
        return NoReplyError(f"no whole reply after {seconds:.0f} s")
    except urllib.error.URLError as error:
        return NoReplyError(f"no connection: {error.reason}")
    except http.client.HTTPException as error:
        return NoReplyError(f"no HTTP, or a reply that was cut off: {type(error).__name__}")
    except (OSError, ValueError) as error:
        return NoReplyError(f"no connection: {error}")
    if len(content) > LARGEST_REPLY:
        return NoReplyError(f"a reply of more than {LARGEST_REPLY >> 20} MiB")
    return Reply(status, content, float(after) if after and after.isdecimal() else None)


def _certificates() -> ssl.SSLContext:
    """The machine's, else those of `certifi`: some builds of Python find none."""
    context = ssl.create_default_context()
    if not context.get_ca_certs():
        try:
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
    return context
