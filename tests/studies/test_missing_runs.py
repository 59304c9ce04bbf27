"""A run that failed has not diverged: it is repeated, then missing, and there is no verdict without it."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import dummies
import pytest
from dummies import Attempting, Instantly, pretend

import nalora
from nalora.studies.answer import answer, write
from nalora.studies.conduct import conduct, so_far
from nalora.studies.engines import LocalEngine
from nalora.studies.page import write_page
from nalora.studies.store import TEST, VALIDATION, Store

SEEDS = [0, 1, 2]


def study(**changes):
    return dummies.study(seeds=SEEDS, **changes)


def is_best(job, method="lora"):
    return job.settings["method"] == method and job.settings["learning_rate"] == dummies.BEST[method]


def count_starts(job):
    with (Path(job.store) / f"{job.key}.starts").open("a") as file:
        file.write("start\n")
    return len((Path(job.store) / f"{job.key}.starts").read_text().split())


def part_of(progress):
    (part,) = answer(progress.schedule, progress.results, progress.failed).parts
    return part


def crash_once(job):
    if count_starts(job) == 1 and is_best(job):
        raise RuntimeError("CUDA error: unspecified launch failure")
    pretend(job)


def test_a_run_that_crashed_is_repeated_and_the_verdict_is_the_same(tmp_path):
    whole = conduct(study(), tmp_path / "whole", Instantly())
    progress = conduct(study(), tmp_path, Attempting(crash_once))
    assert progress.failed == {}
    assert not (tmp_path / "dummy.failures.jsonl").exists()
    assert part_of(progress) == part_of(whole)


def kill_itself_once(job):
    if count_starts(job) == 1 and is_best(job) and job.settings["seed"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dummies.pretend_in_steps(job)


def test_a_killed_worker_changes_nothing(tmp_path):
    """A real worker, as the kernel kills one when memory runs out."""
    whole = conduct(study(), tmp_path / "whole", Instantly())
    progress = conduct(study(), tmp_path, LocalEngine(1, do=kill_itself_once))
    assert part_of(progress) == part_of(whole)
    lost = progress.schedule.job(progress.schedule.cells[0], dummies.BEST["lora"], 0)
    assert (tmp_path / f"{lost.key}.starts").read_text() == 3 * "start\n", "killed, repeated, and the test set later"


def crash_always(job):
    count_starts(job)
    if is_best(job) and job.settings["seed"] == 0:
        raise RuntimeError("the driver is gone")
    pretend(job)


def test_a_run_that_crashes_again_is_missing_and_its_arm_has_neither_rate_nor_verdict(tmp_path):
    progress = conduct(study(controls={"na-lora": ["lora"]}), tmp_path, Attempting(crash_always))
    (lost,) = progress.missing
    assert (lost.label, progress.failed) == ("lora, lr 0.001, seed 0", {lost.key: "RuntimeError: the driver is gone"})
    assert (tmp_path / f"{lost.key}.starts").read_text() == 2 * "start\n"
    part = part_of(progress)
    assert part.rates == {"lora": None, "na-lora": 3e-4}
    assert part.missing == ("lora",)
    assert not any(part.comparisons.values())
    assert not part.controls
    assert part.sentences == ["lora lacks 1 run that failed: na-lora not compared with lora."]
    write(answer(progress.schedule, progress.results, progress.failed), tmp_path)
    page = (tmp_path / "dummy.md").read_text()
    assert "Missing: lora, lr 0.001, seed 0 (RuntimeError: the driver is gone)." in page
    assert "--retry-failed" in page
    assert "better" not in page.replace("a rate beyond it may be better", "")
    (numbers,) = json.loads((tmp_path / "dummy.json").read_text())
    assert numbers["learning_rates"] == {"lora": None, "na-lora": 3e-4}
    assert [run["key"] for run in numbers["missing_runs"]] == [lost.key]

    again = Attempting()
    assert conduct(study(), tmp_path, again).failed == progress.failed
    assert again.submitted == [], "it is not tried for ever"
    whole = conduct(study(), tmp_path / "whole", Instantly())
    retried = conduct(study(), tmp_path, Attempting(), retry_failed=True)
    assert part_of(retried) == part_of(whole)
    assert so_far(study(), tmp_path).failed == {}, "the old row is still in the file, and the run is there"


def crash_with_a_later_seed(job):
    if is_best(job) and job.settings["seed"] == 2:
        raise RuntimeError("the driver is gone")
    pretend(job)


def test_an_arm_that_lacks_one_of_its_seeds_is_not_compared_by_the_others(tmp_path):
    progress = conduct(study(), tmp_path, Attempting(crash_with_a_later_seed))
    part = part_of(progress)
    assert part.rates == dummies.BEST, "the rate was chosen before"
    assert [run.label for run in part.lost["lora"]] == ["lora, lr 0.001, seed 2"]
    assert not any(part.comparisons.values())
    assert [len(cell.values) for cell in part.table.rows["lora"]] == [2, 2], "what is known is shown"
    assert not any(cell.mark for cells in part.table.rows.values() for cell in cells)


def refuse(job):
    count_starts(job)
    if job.settings["method"] == "lora":
        raise nalora.NALoRAError("rank", found="0", expected="1 or more", fix="set it")
    pretend(job)


def test_an_arm_without_the_answers_of_one_seed_is_not_complete(tmp_path):
    """A worker that was killed between the losses and the answers leaves such a run."""
    schedule = conduct(study(), tmp_path, Instantly()).schedule
    cell = next(cell for cell in schedule.cells if cell.arm.name == "na-lora")
    killed = schedule.job(cell, dummies.BEST["na-lora"], SEEDS[-1])
    (summary,) = (tmp_path / killed.key).rglob("summary.json")
    summary.unlink()
    part = part_of(so_far(study(), tmp_path))
    assert part.missing == ("na-lora",)
    assert not any(part.comparisons.values())


def test_an_error_in_the_settings_is_not_repeated_and_counts_as_missing(tmp_path):
    progress = conduct(study(), tmp_path, Attempting(refuse))
    assert len(progress.missing) == 3
    assert all(count.read_text() == "start\n" for job in progress.missing
               for count in [tmp_path / f"{job.key}.starts"])  # fmt: skip
    part = part_of(progress)
    assert part.screening["lora"] == dict.fromkeys((1e-4, 3e-4, 1e-3), "missing")
    assert not any("Diverged" in note for note in part.notes)
    assert part.sentences == ["lora lacks 3 runs that failed: na-lora not compared with lora."]


def diverge(job):
    """The files of a training run that diverged: a result that records it, and an error."""
    count_starts(job)
    folder = Store(job.store).folder(job.key)
    if job.settings["method"] == "lora" and job.settings["learning_rate"] == 1e-3:
        folder.path.mkdir(exist_ok=True)
        dummies.write(folder.result, {"train_loss": None, "diverged": True, "diverged_step": 7, "seconds": 1.0})
        raise nalora.NALoRAError("loss", found="nan", expected="a finite number", fix="lower the learning rate")
    pretend(job)


def test_a_run_that_diverged_counts_as_infinite_loss_and_is_not_trained_again(tmp_path):
    progress = conduct(study(), tmp_path, Attempting(diverge))
    assert progress.failed == {}
    part = part_of(progress)
    assert part.rates == {"lora": 3e-4, "na-lora": 3e-4}
    assert part.screening["lora"][1e-3] == math.inf
    assert part.missing == ()
    diverged = progress.schedule.job(progress.schedule.cells[0], 1e-3, 0).key
    assert (tmp_path / f"{diverged}.starts").read_text() == "start\n"
    again = Attempting(diverge)
    assert part_of(conduct(study(), tmp_path, again)) == part
    assert again.submitted == []
    known = Store(tmp_path).result(diverged)
    assert known.diverged
    assert known.losses == {VALIDATION: math.inf, TEST: math.inf}


def diverge_with_a_later_seed(job):
    if job.settings["method"] == "lora" and job.settings["seed"] == 2:
        diverge(replace(job, settings={**job.settings, "learning_rate": 1e-3}))
    pretend(job)


def test_an_arm_that_diverged_with_a_seed_is_compared_by_no_measure(tmp_path):
    progress = conduct(study(), tmp_path, Attempting(diverge_with_a_later_seed))
    part = part_of(progress)
    assert {*part.comparisons} == set(), "the baseline diverged"
    assert part.sentences == [
        f"lora diverged with 1 of 3 seeds: na-lora not compared with lora by {measure}."
        for measure in ("test loss", "accuracy")
    ]
    assert [cell.text(2, 3) for cell in part.table.rows["lora"]] == ["not finite (1 of 3)"] * 2


def test_an_arm_that_diverged_with_every_rate_is_named(tmp_path):
    def always(job):
        diverge_at = {**job.settings, "learning_rate": 1e-3}
        if job.settings["method"] == "lora":
            diverge(replace(job, settings=diverge_at))
        pretend(job)

    progress = conduct(study(), tmp_path, Attempting(always))
    part = part_of(progress)
    assert (part.missing, progress.failed) == ((), {})
    assert part.sentences == ["lora diverged with every learning rate: na-lora not compared with lora."]
    assert "Diverged with every learning rate: lora." in part.notes


def test_a_failures_file_of_an_earlier_version_is_read(tmp_path):
    schedule = so_far(study(), tmp_path).schedule
    lost = schedule.job(schedule.cells[0], dummies.BEST["lora"], 0)
    row = {"key": lost.key, "label": lost.label, "error": "its process died (exit code -9)", "log": f"{lost.key}.log"}
    (tmp_path / "dummy.failures.jsonl").write_text(json.dumps(row) + "\n")
    progress = conduct(study(), tmp_path, Instantly())
    assert [job.key for job in progress.missing] == [lost.key]
    assert part_of(progress).rates == {"lora": None, "na-lora": 3e-4}
    assert conduct(study(), tmp_path, Instantly(), retry_failed=True).missing == []


def test_a_failure_that_no_answer_needs_is_not_missing(tmp_path):
    """Of a seed at a rate that is not chosen: the study once had more screening seeds."""
    schedule = so_far(study(), tmp_path).schedule
    other = schedule.job(schedule.cells[0], 1e-4, 2)
    row = {"key": other.key, "label": other.label, "error": "died", "log": "log"}
    (tmp_path / "dummy.failures.jsonl").write_text(json.dumps(row) + "\n")
    progress = conduct(study(), tmp_path, Instantly())
    assert progress.failed
    assert progress.missing == []
    assert part_of(progress).rates == dummies.BEST


@pytest.mark.parametrize("lost", [0, 2])
def test_the_page_and_its_charts_name_the_missing_run(tmp_path, lost):
    import yaml

    def crash(job):
        if is_best(job) and job.settings["seed"] == lost:
            raise RuntimeError("the driver is gone")
        pretend(job)
        run = Path(job.store) / job.key
        (run / "run.yaml").write_text(yaml.safe_dump(job.settings))
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")

    progress = conduct(study(), tmp_path, Attempting(crash))
    page = write_page(study(), progress, tmp_path, tmp_path / "page.html").read_text()
    label = f"lora, lr 0.001, seed {lost}"
    assert f"Missing: {label} (RuntimeError: the driver is gone)." in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["answer"]["parts"][0]["missing"] == [label]
    assert not any(data["answer"]["parts"][0]["differences"].values())
