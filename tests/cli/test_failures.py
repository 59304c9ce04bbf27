"""Errors of the machine are one sentence; bugs keep their traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import tiny
import yaml

from nalora.cli.failures import message_of
from nalora.errors import NALoRAError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"), "runs/x: found that the disk is full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "disk: found that the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "/root/x: found Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "found File name too long"),
        (NALoRAError("a", found="b", expected="c", fix="d"), "a: found b; expected c. Fix: d"),
        (ValueError("a bug"), None),
        (OSError("a library's own words"), None),
    ],
)
def test_messages(error, expected):
    message = message_of(error)
    assert message is None if expected is None else expected in message


ON_A_SMALL_DISK = """
mount -t tmpfs none small -o size=SIZEk
"$PYTHON" -m nalora.cli train run.yaml output=small/run
echo "code $?"
mount -t tmpfs none small -o remount,size=64m
"$PYTHON" -m nalora.cli train run.yaml output=small/run RESUME
echo "code $?"
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting a file system needs root or user namespaces",
)
@pytest.mark.parametrize(
    ("size", "resume"),
    [
        pytest.param(4, "", id="at the start"),
        pytest.param(400, "--resume", id="on the way", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_one_sentence_and_the_run_can_be_resumed(tmp_path, size, resume):
    model = tiny.saved_llama(tmp_path / "base")
    (tmp_path / "small").mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({
        "model": model, "task": "gym/chain_sum", "train_size": 20, "test_size": 4, "steps": 12, "batch_size": 4,
        "save_every": 1, "log_every": 1, "device": "cpu", "rank": 16, "snapshot_every": 1,
    }))  # fmt: skip
    script = ON_A_SMALL_DISK.replace("SIZE", str(size)).replace("RESUME", resume)
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script + 'cat small/run/result.json; cp -r small/run whole'],
        cwd=tmp_path, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("nalora: ")]
    assert "the disk is full" in line or "No space left" in line
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 2", "code 0"], done.stderr
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["steps"] == 12
