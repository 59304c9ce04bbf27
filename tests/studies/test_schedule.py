"""The next jobs follow from the results so far, and nothing is done twice."""

from __future__ import annotations

import math

import dummies
import pytest

import nalora
from nalora.runs.settings import check
from nalora.studies.answer import answer
from nalora.studies.schedule import Schedule
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result, key
from nalora.studies.study import read


def known(job, parts=(VALIDATION,)):
    losses = {part: dummies.loss_of(job.settings, part) for part in parts if part != ANSWERS}
    return Result(1.0, losses, {"accuracy": 0.5} if ANSWERS in parts else {}, 1.0)


def test_screening_first_then_the_chosen_rate_with_every_seed():
    schedule = Schedule(dummies.study(), "store")
    first = schedule.open_jobs({}, {})
    assert len(first) == 6
    assert {job.parts for job in first} == {(VALIDATION,)}
    results = {job.key: known(job) for job in first}
    second = schedule.open_jobs(results, {})
    assert {(job.settings["method"], job.settings["learning_rate"]) for job in second} == set(dummies.BEST.items())
    assert len(second) == 6, "each arm's three seeds; of the screening run among them more parts are evaluated"
    assert sum(job.key in results for job in second) == 2
    results |= {job.key: known(job, (VALIDATION, TEST, ANSWERS)) for job in second}
    assert schedule.open_jobs(results, {}) == []


def test_only_chosen_runs_are_evaluated_on_the_test_split():
    schedule = Schedule(dummies.study(), "store")
    tested = [job for job in schedule.open_jobs({}, {}) if TEST in job.parts or ANSWERS in job.parts]
    assert tested == []


def test_no_rate_is_chosen_while_a_screening_run_is_missing_and_the_other_arm_continues():
    """The run that was lost may be the one with the best rate, as here."""
    schedule = Schedule(dummies.study(), "store")
    jobs = schedule.open_jobs({}, {})
    lora, na_lora = schedule.cells
    best = next(j for j in jobs if (j.settings["method"], j.settings["learning_rate"]) == ("lora", 1e-3))
    results = {job.key: known(job) for job in jobs if job is not best}
    lost = {best.key: "died"}
    means = schedule.screened(lora, results)
    assert means.pop(1e-3) is None
    assert all(math.isfinite(mean) for mean in means.values())
    assert schedule.chosen_rate(lora, results) is None
    assert schedule.chosen_rate(na_lora, results) == 3e-4
    assert not schedule.diverged(lora, results)
    assert schedule.lost(lora, results, lost) == [best]
    assert schedule.lost(na_lora, results, lost) == []
    assert {job.settings["method"] for job in schedule.open_jobs(results, lost)} == {"na-lora"}
    assert schedule.total(results) == 6 + 2 + 2, "the other seeds are still to come"


def test_a_run_that_diverged_has_an_infinite_loss_and_is_known():
    schedule = Schedule(dummies.study(), "store")
    jobs = schedule.open_jobs({}, {})
    infinite = Result(None, {VALIDATION: math.inf, TEST: math.inf}, {}, 1.0, diverged=True)
    lora = schedule.cells[0]
    best = schedule.job(lora, 1e-3, 0).key
    results = {job.key: known(job) for job in jobs} | {best: infinite}
    assert schedule.screened(lora, results)[1e-3] == math.inf
    assert schedule.chosen_rate(lora, results) == 3e-4
    assert best not in {job.key for job in schedule.open_jobs(results, {})}
    every = results | {schedule.job(lora, rate, 0).key: infinite for rate in lora.arm.learning_rates}
    assert schedule.chosen_rate(lora, every) is None
    assert schedule.diverged(lora, every)
    assert not schedule.diverged(schedule.cells[1], every)
    assert {job.settings["method"] for job in schedule.open_jobs(every, {})} == {"na-lora"}


def test_one_learning_rate_needs_no_screening():
    schedule = Schedule(dummies.study(learning_rates=[1e-3]), "store")
    assert {job.parts for job in schedule.open_jobs({}, {})} == {(VALIDATION, TEST, ANSWERS)}
    assert len(schedule.open_jobs({}, {})) == schedule.total({}) == 6


