"""Figures of runs show the values of the files, and reasons for missing ones."""

from __future__ import annotations

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from figure_files import check_files, texts

from nalora.activations import get
from nalora.control.recorded import named_activation
from nalora.report import figures
from nalora.report.capacity import read_capacity
from nalora.report.charts import COLOURS, running_mean
from nalora.report.data import read_run, read_runs
from nalora.report.drawing import stroke, style
from report.run_folders import write, write_run

loss_curves, step_scales, update_norms, over_training, by_layer = (
    partial(figures.line_figure, name)
    for name in ("loss", "step-scales", "update-norm", "diagnostics-over-training", "diagnostics-by-layer")
)
regime_maps, mask_maps = (partial(figures.heat_figure, name) for name in ("regimes", "mask"))


@pytest.fixture
def runs(tmp_path):
    """A LoRA run without gates and a complete NA-LoRA run."""
    write_run(tmp_path, name="lora", method="lora", gates=False, seed=1)
    write_run(tmp_path, name="na-lora", layers=4)
    return read_runs([tmp_path])


def lines(axes, label):
    """Return the line with that label."""
    (found,) = [line for line in axes.get_lines() if line.get_label() == label]
    return found


def meshes(figure):
    return [axes.collections[0] for axes in figure.axes if axes.collections and axes.get_label() != "<colorbar>"]


def no_empty_axes(figure):
    """Check that every panel shows data or a reason."""
    for axes in figure.axes:
        assert axes.lines or axes.collections or axes.patches or axes.images or axes.texts, axes
    return figure


def test_losses_equal_the_logged_ones(runs):
    figure = no_empty_axes(loss_curves(runs))
    for run in runs:
        steps, losses = lines(figure.axes[0], run.name).get_data()
        np.testing.assert_array_equal(steps, [row["step"] for row in run.metrics])
        np.testing.assert_array_equal(losses, [row["loss"] for row in run.metrics])
    assert {"step", "cross-entropy per target token (nats)", "lora", "na-lora"} <= set(texts(figure))


def test_many_losses_are_drawn_pale_under_their_mean(tmp_path):
    run = read_run(write_run(tmp_path, steps=400, layers=1))
    axes = loss_curves([run]).axes[0]
    raw = lines(axes, "_raw").get_ydata()
    np.testing.assert_array_equal(raw, run.series("loss")[1])
    mean = lines(axes, "run").get_ydata()
    np.testing.assert_allclose(mean[200], raw[196:204].mean())
    assert any("running mean over 8 logged steps" in text for text in texts(axes.figure))


def test_running_mean_skips_what_is_not_finite_and_keeps_the_ends():
    mean = running_mean(np.array([1.0, np.nan, 3.0, 5.0]), 3)
    np.testing.assert_allclose(mean, [1, 2, 4, 4])


@pytest.mark.parametrize(
    ("draw", "names"),
    [(regime_maps, ["p_sup", "p_res", "p_pos"]), (mask_maps, ["kept_share", "stability"])],
)
def test_heat_maps_are_layers_by_steps(runs, draw, names):
    run = runs[1]
    figure = no_empty_axes(draw(run))
    shown = meshes(figure)
    assert len(shown) == len(names)
    for mesh, name in zip(shown, names, strict=True):
        np.testing.assert_array_equal(mesh.get_array(), run.gates.columns[name].T)
        np.testing.assert_allclose(mesh.get_coordinates()[0, [0, -1], 0], [0.5, 20.5])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["0", "1", "2", "3"]


def test_steps_far_apart_are_drawn_wide(runs):
    edges = figures._edges(np.array([1.0, 2.0, 4.0, 8.0]))
    assert edges.tolist() == [0.5, 1.5, 3.0, 6.0, 10.0]
    assert figures._edges(np.array([7.0])).tolist() == [6.5, 7.5]


