"""The figure of an activation shows its curves and its characteristic points."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_files import check_files, svg_words, texts

from nalora.activations import KNOWN, get
from nalora.control.custom_activation import from_function
from nalora.errors import NALoRAError
from nalora.report.activation_figure import activation_figure, draw_activation


@pytest.mark.parametrize("activation", KNOWN, ids=lambda each: each.name)
def test_curves_are_the_activations(activation):
    lines = [line for axes in activation_figure(activation).axes for line in axes.get_lines()]
    drawn = {line.get_label(): line for line in lines if line.get_label()[0] != "_"}
    assert [label.partition("(")[0] for label in drawn] == ["φ", "φ′", "s", "κ", "χ"]
    for line, what in zip(drawn.values(), ("phi", "derivative", "selection", "kappa", "chi"), strict=True):
        z, values = (np.asarray(each) for each in line.get_data())
        there = np.isfinite(values)
        np.testing.assert_array_equal(values[there], getattr(activation, what)(torch.tensor(z[there])).numpy())
        assert there.sum() > 1000


@pytest.mark.parametrize(
    ("name", "marks"),
    [("silu", {"−1.2785", "+1.2785"}), ("gelu", {"−0.7518", "+0.8399"}), ("mish", {"−1.1924", "+0.8772"})],
)
def test_points_are_marked_and_named(name, marks):
    figure, points = activation_figure(get(name)), get(name).characteristic_points
    upper, lower = figure.axes[:2]
    for axes in (upper, lower):
        verticals = {line.get_xdata()[0] for line in axes.get_lines() if len(set(line.get_xdata())) == 1}
        assert verticals >= set(points)
    (dots,) = [line for line in lower.get_lines() if line.get_label() == "_points"]
    assert dots.get_ydata()[0] == pytest.approx(0, abs=1e-12)
    assert marks <= {text.split("\n")[0] for text in texts(figure)}
    assert any("κ's maximum" in text for text in texts(figure))


def test_relu_has_no_points_and_a_notice():
    figure = activation_figure(get("relu"))
    assert any("no characteristic points" in text for text in texts(figure))
    kappa = next(line for line in figure.axes[1].get_lines() if line.get_label().startswith("κ"))
    assert np.isnan(kappa.get_ydata()).sum() == 1  # a gap at the jump, not a slope


def test_a_pole_is_a_gap():
    figure = activation_figure(from_function(torch.nn.functional.softplus, "softplus"))
    selection = next(line for line in figure.axes[0].get_lines() if line.get_label().startswith("s"))
    assert np.isnan(selection.get_ydata()).any()
    assert max(figure.axes[0].get_ylim()) < 10


@pytest.mark.parametrize("activation", [get("silu"), from_function(lambda z: z * torch.sigmoid(3 * z), "my gate/3")])
def test_files(activation, tmp_path):
    files = draw_activation(activation, tmp_path / "new")
    assert [file.name for file in files] == [
        f"{'silu' if activation.name == 'silu' else 'my-gate-3'}.{k}" for k in ("png", "svg")
    ]
    check_files(files, must_say=["φ(z)", "gate pre-activation"])


def test_a_custom_activation_is_drawn_with_its_numerically_found_points():
    steep = from_function(lambda z: z * torch.sigmoid(3 * z), "steep")
    figure = activation_figure(steep)
    found = get("silu").characteristic_points.upper / 3
    assert any(text.startswith(f"+{found:.4f}") for text in texts(figure))


def test_the_same_drawing_is_the_same_file(tmp_path):
    first, again = (draw_activation(get("mish"), tmp_path / name) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]


@pytest.mark.parametrize("known", KNOWN, ids=lambda each: each.name)
def test_the_page_about_activations_has_the_points(known):
    page = (Path(__file__).parents[2] / "docs" / "activations.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{known.name}`")]
    points = known.characteristic_points
    shown = [f"{point:+.9f}".replace("-", "−") for point in points] if points else ["–", "–"]
    assert [cell.strip() for cell in row.split("|")[2:4]] == shown


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_the_figures_of_the_documentation_are_current(name, tmp_path):
    """Only texts are compared: coordinates may differ in the last digit between versions of matplotlib."""
    kept = Path(__file__).parents[2] / "docs" / "figures" / f"{name}.svg"
    drawn = draw_activation(get(name), tmp_path)[1]
    assert svg_words(kept) == svg_words(drawn)


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NALoRAError, match=r"pip install 'nalora\[report\]'"):
        draw_activation(get("silu"), tmp_path)
