"""What to start with follows from verdicts on one task and on a second one."""

from __future__ import annotations

import importlib

import pytest

ARMS = {"lora": {"method": "lora"}, "full fine-tuning": {"method": "full"}, "a": {"method": "dora"},
        "b": {"method": "rslora"}, "ours": {"method": "na-lora"}}  # fmt: skip


def script(name):
    return importlib.import_module(name)


def states(verdicts, missing=(), planned=3):
    """States of arms with a difference and a verdict each; missing ones have one seed and a row that is ignored."""
    rows = [
        {"method": arm, "difference": difference, "interval": [difference - 0.1, difference + 0.1], "verdict": verdict}
        for arm, (difference, verdict) in verdicts.items()
    ]
    seeds = {arm: 1 if arm in missing else planned for arm in ("lora", *verdicts)}
    part = {
        "measures": ["accuracy", "test loss"],
        "values": {arm: [{}, {str(seed): 1.0 for seed in range(number)}] for arm, number in seeds.items()},
        "comparisons": {"test loss": rows},
        "learning_rates": {arm: 0.004 if arm == "lora" else 0.008 for arm in seeds},
        "missing": list(missing),
    }
    return script("tables.arm_states").states_of(part, dict.fromkeys(seeds, planned))


FULL = {"full fine-tuning": (-0.02, "better")}


def test_the_share_of_the_gap_and_the_verdicts():
    by_arm = {state.arm: state for state in states({**FULL, "a": (-0.005, "better"), "b": (0.01, "worse")}, ["b"])}
    assert by_arm["a"].share == pytest.approx(0.25)
    assert by_arm["full fine-tuning"].share == 1
    assert by_arm["lora"].verdict == "baseline"
    assert (by_arm["b"].verdict, by_arm["b"].share, by_arm["b"].difference) == ("not finished", None, "")


@pytest.mark.parametrize(
    ("first", "second", "method", "variant"),
    [
        ({"a": (-0.01, "not distinguishable")}, {}, "lora", None),
        ({"a": (-0.01, "better"), "b": (-0.02, "not distinguishable")}, {}, "lora", "a"),
        ({"a": (-0.01, "better"), "b": (-0.02, "better")}, {}, "lora", "b"),
        ({"a": (-0.01, "better"), "b": (-0.02, "better")}, {"a": (-0.01, "better")}, "a", None),
        ({"a": (-0.01, "better")}, {"a": (-0.01, "not distinguishable")}, "lora", "a"),
        ({"a": (-0.01, "better")}, {"b": (-0.01, "better")}, "lora", "a"),
        ({"a": (0.01, "worse")}, {"a": (-0.01, "better")}, "lora", None),
    ],
)
def test_a_variant_is_recommended_once_two_tasks_agree(first, second, method, variant):
    module = script("choosing_page.method_choice")
    start, to_try = module.choose(states({**FULL, **first}), states({**FULL, **second}) if second else [])
    assert (start.arm, to_try.arm if to_try else None) == (method, variant)
    assert start.confirmed == (method != "lora")


def test_an_arm_without_all_of_its_seeds_is_not_recommended():
    module = script("choosing_page.method_choice")
    start, to_try = module.choose(states({**FULL, "a": (-0.01, "better")}, missing=["a"]), [])
    assert (start.arm, to_try) == ("lora", None)


def test_what_is_known_on_the_second_task_is_reported():
    module, answer = script("choosing_page.method_choice"), script("choosing_page.short_answer")
    _, variant = module.choose(states({**FULL, "a": (-0.01, "better")}), [])
    undecided = states({**FULL, "a": (-0.01, "not distinguishable")})
    assert answer.second_task(variant, []) == "not judged on a second task yet"
    assert answer.second_task(variant, undecided) == "on a second task not distinguishable"
    assert answer.second_task(variant, states(FULL | {"a": (0, "")}, ["a"])) == "on a second task not finished"


def test_the_table_groups_by_verdict_and_leaves_na_lora_out():
    costs = script("choosing_page.step_costs").MethodCosts("8b", "a machine", {})
    every = states({**FULL, "a": (0.01, "worse"), "b": (-0.01, "better"), "ours": (-0.3, "better")})
    rows = script("choosing_page.method_choice").table(every, ARMS, costs)[2:]
    assert [row.split(" (")[0] for row in rows] == ["| lora", "| full fine-tuning", "| b", "| a"]
    assert "| **better** | -0.0100 (-0.1100 … +0.0900) | 50 % | 3 of 3 | 0.008 | 2.00 | not measured |" in rows[2]
    lines = script("choosing_page.method_choice").summary(every, ARMS)
    assert lines[0] == "- **Better than LoRA:** b."
    assert lines[-1] == "- **Worse than LoRA:** a."
    assert sum("none" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("verdicts", "missing", "start", "why"),
    [
        ({}, (), "8", "has not run"),
        (
            {"r = 4": (0.01, "worse"), "r = 64": (-0.01, "not distinguishable")},
            (),
            "8",
            "no other rank is significantly",
        ),
        ({"r = 64": (-0.01, "better"), "r = 32": (-0.005, "better")}, (), "8, then 64", "r = 64 is better"),
        ({"r = 64": (-0.01, "better"), "r = 32": (-0.005, "better")}, ["r = 64"], "8, then 32", "not finished: r = 64"),
    ],
)
def test_the_rank_follows_from_its_study(verdicts, missing, start, why):
    module = script("choosing_page.rank_choice")
    every = states({**FULL, **verdicts, "gate whole": (-0.5, "better")}, missing) if verdicts else []
    by_rank = module.ranks(every, 8)
    assert list(by_rank) == sorted(by_rank)
    with_rank, reason = module.advice(by_rank, 8)
    assert with_rank == start
    assert why in reason