def test_step_scales_are_means_and_ranges_over_layers(runs):
    figure = no_empty_axes(step_scales(runs))
    gates = runs[1].gates
    for axes, name in zip(figure.axes, ("scale_gate", "scale_up", "scale_down"), strict=True):
        np.testing.assert_allclose(lines(axes, "na-lora").get_ydata(), gates.columns[name].mean(axis=1))
        band = axes.collections[0].get_paths()[0].vertices
        assert band[:, 1].max() == gates.columns[name].max()
    assert any("lora does not steer gates" in text for text in texts(figure))


def test_kappa_is_above_the_histogram_with_its_thresholds(runs):
    run = runs[1]
    figure = no_empty_axes(figures.kappa_figure(run))
    upper, lower = figure.axes[:2]
    z, kappa = lines(upper, "κ(z)").get_data()
    np.testing.assert_allclose(kappa, get("silu").kappa(torch.tensor(z)).numpy())
    histogram = run.diagnosis["histogram"]
    counts = np.array(histogram["counts"]).sum(axis=1)
    assert [stairs.get_label() for stairs in lower.patches] == ["z at step 0", "z at step 20"]
    for stairs, count in zip(lower.patches, counts, strict=True):
        np.testing.assert_allclose(stairs.get_data().values, count / count.sum())
        np.testing.assert_array_equal(stairs.get_data().edges, histogram["edges"])
    points = get("silu").characteristic_points
    for axes in (upper, lower):
        assert {line.get_xdata()[0] for line in axes.get_lines()} >= set(points)


def test_update_norms_are_the_adapters(runs):
    axes = update_norms(runs).axes[0]
    for run in runs:
        capacity, _ = read_capacity(run)
        first = [norm for name, norm in capacity.modules.items() if ".layers.0." in name]
        assert len(first) == 5
        assert lines(axes, run.name).get_ydata()[0] == pytest.approx(np.linalg.norm(first))


# The paper's two figures


@pytest.mark.parametrize(("draw", "axis"), [(over_training, 1), (by_layer, 0)])
def test_the_papers_figures_are_means_of_the_diagnosis(runs, draw, axis):
    figure = no_empty_axes(draw(runs))
    for axes, measure in zip(figure.axes, ("flip", "kappa_drift", "suppressive"), strict=True):
        for run in runs:
            values = np.array([interval[measure] for interval in run.diagnosis["intervals"]])
            x, y = lines(axes, run.name).get_data()
            np.testing.assert_allclose(y, values.mean(axis=axis))
            assert list(x) == ([5, 10, 20] if axis else [0, 1, 2, 3])
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > max(line.get_ydata().max() for line in axes.get_lines())
    said = " ".join(texts(figure))
    assert "4,321 tokens in 64 examples of gym/chain_sum" in said
    assert "Intervals of 5 to 10 steps" in said


def test_different_probes_are_noted(runs):
    runs[0].diagnosis["probe"]["examples"] = 7
    assert any("Different probes" in text for text in texts(over_training(runs)))


def test_a_run_without_a_diagnosis_is_noted(tmp_path, runs):
    bare = read_run(write_run(tmp_path / "more", name="bare", diagnosis=False))
    figure = by_layer([*runs, bare])
    assert any("bare: No diagnosis yet" in text for text in texts(figure))
    assert "bare: No diagnosis yet" in by_layer([bare])


def test_activations_without_regimes_get_a_notice_in_their_panel(tmp_path):
    path = write_run(tmp_path, layers=2)
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    for block in diagnosis["blocks"]:
        block |= {"activation": "relu", "lower": None, "upper": None}
    for interval in diagnosis["intervals"]:
        interval |= {"flip": None, "suppressive": [None, None]}
    write(path / "diagnosis.json", diagnosis)
    run = read_run(path)
    figure = no_empty_axes(over_training([run]))
    assert sum("no finite" in text.replace("\n", " ") for text in texts(figure)) == 2
    assert lines(figure.axes[1], "run").get_ydata().size == 3
    assert not any("+" in text for text in texts(no_empty_axes(figures.kappa_figure(run))))


