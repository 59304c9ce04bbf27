"""A report shows the values that controls applied, not those only followed, also for runs of 0.1."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tiny
from rich.console import Console

from nalora.report import figures
from nalora.report.data import read_run
from nalora.report.html import page
from nalora.runs.settings import check
from nalora.training.run import train
from report.run_folders import write_run

SCALES = ("scale_gate", "scale_up", "scale_down")
GELU = {"activations": ["gelu"] * 4, "thresholds": [[-0.7518, 0.8399]] * 4}


def rows_of(run):
    return [json.loads(line) for line in (run / "gates.jsonl").read_text().splitlines()[1:]]


@pytest.mark.parametrize(
    ("settings", "header", "why"),
    [
        ({"scaling": False}, {}, "switched off"),
        ({"regimes": "paper"}, GELU, "the paper calls gelu degenerate"),
        ({"regimes": "derived"}, {"activations": ["relu"] * 4, "thresholds": [None] * 4}, "no finite regimes"),
    ],
)
def test_a_run_of_0_1_without_scaling_has_scales_of_one(tmp_path, settings, header, why):
    path = write_run(tmp_path, header=header, **settings)
    run = read_run(path)
    for name in SCALES:
        assert (run.gates.columns[name] == 1).all()
        followed = np.array([row[name] for row in rows_of(path)])
        assert np.array_equal(run.gates.columns[f"followed_{name}"], followed)
    assert why in run.missing["scaling"]
    assert "mask" not in run.missing
    assert why in figures.line_figure("step-scales", [run])
    assert (run.gates.columns["kept_share"] != 1).any()


@pytest.mark.parametrize("settings", [{"mask": False}, {"method": "na-lora-off", "mask": False, "scaling": False}])
def test_a_run_of_0_1_without_mask_keeps_every_channel(tmp_path, settings):
    run = read_run(write_run(tmp_path, **settings))
    assert (run.gates.columns["kept_share"] == 1).all()
    assert (run.gates.columns["mask_mean"] == 1).all()
    assert (run.gates.columns["stability"] == 0).all()
    assert "followed_kept_share" in run.gates.columns
    assert (
        figures.heat_figure("mask", run)
        == run.missing["mask"]
        == "The channel mask does not act in this run: switched off."
    )
    assert ("scaling" in run.missing) == (settings.get("scaling") is False)


def test_a_run_of_0_1_with_both_controls_is_read_unchanged(tmp_path):
    path = write_run(tmp_path)
    run = read_run(path)
    for name in (*SCALES, "mask_mean", "kept_share", "stability"):
        assert np.array_equal(run.gates.columns[name], np.array([row[name] for row in rows_of(path)]))
    assert not [name for name in run.gates.columns if name.startswith("followed")]
    assert not {"mask", "scaling"} & run.missing.keys()


def test_the_mean_that_was_preserved_is_one(tmp_path):
    run = read_run(write_run(tmp_path, preserve_mean=True))
    assert (run.gates.columns["mask_mean"] == 1).all()
    assert (run.gates.columns["followed_mask_mean"] < 1).any()
    assert (run.gates.columns["kept_share"] != 1).any()


def test_recorded_reasons_override_the_settings(tmp_path):
    """Its rows have applied values; the settings are ignored."""
    off = ["", "", "the paper calls gelu degenerate", "the paper calls gelu degenerate"]
    header = {"mask_off": [""] * 4, "scaling_off": off}
    path = write_run(tmp_path, header=header, scaling=False)
    run = read_run(path)
    assert np.array_equal(run.gates.columns["scale_gate"], np.array([row["scale_gate"] for row in rows_of(path)]))
    assert run.gates.scaling_off == tuple(off)
    assert "scaling" not in run.missing, "two layers are scaled"


def test_a_run_of_0_1_that_was_resumed_later_is_read_row_by_row(tmp_path):
    path = write_run(tmp_path, scaling=False)
    applied = {"step": 21} | {name: [1.0] * 4 for name in SCALES} | {f"followed_{name}": [1.5] * 4 for name in SCALES}
    with (path / "gates.jsonl").open("a") as file:
        file.write(json.dumps(applied) + "\n")
    columns = read_run(path).gates.columns
    assert (columns["scale_gate"] == 1).all()
    assert (columns["followed_scale_gate"][-1] == 1.5).all()
    assert (columns["followed_scale_gate"][0] == rows_of(path)[0]["scale_gate"]).all()


@pytest.fixture(scope="module")
def gelu_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gelu")
    with (folder / "screen").open("w") as screen:
        settings = {
            "model": tiny.saved_llama(folder / "base", hidden_act="gelu"), "task": "gym/chain_sum", "train_size": 16,
            "test_size": 4, "output": str(folder / "run"), "steps": 3, "batch_size": 4, "log_every": 1,
            "device": "cpu", "max_length": 128, "method": "na-lora", "start": "first",
        }  # fmt: skip
        train(check(settings), console=Console(file=screen, force_terminal=True, width=200))
    return folder


def test_training_gelu_logs_what_is_applied(gelu_run):
    rows = [json.loads(line) for line in (gelu_run / "run" / "metrics.jsonl").read_text().splitlines()]
    header, *gates = map(json.loads, (gelu_run / "run" / "gates.jsonl").read_text().splitlines())
    assert all("degenerate" in why for why in header["scaling_off"])
    assert header["mask_off"] == ["", ""]
    for row in rows:
        assert [row[f"nalora/{name}"] for name in SCALES] == [1, 1, 1]
        assert row["nalora/followed_scale_gate"] != 1
        assert row["nalora/mask_mean"] < 1
        assert row["nalora/scaling_acts"] == 0
    for row in gates:
        assert [row[name] for name in SCALES] == [[1, 1]] * 3
        assert row["followed_scale_gate"] != [1, 1]
        assert "followed_mask_mean" not in row


def test_the_progress_bar_shows_no_scales_that_do_not_act(gelu_run):
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", (gelu_run / "screen").read_text())
    assert "sup/res/pos" in shown
    assert "scales" not in shown.partition("sup/res/pos")[2]


def test_the_page_has_the_reason_why_steps_are_not_scaled(gelu_run):
    text = page([read_run(gelu_run / "run")])
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    run = data["runs"][0]
    assert "degenerate" in run["missing"]["scaling"]
    assert all("degenerate" in why for why in run["gates"]["scaling_off"])
