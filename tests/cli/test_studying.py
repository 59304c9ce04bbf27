"""`nalora study` as a user types it: a small real model is trained, chosen, evaluated and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiny
import yaml
from rich.console import Console

from nalora.cli.studying import states
from nalora.report.tables import escape_markdown
from nalora.runs.marker import MARKER
from nalora.studies import conduct
from nalora.studies.conduct import Progress
from nalora.studies.schedule import Schedule
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result, Store
from nalora.studies.study import parse


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    described = {
        "settings": {
            "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 6,
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "rank": 4, "steps": 3,
            "batch_size": 4, "device": "cpu", "max_new_tokens": 4,
        },
        "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora", "apply_to": "update"}},
        "learning_rates": [1e-3, 1e-2], "validation_size": 8, "seeds": [0, 1],
    }  # fmt: skip
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return path


def test_a_study_from_its_file_to_its_answer(run, file, tmp_path):
    store = tmp_path / "store"
    command = ["study", file, "--store", store, "--workers", 2]
    _, planned, _ = run(*command, "--dry-run")
    assert "6 runs in all" in planned
    assert not store.exists()
    code, out, err = run(*command)
    assert code == 0, out + err
    runs = [Store(store).result(folder.name) for folder in store.iterdir() if folder.is_dir()]
    assert len(runs) == 6
    finished = [line for line in out.splitlines() if "): done; " in line]
    assert len(finished) == 6, "a line per run where there is no terminal"
    assert "6 of 6 runs done" in finished[-1]
    assert all(each.has(VALIDATION) for each in runs)
    assert sum(each.has(TEST) and each.has(ANSWERS) for each in runs) == 4, "the test set is for the chosen runs alone"
    (part,) = json.loads((store / "small.json").read_text())
    assert set(part["values"]) == {"lora", "na-lora"}
    assert part["measures"][0] == "test loss"
    assert all(len(seeds) == 2 for cells in part["values"].values() for seeds in cells)
    assert len(part["sentences"]) == len(part["measures"])
    stamps = {file: file.stat().st_mtime_ns for file in store.rglob("result.json")}
    assert run(*command)[0] == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in store.rglob("result.json")}
    runs_left, gpu_hours = run(*command, "--dry-run")[1].splitlines()
    assert runs_left == "6 runs in all, 0 of them can start now, 2 arms"
    assert gpu_hours.startswith("GPU hours: not estimated, because no step of ")


def test_weights_that_are_not_there_are_missed_before_the_first_run(run, file, tmp_path):
    described = yaml.safe_load(file.read_text())
    described["settings"] |= {"model": str(tmp_path / "nowhere.gguf")}
    file.write_text(yaml.safe_dump(described, sort_keys=False))
    code, _, err = run("study", file, "--store", tmp_path / "store")
    assert code == 2
    assert "nowhere.gguf: found no such file" in " ".join(err.split())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_too_few_rows_for_the_held_out_ones_are_missed_before_the_first_run(run, file, tmp_path, options):
    rows = "".join(json.dumps({"prompt": f"{n} + 1", "completion": str(n + 1)}) + "\n" for n in range(40))
    (tmp_path / "sums.jsonl").write_text(rows)
    described = yaml.safe_load(file.read_text())
    for name in ("settings", "train_size", "test_size"):
        del described["settings"][name]
    file.write_text(yaml.safe_dump(described | {
        "settings": described["settings"] | {"task": str(tmp_path / "sums.jsonl")}, "validation_size": 200
    }))  # fmt: skip
    code, out, err = run("study", file, "--store", tmp_path / "store", *options)
    assert (code, out) == (2, "")
    assert "validation_size: 200: found 38 training examples" in err
    assert not (tmp_path / "store").exists()


def test_data_that_is_not_there_is_missed_before_the_first_run(run, file, tmp_path):
    described = yaml.safe_load(file.read_text())
    described["settings"] |= {"data_dir": str(tmp_path / "nowhere")}
    file.write_text(yaml.safe_dump(described, sort_keys=False))
    code, _, err = run("study", file, "--store", tmp_path / "store")
    assert code == 2
    assert "nowhere: found no such folder" in " ".join(err.split())
    assert not (tmp_path / "store").exists()


def test_a_dry_run_refuses_what_a_start_would_refuse(run, file, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine.txt").write_text("mine")
    code, _, err = run("study", file, "--store", tmp_path / "store", "--dry-run")
    assert code == 2
    assert "--store" in err
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["mine.txt"]


def has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_study_that_is_stopped_keeps_half_a_run(file, tmp_path, number):
    """Stopped in the middle of its only run, the study continues and results in the same adapter.

    The signal reaches the study and its workers, as from a terminal or a service manager.
    """
    described = yaml.safe_load(file.read_text()) | {"learning_rates": [1e-3], "seeds": [0], "generate": "none"}
    described["settings"] |= {"steps": 400, "log_every": 1}
    described["arms"] = {"lora": {"method": "lora"}}
    file.write_text(yaml.safe_dump(described, sort_keys=False))

    def start(store):
        command = [sys.executable, "-m", "nalora.cli", "study", str(file), "--store", str(store)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, start_new_session=True, **pipes)

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    study = start(stopped)
    while not any(len(metrics.read_text().splitlines()) > 20 for metrics in stopped.glob("*/metrics.jsonl")):
        assert study.poll() is None
        time.sleep(0.05)
    os.killpg(study.pid, number)
    printed, _ = study.communicate(timeout=60)
    assert study.returncode == 128 + number
    latest = time.monotonic() + 10  # Python's own tracker of shared resources ends a moment after the study
    while has_processes(study.pid):
        assert time.monotonic() < latest, "a worker is left"
        time.sleep(0.1)
    assert printed.splitlines()[-1] == "Stopped; start the study again to continue."
    assert list(stopped.glob("*/checkpoints/checkpoint-*"))
    assert not list(stopped.glob("*/result.json"))
    for store in (stopped, whole):
        assert start(store).wait(timeout=120) == 0
    (kept,), (expected,) = (list(store.glob("*/adapter/adapter_model.safetensors")) for store in (stopped, whole))
    assert kept.read_bytes() == expected.read_bytes()


def test_the_answer_so_far_is_printed_without_a_run(run, file, tmp_path):
    store = tmp_path / "store"
    code, _, err = run("study", file, "--store", store, "--so-far")
    assert code != 0
    assert "a store of runs" in err
    store.mkdir()
    _, printed, _ = run("study", file, "--store", store, "--so-far")
    assert "| lora | 0.001: –, 0.01: – |" in printed
    assert {each.name for each in store.iterdir()} == {"small.md", "small.json", MARKER}
    (store / "small.md").write_text("# my own notes")
    assert "a file that is not an answer written by nalora" in run("study", file, "--store", store, "--so-far")[2]
    assert (store / "small.md").read_text() == "# my own notes"


def test_a_study_that_cannot_run_is_refused_and_starts_nothing(run, file, tmp_path):
    described = yaml.safe_load(file.read_text())
    described["arms"]["lorra"] = {"method": "lorra"}
    file.write_text(yaml.safe_dump(described))
    code, _, err = run("study", file, "--store", tmp_path / "store")
    assert code == 2
    assert "did you mean lora" in err
    assert not (tmp_path / "store").exists()


def test_without_scipy_it_is_refused_before_any_run(run, file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    (tmp_path / "store").mkdir()
    for more in ((), ("--so-far",)):
        code, _, err = run("study", file, "--store", tmp_path / "store", *more)
        assert code == 2
        assert "found no package scipy; expected the package scipy" in err
    assert not list((tmp_path / "store").iterdir())


def test_a_store_that_cannot_be_written_to_is_named_before_anything_starts(run, file, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for store in (taken, taken / "below"):
        code, _, err = run("study", file, "--store", store)
        assert code == 2
        assert f"{store}: found {'a file' if store == taken else 'that it cannot be written to'}" in err
    assert taken.read_text() == "a file"


def test_a_study_with_failed_runs_prints_everything_and_exits_with_1(run, file, tmp_path, monkeypatch):
    def ended(described, store, engine, **options):
        schedule = Schedule(described, str(store))
        lost = schedule.screening(schedule.cells[0])[0].key
        return Progress(schedule, {}, {lost: "[/x] out of memory", "0123": "of an arm that is no more"})

    monkeypatch.setattr(conduct, "conduct", ended)
    store = tmp_path / "store"
    code, out, _ = run("study", file, "--store", store)
    assert code == 1
    printed = " ".join(out.split())
    assert "Missing: lora, lr 0.001, seed 0 (" in printed
    assert "): [/x] out of memory (see " in printed
    assert "start the study again with --retry-failed" in printed
    assert "0123" not in out
    assert (store / "small.md").is_file()
    assert "Exits with 1 if runs are missing" in " ".join(run("study", "--help")[1].split())


@pytest.mark.parametrize("name", ["[/x]", "[red]", ":x:"])
def test_an_arm_s_name_is_shown_as_it_is(run, file, tmp_path, name):
    described = yaml.safe_load(file.read_text())
    described["arms"] = {name: {"method": "lora"}}
    file.write_text(yaml.safe_dump(described, sort_keys=False))
    store = tmp_path / "store"
    store.mkdir()
    assert f"{name}, lr 0.001, seed 0" in run("study", file, "--store", store, "--dry-run")[1]
    code, printed, _ = run("study", file, "--store", store, "--so-far")
    assert code == 0
    assert f"Not complete: {escape_markdown(name)}." in printed
    assert name in shown(Progress(Schedule(parse(described), "store"), {}))


def shown(progress):
    """The live table as a terminal shows it."""
    screen = Console(width=120)
    with screen.capture() as captured:
        screen.print(states(progress))
    return captured.get()


def test_the_live_table_counts_every_arm_s_runs_and_estimates_the_time_left(file, monkeypatch):
    schedule = Schedule(parse(yaml.safe_load(file.read_text())), "store")
    lora, na_lora = schedule.cells
    first, second = schedule.screening(lora)
    third, fourth = schedule.screening(na_lora)
    progress = Progress(schedule, {}, began=100.0, total=schedule.total({}))
    monkeypatch.setattr(conduct, "time", SimpleNamespace(monotonic=lambda: 220.0))
    assert "0 of 6 runs" in shown(progress)
    assert "left" not in shown(progress), "nothing is known of the pace before a run has ended"

    progress.results = {
        first.key: Result(1.0, {VALIDATION: 2.0}, {}, 1.0),
        second.key: Result(1.0, {VALIDATION: 1.0}, {}, 1.0),
    }
    progress.failed = {third.key: "died"}
    progress.running = {fourth.key: fourth}
    rows = {line.split()[0]: line.split()[1:] for line in shown(progress).splitlines() if "lora" in line}
    assert rows == {"lora": ["2", "0", "0", "0.01"], "na-lora": ["0", "1", "1", "screening"]}
    # Two runs took 120 s, and three are left: six less the two that are done and the one that failed.
    assert progress.seconds_left == 180.0
    assert "2 of 6 runs, about 3 min left" in shown(progress)

    progress.stopping = True
    assert "2 of 6 runs; stopping, press Ctrl-C again to stop without waiting" in " ".join(shown(progress).split())
