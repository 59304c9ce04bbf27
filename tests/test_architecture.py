"""Packages import in one direction, modules are short and tested, and the page that explains them names real files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("docs_architecture", PAGE.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_package_imports_one_above_it(architecture):
    order = list(architecture.PACKAGES)
    against = {
        ends: where for ends, where in architecture.arrows().items() if order.index(ends[0]) < order.index(ends[1])
    }
    assert not against
    assert len(architecture.arrows()) > 50, "the imports were found at all"


def test_the_top_of_the_package_has_at_most_twenty_entries(architecture):
    ignored = ("__pycache__", "__init__.py", "py.typed")
    entries = {each.name for each in architecture.SOURCE.iterdir() if each.name not in ignored}
    assert {Path(name).stem for name in entries} == {*architecture.PACKAGES, "__main__"}
    assert len(entries) <= 20
    assert sum(name.endswith(".py") for name in entries) <= 5


def test_an_import_inside_a_function_or_for_types_counts(architecture, tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nalora.cli import demo\n"
        "def late():\n    import nalora.studies.store\n"
    )
    assert architecture.imports(file, {"nalora.cli.demo"}) == {"nalora.cli.demo", "nalora.studies.store"}


def test_nine_of_ten_modules_have_a_test_of_their_name_or_are_imported_by_one(architecture):
    known = {name: file for name, file in architecture.modules().items() if file.name != "__init__.py"}
    tests = list((ROOT / "tests").rglob("*.py"))
    named = {file.stem.removeprefix("test_") for file in tests if file.stem.startswith("test_")}
    imported = set().union(*(architecture.imports(file, set(known)) for file in tests))
    untested = [name for name, file in known.items() if name not in imported and file.stem not in named]
    assert len(untested) <= len(known) / 10, untested


def test_no_module_is_longer_than_330_lines(architecture):
    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in architecture.modules().items()}
    assert {name: number for name, number in lines.items() if number > 330} == {}


def test_the_readme_repeats_the_order(architecture):
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to look")[2]
    rows = re.findall(r"^\| \[`(\w+)(?:\.py|/)`\]\((\S+)\) \| (.*) \|$", table, re.MULTILINE)
    named = [(name, words) for name, _, words in rows]
    assert named == list(reversed(architecture.PACKAGES.items()))
    assert all((ROOT / path).exists() for _, path, _ in rows)


def test_every_file_that_the_page_names_exists():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > 25
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_the_drawing_is_the_one_of_these_imports(architecture):
    """Its words alone: how a line is drawn depends on the version of matplotlib."""
    drawn = architecture.DRAWING.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in architecture.PACKAGES)
    assert drawn.count('<g id="patch_') - len(architecture.PACKAGES) >= len(
        architecture.shortest(set(architecture.arrows()))
    )
