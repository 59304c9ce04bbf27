"""Names chosen by users are harmless in charts, tables, titles and files, whatever their content and length."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nalora.files import outputs
from nalora.report.data import read_run
from nalora.report.figures import _file_names, line_figure, write_figures
from nalora.report.html import page
from nalora.report.naming import MOST, brief, tidy
from nalora.report.run_tables import run_tables
from nalora.report.study_answer import AnswerPart, StudyAnswer
from nalora.report.tables import Column, Record, escape_latex, escape_markdown, latex, markdown, tabulate
from report.run_folders import write_run

HOSTILE = (
    '<a href="https://evil.example/">click</a>', "<b>bold</b>", "</script><script>alert(1)</script>",
    "%{x}%{fullData.name}", "$x^2$ and $", "_hidden", "[text](javascript:alert(1))",
    "see https://evil.example or www.evil.example", "write a@evil.example", "&lt;b&gt;", "a|b\nc",
    r"\input{/etc/passwd}", "tab\tbell\x07", "🙂" * 90, "n" * 300,
)  # fmt: skip
names = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(min_size=1, max_size=300),
    st.lists(st.sampled_from(['<a href="x">', "</a>", "<b>", "`", "$", "%{", "}", "&amp;", "https://", "[", "]("])).map(
        "".join
    ),
)


class Tags(HTMLParser):
    """The elements of a page, without the content of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@given(st.lists(names, max_size=8, unique=True))
@example(["n" * 300, "n" * 299 + "m", "n" * 150 + "x" + "n" * 149])
def test_short_names_are_short_and_differ(given_names):
    short = brief(given_names)
    assert list(short) == given_names
    assert len(set(short.values())) == len(given_names)
    assert all(len(each) <= MOST + 5 for each in short.values())
    assert all(short[name] == name for name in given_names if len(name) <= MOST)


@given(st.text())
def test_tidy_text_is_one_line_of_valid_xml(text):
    found = tidy(text)
    assert "\n" not in found
    ET.fromstring(
        f"<a>{re.sub('[<&]', '', found)}</a>".encode("utf-8", "strict")
    ) if "\uffff" not in found and "\ufffe" not in found else None
    assert tidy(found) == found


@given(names)
def test_markdown_shows_a_name_and_links_nothing(name):
    found = escape_markdown(name)
    plain = re.sub(r"\\([\\`*_{}\[\]<>#|~&:.])", "", found)
    assert not re.search(r"[`*_{}\[\]<>#|~&]", plain), "markup that is not escaped"
    assert not re.search(r"(https?|ftp|mailto|xmpp):", found, re.IGNORECASE)
    assert not re.search(r"www\.", found, re.IGNORECASE)
    assert not re.search(r"@[\w.-]", found)


@given(names)
def test_latex_shows_a_name_literally(name):
    found = escape_latex(name)
    commands = set(re.findall(r"\\([a-zA-Z]+)", found))
    assert commands <= {
        "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar", "pm", "times",
        "uparrow", "downarrow", "leq", "geq", "phi", "kappa", "chi", "alpha", "beta", "lambda", "eta", "ldots", "cdot",
    }  # fmt: skip
    grouping = re.sub(r"\\[{}]", "", found)
    assert grouping.count("{") == grouping.count("}")


def test_long_labels_are_short_in_a_row_and_complete_in_the_caption():
    long = "n" * 150 + "|" + "m" * 150
    table = tabulate([Record(long, 0, {"loss": 1.0}), Record("short", 0, {"loss": 2.0})], [Column("loss")])
    for text in (markdown(table), latex(table)):
        row = next(line for line in text.splitlines() if "…" in line.replace(r"\ldots{}", "…") and "1.0" in line)
        assert len(row) < 120
        assert "n" * 150 in text
    assert "Shortened" not in markdown(tabulate([Record("short", 0, {"loss": 1.0})], [Column("loss")]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("named"), steps=6, layers=2, diagnosis=False))


@given(name=names, value=names)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_creates_an_element_of_the_page(run, name, value):
    with mock.patch("nalora.report.html._plotly", return_value=""):  # 4.8 MB without any name
        plain = Tags(page([run, replace(run, name="other")]))
        text = page([replace(run, name=name, settings=run.settings | {"note": value}), replace(run, name="other")])
    found = Tags(text)
    # Another setting is another row, and a long name is in a span; nothing else may differ.
    new = [(tag, attributes) for tag, attributes in found.found if tag in ("a", "b", "script", "img", "svg", "iframe")]
    assert new == [each for each in plain.found if each[0] in ("a", "b", "script", "img", "svg", "iframe")]
    assert not any(key.startswith("on") for _, attributes in found.found for key in attributes)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["runs"][0]["name"] == name


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_figure_shows_any_name_literally(run, name, tmp_path):
    figure = line_figure("loss", [replace(run, name=name), replace(run, name="other"), replace(run, name=f"{name}!")])
    figure.savefig(tmp_path / "loss.svg")
    drawn = ET.parse(tmp_path / "loss.svg")
    assert not list(drawn.iter("{http://www.w3.org/2000/svg}a"))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    shown = tidy(brief([name])[name])
    assert len(labels) == 3
    assert labels[0].replace(r"\$", "$").removeprefix("\N{ZERO WIDTH SPACE}") == shown
    if shown != tidy(name):
        assert "".join(tidy(name).split()) in "".join(figure.legends[0].get_title().get_text().split())


def test_files_of_figures_have_unique_names(run, tmp_path):
    long = "n" * 300
    runs = [replace(run, name=name) for name in ("a b", "a-b", "../../away", long, f"{long}!")]
    runs = [replace(each, gates=None) for each in runs[:-1]] + runs[-1:]
    written = write_figures(runs, tmp_path / "figures")
    assert len({file.name for file in written.files}) == len(written.files)
    assert all(file.parent == tmp_path / "figures" for file in written.files)
    assert [path.name for path in tmp_path.iterdir()] == ["figures"]
    assert len(set(_file_names([each.name for each in runs]))) == 5


def test_tables_of_runs_with_any_name(run):
    runs = [replace(run, name=name, settings=run.settings | {"note": name}) for name in HOSTILE]
    for table in run_tables(runs).values():
        text = markdown(table)
        assert "<a" not in text.replace(r"\<a", "")
        assert not re.search(r"https?:", text)


@pytest.mark.parametrize("name", ['<a href="https://evil.example/">x</a>', "[x](https://evil.example)"])
def test_a_studys_markdown_escapes_its_arms(name):
    table = tabulate([Record(name, 0, {"test loss": 1.0})])
    part = AnswerPart(
        {"over": name}, table, [f"{name} diverged"], [f"Not complete: {name}."], {name: {1e-3: 0.5}}, {name: 1e-3}
    )
    text = StudyAnswer(name, name, [part]).markdown().replace(f"<!-- {outputs.TEXT} -->", "")
    assert not re.search(r"(?<!\\)[<\[]", re.sub(r"</?u>", "", text))
    assert "https:" not in text
