"""Send one request to an OpenAI-compatible server, limited in time and size whatever the server does.

A plain HTTP client waits again for every byte and reads a reply of any length. This one stops after a total time, reads
at most `LARGEST_REPLY` bytes and follows no redirect, which would send the key to another server.
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
    """No complete reply was received; the message gives the reason."""


@dataclass(frozen=True)
class Reply:
    """The server's reply: `content` is not validated, `retry_after` is in seconds."""

    status: int
    content: bytes
    retry_after: float | None = None

    def error_text(self) -> str:
        """Return the server's error message on one line."""
        try:
            error = json.loads(self.content)["error"]
            text = error["message"] if isinstance(error, dict) else error
        except (ValueError, KeyError, TypeError, RecursionError):
            text = self.content[:2_000].decode(errors="replace")
        return " ".join(str(text).split())[:300]


def send(url: str, path: str, key: str, body: Any = None, *, seconds: float) -> Reply:
    """Return the reply to a POST of the body as JSON, or to a GET without a body.

    The key is sent as the bearer token, unless the URL contains a user and password, which are sent instead. Raises
    a NoReplyError without a complete reply in this time, or for one that is too long or not HTTP.
    """
    results: queue.SimpleQueue[Reply | NoReplyError] = queue.SimpleQueue()
    # In a thread that is abandoned after its time: a server that sends a byte now and then resets every timeout of
    # a socket.
    exchange = threading.Thread(target=lambda: results.put(_exchange(url, path, key, body, seconds)), daemon=True)
    exchange.start()
    try:
        result = results.get(timeout=max(seconds, 0))
    except queue.Empty:
        result = NoReplyError(f"no complete reply after {seconds:.0f} s")
    if isinstance(result, NoReplyError):
        raise result
    return result


def without_secrets(url: str) -> str:
    """Return the URL without user, password and query, each of which may hold a key."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def masked(text: str, key: str) -> str:
    """Return the text without the key and without the parts of it that servers quote, as in `sk-proj-****1234`."""
    if not key:
        return text
    text = text.replace(key, "…")
    # Parts of a shorter key occur in ordinary words.
    if len(key) < 8:
        return text
    parts = {key[:4], key[-4:], *(key[start : start + 6] for start in range(len(key) - 5))}
    word = re.compile(r"[^\s\"'`,;:()\[\]{}<>]+")
    return word.sub(lambda match: "…" if any(part in match[0] for part in parts) else match[0], text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _exchange(url: str, path: str, key: str, body: Any, seconds: float) -> Reply | NoReplyError:
    opener = urllib.request.build_opener(_NoRedirects(), urllib.request.HTTPSHandler(context=_certificates()))
    try:
        try:
            response = opener.open(_request(url, path, key, body), timeout=max(seconds, 0.001))
        except urllib.error.HTTPError as error:
            response = error
        with response:
            content = response.read(LARGEST_REPLY + 1)
            status, after = response.status or 0, response.headers.get("Retry-After")
    except TimeoutError:
        return NoReplyError(f"no complete reply after {seconds:.0f} s")
    except urllib.error.URLError as error:
        return NoReplyError(f"no connection: {error.reason}")
    except http.client.HTTPException as error:
        return NoReplyError(f"no HTTP, or a truncated reply: {type(error).__name__}")
    except (OSError, ValueError) as error:
        return NoReplyError(f"no connection: {error}")
    if len(content) > LARGEST_REPLY:
        return NoReplyError(f"a reply of more than {LARGEST_REPLY >> 20} MiB")
    return Reply(status, content, float(after) if after and after.isdecimal() else None)


def _request(url: str, path: str, key: str, body: Any) -> urllib.request.Request:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the URL does not start with http:// or https://")
    authorization = f"Bearer {key}"
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    headers = {"Authorization": authorization, "Content-Type": "application/json", "User-Agent": "nalora"}
    data = None if body is None else json_text(body).encode()
    return urllib.request.Request(without_secrets(url).rstrip("/") + path, data, headers)


def _certificates() -> ssl.SSLContext:
    """Return the machine's certificates, or those of `certifi` for a build of Python that finds none."""
    context = ssl.create_default_context()
    if not context.get_ca_certs():
        try:
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
    return context
