import csv

import methods_cost
import pytest


@pytest.mark.slow  # every method trains a tiny model: half a minute
def test_every_method_is_measured(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.csv"
    arguments = "--device cpu --shape tiny --length 32 --batch 2 --steps 3 --warmup 1 --rows"
    monkeypatch.setattr("sys.argv", ["methods_cost.py", *arguments.split(), str(rows)])
    methods_cost.main()
    with rows.open(newline="") as file:
        measured = {row["variant"] for row in csv.DictReader(file) if row["unit"] == "ms" and float(row["p50"]) > 0}
    refused = {variant.name for variant in methods_cost.VARIANTS if "k = 8" in variant.name and "block" in variant.name}
    assert measured == {variant.name for variant in methods_cost.VARIANTS} - refused
    output = capsys.readouterr().out
    assert all(f"{name:32s} not measured: rank: 64" in output for name in refused)  # k_proj has 32 outputs
