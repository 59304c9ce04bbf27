"""Files that released versions wrote are still read: runs, stores, states and run files.

`tests/released/make.py` made them. Only the command line and public names are used: modules may move.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
import yaml
from safetensors.torch import load_file

import nalora
from nalora.cli import main

RELEASES = sorted((Path(__file__).parent / "released").glob("v*"))


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def released(request) -> Path:
    return request.param


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: exit code and everything that it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        # Commands switch off logging and warnings for the whole process, and so for the tests that come later.
        for name, module in list(sys.modules.items()):
            if name.startswith("nalora.cli") and hasattr(module, "hush_libraries"):
                monkeypatch.setattr(module, "hush_libraries", lambda: None)
        monkeypatch.setattr(sys, "argv", ["nalora", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        printed = capsys.readouterr()
        return leaving.value.code or 0, printed.out + printed.err

    return run


@pytest.fixture
def project(released, tmp_path, monkeypatch) -> Path:
    """The folder in which a run was trained; the current folder is another one."""
    unpack(released / "run.tar.gz", tmp_path / "project")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "project"


def unpack(archive: Path, folder: Path) -> None:
    shutil.unpack_archive(archive, folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def assert_close(found, kept, where: str = "") -> None:
    """Everything that was kept is there; numbers may differ by rounding, times by anything."""
    if isinstance(kept, dict):
        for name in kept.keys() - {"seconds", "tokens_per_second", "cost"}:
            assert_close(found[name], kept[name], f"{where}.{name}")
    elif isinstance(kept, list):
        assert len(found) == len(kept), where
        for index, value in enumerate(kept):
            assert_close(found[index], value, f"{where}[{index}]")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-3, abs=1e-5), where
    else:
        assert found == kept, where


def test_a_finished_run_is_not_trained_again(command, project, monkeypatch):
    monkeypatch.chdir(project)
    before = contents(project)
    code, printed = command("train", "run.yaml", "--resume")
    assert code == 0, printed
    assert "already finished" in printed
    code, _ = command("train", "run.yaml")
    assert code == 2, "a new run must not replace the finished one"
    assert contents(project) == before


def test_an_unfinished_run_continues_to_the_same_adapter(command, project, monkeypatch):
    """From the checkpoint before the last step, with the optimizer's and the controller's state in it."""
    monkeypatch.chdir(project)
    kept = {name: rows(project / "run" / name) for name in ("metrics.jsonl", "gates.jsonl")}
    adapter = load_file(project / "run" / "adapter" / "adapter_model.safetensors")
    result = json.loads((project / "run" / "result.json").read_text())
    (project / "run" / "result.json").unlink()
    shutil.rmtree(project / "run" / "adapter")
    shutil.rmtree(project / "run" / "checkpoints" / "checkpoint-6")
    code, printed = command("train", "run.yaml", "--resume")
    assert code == 0, printed
    assert (project / "run" / "checkpoints" / "checkpoint-4").is_dir()
    trained = load_file(project / "run" / "adapter" / "adapter_model.safetensors")
    assert trained.keys() == adapter.keys()
    for name, tensor in adapter.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    metrics = rows(project / "run" / "metrics.jsonl")
    assert metrics[:4] == kept["metrics.jsonl"][:4], "trained again from the start: their times differ"
    assert_close(metrics, kept["metrics.jsonl"], "metrics.jsonl")
    assert_close(rows(project / "run" / "gates.jsonl"), kept["gates.jsonl"], "gates.jsonl")
    again = json.loads((project / "run" / "result.json").read_text())
    assert_close(again, result)


def test_its_evaluation_is_found(command, project):
    """Answers and losses are not computed again: summaries have the same numbers, outputs get question and scores."""

    def answers() -> dict[Path, tuple[int, bytes] | list]:
        files = sorted((project / "run" / "evaluations").rglob("*.jsonl"))
        kept = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files if file.stem != "outputs"}
        for file in (file for file in files if file.stem == "outputs"):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            kept[file] = sorted((row["id"], row["outputs"], row["tokens"], row["finished"]) for row in rows)
        return kept

    before = answers()
    summaries = {file: json.loads(file.read_text()) for file in (project / "run" / "evaluations").rglob("summary.json")}
    assert len(summaries) == 2
    code, printed = command("evaluate", project / "run")
    assert code == 0, printed
    assert answers() == before, "it was evaluated again"
    for file in before:
        if file.stem == "outputs":
            assert {"question", "expected", "scores"} <= json.loads(file.read_text().partition("\n")[0]).keys()
    for file, summary in summaries.items():
        assert str(file.parent) in printed
        assert_close(json.loads(file.read_text()), summary, file.parent.name)


def test_it_is_diagnosed_and_reported(command, project, monkeypatch):
    monkeypatch.chdir(project)
    code, printed = command("report", "run", "--output", "kept.html")
    assert code == 0, printed
    kept = json.loads((project / "run" / "diagnosis.json").read_text())
    (project / "run" / "diagnosis.json").unlink()
    code, printed = command("diagnose", "run", "--probe-size", 6)
    assert code == 0, printed
    assert_close(json.loads((project / "run" / "diagnosis.json").read_text()), kept)
    assert "sst2" in (project / "kept.html").read_text(encoding="utf-8")


def test_its_adapter_loads_with_peft(project):
    base = transformers.AutoModelForCausalLM.from_pretrained(project / "base").eval()
    ids = tiny.tokens()
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(base, project / "run" / "adapter").eval()(input_ids=ids).logits
    assert adapted.isfinite().all()
    assert not torch.allclose(before, adapted, atol=1e-4)


def results_in(answer):
    """The rows of its tables, and the numbers of its sentences; the rule by which rows are marked is left out.

    So are equal results, of which 0.1 wrote that they differ by +0 with an interval of +0 … +0.
    """
    answer = "\n".join(line for line in answer.splitlines() if "+0 … +0" not in line and "have the same" not in line)
    rows = [line.split() for line in answer.splitlines() if line.startswith("|")]
    rest = [part for part in answer.split("\n\n") if not part.startswith(("|", "Mean ±"))]
    return rows, re.findall(r"[-+]?\d+(?:\.\d+)?", "\n".join(rest))


def test_a_finished_study_has_nothing_left_to_do(command, released, tmp_path, monkeypatch):
    unpack(released / "store.tar.gz", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path / "store")
    runs = {name for name in before if "/" in name}
    assert sum(name.endswith("/result.json") for name in runs) == 6
    code, printed = command("study", "small.yaml", "--store", "store")
    assert code == 0, printed
    answer = json.loads((released / "expected.json").read_text(encoding="utf-8"))["answer"]
    assert results_in(printed) == results_in(answer)
    after = contents(tmp_path / "store")
    assert {name: after[name] for name in after if "/" in name} == {name: before[name] for name in runs}
    code, printed = command("report", "small.yaml", "--store", "store", "--output", "page.html")
    assert code == 0, printed


def test_a_controller_loads_its_state(released, tmp_path):
    recipe = json.loads((released / "state" / "recipe.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**recipe["model"]))
    model = peft.get_peft_model(model, peft.LoraConfig(**recipe["lora"])).train()
    optimizer = torch.optim.AdamW(tiny.trainable(model), lr=1e-2)
    given = recipe["nalora"]
    scales = {name: nalora.ProjectionScale(*given[name]) for name in ("gate", "up", "down")}
    config = nalora.NALoRAConfig(**given | scales | {"thresholds": tuple(given["thresholds"])})
    controller = nalora.attach(model, optimizer, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # settings that differ from those in the file are a warning
        controller.load(released / "state")
    controller.save(tmp_path)
    kept, loaded = (load_file(folder / "nalora_state.safetensors") for folder in (released / "state", tmp_path))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    assert any(tensor.ne(1).any() for tensor in kept.values())
    ids = tiny.tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    controller.save(tmp_path)
    stepped = load_file(tmp_path / "nalora_state.safetensors")
    assert any(not torch.equal(stepped[name], tensor) for name, tensor in kept.items())


def test_every_setting_is_understood_and_every_run_keeps_its_key(command, released, tmp_path):
    """Listing the runs of a study checks all their settings, loads nothing and trains nothing."""
    spec = importlib.util.spec_from_file_location("make", released.parent / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(make.study_of_run_files(released / "run_files"), sort_keys=False))
    expected = json.loads((released / "expected.json").read_text(encoding="utf-8"))["keys"]
    for file, name in ((study, "run_files"), (released / "every_study_setting.yaml", "every_study_setting.yaml")):
        code, printed = command("study", file, "--store", tmp_path / "none", "--dry-run")
        assert code == 0, printed
        assert re.findall(r"^[0-9a-f]{16}\b", printed, re.MULTILINE) == expected[name]


def test_every_run_file_is_read(command, released, tmp_path):
    """To resume a run that is not there is refused once the whole file was understood."""
    files = sorted((released / "run_files").glob("*.yaml"))
    assert len(files) == 11
    for file in files:
        code, printed = command("train", file, "--resume", f"output={tmp_path / 'none'}", "device=cpu", "report_to=")
        assert code == 2
        assert "no run" in printed, f"{file.name}: {printed}"
