"""A hub that cannot be reached is found out in seconds; one that is slow, or answers with an error, is used."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import socket
import threading
import time

import huggingface_hub
import pytest
import tiny

import nalora
from nalora.control.inspection import inspect_model
from nalora.models import hub
from nalora.models.loading import ModelSpec, load, model_kind
from nalora.runs import targets


@pytest.fixture
def slept(monkeypatch, tmp_path):
    """The waits between requests of a process that may ask the hub, whose cache is empty."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub._is_reachable.cache_clear()
    yield waits
    hub._is_reachable.cache_clear()
    huggingface_hub.close_session()


def endpoint(monkeypatch, port: int) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unreachable(monkeypatch, slept):
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint(monkeypatch, taken.getsockname()[1])
        yield slept


@pytest.mark.parametrize(
    "use",
    [
        inspect_model,
        lambda name: load(ModelSpec(name, device="cpu")),
        lambda name: targets.load(targets.resolve(name, device="cpu")),
    ],
    ids=["inspect", "load", "target"],
)
def test_an_unknown_model_is_refused_without_many_waits(unreachable, use):
    with pytest.raises(nalora.NALoRAError, match="couldn't connect"):
        use("no-such/model")
    assert sum(unreachable) <= 2


def test_a_model_in_the_cache_is_loaded_without_the_hub(unreachable, tmp_path):
    repository = tmp_path / "cache" / "models--owner--model"
    shutil.copytree(tiny.saved_llama(tmp_path / "model", layers=1), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert load(ModelSpec("owner/model", device="cpu")).processor.eos_token
    assert model_kind(ModelSpec("owner/model")) == "causal"
    assert sum(unreachable) <= 2


def offline() -> bool:
    """Whether a model would be loaded from the cache alone."""
    with hub.offline_if_unreachable("owner/model"):
        return huggingface_hub.is_offline_mode()


def test_offline_mode_ends_with_the_load(unreachable):
    assert offline()
    assert not huggingface_hub.is_offline_mode()


@contextlib.contextmanager
def server(answer):
    """A hub on this machine whose every answer is made by a function."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            answer(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        try:
            yield running.server_address[1]
        finally:
            running.shutdown()


def fails(request) -> None:
    request.send_response(503)
    request.end_headers()


def test_a_hub_that_answers_with_an_error_is_used(monkeypatch, slept):
    with server(fails) as port:
        endpoint(monkeypatch, port)
        assert not offline()


def test_a_slow_hub_is_used(monkeypatch, slept):
    released = threading.Event()
    monkeypatch.setattr(hub, "_CONNECT_S", 0.2)
    with server(lambda request: released.wait(60)) as port:
        endpoint(monkeypatch, port)
        assert not offline()
        released.set()


def test_the_hub_is_checked_once(monkeypatch, slept):
    requests = []
    with server(lambda request: (requests.append(request.path), fails(request))) as port:
        endpoint(monkeypatch, port)
        assert [offline(), offline()] == [False, False]
    assert len(requests) == 1


def test_a_hub_that_comes_back_is_used(monkeypatch, slept):
    failures = iter([hub._FAILED, None])
    monkeypatch.setattr(hub, "_connection_failure", lambda endpoint: next(failures))
    assert not offline()
    assert slept == [hub._AGAIN_AFTER_S]


def test_offline_mode_makes_no_request(monkeypatch, slept):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_connection_failure", lambda endpoint: pytest.fail("asked the hub"))
    assert offline()


def test_a_folder_makes_no_request(monkeypatch, slept, tmp_path):
    monkeypatch.setattr(hub, "_connection_failure", lambda endpoint: pytest.fail("asked the hub"))
    with hub.offline_if_unreachable(str(tmp_path)):
        assert not huggingface_hub.is_offline_mode()
