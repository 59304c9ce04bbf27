"""Data files are a task like any other for every command: train, evaluate, diagnose and report."""

from __future__ import annotations

import json

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
