"""A study's report: its answer first, in sentences and charts with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import dummies
import pytest
import yaml
from report.browsing import Visit, installed_browser

import nalora
from nalora.studies.answer import answer
from nalora.studies.conduct import so_far
from nalora.studies.page import write_page
from nalora.studies.schedule import Schedule
from nalora.studies.study import question


def store_of(study, folder, jobs):
    """The runs as a study leaves them, with settings and a training curve."""
    for job in jobs:
        dummies.pretend(job)
        run = folder / job.key
        (run / "run.yaml").write_text(yaml.safe_dump(job.settings))
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 2 / i}) + "\n" for i in (1, 2, 3)))


@pytest.fixture
def finished(tmp_path):
    arms = {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora"}, "random": {"method": "na-lora-random"}}
    study = dummies.study(arms=arms, controls={"na-lora": ["random"]})
    schedule = Schedule(study, str(tmp_path))
    for _ in range(2):
        store_of(study, tmp_path, schedule.open_jobs(so_far(study, tmp_path).results, {}))
    return study, tmp_path


def test_the_answer_comes_first_and_one_run_represents_each_arm(finished):
    study, store = finished
    progress = so_far(study, store)
    page = write_page(study, progress, store, store / "page.html", "Question: <whether> it helps.").read_text()
    (part,) = answer(progress.schedule, progress.results, progress.failed).parts
    assert page.index("Study results") < page.index(">Results<")
    assert "Question: &lt;whether&gt; it helps." in page
    assert all(sentence in page for sentence in part.sentences)
    assert any("na-lora is" in sentence and "random" in sentence for sentence in part.sentences)
    assert "Bold: significantly" not in page, "marks are words here"
    assert "lora (lr 0.001, seed 0)" in page
    assert "na-lora (lr 0.0003, seed 0)" in page


def test_in_a_browser_charts_show_the_studys_numbers(finished):
    from playwright.sync_api import sync_playwright

    study, store = finished
    progress = so_far(study, store)
    file = write_page(study, progress, store, store / "page.html")
    (part,) = answer(progress.schedule, progress.results, progress.failed).parts
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=installed_browser(), args=["--no-sandbox"])
        visit = Visit(browser, file)
        assert {"rates-0", "difference-0-0", "control-0-0"} <= set(visit.charts())
        curves = {trace["name"]: trace for trace in visit.traces("rates-0")}
        for arm, losses in part.screening.items():
            assert curves[arm]["x"] == list(losses)
            assert curves[arm]["y"] == pytest.approx(list(losses.values()), rel=1e-5)
        for chart, found in (("difference-0-0", part.comparisons), ("control-0-0", part.controls)):
            shown = [trace["x"] for trace in visit.traces(chart)]
            assert shown == [pytest.approx([each.difference], rel=1e-5) for each in found["test loss"]]
        assert visit.problems == []
        assert all(url.startswith("file:") for url in visit.requests)
        browser.close()


def test_a_rate_that_destroyed_a_run_does_not_press_the_others_flat(finished):
    from playwright.sync_api import sync_playwright

    study, store = finished
    progress = so_far(study, store)
    schedule = progress.schedule
    job = schedule.screening(schedule.cells[0])[-1]
    worst = progress.results[job.key]
    destroyed = progress.results | {job.key: worst._replace(losses=worst.losses | {"validation": 500.0})}
    kinds = []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=installed_browser(), args=["--no-sandbox"])
        for results in (progress.results, destroyed):
            page = write_page(study, replace(progress, results=results), store, store / "page.html")
            visit = Visit(browser, page)
            visit.show("rates-0")
            kinds.append(visit.page.evaluate("document.getElementById('plot-rates-0')._fullLayout.yaxis.type"))
            assert visit.problems == []
        browser.close()
    assert kinds == ["linear", "log"]


def test_half_of_a_study_is_shown_and_nothing_of_one_is_refused(tmp_path):
    study = dummies.study()
    with pytest.raises(nalora.NALoRAError, match="no finished run"):
        write_page(study, so_far(study, tmp_path), tmp_path, tmp_path / "page.html")
    store_of(study, tmp_path, Schedule(study, str(tmp_path)).open_jobs({}, {})[:2])
    page = write_page(study, so_far(study, tmp_path), tmp_path, tmp_path / "page.html").read_text()
    assert "Not complete: lora; na-lora." in page


def test_the_question_is_the_comment_at_the_top_of_the_file(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(
        "# nalora study study.yaml\n# Question: one thing,\n# and another.\n# Runs: 3 (three).\nname: x\n# Not this.\n"
    )
    assert question(file) == "Question: one thing, and another."
