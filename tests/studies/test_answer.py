"""The answer's page: what was chosen, and what that choice cannot say."""

from __future__ import annotations

import json
import math

import pytest

from nalora.studies.answer import answer, write
from nalora.studies.schedule import Schedule
from nalora.studies.store import TEST, VALIDATION, Result
from nalora.studies.study import parse

STUDY = {
    "settings": {"model": "smollm2-135m", "task": "gym/chain_sum"},
    "arms": {"lora": {"method": "lora"}, "dora": {"method": "dora"}},
    "learning_rates": [1e-4, 3e-4, 1e-3], "seeds": [0, 1], "generate": "none",
}  # fmt: skip


@pytest.mark.parametrize(("best", "named"), [(1e-4, True), (3e-4, False), (1e-3, True)])
def test_a_rate_chosen_at_an_end_of_its_grid_is_named(best, named):
    schedule = Schedule(parse(STUDY), "store")
    results = {}
    for cell in schedule.cells:
        # DoRA's best is always in the middle of its rates.
        wanted = best if cell.arm.name == "lora" else 3e-4
        for rate in cell.arm.learning_rates:
            for seed in (0, 1):
                loss = 1.0 if rate == wanted else 2.0
                results[schedule.job(cell, rate, seed).key] = Result(loss, {VALIDATION: loss, TEST: loss}, {}, 1.0)
    page = answer(schedule, results, {}).markdown()
    assert ("a rate beyond it may be better: lora." in page) == named
    assert f"**{best:g}: 1.0000**" in page
    assert page.count("**0.0003: 1.0000**") == (2 if best == 3e-4 else 1)


def test_what_is_known_so_far_is_reported_and_no_rate_is_chosen_from_half_of_it():
    schedule = Schedule(parse(STUDY), "store")
    lora = schedule.cells[0]
    known = schedule.job(lora, 1e-4, 0).key
    page = answer(schedule, {known: Result(1.0, {VALIDATION: 0.5}, {}, 1.0)}, {}).markdown()
    assert "| lora | 0.0001: 0.5000, 0.0003: –, 0.001: – |" in page
    assert "Not complete: lora; dora." in page
    assert "**0." not in page


def test_what_has_no_loss_is_compared_without_and_a_rating_is_no_share():
    schedule = Schedule(parse({**STUDY, "learning_rates": [1e-4]}), "store")
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(
            1.0, {VALIDATION: 1.0, TEST: math.nan}, {"rating": 5.5 + seed, "pass_at_1": 0.25}, 1.0
        )
        for cell in schedule.cells
        for seed in (0, 1)
    }
    (part,) = answer(schedule, results, {}).parts
    assert [(column.measure, column.scale) for column in part.table.columns] == [("rating", 1.0), ("pass_at_1", 100.0)]
    assert part.missing == ()
    assert {each.measure for each in part.table.columns} == part.comparisons.keys()


def test_an_arm_is_compared_with_its_controls_as_a_family_of_its_own():
    arms = {**STUDY["arms"], "rslora": {"method": "rslora"}}
    study = {**STUDY, "arms": arms, "learning_rates": [1e-4], "seeds": [0, 1, 2], "controls": {"rslora": ["dora"]}}
    schedule = Schedule(parse(study), "store")
    # rsLoRA is far from DoRA and near to LoRA; seeds differ by more than either.
    of = {"lora": 1.0, "dora": 2.0, "rslora": 1.001}
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: of[cell.arm.name] + noise}, {}, 1.0)
        for cell in schedule.cells
        for seed, noise in enumerate([5.0, 6.0, 7.0 if cell.arm.name == "lora" else 7.01])
    }
    found = answer(schedule, results, {})
    (part,) = found.parts
    ((control,),) = part.controls.values()
    assert (control.method, control.baseline, control.verdict) == ("rslora", "dora", "better")
    assert control.adjusted_p == control.p, "the comparisons with the baseline are another family"
    assert [each.baseline for each in part.comparisons["test loss"]] == ["lora", "lora"]
    page = found.markdown()
    assert "- rslora is better than dora" in page
    assert "- rslora is not distinguishable from lora" in page


def test_a_control_that_has_not_run_yet_is_left_out():
    schedule = Schedule(parse({**STUDY, "learning_rates": [1e-4], "controls": {"lora": ["dora"]}}), "store")
    lora = schedule.cells[0]
    results = {
        schedule.job(lora, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: 1.0}, {}, 1.0) for seed in (0, 1)
    }
    (part,) = answer(schedule, results, {}).parts
    assert part.controls == {}


def of_losses(losses, **changes):
    """What follows from these test losses of each arm, by seed, at one learning rate."""
    arms = {name: {"method": name} for name in losses}
    seeds = list(range(len(next(iter(losses.values())))))
    schedule = Schedule(parse({**STUDY, "arms": arms, "learning_rates": [1e-4], "seeds": seeds, **changes}), "store")
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: loss}, {"accuracy": 0.5}, 1.0)
        for cell in schedule.cells
        for seed, loss in enumerate(losses[cell.arm.name])
    }
    return answer(schedule, results, {}).parts[0]


