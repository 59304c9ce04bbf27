"""Servers of the judge for the tests: one that answers as a test says, and `transformers serve` with a small model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY = "sk-never-to-be-seen-1234"
REAL_WORDS = ["[UNK]", "[PAD]", "</s>", "assistant:", "Rating:", "[[7]]"]


class ScriptedServer:
    """Answers POST /v1/chat/completions with the result of `reply(prompt, number of the request)`."""

    def __init__(self):
        self.requests: list[dict] = []
        self.reply = lambda prompt, number: "Fine. Rating: [[7]]"
        self.models = ["judge-1"]
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append({"key": self.headers["Authorization"], "path": self.path, **body})
                    answer = outer.reply(body["messages"][-1]["content"], len(outer.requests))
                if isinstance(answer, int):
                    return self._send(answer, {"error": {"message": f"no: {self.headers['Authorization']}"}})
                if callable(answer):
                    return answer(self)
                answer, reason = answer if isinstance(answer, tuple) else (answer, "stop")
                message = {"role": "assistant", "content": answer}
                choice = {"index": 0, "message": message, "finish_reason": reason}
                kind = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
                self._send(200, {**kind, "choices": [choice]})

            def do_GET(self):
                models = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in outer.models]
                self._send(200, {"object": "list", "data": models})

            def _send(self, status, payload):
                content = json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def prompts(self):
        return [each["messages"][-1]["content"] for each in self.requests]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    scripted = ScriptedServer()
    yield scripted
    scripted.http.shutdown()
    scripted.http.server_close()


def save_model_that_rates(folder):
    """A Llama without attention whose next word depends on the last one alone: assistant: → Rating: → [[7]] → end."""
    import tokenizers
    import torch
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(REAL_WORDS)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = dict(unk_token="[UNK]", pad_token="[PAD]", eos_token="</s>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}assistant:"
    size = len(REAL_WORDS)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    layer = model.model.layers[0]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
        weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(size, 8)
    for word, following in ((3, 4), (4, 5), (5, 2)):
        model.lm_head.weight.data[following, word] = 9.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def transformers_server(tmp_path):
    """`transformers serve` with that model on a free port of this machine."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    folder = tmp_path / "model"
    save_model_that_rates(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except OSError:
                said = (tmp_path / "server.log").read_text()[-2000:]
                assert process.poll() is None, f"the server stopped: {said}"
                assert time.monotonic() < deadline, f"the server did not come up: {said}"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1", str(folder)
    finally:
        process.kill()
        process.wait(10)
        log.close()