def test_some_blocks_without_regimes_leave_the_mean_of_the_others(tmp_path):
    path = write_run(tmp_path, layers=2)
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    for interval in diagnosis["intervals"]:
        interval["flip"] = [None, 0.25]
    write(path / "diagnosis.json", diagnosis)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        over, by = (draw([read_run(path)]) for draw in (over_training, by_layer))
    assert lines(over.axes[0], "run").get_ydata().tolist() == [0.25] * 3
    np.testing.assert_array_equal(lines(by.axes[0], "run").get_ydata(), [np.nan, 0.25])


def test_the_difference_to_the_first_run_is_drawn_around_zero(runs):
    figure = figures.line_figure("loss-difference", runs)
    (first, loss), (second, other) = [(run.name, dict(zip(*run.series("loss"), strict=True))) for run in runs]
    assert figure.get_suptitle() == f"Training loss: difference to {first}"
    assert set(lines(figure.axes[0], first).get_ydata()) == {0.0}
    drawn = lines(figure.axes[0], second)
    np.testing.assert_allclose(drawn.get_ydata(), [other[step] - loss[step] for step in other])


# Whole folders


def test_every_figure_is_written_as_png_and_svg(runs, tmp_path):
    written = figures.write_figures(runs, tmp_path / "figures")
    names = {file.stem for file in written.files}
    shared = {
        "loss",
        "loss-difference",
        "step-scales",
        "update-norm",
        "diagnostics-over-training",
        "diagnostics-by-layer",
    }
    assert names == shared | {"lora-kappa", "na-lora-regimes", "na-lora-mask", "na-lora-kappa"}
    for name in names:
        check_files([tmp_path / "figures" / f"{name}.{kind}" for kind in ("png", "svg")])
    assert len(written.skipped) == 2
    assert all("does not steer gates" in sentence for sentence in written.skipped)


def test_only_the_two_paper_figures_are_written(runs, tmp_path):
    written = figures.write_paper_figures(runs, tmp_path / "two")
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == [
        f"diagnostics-{name}.{kind}" for name in ("by-layer", "over-training") for kind in ("png", "svg")
    ]
    check_files(written.files[:2], must_say=["Effective-homogeneity diagnostics over training", "regime flip rate"])
    check_files(written.files[2:], must_say=["Layer-wise", "suppressive crossings", "layer"])


def test_an_empty_run_leaves_no_file_and_gives_reasons(tmp_path):
    (tmp_path / "run.yaml").write_text("method: na-lora\n")
    written = figures.write_figures(read_runs([tmp_path]), tmp_path / "figures")
    assert written.files == []
    assert len(written.skipped) == 8
    assert all(" was not drawn: " in sentence and len(sentence) > 35 for sentence in written.skipped)
    assert not (tmp_path / "figures").exists()


def test_gates_without_numbers_are_skipped(tmp_path):
    path = write_run(tmp_path, layers=2, steps=3)
    head, *rows = (path / "gates.jsonl").read_text().splitlines()
    emptied = [json.loads(row) | {"p_sup": [None, None], "kept_share": [None, None]} for row in rows]
    (path / "gates.jsonl").write_text("\n".join([head, *map(json.dumps, emptied)]))
    run = read_run(path)
    for draw in (regime_maps, mask_maps):
        figure = no_empty_axes(draw(run))
        assert any("No numbers" in text for text in texts(figure))


def test_one_step_and_one_layer_can_be_drawn(tmp_path):
    run = read_run(write_run(tmp_path, layers=1, steps=1))
    written = figures.write_figures([run], tmp_path / "figures")
    assert written.skipped == []