def test_a_screened_run_that_fails_in_a_later_evaluation_keeps_its_rate():
    """Else the arm would be judged at a worse rate, and then at the next."""
    schedule = Schedule(dummies.study(), "store")
    cell = schedule.cells[0]
    results = {
        schedule.job(cell, rate, 0).key: Result(1.0, {VALIDATION: loss}, {}, 1.0)
        for loss, rate in enumerate(cell.arm.learning_rates, start=1)
    }
    best = cell.arm.learning_rates[0]
    failed = {schedule.job(cell, best, 0).key: "out of memory"}
    assert schedule.chosen_rate(cell, results) == best
    assert schedule.screened(cell, results)[best] == 1
    assert not {job.key for job in schedule.open_jobs(results, failed)} & failed.keys()
    (part,) = answer(schedule, results, failed).parts
    assert "missing" not in part.screening[cell.arm.name].values()


def test_a_setting_that_changes_nothing_is_the_same_run_and_any_other_a_new_one():
    study = dummies.study()
    run = study.run({}, study.arms[0], 1e-3, 0)
    same = dummies.study(settings={**study.settings, "log_every": 7, "report_to": "wandb"})
    other = dummies.study(settings={**study.settings, "warmup": 0.04})
    assert key(run) == key(same.run({}, same.arms[0], 1e-3, 0))
    assert key(run) != key(other.run({}, other.arms[0], 1e-3, 0))
    assert key(run) != key(study.run({}, study.arms[0], 1e-3, 1))


def test_a_setting_given_at_its_default_is_the_same_run():
    """So that settings which a later version adds leave the names of runs alone."""
    for method in ({"method": "lora"}, {"method": "na-lora", "on": "lora+"}, {"method": "na-lora-off"}):
        given = {"model": "smollm2-135m", "task": "gym/chain_sum", **method}
        everything = {name: value for name, value in check(given).to_dict().items() if name != "output"}
        assert key(check(everything)) == key(check(given))
    runs = [{"method": "na-lora", "ratio": 8.0, "on": "lora+"}, {"method": "na-lora", "on": "lora+"},
            {"method": "lora+"}, {"method": "na-lora"}, {"method": "na-lora-off"}, {"method": "na-lora", "mask": False},
            {"method": "na-lora-off", "mask": True}, {"method": "lora"}, {"method": "lora", "rank": 4}]  # fmt: skip
    names = {key(check({"model": "smollm2-135m", "task": "gym/chain_sum", **each})) for each in runs}
    assert len(names) == len(runs)


def test_an_arm_is_completed_before_the_next_one_is_begun():
    """A study that is stopped early then has complete arms in place of many that are half done."""
    schedule = Schedule(dummies.study(), "store")
    jobs = schedule.open_jobs({}, {})
    first = schedule.cells[0].arm.settings["method"]
    screened = {job.key: known(job) for job in jobs if job.settings["method"] == first}
    left = schedule.open_jobs(screened, {})
    assert [TEST in job.parts for job in left] == [True] * 3 + [False] * 3
    assert {job.settings["method"] for job in left[:3]} == {first}


def test_every_combination_is_a_cell():
    study = dummies.study(over={"rank": [8, 32], "alpha": [16, 32]})
    assert len(Schedule(study, "store").cells) == 8
    assert Schedule(study, "store").total({}) == 8 * (3 + 2)


NAMED = {
    "sums": {
        "short": {"settings": {"max_terms": 2}},
        "long": {"settings": {"max_terms": 6}, "max_length": 256, "learning_rates": [1e-5, 1e-4]},
    },
    "rank": [8, 32],
}


def test_several_settings_have_one_name_and_their_own_learning_rates():
    schedule = Schedule(dummies.study(over=NAMED), "store")
    assert {cell.settings for cell in schedule.cells} == {
        (("sums", name), ("rank", rank)) for name in ("short", "long") for rank in (8, 32)
    }
    cells = {cell.name: cell for cell in schedule.cells}
    short, long = cells["lora, sums short, rank 8"], cells["lora, sums long, rank 32"]
    assert [job.settings["learning_rate"] for job in schedule.screening(short)] == [1e-4, 3e-4, 1e-3]
    assert [job.settings["learning_rate"] for job in schedule.screening(long)] == [1e-5, 1e-4]
    settings = schedule.screening(long)[0].settings
    assert (settings["settings"], settings["max_length"], settings["rank"]) == ({"max_terms": 6}, 256, 32)
    assert schedule.screening(short)[0].settings["max_length"] == 1024
    assert schedule.total({}) == 2 * 2 * (3 + 2) + 2 * 2 * (2 + 2)


