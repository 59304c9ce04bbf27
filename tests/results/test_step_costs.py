"""Costs on the page on choosing are those of benchmarks/rows.csv, under the names that its scripts give to methods."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from nalora.studies.study import read


def script(name):
    return importlib.import_module(name)


def step(variant, ms, gib, question="methods", setting="llama-3.1-8b shapes, 4x1024", run="1"):
    row = dict.fromkeys(script("choosing_page.step_costs").harness.COLUMNS, "")
    row |= {"question": question, "setting": setting, "variant": variant, "unit": "ms", "p50": str(ms), "samples": "9"}
    return row | {"peak_gib": str(gib), "device": "a GPU", "run": run}


def method(variant, ms, gib):
    one = step(variant, ms, gib)
    return [one, one | {"unit": "s"}, one | {"unit": "passes", "p50": "0"}]


def test_a_methods_costs_are_multiples_of_loras():
    costs = script("choosing_page.step_costs").method_costs(
        [*method("lora", 100, 10), *method("peft/gralora, k = 4", 150, 11)]
    )
    assert costs.ratios({"method": "peft/gralora", "gralora_k": 4}) == ("1.50", "1.10")
    assert costs.ratios({"method": "peft/gralora", "gralora_k": 8}) == ("not measured", "not measured")
    assert costs.ratios({"method": "lora"}) == ("1.00", "1.00")


def test_ranks_are_multiples_of_the_lowest():
    module = script("choosing_page.step_costs")
    rows = [
        step(variant, ms * factor, gib * factor, module.QUESTION, f"8b, 4x1024, r={rank}, bf16 base")
        for rank, factor in ((8, 1), (128, 1.5))
        for variant, ms, gib in ((module.PEFT, 200, 20), (module.GRAPHS, 100, 10))
    ]
    assert module.rank_ratios(rows) == (8, 128, 1.5, 1.5)
    table = module.rank_table(rows)
    assert "| PEFT LoRA | 200 ms (1.00) | 300 ms (1.50) |" in table
    assert "| PEFT LoRA | 20.0 GiB (1.00) | 30.0 GiB (1.50) |" in table
    assert module.rank_ratios(rows[:2]) is None
    assert module.rank_table(rows[:2]) == []


def test_fused_layers_are_compared_within_one_run():
    module = script("choosing_page.step_costs")
    rows = [step(module.PEFT, 200, 20, module.QUESTION), step(module.GRAPHED, 100, 12, module.QUESTION)]
    later = step(module.PEFT, 400, 40, module.QUESTION, run="2")
    assert module.fused_layers([*rows, later])[2:] == (0.5, 0.6)
    assert module.fused_layers([*rows[:1], later]) is None


def test_fused_layers_are_those_of_the_newest_run_with_peft():
    """NA-LoRA's, under that name, if that run did not measure `nalora.fuse`."""
    module = script("choosing_page.step_costs")
    rows = [
        step(variant, ms, gib, module.QUESTION, run=run)
        for run, variant, ms, gib in (
            ("1", module.PEFT, 200, 20), ("1", module.GRAPHED, 100, 12),
            ("2", module.PEFT, 400, 40), ("2", module.GRAPHS, 100, 10),
        )
    ]  # fmt: skip
    assert module.fused_layers(rows)[2:] == (0.25, 0.25)
    assert module.fused_layers(rows)[0] != module.fused_layers(rows[:2])[0] == "`nalora.fuse`"


def test_ranks_of_an_older_commit_are_named():
    module = script("choosing_page.step_costs")
    older = importlib.import_module("peers_page").KEPT_NORM_OUTPUTS
    rows = [
        step(variant, 100, 10, module.QUESTION, f"8b, 4x1024, r={rank}, bf16 base") | {"commit": older}
        for rank in (8, 128)
        for variant in (module.PEFT, module.GRAPHS)
    ]
    assert "norms" not in "".join(module.rank_table(rows))
    newer = rows[1] | {"commit": "new", "p50": "110", "run": "2"}
    assert "take 110 ms and 10.0 GiB at r = 8 (commit new)" in "".join(module.rank_table([*rows, newer]))


def test_arms_have_the_names_of_the_measured_methods(monkeypatch):
    pytest.importorskip("triton")
    module = script("choosing_page.step_costs")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    measured = {variant.name for variant in script("methods_cost").VARIANTS}
    names = {module.variant(arm.settings) for arm in read("equal-cost").arms}
    unknown = {name for name in names - measured if not name.startswith(("na-lora-random", "na-lora on"))}
    assert unknown == set()