def test_the_users_style_has_no_effect(runs, tmp_path):
    import matplotlib

    plain = figures.write_paper_figures(runs, tmp_path / "plain").files
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        styled = figures.write_paper_figures(runs, tmp_path / "styled").files
    assert [file.read_bytes() for file in plain] == [file.read_bytes() for file in styled]
    before = matplotlib.rcParams["font.size"]
    with style():
        pass
    assert matplotlib.rcParams["font.size"] == before


def test_strokes_differ_without_colour_too():
    many = [stroke(number, markers=True) for number in range(32)]
    assert len({(each["color"], str(each["linestyle"])) for each in many}) == 32
    first = many[: len(COLOURS["light"])]
    assert (
        len({str(each["linestyle"]) for each in first})
        == len({each["marker"] for each in first})
        == len(COLOURS["light"])
    )


def test_the_first_of_two_equal_lines_is_visible_around_the_second():
    first, second = stroke(0, markers=True), stroke(1, markers=True)
    assert first["linewidth"] > second["linewidth"]
    assert first["markersize"] > second["markersize"]


@pytest.mark.parametrize("draw", [loss_curves, update_norms, step_scales, by_layer])
def test_legends_of_ten_long_names_neither_overlap_nor_leave_the_figure(tmp_path, draw):
    for i in range(10):
        write_run(tmp_path, name=f"llama-3.1-8b-math-na-lora-update-seed-{i}", layers=12, seed=i, gates=i > 1)
    runs = read_runs([tmp_path])
    figure = draw(runs)
    alone = draw(runs[-1:])
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for each in (figure, alone):
        with style():
            FigureCanvasAgg(each).draw()
        whole = each.bbox
        (legend,) = [child.get_window_extent() for child in each.legends] if each.legends else [None]
        title = each._suptitle.get_window_extent()
        for axes in each.axes:
            box = axes.get_tightbbox()
            assert whole.x0 - 1 <= box.x0 < box.x1 <= whole.x1 + 1
            assert box.y1 <= title.y0 + 1
            assert legend is None or box.y0 >= legend.y1 - 1
            assert axes.get_window_extent().height > 120
        assert legend is None or legend.x1 <= whole.x1
        assert title.x1 <= whole.x1


def test_one_sentence_for_the_same_reason(tmp_path, runs):
    bare = [write_run(tmp_path / "more", name=name, method="lora", gates=False) for name in ("a", "b")]
    figure = step_scales([*read_runs(bare), runs[1]])
    said = " ".join(texts(figure)).replace("\n", " ")
    assert "a, b: lora does not steer gates" in said


def test_an_unknown_activation_keeps_its_histogram(tmp_path):
    path = write_run(tmp_path, layers=2)
    diagnosis = json.loads((path / "diagnosis.json").read_text())
    diagnosis["blocks"][1]["activation"] = "weird"
    write(path / "diagnosis.json", diagnosis)
    figure = no_empty_axes(figures.kappa_figure(read_run(path)))
    assert any("no formula for κ of weird" in text.replace("\n", " ") for text in texts(figure))
    counts = np.array(diagnosis["histogram"]["counts"])
    for column, axes in enumerate(figure.axes[2:4]):
        shown = axes.patches[0].get_data().values
        np.testing.assert_allclose(shown, counts[0, column] / counts[0, column].sum())


@pytest.mark.parametrize(("name", "upper"), [("silu≤7", 7.0), ("gelu", np.inf), ("swish", np.inf)])
def test_clamped_activations_are_known_by_their_name(name, upper):
    assert named_activation(name).upper == upper


@pytest.mark.parametrize("name", ["weird", "silu≤x", "silu≤-1", ""])
def test_unknown_activations_have_no_formula(name):
    assert named_activation(name) is None


def test_a_run_has_one_colour_in_all_figures(runs):
    colours = {
        lines(draw(runs).axes[0], "na-lora").get_color() for draw in (loss_curves, update_norms, step_scales, by_layer)
    }
    assert colours == {COLOURS["light"][1]}