def test_an_arm_s_own_learning_rates_take_precedence_over_a_combination_s():
    arms = {"lora": {"method": "lora"}, "full": {"method": "full", "learning_rates": [1e-6]}}
    schedule = Schedule(dummies.study(over=NAMED, arms=arms), "store")
    assert {cell.arm.learning_rates for cell in schedule.cells if cell.arm.name == "full"} == {(1e-6,)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {}}, "arms: missing or empty"),
        ({"over": {"rank": []}}, "over.rank: an empty list"),
        ({"learning_rates": []}, "learning_rates: an empty list"),
        ({"arms": {"lora": {"method": "lorra"}}}, "did you mean lora"),
        ({"arms": {"lora": {"method": "lora", "output": "here"}}}, "output is set by the study itself"),
        ({"settings": {"validation_size": 9}}, "validation_size is set by the study itself: write it at the top level"),
        ({"settings": {"model": "m", "task": "gym/chain_sum", "stepps": 3}}, "did you mean steps"),
        ({"seed": [0]}, "seed: no such setting of a study"),
        ({"generate": "sometimes"}, "expected one of chosen, none, all"),
        ({"over": {"rank": [8, "many"]}}, "rank: 'many'"),
        ({"controls": {"lora": ["lorra"]}}, "controls: no arm 'lorra'"),
        ({"controls": {"lora": ["lora"]}}, "controls: 'lora' is listed as its own control"),
        ({"controls": {"lora": "dora"}}, r"expected `arm: \[other arm, ...\]` lines"),
        ({"over": {"sums": {"short": 2}}}, "over.sums.short: 2, expected settings"),
        ({"over": {"sums": {"short": {"seed": 2}}}}, "over.sums.short: seed is set by the study itself"),
        ({"over": {"sums": {"short": {"max_lenth": 2}}}}, "did you mean max_length"),
        ({"seeds": [0, 0]}, "seeds: 0 is given twice"),
        ({"name": "é" * 150}, "name: 300 bytes long, expected at most 200"),
        ({"seeds": [0, 1.5]}, "seeds: 1.5, expected a whole number"),
        ({"seeds": [-1]}, "seeds: -1, expected a whole number, 0 or more"),
        ({"seeds": 3}, "seeds: 3, expected a list"),
        ({"screening_seeds": ["first"]}, "screening_seeds: 'first', expected a whole number"),
        ({"learning_rates": [1e-3, "1e-3"]}, "learning_rates: 0.001 is given twice"),
        ({"learning_rates": ["fast"]}, "learning_rates: 'fast', expected a number"),
        ({"learning_rates": 1e-3}, "learning_rates: 0.001, expected a list"),
        ({"learning_rates": None}, "learning_rates: None, expected a list of numbers"),
        ({"learning_rates": [float("inf")]}, "learning_rates: inf, expected a number"),
        ({"learning_rates": [float("nan")]}, "learning_rates: nan, expected a number"),
        ({"learning_rates": [-1e-3]}, "learning_rates: -0.001, expected a positive number"),
        ({"learning_rates": [True]}, "learning_rates: True, expected a number"),
        ({"over": {"rank": [8, 8]}}, "over.rank: 8 is given twice"),
        ({"over": {"rank": [8, "8"]}}, "over.rank: 8 is given twice"),
        ({"over": {"rank": 8}}, "over.rank: 8, expected a list of values"),
        ({"over": ["rank"]}, "over: a list, expected `setting:"),
        ({"over": {8: [1]}}, "over: 8, expected the name of a setting"),
        ({"over": {"seed": [0, 1]}}, "over.seed: seed is set by the study itself"),
        ({"over": {"learning_rate": [1e-3]}}, "over.learning_rate: learning_rate is set by the study itself"),
        ({"over": {"learning_rates": [1e-3]}}, "over.learning_rates: learning_rates is set by the study itself"),
        ({"over": {"sums": {"short": {"learning_rates": 1e-3}}}}, "short.learning_rates: 0.001, expected a list"),
        ({"name": "a/b"}, "name: 'a/b', expected a file's name"),
        ({"name": "..\\x"}, "expected a file's name, not a path"),
        ({"name": None}, "name: nothing, expected a text"),
        ({"validation_size": 0}, "validation_size: 0, expected a whole number, 1 or more"),
        ({"validation_size": -3}, "validation_size: -3, expected a whole number, 1 or more"),
        ({"test_limit": "many"}, "test_limit: 'many', expected a whole number or nothing"),
        ({"drop_rates_worse_than": 0}, "drop_rates_worse_than: 0.0, expected a positive number"),
        ({"drop_rates_worse_than": "far"}, "drop_rates_worse_than: 'far', expected a number or nothing"),
        ({"drop_rates_worse_than": True}, "drop_rates_worse_than: True, expected a number or nothing"),
        ({"drop_rates_worse_than": [0.1]}, r"drop_rates_worse_than: \[0.1\], expected a number or nothing"),
        ({"max_batch_tokens": 0}, "max_batch_tokens: 0, expected a whole number, 1 or more"),
        ({"settings": "lora"}, "settings: 'lora', expected `name: value` lines"),
        ({"settings": {"model": "m", 3: 4}}, "settings: 3, expected the name of a setting"),
        ({"arms": ["lora"]}, "arms: a list, expected `name: value` lines"),
        ({"arms": {"lora": "lora"}}, "arms.lora: 'lora', expected settings"),
        ({"arms": {"lora": {"learning_rates": []}}}, "arms.lora.learning_rates: an empty list"),
        ({"arms": {"lora": {"seeds": []}}}, "arms.lora.seeds: an empty list"),
        ({"arms": {"lora": {"seeds": [1, 1]}}}, "arms.lora.seeds: 1 is given twice"),
        ({"controls": {"lora": ["na-lora", "na-lora"]}}, "controls.lora: na-lora is given twice"),
        ({"seeds": [0, 0], "over": {"rank": [8, 8]}, "name": "a/b"}, "3 problems: .*name.*rank.*seeds"),
    ],
)
def test_a_study_that_cannot_run_is_refused_as_a_whole(changes, message):
    with pytest.raises(nalora.NALoRAError, match=message):
        dummies.study(**changes)


