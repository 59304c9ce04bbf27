"""Data files are a task like any other for every command: train, evaluate, diagnose and report."""

from __future__ import annotations

import json
import re

import pytest
import tiny
import yaml


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tiny.saved_llama(tmp_path / "base")


def written(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return file.name


def test_arithmetic_is_trained_on_evaluated_diagnosed_and_reported(run, model, tmp_path):
    """The columns are those of SVAMP."""
    sums = [{"Body": f"Tom has {n} apples.", "Question": f"{n} + 1 =", "Answer": n + 1.0} for n in range(40)]
    file = written(tmp_path / "sums.jsonl", sums)
    settings = {"model": model, "task": file, "output": "run", "steps": 2, "batch_size": 4, "max_new_tokens": 3,
                "max_length": 64, "snapshot_every": 1, "device": "cpu", "learning_rate": 1e-2}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    for command in (["train", "run.yaml"], ["evaluate", "run"], ["diagnose", "run", "--probe-size", 6]):
        code, out, err = run(*command)
        assert code == 0, out + err
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert (diagnosis["probe"]["task"], diagnosis["probe"]["examples"]) == ("sums.jsonl", 6)
    code, out, err = run("report", "run")
    assert code == 0, out + err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "sums.jsonl" in page
    (summary,) = (tmp_path / "run" / "evaluations" / "sums.jsonl").glob("adapted-*/summary.json")
    assert [*json.loads(summary.read_text())["measures"]] == ["number"]


def test_a_run_says_when_it_does_not_train_on_all_rows(run, model, tmp_path):
    rows = [{"question": f"{n} + 1 =", "answer": f"{n + 1}" * (40 if n % 10 == 0 else 1)} for n in range(40)]
    task = written(tmp_path / "sums.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"model: {model}\ntask: {task}\nmax_length: 64\nbatch_size: 4\ndevice: cpu\ntest_share: 0.2\n"
    )
    code, out, err = run("train", "run.yaml", "steps=2", "output=short")
    assert code == 0, out + err
    left_out = json.loads((tmp_path / "short" / "result.json").read_text())["dropped_too_long"]
    assert left_out
    assert f"longer than max_length: 64: {left_out} example" in out
    assert "raise max_length" in out
    passes = r"0\.\d+ passes over the data: raise steps, or set epochs"
    assert re.search(passes, out)
    assert re.search(passes, run("train", "run.yaml", "steps=2", "output=dry", "--dry-run")[1])
    code, out, _ = run("train", "run.yaml", "max_length=512", "output=all")
    assert code == 0, out
    assert "passes over" not in out
    assert "longer than" not in out
