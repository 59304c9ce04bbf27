"""The built wheel in an empty environment: from a JSONL file to an answer, as the README's first page does it."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
import tiny
import wheels

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment with the wheel and its extra `train`, and the tests' torch."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = wheels.build(folder)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    for requirement in ("torch", f"{wheel}[train]"):
        subprocess.run([*pip, requirement], check=True, capture_output=True, text=True, timeout=900)
    subprocess.run([python, "-m", "pip", "check"], check=True, capture_output=True, text=True)
    return folder / "env" / "bin" / "nalora"


@pytest.mark.slow
def test_from_a_data_file_to_a_chat(environment, tmp_path):
    model = tiny.saved_llama(tmp_path / "base")
    rows = [{"question": f"{a} plus {b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def nalora(*arguments: str, typed: str = "") -> str:
        done = subprocess.run(
            [environment, *arguments],
            input=typed,
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stdout[-1500:], done.stderr[-1500:])
        return done.stdout

    assert "question/answer" in nalora("data", "sums.jsonl", "--model", model)
    settings = [f"model={model}", "task=sums.jsonl", "output=mine", "steps=3", "max_new_tokens=4"]
    (tmp_path / "run.yaml").write_text("batch_size: 4\nlearning_rate: 0.001\n")
    assert "sums.jsonl" in nalora("train", "run.yaml", *settings, "--dry-run")
    assert not (tmp_path / "mine").exists()
    nalora("train", "run.yaml", *settings)
    assert "adapted" in nalora("evaluate", "mine")
    assert "plus" in nalora("show", "mine")
    assert nalora("chat", "mine", "--max-tokens", "4", typed="1 plus 1?\n").strip()
    nalora("export", "mine", "--to", "merged", "--output", "merged")
    assert (tmp_path / "merged" / "config.json").is_file()
    assert nalora("chat", "./merged", "--max-tokens", "4", typed="1 plus 1?\n").strip()
