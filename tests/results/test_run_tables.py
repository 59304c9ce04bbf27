"""The tables in results/ hold everything that a store of finished runs does."""

from __future__ import annotations

import csv
import importlib
import json
import lzma
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from nalora.studies.schedule import Schedule
from nalora.studies.store import Store
from nalora.studies.study import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
# Three runs of the store from which the first tables were made: the parsed content of every file.
SAMPLE = json.loads(Path(__file__).with_name("sample.json").read_text(encoding="utf-8"))
TABLES = ("runs.csv", "evaluations.csv", "curves.csv.xz")


def content(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)


def contents(folder):
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): content(file) for file in files}


def uncompressed(file):
    return lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()


def spelled(value):
    """With the type of every number: 1 is not 1.0."""
    return json.dumps(value, sort_keys=True)


def collect(store, results):
    return importlib.import_module("collect").collect(store, results)


def restore(results, store):
    return importlib.import_module("restore").restore(results, store)


@pytest.mark.parametrize("key", SAMPLE)
def test_a_restored_run_has_the_files_of_the_original(store, key):
    assert spelled(contents(store / key)) == spelled(SAMPLE[key])


def test_collecting_the_restored_store_gives_the_same_tables(store, tmp_path):
    collect(store, tmp_path)
    tables = [file.relative_to(RESULTS) for name in TABLES for file in RESULTS.glob(f"*/{name}")]
    assert len(tables) >= 18
    # Another version of xz may compress the same text to other bytes.
    assert [table for table in tables if uncompressed(RESULTS / table) != uncompressed(tmp_path / table)] == []


def test_the_restored_store_has_every_run_under_its_key(store):
    """A study looks for its runs by these keys, and the finished studies have nothing left to train."""
    assert len(list(store.glob("*/result.json"))) >= 644
    runs = Store(store)
    for name in ("gsm8k", "caesar", "judgement", "long"):
        schedule = Schedule(read(ROOT / "studies" / f"{name}.yaml"), str(store))
        jobs = [job for cell in schedule.cells for job in schedule.screening(cell)]
        assert jobs
        assert [job.label for job in jobs if runs.result(job.key) is None] == []


def test_results_in_git_are_small():
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    files = [ROOT / name for name in listed.stdout.splitlines()]
    assert len([file for file in files if file.suffix != ".py"]) <= 60  # scripts are not results
    assert sum(file.stat().st_size for file in files if file.is_file()) < 6e6


def run_folder(store, key, study="sums", loss=0.5, **settings):
    """A run as a store has it, with every kind of value that a cell must not confuse."""
    folder = store / key
    evaluation = folder / "evaluations" / "gym" / "sums-validation" / "adapted-1"
    evaluation.mkdir(parents=True, exist_ok=True)
    settings = {"method": "lora", "output": str(folder), "steps": None, "rank": 8, "alpha": 16.0, **settings}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    environment = {"command": f"nalora study studies/{study}.yaml --store {store} --per-gpu 4", "versions": {"a": "1"}}
    (folder / "environment.json").write_text(json.dumps({**environment, "working_directory": str(store)}))
    (folder / "result.json").write_text(json.dumps({"train_loss": None, "diverged": True}))
    rows = [{"step": 1, "loss": loss}, {"step": 2, "loss": None, "nalora/a": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (evaluation / "losses.json").write_text(json.dumps({"target_loss": {"value": loss}, "chance": {"a b": 0.1}}))
    return folder


TEXTS = {"empty": "", "number": "1e-3", "null": "null", "list": ["a", 1], "mapping": {"a.b": None}, "comma": 'a, "b"\n'}


def test_values_keep_their_types(tmp_path):
    folder = run_folder(tmp_path / "store", "a" * 16, **TEXTS)
    collect(tmp_path / "store", tmp_path / "results")
    assert restore(tmp_path / "results", tmp_path / "restored") == 1
    original, restored = contents(folder), contents(tmp_path / "restored" / folder.name)
    original["run.yaml"]["output"] = f"runs/{folder.name}"
    original["environment.json"]["command"] = "nalora study studies/sums.yaml --store results/store --per-gpu 4"
    del original["environment.json"]["working_directory"]
    assert spelled(restored) == spelled(original)


def test_a_new_run_adds_lines_and_leaves_other_studies_alone(tmp_path):
    store, results = tmp_path / "store", tmp_path / "results"
    for key, study in (("1" * 16, "sums"), ("3" * 16, "sums"), ("4" * 16, "words")):
        run_folder(store, key, study)
    collect(store, results)
    assert collect(store, results) == []
    kept = (results / "sums" / "runs.csv").read_text().splitlines()
    shutil.rmtree(store)
    run_folder(store, "2" * 16)
    assert {file.parent.name for file in collect(store, results)} == {"sums"}
    added = (results / "sums" / "runs.csv").read_text().splitlines()
    assert [line for line in added if line in kept] == kept
    assert [line[:16] for line in added[1:]] == ["1" * 16, "2" * 16, "3" * 16]


def test_what_is_in_a_store_already_is_not_touched(tmp_path):
    store = tmp_path / "store"
    Store(store).claim()
    run_folder(store, "1" * 16)
    collect(store, tmp_path / "results")
    run_folder(store, "1" * 16, loss=0.25)
    before = contents(store / ("1" * 16))
    assert restore(tmp_path / "results", store) == 0
    assert contents(store / ("1" * 16)) == before


def test_a_run_trained_again_replaces_the_earlier_one_whose_losses_are_kept(tmp_path):
    for loss in (0.5, 0.7, 0.7):
        run_folder(tmp_path / f"store {loss}", "1" * 16, loss=loss)
        collect(tmp_path / f"store {loss}", tmp_path / "results")
    (line,) = (tmp_path / "results" / "repeats.jsonl").read_text().splitlines()
    assert json.loads(line) == {"run": "1" * 16, "losses": {"gym/sums-validation": 0.5}}
    noise = importlib.import_module("tables.noise")
    text = " ".join(noise.repeats(noise.trainings(tmp_path / "results")))
    assert "1 run was trained again" in text
    assert "validation losses differ by 0.2000 (median of 1; at most 0.2000)." in text


def test_the_scripts_run_as_in_the_readme(tmp_path, monkeypatch):
    run_folder(tmp_path / "store", "1" * 16)
    scripts = tmp_path / "results"
    scripts.mkdir()
    for script, *arguments in (("collect.py", str(tmp_path / "store")), ("restore.py",)):
        shutil.copy(RESULTS / script, scripts)
        monkeypatch.setattr("sys.argv", [script, *arguments])
        runpy.run_path(str(scripts / script), run_name="__main__")
    assert (scripts / "store" / ("1" * 16) / "result.json").is_file()
    with (scripts / "sums" / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["method"], row["result.diverged"]) == ("1" * 16, "lora", "true")
