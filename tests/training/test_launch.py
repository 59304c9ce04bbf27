"""Two processes that were launched together train what one process trains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import tiny
import torch
import yaml
from safetensors.torch import load_file

from nalora.training.folder import RunFolder, read_jsonl


def test_two_processes_are_one(tmp_path):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 8,
        "settings": {"min_digits": 3, "max_digits": 4}, "method": "na-lora", "apply_to": "update", "steps": 4,
        "batch_size": 8, "micro_batch_size": 4, "device": "cpu", "log_every": 1, "learning_rate": 1e-3,
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "nalora.cli", "train", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    for name, start in (("one", []), ("two", launch)):
        arguments = [sys.executable, *start, *command, f"output={tmp_path / name}"]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(RunFolder(tmp_path / name).adapter / "adapter_model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
    losses = [[row["loss"] for row in read_jsonl(RunFolder(tmp_path / name).metrics)] for name in ("one", "two")]
    assert len(losses[0]) == len(losses[1]) == 4
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-5)
