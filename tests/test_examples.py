"""The scripts in examples/ run as they are, on a small model, and leave adapters that PEFT loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs_and_saves_an_adapter(script, tmp_path):
    pytest.importorskip("trl")
    model = tiny.saved_llama(tmp_path / "base")
    rows = [
        {"prompt": f"{a} plus {a} is", "completion": f" {2 * a}", "chosen": f" {2 * a}", "rejected": " no"}
        for a in range(8)
    ]
    if "dpo" not in script.stem:
        rows = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    else:
        rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [sys.executable, script, model, tmp_path / "data.jsonl", tmp_path / "adapter"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(torch.count_nonzero(weight) for name, weight in weights.items() if "lora_B" in name)


def test_the_readme_shows_the_plain_loop_as_it_is():
    code = (ROOT / "examples" / "plain_loop.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert code.rstrip() in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_is_short(script):
    assert len(script.read_text().splitlines()) < 40
