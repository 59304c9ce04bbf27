"""`nalora report` with --figures, --paper-figures and --tables: files in place of the page, one path a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path):
    """A run with a loss and a diagnosis of one interval, and nothing else."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.yaml").write_text("method: lora\nmodel: tiny\ntask: sums\nseed: 0\n")
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 2 / i}) + "\n" for i in (1, 2, 3)))
    (path / "result.json").write_text(json.dumps({"steps": 3, "seconds": 6.0, "train_loss": 1.2}))
    measures = {"flip": [0.1, 0.2], "kappa_drift": [0.5, 0.6], "suppressive": [0.1, 0.1]}
    blocks = [{"name": f"layers.{i}.mlp", "activation": "silu", "lower": -1.28, "upper": 1.28} for i in range(2)]
    diagnosis = {"version": 1, "blocks": blocks, "steps": [0, 3], "intervals": [{"from": 0, "to": 3} | measures]}
    (path / "diagnosis.json").write_text(json.dumps(diagnosis))
    return path


def test_figures(report, folder, tmp_path):
    code, out, err = report(folder, "--figures", tmp_path / "f")
    assert code == 0
    files = [Path(line) for line in out.splitlines()]
    assert {file.stem for file in files} == {"loss", "diagnostics-over-training", "diagnostics-by-layer"}
    assert all(file.is_file() for file in files)
    assert "run-kappa was not drawn: the diagnosis has no histogram" in err
    assert not (folder / "report.html").exists()


def test_the_papers_figures(report, folder, tmp_path):
    code, out, err = report(folder, "--paper-figures", tmp_path / "p")
    assert (code, err) == (0, "")
    assert sorted(Path(line).name for line in out.splitlines()) == [
        f"diagnostics-{name}.{kind}" for name in ("by-layer", "over-training") for kind in ("png", "svg")
    ]


def test_tables(report, folder, tmp_path):
    code, out, _ = report(folder, "--tables", tmp_path / "t")
    assert code == 0
    assert [Path(line).name for line in out.splitlines()] == ["tables.md", "tables.tex"]
    text = (tmp_path / "t" / "tables.md").read_text()
    assert "| lora | 2.000 |" in text
    assert "| lora | 0.1500 | 0.5500 | 0.1000 |" in text


def test_the_page_is_written_too_where_it_is_requested(report, folder, tmp_path):
    code, out, _ = report(folder, "--tables", tmp_path / "t", "--output", tmp_path / "page.html")
    assert code == 0
    assert (tmp_path / "page.html").is_file()
    assert "page.html" in out


@pytest.mark.parametrize("option", ["--figures", "--paper-figures"])
def test_a_study_has_none_of_these(report, tmp_path, option):
    (tmp_path / "study.yaml").write_text("name: some\n")
    code, _, err = report(tmp_path / "study.yaml", option, tmp_path / "f")
    assert code == 2
    assert "leave them out" in " ".join(err.split())


def test_nothing_to_draw_is_reported_and_no_folder_made(report, tmp_path):
    (tmp_path / "run.yaml").write_text("method: lora\n")
    code, out, err = report(tmp_path, "--paper-figures", tmp_path / "p")
    assert (code, out) == (1, "")
    assert "No diagnosis yet" in err
    assert not (tmp_path / "p").exists()


def test_no_run_is_one_line(report, tmp_path):
    code, _, err = report(tmp_path / "nowhere", "--figures", tmp_path / "f")
    assert code == 2
    assert "no such folder" in err


@pytest.mark.parametrize("option", ["--figures", "--paper-figures"])
def test_a_folder_that_is_a_symbolic_link_is_refused(report, folder, tmp_path, option):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    code, _, err = report(folder, option, tmp_path / "link")
    assert code == 2
    assert "link: found a symbolic link; expected a folder. Fix: give the folder that it points to" in err
    assert list((tmp_path / "theirs").iterdir()) == []
