"""The page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from nalora.report.capacity import read_capacity
from nalora.report.data import read_run, read_runs
from nalora.report.html import write_report
from report.browsing import Visit, a_browser
from report.run_folders import write_run


@pytest.fixture(scope="module")
def browser():
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two complete NA-LoRA runs and a LoRA run."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, name="first", mismatch=True, channels=True)
    write_run(folder, name="second", seed=1)
    write_run(folder, name="third", seed=2, method="lora", gates=False)
    write_report(read_runs([folder]), folder / "report.html")
    return folder


@pytest.fixture
def visit(browser, folder):
    visit = Visit(browser, folder / "report.html")
    yield visit
    visit.context.close()
    assert visit.problems == []
    assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def gate_rows(run):
    _, *rows = (run / "gates.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def number_in(label: str, before: str) -> float:
    """Return the number that follows a text."""
    return float(re.search(re.escape(before) + r"\s*([+−-]?[\d.]+(?:e[+−-]?\d+)?)", label)[1].replace("−", "-"))


def test_every_chart_is_drawn(visit):
    charts = visit.charts()
    assert len(charts) == 22
    for chart in charts:
        traces = visit.traces(chart)
        assert traces, chart
        assert all(len(trace["x"]) for trace in traces), chart
        box = visit.show(chart).locator(".main-svg").first.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 80


def test_every_chart_is_described_and_has_its_table(visit):
    for chart in visit.charts():
        plot = visit.show(chart)
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 30, chart
        details = visit.page.locator(f"#chart-{chart} details")
        details.locator("summary").click()
        details.locator("tbody tr").first.wait_for()


@pytest.mark.parametrize("name", ["p_sup", "p_res", "p_pos", "kept_share", "stability"])
def test_hovering_a_heat_map_shows_the_files_value(visit, folder, name):
    for step, layer in ((1, 0), (13, 2), (20, 3)):
        label = visit.hover(name, step, str(layer))
        assert f"layer {layer}, step {step}" in label
        words = visit.traces(name)[0]["name"]
        assert number_in(label, words) == gate_rows(folder / "first")[step - 1][name][layer]


def test_hovering_a_curve_shows_the_files_value(visit, folder):
    visit.page.locator("#run-1").uncheck()
    visit.page.locator("#run-2").uncheck()
    rows = [json.loads(line) for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    for row in (rows[3], rows[16]):
        label = visit.hover("loss", row["step"], row["loss"])
        assert f"step {row['step']}" in label
        assert number_in(label, "loss") == float(f"{row['loss']:.5g}")


def test_hovering_channels_and_intervals_shows_their_values(visit, folder):
    norms = read_capacity(read_run(folder / "first"))[0].rows["model.layers.0.mlp.gate_proj"]
    label = visit.hover("channels", 7, float(norms[7]))
    assert "channel 7" in label
    assert number_in(label, "update norm") == pytest.approx(norms[7], rel=1e-4)
    diagnosis = json.loads((folder / "first" / "diagnosis.json").read_text())
    label = visit.hover("moved-heat", "5 → 10", "2")
    assert number_in(label, "D_sel") == diagnosis["intervals"][1]["D_sel"][2]
    scores = read_run(folder / "second").evaluations["gym/chain_sum"]["adapted"]["measures"]["accuracy"]
    label = visit.hover("answers-0", scores["value"], "second")
    assert number_in(label, "accuracy") == pytest.approx(scores["value"], rel=1e-5)


def test_selecting_a_layer_changes_the_charts(visit, folder):
    rows = gate_rows(folder / "first")
    charts = ("scales", "moved-layer", "channels", "kappa")
    before = {chart: visit.traces(chart) for chart in charts}
    visit.page.locator("#layer").select_option("3")
    scale = visit.traces("scales")[0]
    assert scale["y"] == pytest.approx([row["scale_gate"][3] for row in rows], rel=1e-6)
    for chart in charts:
        assert visit.traces(chart) != before[chart], chart
        assert "layer 3" in visit.page.locator(f"#chart-{chart} h3").inner_text().lower()


def test_clicking_a_heat_map_selects_its_layer(visit):
    visit.hover("p_sup", 10, "2")
    visit.page.mouse.down()
    visit.page.mouse.up()
    assert visit.page.locator("#layer").input_value() == "2"


def test_selecting_runs_changes_the_charts(visit):
    assert [trace["name"] for trace in visit.traces("loss")] == ["first", "second", "third"]
    visit.page.locator("#run-1").uncheck()
    assert [trace["name"] for trace in visit.traces("loss")] == ["first", "third"]
    assert [trace["name"] for trace in visit.traces("answers-0")] == ["base", "first", "third"]
    for number in (0, 2):
        visit.page.locator(f"#run-{number}").uncheck()
    assert "No run is selected" in visit.page.locator("#chart-loss .note").inner_text()


def test_the_run_in_detail_changes_the_heat_maps(visit, folder):
    assert visit.traces("p_sup")[0]["z"][1] == pytest.approx([r["p_sup"][1] for r in gate_rows(folder / "first")])
    visit.page.locator("#detail").select_option("1")
    assert visit.traces("p_sup")[0]["z"][1] == pytest.approx([r["p_sup"][1] for r in gate_rows(folder / "second")])
    visit.page.locator("#detail").select_option("2")
    visit.show("p_sup")
    assert "lora does not steer gates" in visit.page.locator("#chart-p_sup .note").inner_text()


def test_heat_maps_can_show_the_change(visit, folder):
    visit.page.locator("#mode").select_option("change")
    rows = gate_rows(folder / "first")
    expected = [row["p_pos"][3] - rows[0]["p_pos"][3] for row in rows]
    assert visit.traces("p_pos")[0]["z"][3] == pytest.approx(expected, abs=1e-6)
    label = visit.hover("p_pos", 20, "3")
    assert number_in(label, "positive share") == rows[-1]["p_pos"][3]


def test_a_channel_can_be_selected(visit, folder):
    norms = read_capacity(read_run(folder / "first"))[0].rows["model.layers.0.mlp.gate_proj"]
    visit.show("channels")
    said = visit.page.locator("#chart-channels figcaption p")
    assert f"Channel {norms.argmax()} of layer 0" in said.inner_text()
    visit.page.locator("#channel").fill("5")
    visit.page.locator("#channel").press("Enter")
    rank = 1 + int((norms > norms[5]).sum())
    assert f"Channel 5 of layer 0: update norm {norms[5]:.4g}, number {rank} of 24" in said.inner_text()
    assert visit.traces("channels")[1]["x"] == [5]
    assert "Channel 5 of layer 0" in visit.page.locator("#chart-channel-moved h3").inner_text()


def test_a_keyboard_reaches_every_control(visit):
    page = visit.page
    page.wait_for_function("window.Plotly")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "results"
    page.evaluate("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
        if reached[-1] == "theme":
            page.keyboard.press("Enter")
        elif reached[-1] == "run-1":
            page.keyboard.press("Space")
        elif reached[-1] == "layer":
            page.keyboard.press("ArrowDown")
    assert [each for each in reached if each in ("theme", "run-0", "run-1", "run-2", "detail", "layer", "channel")] == [
        "theme", "run-0", "run-1", "run-2", "detail", "layer", "channel",
    ]  # fmt: skip
    assert page.locator("#theme").inner_text() == "Theme: light"
    assert page.locator("#layer").input_value() == "1"
    assert [trace["name"] for trace in visit.traces("loss")] == ["first", "third"]


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_fits_the_screen(browser, folder, width):
    visit = Visit(browser, folder / "report.html", viewport={"width": width, "height": 900})
    for chart in visit.charts():
        visit.show(chart)
        box = visit.page.locator(f"#chart-{chart}").bounding_box()
        assert box["x"] >= 0, chart
        assert box["x"] + box["width"] <= width, chart
        drawn = visit.page.locator(f"#plot-{chart} .main-svg").first.bounding_box()
        assert drawn["x"] + drawn["width"] <= width, chart
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.problems == []
    visit.context.close()


@pytest.mark.parametrize("touch", [False, True], ids=["mouse", "touch"])
def test_the_zoom_bar_needs_a_pointer_that_hovers(browser, folder, touch):
    visit = Visit(browser, folder / "report.html", is_mobile=touch, has_touch=touch)
    assert visit.page.evaluate("matchMedia('(hover: none)').matches") is touch
    assert visit.show("loss").locator(".modebar-btn").count() == (0 if touch else 3)
    visit.context.close()


def test_dark_is_dark_and_the_button_changes_it(browser, folder):
    visit = Visit(browser, folder / "report.html", color_scheme="dark")
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert visit.page.evaluate(brightness) < 60
    dark = visit.traces("loss")[0]["color"]
    visit.page.locator("#theme").click()
    assert visit.page.evaluate(brightness) > 200
    assert visit.traces("loss")[0]["color"] != dark
    assert visit.problems == []
    visit.context.close()


def test_print_is_light_complete_and_without_controls(browser, folder):
    visit = Visit(browser, folder / "report.html", color_scheme="dark")
    visit.charts()
    visit.page.emulate_media(media="print", color_scheme="dark")
    visit.page.wait_for_function(
        "[...document.querySelectorAll('.plot')].every(p => p.hidden || p.querySelector('.main-svg'))"
    )
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not visit.page.locator("#controls").is_visible()
    assert not visit.page.locator("nav").is_visible()
    assert visit.page.get_by_text(
        "batch_size", exact=True
    ).first.is_visible()  # sections that are closed on the screen are printed
    widths = visit.page.evaluate("[...document.querySelectorAll('.plot:not([hidden])')].map(p => p._fullLayout.width)")
    assert max(widths) <= 700  # an A4 page between its margins
    assert visit.page.pdf(format="A4").startswith(b"%PDF")
    visit.page.emulate_media(media="screen")
    visit.show("time")
    visit.page.wait_for_function("document.getElementById('plot-time')._fullLayout.width > 700")
    assert visit.problems == []
    visit.context.close()


PARTIAL = {
    "still running": ("result.json", "adapter/adapter_model.safetensors"),
    "nothing logged": ("metrics.jsonl", "gates.jsonl", "diagnosis.json"),
    "settings lost": ("run.yaml", "environment.json"),
}


@pytest.mark.parametrize("what", PARTIAL)
def test_partial_runs_have_notices_in_place_of_charts(browser, tmp_path, what):
    run = write_run(tmp_path, evaluated=False)
    for lost in PARTIAL[what]:
        (run / lost).unlink()
    if (run / "metrics.jsonl").is_file():
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 21, "lo')
    _every_chart_is_drawn_or_explained(browser, write_report([read_run(run)], tmp_path / "report.html"))


def test_a_few_steps_have_ticks_at_whole_steps(browser, tmp_path):
    write_run(tmp_path, steps=3)
    visit = Visit(browser, write_report(read_runs([tmp_path]), tmp_path / "report.html"))
    for chart in ("loss", "p_sup", "scales"):
        visit.show(chart)
        code = "id => [...document.querySelectorAll(`#plot-${id} .xtick text`)].map(tick => tick.textContent)"
        ticks = visit.page.evaluate(code, chart)
        assert ticks, chart
        assert all(re.fullmatch(r"\d+", tick) for tick in ticks), (chart, ticks)
    visit.context.close()
    assert visit.problems == []


def test_runs_that_cannot_be_compared_still_make_a_page(browser, tmp_path):
    write_run(tmp_path, name="small", layers=2)
    write_run(tmp_path, name="large", layers=6, model="another", task="another", gates=False)
    write_run(tmp_path, name="full", method="full", gates=False, diagnosis=False, adapter=False, evaluated=False)
    visit = _every_chart_is_drawn_or_explained(browser, write_report(read_runs([tmp_path]), tmp_path / "report.html"))
    assert "cannot be compared" in visit


def _every_chart_is_drawn_or_explained(browser, report) -> str:
    visit = Visit(browser, report)
    for detail in visit.page.locator("#detail option").all():
        if visit.page.locator("#detail").is_visible():
            visit.page.locator("#detail").select_option(detail.get_attribute("value"))
        for chart in visit.charts():
            drawn = any(len(trace["x"]) for trace in visit.traces(chart))
            note = visit.page.locator(f"#chart-{chart} .note")
            assert drawn != note.is_visible(), chart
            assert drawn or len(note.inner_text()) > 20, chart
    text = visit.page.locator("#notices").inner_text()
    assert visit.problems == []
    visit.context.close()
    return text


@pytest.fixture(scope="module")
def ten_long_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ten")
    first = write_run(folder, name="run-0", steps=3000, layers=32, width=2048, channels=True)
    for seed in range(1, 10):
        run = write_run(folder, name=f"run-{seed}", seed=seed, steps=3000, layers=32, width=2048, gates=False)
        shutil.copy(first / "gates.jsonl", run / "gates.jsonl")  # writing it would take most of the time
    return write_report(read_runs([folder]), folder / "report.html")


def test_ten_long_runs_are_small_and_open_as_fast_as_a_short_one(browser, ten_long_runs, tmp_path):
    """Relative times, since most of the time until the first chart is the parsing of plotly.js, in any page."""
    assert ten_long_runs.stat().st_size < 15e6
    write_run(tmp_path, name="short", steps=20)
    short = write_report(read_runs([tmp_path]), tmp_path / "report.html")
    spent = {path: min(_seconds_until_first_chart(browser, path) for _ in range(3)) for path in (short, ten_long_runs)}
    assert spent[ten_long_runs] - spent[short] < 0.8


@pytest.mark.slow
def test_ten_long_runs_show_their_first_chart_within_two_seconds(browser, ten_long_runs):
    assert min(_seconds_until_first_chart(browser, ten_long_runs) for _ in range(5)) < 2


def _seconds_until_first_chart(browser, path):
    """Return the processor time of the page's process; wall-clock time would include other processes."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    before, began = _process_seconds(session), time.perf_counter()
    page.goto(path.resolve().as_uri())
    loaded = time.perf_counter() - began
    page.wait_for_function("document.querySelector('#plot-loss .main-svg')", polling=20)
    wall, spent = time.perf_counter() - began, _process_seconds(session) - before
    context.close()
    print(f"loaded after {loaded:.2f} s, first chart after {wall:.2f} s, {spent:.2f} s of processor time")
    return spent