def test_an_arm_that_diverged_with_some_seeds_is_not_compared_by_the_others():
    finite = {"lora": [1.0, 1.1, 0.9, 1.0, 1.05], "rslora": [1.2, 1.31, 1.1, 1.2, 1.25]}
    part = of_losses({**finite, "dora": [0.5, 0.61, math.inf, 0.5, math.inf]}, controls={"dora": ["rslora"]})
    assert [each.method for each in part.comparisons["test loss"]] == ["rslora"]
    assert part.controls.keys() == {"accuracy"}
    assert part.sentences[-2:] == [
        "dora diverged with 2 of 5 seeds: not compared with lora by test loss.",
        "dora diverged with 2 of 5 seeds: not compared with rslora by test loss.",
    ]
    assert [each.method for each in part.comparisons["accuracy"]] == ["rslora", "dora"]


def test_what_diverged_makes_nothing_easier_to_claim_of_the_rest():
    finite = {"lora": [1.0, 1.1, 0.9, 1.0, 1.05], "rslora": [1.05, 1.12, 0.96, 1.01, 1.11]}
    equal = {name: [1.0, 1.1, 0.9, 1.01, 1.04] for name in ("dora", "pissa")}
    broken = {name: [*values[:4], math.inf] for name, values in equal.items()}
    whole, rest = (of_losses({**finite, **others}).comparisons["test loss"][0] for others in (equal, broken))
    assert whole.p == rest.p
    assert whole.adjusted_p == rest.adjusted_p == pytest.approx(3 * rest.p)


@pytest.mark.parametrize("diverged", [1, 3])
def test_with_a_baseline_that_diverged_nothing_is_compared(diverged):
    part = of_losses({"lora": [math.inf] * diverged + [1.0] * (3 - diverged), "dora": [0.5, 0.6, 0.7]})
    assert "test loss" not in part.comparisons
    sentence = f"lora diverged with {diverged} of 3 seeds: dora not compared with lora by test loss."
    assert sentence in part.sentences


def test_of_two_that_diverged_both_are_named():
    part = of_losses({"lora": [math.inf, 1.0, 1.0], "dora": [1.0, math.inf, math.inf]})
    assert part.sentences[-1] == (
        "dora diverged with 2 of 3 seeds and lora diverged with 1 of 3 seeds: not compared with lora by test loss."
    )


def test_a_rate_whose_run_is_missing_is_distinguished_from_one_that_diverged(tmp_path):
    schedule = Schedule(parse(STUDY), "store")
    lora = schedule.cells[0]
    failed, diverged, well = (schedule.job(lora, rate, 0).key for rate in (1e-4, 3e-4, 1e-3))
    results = {
        diverged: Result(1.0, {VALIDATION: math.inf}, {}, 1.0),
        well: Result(1.0, {VALIDATION: 0.5}, {}, 1.0),
    }
    found = answer(schedule, results, {failed: "died"})
    page = found.markdown()
    assert "| lora | 0.0001: missing, 0.0003: inf, 0.001: 0.5000 |" in page, "none is chosen"
    assert "Missing: lora, lr 0.0001, seed 0 (died)." in page
    assert "1 run(s) are missing because they failed." in page
    write(found, tmp_path)
    (numbers,) = json.loads((tmp_path / "study.json").read_text())
    assert numbers["validation_losses"]["lora"] == {"0.0001": "missing", "0.0003": "diverged", "0.001": 0.5}
    assert numbers["learning_rates"]["lora"] is None
    assert numbers["missing_runs"] == [
        {"arm": "lora", "key": failed, "label": "lora, lr 0.0001, seed 0", "error": "died"}
    ]


def test_a_diverged_run_has_no_accuracy_and_the_other_seeds_do_not_replace_it():
    schedule = Schedule(parse({**STUDY, "learning_rates": [1e-4], "seeds": [0, 1, 2]}), "store")
    lora, dora = schedule.cells
    results = {
        schedule.job(cell, 1e-4, seed).key: Result(1.0, {VALIDATION: 1.0, TEST: 1.0}, {"accuracy": 0.5}, 1.0)
        for cell in (lora, dora)
        for seed in (0, 1, 2)
    }
    infinite = {VALIDATION: math.inf, TEST: math.inf}
    results[schedule.job(dora, 1e-4, 1).key] = Result(None, infinite, {}, 1.0, diverged=True)
    (part,) = answer(schedule, results, {}).parts
    assert part.comparisons == {"test loss": [], "accuracy": []}
    assert [cell.text(1, 3) for cell in part.table.rows["dora"]] == ["not finite (1 of 3)"] * 2
    assert [column.title for column in part.table.columns] == ["test loss", "accuracy %"], "still a share"
    assert part.sentences == [
        f"dora diverged with 1 of 3 seeds: not compared with lora by {measure}."
        for measure in ("test loss", "accuracy")
    ]
    assert part.missing == ()


def test_an_arm_s_name_does_not_break_the_page_s_tables():
    schedule = Schedule(parse({**STUDY, "arms": {"a|b": {"method": "lora"}}}), "store")
    page = answer(schedule, {}, {}).markdown()
    assert "| a\\|b | 0.0001: –, 0.0003: –, 0.001: – |" in page
