"""Learning rates that are clearly worse with the first screening seed are not trained with the other ones."""

from __future__ import annotations

import json
import math

import dummies
import pytest
from dummies import Instantly
from hypothesis import given
from hypothesis import strategies as st

from nalora.studies.answer import answer, write
from nalora.studies.conduct import conduct, so_far
from nalora.studies.schedule import Schedule
from nalora.studies.store import VALIDATION, Result
from nalora.studies.study import parse

RATES, SEEDS = (1e-4, 3e-4, 1e-3), (5, 0, 1)


def study(margin, **changes):
    return dummies.study(screening_seeds=list(SEEDS), drop_rates_worse_than=margin, **changes)


def screened(schedule, losses):
    """Results of the first arm: validation losses by learning rate and seed."""
    cell = schedule.cells[0]
    return {
        schedule.job(cell, rate, seed).key: Result(1.0, {VALIDATION: loss}, {}, 1.0)
        for (rate, seed), loss in losses.items()
    }


def rates_and_seeds(jobs):
    return {(job.settings["learning_rate"], job.settings["seed"]) for job in jobs if job.settings["method"] == "lora"}


def test_the_other_seeds_wait_for_the_first_and_worse_rates_never_get_them():
    schedule = Schedule(study(0.02), "store")
    assert rates_and_seeds(schedule.open_jobs({}, {})) == {(rate, 5) for rate in RATES}
    two = screened(schedule, {(1e-4, 5): 1.0, (3e-4, 5): 1.019})
    assert rates_and_seeds(schedule.open_jobs(two, {})) == {(1e-3, 5)}, "the third may be the best of all"
    three = two | screened(schedule, {(1e-3, 5): 1.021})
    assert rates_and_seeds(schedule.open_jobs(three, {})) == {(rate, seed) for rate in (1e-4, 3e-4) for seed in (0, 1)}
    assert schedule.dropped_rates(schedule.cells[0], three) == (1e-3,)
    assert schedule.total(three) == (3 + 2 + 2) + (3 * 3) + 2 * 1, "seed 2 of each arm's chosen rate comes later"


def test_the_rate_is_chosen_among_those_that_are_left_by_their_mean():
    schedule = Schedule(study(0.02), "store")
    cell = schedule.cells[0]
    losses = {(1e-4, 5): 1.0, (3e-4, 5): 1.01, (1e-3, 5): 1.5}
    others = {(1e-4, 0): 1.3, (1e-4, 1): 1.3, (3e-4, 0): 1.2, (3e-4, 1): 1.2}
    # Known from another study, and not looked at: with all seeds the dropped rate would be the best one.
    ignored = {(1e-3, 0): 0.1, (1e-3, 1): 0.1}
    first = screened(schedule, losses)
    assert schedule.chosen_rate(cell, first) is None
    results = screened(schedule, {**losses, **others, **ignored})
    assert schedule.chosen_rate(cell, results) == 3e-4
    assert schedule.screened(cell, results) == {1e-4: pytest.approx(1.2), 3e-4: pytest.approx(3.41 / 3), 1e-3: 1.5}


def test_a_diverged_rate_is_dropped_unless_all_of_them_diverged():
    schedule = Schedule(study(0.02), "store")
    one = screened(schedule, {(1e-4, 5): 1.0, (3e-4, 5): 1.0, (1e-3, 5): math.inf})
    assert schedule.dropped_rates(schedule.cells[0], one) == (1e-3,)
    every = screened(schedule, {(rate, 5): math.inf for rate in RATES})
    assert schedule.dropped_rates(schedule.cells[0], every) == ()


def test_nothing_is_dropped_while_a_run_with_the_first_seed_is_missing():
    schedule = Schedule(study(0.02), "store")
    cell = schedule.cells[0]
    results = screened(schedule, {(1e-4, 5): 1.0, (3e-4, 5): 1.5})
    lost = {schedule.job(cell, 1e-3, 5).key: "died"}
    assert schedule.dropped_rates(cell, results) is None
    assert schedule.chosen_rate(cell, results) is None
    assert rates_and_seeds(schedule.open_jobs(results, lost)) == set()


@given(st.lists(st.floats(0.1, 10), min_size=9, max_size=9))
def test_a_margin_that_nothing_exceeds_changes_nothing(losses):
    table = dict(zip([(rate, seed) for rate in RATES for seed in SEEDS], losses, strict=True))
    plain, dropping = Schedule(study(None), "store"), Schedule(study(100.0), "store")
    results = screened(plain, table)
    assert plain.dropped_rates(plain.cells[0], results) == dropping.dropped_rates(dropping.cells[0], results) == ()
    assert plain.screened(plain.cells[0], results) == dropping.screened(dropping.cells[0], results)
    assert plain.chosen_rate(plain.cells[0], results) == dropping.chosen_rate(dropping.cells[0], results)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.floats(1e-3, 5))