def _process_seconds(session) -> float:
    return next(m["value"] for m in session.send("Performance.getMetrics")["metrics"] if m["name"] == "ProcessTime")


def test_examples_are_searched_and_filtered(visit):
    page = visit.page
    cards = page.locator("#example-list .example")
    assert cards.count() == 10
    assert page.locator("#example-count").inner_text() == "100 of 100 questions."
    page.locator("#example-more").click()
    assert cards.count() == 20
    page.locator("#example-search").fill("is 17 +")
    assert page.locator("#example-list .asked").all_inner_texts() == ["What is 17 + 34?"]
    rows = cards.first.locator("tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["base", "✗", "wrong", "52"], ["first", "✓", "right", "51"], ["second", "✓", "right", "51"],
        ["third", "✓", "right", "51"],
    ]  # fmt: skip
    page.locator("#run-1").uncheck()
    assert "second" not in cards.first.inner_text()
    page.locator("#run-1").check()
    page.locator("#example-search").fill("")
    shown = {}
    for kind in ("all", "wrong", "right", "changed", "differ"):
        page.locator("#example-kind").select_option(kind)
        shown[kind] = int(page.locator("#example-count").inner_text().split()[0])
    # 31, 34 and 37 right answers, each among the next; 4 of the base model.
    assert shown == {"all": 100, "wrong": 69, "right": 31, "changed": 33, "differ": 6}


def test_curves_show_the_difference_to_the_first_run(visit, folder):
    first, second = (read_run(folder / name).series("loss")[1] for name in ("first", "second"))
    assert visit.page.locator("#difference option").all_inner_texts() == ["the values", "the difference to first"]
    visit.page.locator("#difference").select_option("difference")
    traces = visit.traces("loss")
    assert visit.page.locator("#chart-loss h3").inner_text() == "Training loss: difference to first"
    assert traces[0]["y"] == [0] * len(first)
    assert traces[1]["y"] == pytest.approx(list(second - first), abs=1e-6)
    visit.page.locator("#difference").select_option("value")
    assert visit.traces("loss")[1]["y"] == pytest.approx(list(second), rel=1e-6)
