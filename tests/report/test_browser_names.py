"""Names with markup, and long ones, in a real browser: shown literally, without links, within the window."""

from __future__ import annotations

import html
import json
from dataclasses import replace

import pytest

from nalora.evaluation.significance import compare_methods
from nalora.report.data import read_run
from nalora.report.html import write_report
from nalora.report.study_answer import AnswerPart, StudyAnswer
from nalora.report.tables import Record, tabulate
from report.browsing import Visit, a_browser
from report.run_folders import EVALUATED, summary, write, write_run

LINK = '<a href="https://evil.example/">click</a>'
NAMES = (LINK, "<b>bold</b> %{x} &amp;", "n" * 150 + "<i>" + "m" * 147)
LONG = NAMES[2]
SWITCHED_OFF = {"mask_off": [""] * 3, "scaling_off": ["switched off"] * 3}


def problems_of(visit):
    """Return the problems without plotly's message on automatic margins for long labels."""
    return [problem for problem in visit.problems if "auto-margin" not in problem]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    runs = []
    for seed, name in enumerate(NAMES):
        header = SWITCHED_OFF if seed == 1 else None
        path = write_run(folder, name=f"run-{seed}", seed=seed, layers=3, header=header, note=LINK)
        write(
            path / "evaluations/gym/chain_sum/adapted-1/summary.json",
            summary(40) | {"task": LINK, "evaluated": EVALUATED | {"questions": name[:9], "data": LINK}},
        )
        runs.append(replace(read_run(path), name=name))
    values = {name: {seed: 1.0 + 0.1 * i + 0.01 * seed for seed in range(3)} for i, name in enumerate(NAMES)}
    found = compare_methods(values, [(name, LINK) for name in NAMES], higher_is_better=True)
    part = AnswerPart(
        {"over": LINK},
        table=tabulate([Record(name, 0, {LINK: 1.0}) for name in NAMES]),
        sentences=[f"{LINK} is better"],
        notes=[LINK],
        screening={name: {1e-3: 0.5, 1e-2: 0.4} for name in NAMES},
        rates=dict.fromkeys(NAMES, 1e-3),
        comparisons={LINK: found},
        controls={LINK: found},
        shown={name: f"run-{i}" for i, name in enumerate(NAMES)},
    )
    return write_report(runs, folder / "report.html", StudyAnswer(LINK, LINK, [part], LINK))


@pytest.fixture(scope="module")
def browser():
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def visit(browser, page):
    visit = Visit(browser, page)
    yield visit
    visit.context.close()
    assert problems_of(visit) == []
    assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_no_name_creates_an_element(visit):
    for chart in visit.charts():
        visit.show(chart)
    found = visit.page.evaluate("""[...document.querySelectorAll('a, b, i, [href], [*|href]')]
        .filter(e => e.tagName !== 'LINK' && !e.closest('.modebar'))
        .filter(e => !/^(#|data:image)/.test(e.getAttribute('href') || e.getAttribute('xlink:href') || ''))
        .map(e => e.outerHTML.slice(0, 200))""")
    assert found == []
    assert visit.page.evaluate("[...document.querySelectorAll('tspan')].filter(t => t.style.fontWeight).length") == 0


def test_labels_of_charts_show_names_literally(visit):
    visit.show("difference-0-0")
    texts = "[...document.querySelectorAll('#plot-difference-0-0 .ytick text')].map(t => t.textContent)"
    shown = visit.page.evaluate(texts)
    assert {LINK, NAMES[1]} <= set(shown)
    assert all(len(text) < 60 for text in shown)
    assert LONG not in shown
    titles = visit.page.evaluate(
        "[...document.querySelectorAll('#plot-difference-0-0 .xtitle')].map(t => t.textContent)"
    )
    assert titles == [f"difference in {LINK}"]


@pytest.mark.parametrize("place", range(3))
def test_the_hover_label_has_the_full_name(visit, place):
    name = NAMES[place]
    short = json.loads(visit.page.locator("#data").text_content())["labels"][name]
    # The axis has the label as passed to plotly, in lines.
    lines = [short[i : i + 26] for i in range(0, len(short), 26)]
    category = "<br>".join(html.escape(line, quote=False).replace("%{", "%&#123;") for line in lines)
    text = visit.hover("difference-0-0", 0.1 * place, category)
    assert name in text.replace("\n", "")
    box = visit.page.locator("#plot-difference-0-0 .hoverlayer .hovertext").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1600


def test_the_hover_label_of_a_curve_has_the_full_name(visit):
    rows = visit.traces("loss")
    assert len(rows) == 3
    label = visit.hover("loss", rows[0]["x"][2], rows[0]["y"][2])
    assert "step 3" in label
    items = visit.page.evaluate(
        "[...document.querySelectorAll('#chart-loss .legend li')].map(e => [e.title, e.textContent])"
    )
    assert [title for title, _ in items] == list(NAMES)
    assert all(len(text) < 60 for _, text in items)


@pytest.mark.parametrize("width", [1600, 390])
def test_nothing_is_wider_than_the_window(browser, page, width):
    visit = Visit(browser, page, viewport={"width": width, "height": 900})
    for chart in visit.charts():
        visit.show(chart)
    wide = """limit => [...document.querySelectorAll('main *')]
        .filter(e => !e.closest('.scroll, .plot') && e.getBoundingClientRect().right > limit + 1)
        .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 60)}`)"""
    assert visit.page.evaluate(wide, width) == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert problems_of(visit) == []
    visit.context.close()


def test_scales_that_do_not_act_are_not_drawn(visit):
    """The second run's scaling is switched off: it has no lines, and a sentence gives the reason."""
    visit.show("scales")
    traces = visit.traces("scales")
    assert len(traces) == 6
    note = visit.page.locator("#chart-scales .thin").inner_text()
    assert "are not scaled (switched off)" in note


def test_the_note_on_dead_gates_is_shown_for_d_eh(visit):
    visit.page.locator("#measure").select_option("D_EH")
    visit.show("moved-heat")
    assert "closed gates can carry nearly all of D_EH" in visit.page.locator("#chart-moved-heat .thin").inner_text()
    visit.page.locator("#measure").select_option("D_EH_live")
    assert visit.traces("moved-heat")[0]["name"] == "D_EH of live gates"
