"""`nalora suggest` as a user types it: a small real model is trained shortly, and a rate is suggested with evidence."""

from __future__ import annotations

import json
import shlex
from functools import partial

import pytest
import tiny
import yaml
from figure_files import check_files
from studies.dummies import Attempting

from nalora.errors import NALoRAError
from nalora.runs.folder import RunFolder
from nalora.studies import engines, suggest
from nalora.studies.rate_evidence import known


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture
def file(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    described = {
        "model": base, "task": "gym/chain_sum", "train_size": 48, "test_size": 4, "steps": 20, "batch_size": 8,
        "device": "cpu", "max_length": 128, "learning_rate": 0.5, "warmup": 0.0,
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(described))
    return "mine.yaml"


@pytest.fixture
def here(monkeypatch):
    """Short runs in this process, which saves the start of another; the engines that were made."""
    made = []

    def engine(workers, per_gpu, do):
        made.append(Attempting(do))
        return made[-1]

    monkeypatch.setattr(engines, "LocalEngine", engine)
    return made


def words(text):
    return " ".join(text.split())


def test_from_a_run_s_file_to_a_rate_and_the_command_that_trains_with_it(run, file, tmp_path):
    """With a worker process, as users have it; a folder that was given, and a rerun that trains nothing."""
    command = ["suggest", file, "rank=4", "--steps", 12, "--rates", "1e-5,1e-2,3e-2", "--output", "rates"]
    code, out, err = run(*command)
    assert code == 0, out + err
    assert "LoRA of" in out
    assert "3 short runs of 12 steps: 36 steps, 180 % of one full run" in out
    assert "mean loss of steps 3 to 12" in out
    folder = tmp_path / "rates"
    found = json.loads((folder / "suggestion.json").read_text())
    losses = {row["learning_rate"]: row["loss"] for row in found["rates"]}
    best = min(losses, key=losses.get)
    assert found["suggested_rate"] == best > 1e-5
    assert f"Start with {best:g}:" in out
    row = next(line for line in out.splitlines() if "← suggested" in line)
    assert row.split()[:2] == [f"{best:g}", f"{losses[best]:.4f}"]
    assert found["commands"]["train"] == f"nalora train mine.yaml rank=4 learning_rate={best:g}"
    assert f"  {found['commands']['train']}" in out.splitlines()
    for sentence in known().sentences():
        assert sentence in out
    assert "nothing is known about 12 steps" in out
    passes = found["passes_over_the_data"]
    assert passes > 2
    assert f"12 steps of this run pass {passes:.1f} times over its data" in out
    check_files([folder / "suggestion.png", folder / "suggestion.svg"], ["learning rate", f"{best:g}"])
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    assert len(stamps) == 3
    code, again, _ = run(*command)
    assert code == 0
    assert "3 of them finished before" in again
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    assert again.partition("Start with")[2] == out.partition("Start with")[2]


def test_the_command_that_it_prints_trains_the_run(run, file, here, tmp_path):
    code, out, _ = run("suggest", file, "--steps", 12, "--rates", "1e-4,3e-2", "output=runs/whole")
    assert code == 0
    folder = tmp_path / "runs" / "whole-suggest"
    command = shlex.split(json.loads((folder / "suggestion.json").read_text())["commands"]["train"])
    code, out, err = run(*command[1:], "log_every=1")
    assert code == 0, out + err
    rate = float(command[-1].partition("=")[2])
    short = next(row for row in json.loads((folder / "suggestion.json").read_text())["rates"] if
                 row["learning_rate"] == rate)  # fmt: skip
    rows = [json.loads(line) for line in RunFolder("runs/whole").metrics.read_text().splitlines()]
    assert short["losses"] == [row["loss"] for row in rows[2:12]]


def test_the_command_writes_to_a_new_folder_if_that_of_the_run_is_used(run, file, here, tmp_path):
    command = ["suggest", file, "output=runs/whole", "--steps", 12, "--rates", "1e-3,1e-2,2e-2", "--output", "rates"]
    (tmp_path / "runs" / "whole").mkdir(parents=True)
    assert run(*command)[0] == 0

    def suggested():
        return json.loads((tmp_path / "rates" / "suggestion.json").read_text())["commands"]

    first = shlex.split(suggested()["train"])
    assert "output=runs/whole" in first, "which is empty"
    assert run(*first[1:])[0] == 0
    assert run(*command)[0] == 0
    second = shlex.split(suggested()["train"])
    rate = first[-1].removeprefix("learning_rate=")
    assert [word for word in second if word.startswith("output=")] == [f"output=runs/whole-lr{rate}"]
    assert run(*second[1:])[0] == 0
    assert run(*command)[0] == 0
    assert shlex.split(suggested()["train"])[-1] == f"output=runs/whole-lr{rate}-2"


def test_short_runs_are_not_in_the_folder_of_the_run(run, file, here, tmp_path):
    """A slash at its end, as a shell completes it, does not put them inside: the run could not be written there."""
    code, out, err = run("suggest", file, "output=runs/mine/", "--steps", 2, "--rates", "1e-5,1e-3")
    assert code == 0, out + err
    assert not (tmp_path / "runs" / "mine").exists()
    assert (tmp_path / "runs" / "mine-suggest" / "suggestion.json").is_file()


def test_a_pick_at_the_end_of_the_grid_comes_with_the_command_that_extends_it(run, file, here, tmp_path):
    code, out, _ = run("suggest", file, "--steps", 12, "--rates", "1e-4,1e-3,1e-2", "--output", "rates")
    assert code == 0
    assert "This is the highest rate that was tried, and a higher one may be better." in out
    assert "If you can afford another run" not in out
    (command,) = [line.strip() for line in out.splitlines() if line.startswith("  nalora suggest")]
    assert command == ("nalora suggest mine.yaml --rates 0.0001,0.001,0.01,0.1,1 --steps 12 --output rates")
    assert run(*shlex.split(command)[1:])[0] == 0
    assert [len(engine.submitted) for engine in here] == [3, 2], "finished short runs are not repeated"


def test_stopped_after_the_first_run_it_continues_with_the_others(run, file, monkeypatch):
    class Stopped(Attempting):
        def wait(self, seconds):
            if len(self.submitted) > 1:
                raise KeyboardInterrupt
            return super().wait(seconds)

        def has_room(self):
            return not self.ended

    made = []

    def engine(kind, workers, per_gpu, do):
        made.append(kind(do))
        return made[-1]

    command = ["suggest", file, "--steps", 4, "--rates", "1e-4,1e-3,1e-2", "--output", "rates"]
    monkeypatch.setattr(engines, "LocalEngine", partial(engine, Stopped))
    code, out, _ = run(*command)
    assert code == 130
    assert "Stopped; start the same command again to continue." in out
    monkeypatch.setattr(engines, "LocalEngine", partial(engine, Attempting))
    assert run(*command)[0] == 0
    assert len(made[1].submitted) < 3
    assert len({*made[0].submitted, *made[1].submitted}) == 3


def test_rates_that_all_diverge_are_no_suggestion(run, file, here, tmp_path):
    settings = ["method=full", "max_norm=0", "optimizer=sgd"]
    code, out, err = run("suggest", file, *settings, "--steps", 8, "--rates", "1e25,1e30", "--output", "rates")
    assert code == 0, err
    assert out.count("diverged at step") == 2
    assert "No suggestion: all rates diverged: give lower ones." in out
    assert "Start with" not in out
    found = json.loads((tmp_path / "rates" / "suggestion.json").read_text())
    assert (found["suggested_rate"], found["commands"]) == (None, {})
    assert "all rates diverged" in found["why_none"]


def test_a_short_run_that_fails_is_named_and_there_is_no_suggestion(run, file, here, monkeypatch, tmp_path):
    def work(job):
        raise NALoRAError("machine", found="a broken one", expected="another", fix="mend it")

    monkeypatch.setattr(suggest, "work", work)
    code, out, _ = run("suggest", file, "--steps", 4, "--rates", "1e-4,1e-3", "--output", "rates")
    assert code == 1
    assert out.count("Fix: mend it (see rates/runs/") == 2
    assert "No suggestion: fix the cause and start the same command again." in out
    assert not (tmp_path / "rates" / "suggestion.json").exists()


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(run, file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run("suggest", file, "--steps", 5, "--dry-run")
    assert code == 0
    assert "a run of 20 steps" in out
    assert "7 short runs of 5 steps: 35 steps, 175 % of one full run" in out
    assert "Learning rates: 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016" in out
    assert "Folder: runs/mine-suggest" in out
    assert "GPU hours: not estimated, because no step of" in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["learning_rate=1e-3"], "learning_rate on the command line: found a rate for the run"),
        (["stop_after=4"], "stop_after: 4: found a run that stops early itself"),
        (["--steps", "20"], "--steps 20: found a run of 20 steps; expected fewer steps"),
        (["steps=", "epochs=1", "--steps", "6"], "--steps 6: found a run of 5 steps; expected fewer steps"),
        (["--rates", ""], "--rates: found ''; expected two or more different positive numbers"),
        (["--rates", "1e-3"], "--rates: found '1e-3'; expected two or more different positive numbers"),
        (["optimizer=sgd"], "optimizer: sgd: found no default learning rates"),
        (["target_modules=[nowhere]", "--steps", "2"], "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(run, file, tmp_path, arguments, expected):
    code, out, err = run("suggest", file, *arguments)
    assert code == 2
    assert expected in words(out + err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["notes.txt", "runs/notes.txt", "suggestion.json", "suggestion.svg"])
def test_a_folder_with_files_of_others_is_refused(run, file, tmp_path, name):
    place = tmp_path / "rates"
    if name.startswith(("runs", "suggestion")):  # in a folder that nalora made
        suggest.claim(place)
        (place / "runs" / ".nalora.json").unlink()
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text("mine")
    code, _, err = run("suggest", file, "--steps", 5, "--output", "rates")
    assert code == 2
    assert "--output" in err or "folder" in err
    assert (place / name).read_text() == "mine"
    assert run("train", file, "output=rates")[0] == 2, "nor does a run start there"