def test_settings_of_version_0_1_have_the_same_effect_under_their_old_names():
    new = {"generate": "all", "test_limit": 5, "max_batch_tokens": 4096}
    old = dict(zip(("ask", "ask_limit", "ask_tokens"), new.values(), strict=True))
    renamed, current = dummies.study(**old), dummies.study(**new)
    assert renamed == current != dummies.study()
    assert Schedule(renamed, "store").open_jobs({}, {}) == Schedule(current, "store").open_jobs({}, {})
    with pytest.raises(nalora.NALoRAError, match="ask: now called generate; both are given"):
        dummies.study(ask="all", generate="all")
    with pytest.raises(nalora.NALoRAError, match="generate: 'sometimes', expected one of chosen, none, all"):
        dummies.study(ask="sometimes")


def test_values_of_a_setting_may_be_lists():
    over = {"target_modules": [["q_proj", "v_proj"], "all-linear"], "rank": [8, 32]}
    schedule = Schedule(dummies.study(over=over), "store")
    assert len({cell.settings for cell in schedule.cells}) == 4
    modules = [schedule.screening(cell)[0].settings["target_modules"] for cell in schedule.cells]
    assert modules == [["q_proj", "v_proj"]] * 4 + ["all-linear"] * 4
    results = {job.key: known(job, (VALIDATION, TEST)) for cell in schedule.cells for job in schedule.final(cell, 1e-3)}
    assert [part.heading for part in answer(schedule, results, {}).parts] == [
        f"target_modules {modules}, rank {rank}"
        for modules in ("['q_proj', 'v_proj']", "all-linear")
        for rank in (8, 32)
    ]


def test_arms_and_controls_may_be_numbers():
    study = dummies.study(arms={4: {"rank": 4}, 8: {"rank": 8}}, controls={8: [4]})
    assert [arm.name for arm in study.arms] == ["4", "8"]
    assert study.controls == {"8": ("4",)}


FILE = """
settings: &shared {model: smollm2-135m, task: gym/chain_sum}
arms:
  lora: {method: lora}
learning_rates: [1.0e-3]
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("seeds: [0]\nseeds: [1]\n", "seeds: given twice, in lines 6 and 7"),
        ("over:\n  sums: {a: {rank: 8, rank: 4}}\n", "rank: given twice, in lines 7 and 7"),
        ("seeds: [0, 0]\nname: a\nname: b\n", "name: given twice, in lines 7 and 8"),
        ("name: 2024-13-45\n", "expected YAML"),
        ("seeds: [0\n", "expected YAML"),
    ],
)
def test_a_file_with_repeated_keys_or_bad_yaml_is_refused(tmp_path, more, message):
    file = tmp_path / "study.yaml"
    file.write_text(FILE + more)
    with pytest.raises(nalora.NALoRAError, match=message):
        read(file)


def test_what_is_shared_in_a_file_may_be_overwritten(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(FILE + "over:\n  model:\n    other: {<<: *shared, model: m}\n")
    study = read(file)
    assert study.run(study.combinations()[0], study.arms[0], 1e-3, 0).settings.model == "m"


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_bytes(FILE.encode() + "name: größer".encode("latin-1"))
    with pytest.raises(nalora.NALoRAError, match="not UTF-8"):
        read(file)
