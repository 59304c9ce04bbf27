"""The answer's page: what was chosen, and what that choice cannot say."""

from __future__ import annotations

import math

import pytest

from nalora.studies.answer import answer, in_markdown
from nalora.studies.schedule import Schedule
from nalora.studies.store import TEST, VALIDATION, Result
from nalora.studies.study import understand

STUDY = {
    "settings": {"model": "smollm2-135m", "task": "gym/chain_sum"},
    "arms": {"lora": {"method": "lora"}, "dora": {"method": "dora"}},
    "learning_rates": [1e-4, 3e-4, 1e-3], "seeds": [0, 1], "ask": "none",
}  # fmt: skip


@pytest.mark.parametrize(("best", "named"), [(1e-4, True), (3e-4, False), (1e-3, True)])
def test_a_rate_chosen_at_an_end_of_its_grid_is_named(best, named):
    schedule = Schedule(understand(STUDY), "store")
    results = {}
    for cell in schedule.cells:
        # DoRA's best is always in the middle of its rates.
        wanted = best if cell.arm.name == "lora" else 3e-4
        for rate in cell.arm.learning_rates:
            for seed in (0, 1):
                loss = 1.0 if rate == wanted else 2.0
                results[schedule.job(cell, rate, seed).key] = Result(loss, {VALIDATION: loss, TEST: loss}, {}, 1.0)
    page = in_markdown(schedule.study, answer(schedule, results, {}), {})
    assert ("perhaps better beyond it: lora." in page) == named
    assert f"**{best:g}: 1.0000**" in page
    assert page.count("**0.0003: 1.0000**") == (2 if best == 3e-4 else 1)


def test_what_is_known_so_far_is_told_and_no_rate_is_chosen_from_half_of_it():
    schedule = Schedule(understand(STUDY), "store")
    lora = schedule.cells[0]
    known = schedule.job(lora, 1e-4, 0).key
    page = in_markdown(schedule.study, answer(schedule, {known: Result(1.0, {VALIDATION: 0.5}, {}, 1.0)}, {}), {})
    assert "| lora | 0.0001: 0.5000, 0.0003: –, 0.001: – |" in page
    assert "Not complete: lora; dora." in page
    assert "**0." not in page


def test_what_has_no_loss_is_compared_without_and_a_rating_is_no_share():
    schedule = Schedule(understand({**STUDY, "learning_rates": [1e-4]}), "store")
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(
            1.0, {VALIDATION: 1.0, TEST: math.nan}, {"rating": 5.5 + seed, "pass_at_1": 0.25}, 1.0
        )
        for cell in schedule.cells
        for seed in (0, 1)
    }
    (part,) = answer(schedule, results, {})
    assert [(column.measure, column.scale) for column in part.table.columns] == [("rating", 1.0), ("pass_at_1", 100.0)]
    assert part.missing == ()
    assert {each.measure for each in part.table.columns} == part.comparisons.keys()


def test_an_arm_is_compared_with_its_controls_as_a_family_of_its_own():
    arms = {**STUDY["arms"], "rslora": {"method": "rslora"}}
    study = {**STUDY, "arms": arms, "learning_rates": [1e-4], "seeds": [0, 1, 2], "controls": {"rslora": ["dora"]}}
    schedule = Schedule(understand(study), "store")
    # rsLoRA is far from DoRA and near to LoRA; seeds differ by more than either.
    of = {"lora": 1.0, "dora": 2.0, "rslora": 1.001}
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: of[cell.arm.name] + noise}, {}, 1.0)
        for cell in schedule.cells
        for seed, noise in enumerate([5.0, 6.0, 7.0 if cell.arm.name == "lora" else 7.01])
    }
    (part,) = answer(schedule, results, {})
    ((control,),) = part.controls.values()
    assert (control.method, control.baseline, control.verdict) == ("rslora", "dora", "better")
    assert control.adjusted_p == control.p, "the comparisons with the baseline are another family"
    assert [each.baseline for each in part.comparisons["test loss"]] == ["lora", "lora"]
    page = in_markdown(schedule.study, [part], {})
    assert "- rslora is better than dora" in page
    assert "- rslora is not distinguishable from lora" in page


def test_a_control_that_has_not_run_yet_is_left_out():
    schedule = Schedule(understand({**STUDY, "learning_rates": [1e-4], "controls": {"lora": ["dora"]}}), "store")
    lora = schedule.cells[0]
    results = {
        schedule.job(lora, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: 1.0}, {}, 1.0) for seed in (0, 1)
    }
    (part,) = answer(schedule, results, {})
    assert part.controls == {}
