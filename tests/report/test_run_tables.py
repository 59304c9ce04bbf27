"""The tables of runs: a row per setting, over its seeds, with the numbers of the files."""

from __future__ import annotations

import json

import pytest

from nalora.report.data import read_runs
from nalora.report.naming import row_labels
from nalora.report.run_tables import run_tables, write_tables
from nalora.report.tables import markdown
from nalora.runs.settings import check
from report.run_folders import summary, write, write_run


def scored(folder, name, right, **options):
    run = write_run(folder, name=name, evaluated=False, layers=2, steps=4, **options)
    for who, count in (("base", 4), ("adapted", right)):
        write(run / "evaluations" / "gym" / "chain_sum" / f"{who}-0123456789" / "summary.json", summary(count))
    return run


def test_seeds_of_a_setting_are_one_row_and_the_better_method_is_marked(tmp_path):
    for seed in range(4):
        scored(tmp_path, f"lora-{seed}", 40 + seed, seed=seed, method="lora")
        scored(tmp_path, f"na-{seed}", 60 + seed + seed % 2, seed=seed, method="na-lora")
    table = run_tables(read_runs([tmp_path]))["Results"]
    assert list(table.rows) == ["base: smollm2-135m", "lora", "na-lora"]
    text = markdown(table)
    assert "| lora | 41.50 ± 1.29 |" in text
    assert "| na-lora | **62.00 ± 1.63** |" in text
    assert "| base: smollm2-135m | 4.00 |" in text
    assert "n = 4" in table.caption


def test_rows_are_labelled_by_settings_that_differ(tmp_path):
    for name, options in {
        "a": {"method": "lora"}, "b": {"method": "na-lora", "apply_to": "update"},
        "c": {"method": "na-lora", "apply_to": "gradient"},
        "d": {"method": "na-lora", "apply_to": "gradient", "seed": 1},
    }.items():  # fmt: skip
        scored(tmp_path, name, 50, **options)
    labels = row_labels(read_runs([tmp_path]))
    assert labels == ["lora", "na-lora (apply_to=update)", *["na-lora (apply_to=gradient)"] * 2]


def test_runs_with_equal_settings_and_seed_are_labelled_by_name(tmp_path):
    for name in ("first", "again"):
        scored(tmp_path, name, 50, method="lora")
    assert row_labels(read_runs([tmp_path])) == ["lora [again]", "lora [first]"]
    assert len(run_tables(read_runs([tmp_path]))["Results"].rows) == 3


def test_runs_of_an_earlier_version_are_the_same_setting(tmp_path):
    """Version 0.1 wrote neither the step scales nor the thresholds, and two settings that no longer exist."""
    settings = check({"model": "m", "task": "gsm8k", "method": "na-lora"}).to_dict()
    new = {name: value for name, value in settings.items() if name not in ("method", "seed", "output", "steps")}
    old = {name: value for name, value in new.items() if name not in ("thresholds", "gate", "up", "down")}
    scored(tmp_path, "new", 2, method="na-lora", **new)
    scored(tmp_path, "old", 2, method="na-lora", seed=1, **old, diagnose_every=0, probe_size=64)
    assert row_labels(read_runs([tmp_path])) == ["na-lora", "na-lora"]


def test_models_are_in_the_labels(tmp_path):
    scored(tmp_path, "a", 50, method="lora", model="one")
    scored(tmp_path, "b", 50, method="na-lora", model="two")
    assert row_labels(read_runs([tmp_path])) == ["lora (model=one)", "na-lora (model=two)"]


def test_movement_is_the_sum_over_intervals_of_the_mean_over_layers(tmp_path):
    run = scored(tmp_path, "a", 50)
    diagnosis = json.loads((run / "diagnosis.json").read_text())
    expected = sum(sum(each["flip"]) / len(each["flip"]) for each in diagnosis["intervals"])
    (cell, *_) = run_tables(read_runs([run]))["Movement of the gates"].rows["na-lora"]
    assert cell.mean == pytest.approx(expected)


def test_without_evaluations_the_training_loss_is_shown_and_not_ranked(tmp_path):
    runs = [write_run(tmp_path, name=n, method=n, evaluated=False, diagnosis=False) for n in ("lora", "na-lora")]
    tables = run_tables(read_runs(runs))
    assert "Movement of the gates" not in tables
    assert "| lora | 0.9000 |" in markdown(tables["Results"])
    assert "does not rank" in tables["Results"].caption


def test_an_empty_run_gives_a_table_without_results(tmp_path):
    (tmp_path / "run.yaml").write_text("method: lora\n")
    assert run_tables(read_runs([tmp_path]))["Results"].caption.endswith("No results.")


def test_files(tmp_path):
    scored(tmp_path / "runs", "a", 50)
    files = write_tables(read_runs([tmp_path / "runs"]), tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["tables.md", "tables.tex"]
    assert files[0].read_text().count("## ") == 3
    tex = files[1].read_text()
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == 3
    assert tex.isascii()
