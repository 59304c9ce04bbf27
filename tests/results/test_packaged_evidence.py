"""What `nalora suggest` says of its reliability follows from the kept runs, and so do its default rates."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from nalora.studies.conduct import so_far
from nalora.studies.rate_cases import cases_of
from nalora.studies.rate_evidence import FILE, known, to_json
from nalora.studies.suggest import ADAPTER_RATES, FULL_RATES

RESULTS = Path(__file__).parents[2] / "results"


def script(name):
    return importlib.import_module(name)


def test_the_packaged_file_follows_from_the_runs(store):
    found = to_json(script("rate_evidence").evidence(store))
    assert json.loads(json.dumps(found)) == json.loads(FILE.read_text(encoding="utf-8"))


def test_its_counts_are_those_of_the_published_table(store):
    rows = [
        row
        for row in script("findings_page.early_losses").early_losses(store)
        if row.startswith(("| GSM8K", "| cipher"))
    ]
    sides = [[int(number) for number in row.split(" | ")[2].split(", ")] for row in rows]
    total = known().total
    assert [total.below, total.at, total.above] == [sum(side) for side in zip(*sides, strict=True)]


def test_the_page_has_the_same_numbers():
    page = " ".join((RESULTS.parent / "docs" / "suggest.md").read_text(encoding="utf-8").split())
    total = known().total
    assert f"in {total.grids} grids on two tasks the pick was never above the best rate" in page
    assert (len(known().tasks), total.above) == (2, 0)
    assert f"{total.at} times the best, {total.below} times below it" in page
    assert f"its final loss was {total.loss_above_best:.4f} above the best of the grid" in page
    assert f"({100 * total.next_gap:.0f} %)" in page


@pytest.mark.parametrize("name", ["gsm8k", "equal-cost", "caesar"])
def test_no_row_was_seen_twice_in_the_first_steps(store, name):
    study = script("tables.stored_answers").study(name)
    keys = {
        key
        for by_seed in script("tables.stored_answers").compared_runs(name, store).values()
        for key in by_seed.values()
    }
    examples = {json.loads((store / key / "result.json").read_text())["examples"] for key in keys}
    assert known().rule.steps * study.settings["batch_size"] < min(examples)


def test_the_rule_has_not_been_judged():
    """Once it has, the sentences of `Evidence` must say with which result."""
    assert not (RESULTS / "rate-search" / "verdict.md").exists()


@pytest.mark.parametrize("name", ["gsm8k", "equal-cost", "caesar"])
def test_the_default_rates_include_the_best_rates_of_every_arm(store, name):
    progress = so_far(script("tables.stored_answers").study(name), store)
    cases = cases_of(progress.schedule, progress.results)
    for case in cases:
        grid = FULL_RATES if case.name.startswith("full") else ADAPTER_RATES
        best = min(case.rates, key=case.losses.__getitem__)
        assert grid[0] < best <= grid[-1] * 1.01, case.name
    assert len(cases) >= 10