def test_the_best_rate_of_the_first_seed_is_never_dropped(losses, margin):
    schedule = Schedule(study(margin), "store")
    results = screened(schedule, {(rate, 5): loss for rate, loss in zip(RATES, losses, strict=True)})
    best = RATES[losses.index(min(losses))]
    dropped = schedule.dropped_rates(schedule.cells[0], results)
    assert best not in dropped
    assert all(
        (loss - min(losses) > margin) == (rate in dropped)
        for rate, loss in zip(RATES, losses, strict=True)
        if not math.isclose(loss, min(losses) + margin)
    )


def test_a_study_saves_the_runs_and_reports_which_rates_it_dropped(tmp_path):
    """The dummies' losses differ by 0.1 at least between rates and by about 0.01 between seeds."""
    engine = Instantly()
    progress = conduct(study(0.1), tmp_path, engine)
    whole = conduct(study(None), tmp_path / "whole", Instantly())
    assert len(whole.results) == whole.total == 2 * (9 + 1)
    assert len(progress.results) == progress.total == len({*engine.submitted}) == 2 * (3 + 2 + 1)
    again = Instantly()
    assert len(conduct(study(0.1), tmp_path, again).results) == 12
    assert again.submitted == []
    found = answer(progress.schedule, progress.results, {})
    (part,), (all_seeds,) = found.parts, answer(whole.schedule, whole.results, {}).parts
    assert part.rates == all_seeds.rates == dummies.BEST
    assert part.comparisons == all_seeds.comparisons
    assert part.dropped == {"lora": (1e-4, 3e-4), "na-lora": (1e-4, 1e-3)}
    page = found.markdown()
    assert "whose validation loss is shown: lora at 0.0001, 0.0003; na-lora at 0.0001, 0.001." in page
    first = progress.results[progress.schedule.job(progress.schedule.cells[0], 1e-4, 5).key].losses[VALIDATION]
    assert f"| lora | 0.0001: {first:.4f} (dropped), " in page
    write(found, tmp_path)
    (numbers,) = json.loads((tmp_path / "dummy.json").read_text())
    assert numbers["dropped_learning_rates"] == {"lora": [1e-4, 3e-4], "na-lora": [1e-4, 1e-3]}
    assert len(so_far(study(0.1), tmp_path).results) == 12


class Stopping(Instantly):
    """An engine that is interrupted after a number of runs."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def submit(self, job):
        if len(self.submitted) == self.most:
            raise KeyboardInterrupt
        super().submit(job)


@pytest.mark.parametrize("most", range(1, 12))
def test_a_resumed_study_drops_the_same_rates_and_trains_none_of_them_again(tmp_path, most):
    first, second = Stopping(most), Instantly()
    with pytest.raises(KeyboardInterrupt):
        conduct(study(0.1), tmp_path, first)
    progress = conduct(study(0.1), tmp_path, second)
    # A chosen run is submitted once more, for its test loss.
    assert {file.read_text() for file in tmp_path.glob("*/trained")} == {"once\n"}
    assert len({*first.submitted, *second.submitted}) == 12
    schedule = progress.schedule
    dropped = {cell.arm.name: schedule.dropped_rates(cell, progress.results) for cell in schedule.cells}
    assert dropped == {"lora": (1e-4, 3e-4), "na-lora": (1e-4, 1e-3)}
    never = {schedule.job(cell, rate, seed).key
             for cell in schedule.cells for rate in dropped[cell.arm.name] for seed in SEEDS[1:]}  # fmt: skip
    assert not never & {*first.submitted, *second.submitted}


def test_without_the_key_an_answer_does_not_mention_dropped_rates(tmp_path):
    progress = conduct(study(None), tmp_path, Instantly())
    found = answer(progress.schedule, progress.results, {})
    write(found, tmp_path)
    assert "dropped" not in (tmp_path / "dummy.md").read_text() + (tmp_path / "dummy.json").read_text()


def test_a_number_written_as_text_is_a_number():
    """YAML reads 2e-2 as a text."""
    shared = {"settings": {"model": "m", "task": "gym/chain_sum"}, "arms": {"a": {}}, "learning_rates": [1e-3]}
    assert parse({**shared, "drop_rates_worse_than": "2e-2"}).drop_rates_worse_than == 0.02
    assert parse(shared).drop_rates_worse_than is None
