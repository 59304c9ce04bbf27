"""The figure of short runs: a curve for each rate, the compared losses, the suggested rate."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from figure_files import check_files, texts

from nalora.errors import NALoRAError
from nalora.report.data import read_run
from nalora.report.rate_figure import draw_rates, rate_figure
from report import run_folders

COMPARED = "mean loss of steps 21 to 30"


@pytest.fixture
def runs(tmp_path):
    made = {}
    for number, rate in enumerate((1e-3, 2e-3, 4e-3)):
        run_folders.write_run(tmp_path, name=f"r{number}", seed=number, steps=12, gates=False, diagnosis=False)
        made[rate] = read_run(tmp_path / f"r{number}")
    return made


def test_curves_are_the_losses_of_the_runs(runs):
    figure = rate_figure(runs, {1e-3: 1.2, 2e-3: 1.1}, 2e-3, COMPARED)
    left, right = figure.axes
    for (rate, run), line in zip(runs.items(), left.get_lines(), strict=True):
        assert line.get_label() == f"{rate:g}"
        np.testing.assert_array_equal(line.get_ydata(), run.series("loss")[1])
    points, pick = right.get_lines()
    assert dict(zip(*points.get_data(), strict=True)) == {1e-3: 1.2, 2e-3: 1.1}
    assert set(pick.get_xdata()) == {2e-3}
    shown = " ".join(texts(figure))
    assert "Diverged: 0.004." in shown
    assert "Dashed: the suggested rate, 0.002." in shown
    assert "Mean loss of steps 21 to 30" in shown


def test_a_loss_far_above_the_others_does_not_flatten_them(runs):
    rows = [*runs[4e-3].metrics[:5], {**runs[4e-3].metrics[5], "loss": 900.0}]
    figure = rate_figure({**runs, 4e-3: dataclasses.replace(runs[4e-3], metrics=rows)}, {1e-3: 1.2}, None, COMPARED)
    assert figure.axes[0].get_ylim()[1] < 10
    assert any("not shown; the highest is 900" in text for text in texts(figure))


def test_it_is_written_as_png_and_svg_and_replaces_only_nalora_s(runs, tmp_path):
    for _ in range(2):
        check_files(draw_rates(runs, {1e-3: 1.2, 2e-3: 1.1}, 2e-3, COMPARED, tmp_path / "suggestion"), ["0.002"])
    (tmp_path / "suggestion.svg").write_text("mine")
    with pytest.raises(NALoRAError, match="suggestion.svg"):
        draw_rates(runs, {1e-3: 1.2}, None, COMPARED, tmp_path / "suggestion")
    assert (tmp_path / "suggestion.svg").read_text() == "mine"
