"""Recipes and studies come with the package, and are known by name from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheels

import nalora
from nalora.runs import packaged, settings
from nalora.studies import study

ROOT = Path(nalora.__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as pip makes it of a fresh checkout, unpacked; nothing is written into this one."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(wheels.build(folder)).extractall(folder / "installed")
    return folder / "installed"


def type_in(wheel, folder, *arguments):
    code = "import sys, nalora.cli; assert nalora.__file__.startswith(sys.path[1]), sys.path; nalora.cli.main()"
    code = code.replace("sys.path[1]", repr(str(wheel)))
    environment = os.environ | {"PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wheel_has_what_suggest_says_of_its_rule(wheel):
    file = Path("studies") / "rate_evidence.json"
    assert (wheel / "nalora" / file).read_bytes() == (Path(nalora.__file__).parent / file).read_bytes()


def test_a_wheel_lists_prints_and_finds_them_outside_the_checkout(wheel, tmp_path):
    listed = type_in(wheel, tmp_path, "recipes")
    assert listed.returncode == 0, listed.stderr
    for line in (
        "nalora train laptop",
        "nalora train llama-3.1-8b-math",
        "nalora study laptop",
        "nalora study table-1",
    ):
        assert re.search(rf"{line} .*(hour|minute)", listed.stdout), line
    printed = type_in(wheel, tmp_path, "recipes", "studies/laptop")
    assert printed.stdout == (ROOT / "studies" / "laptop.yaml").read_text()
    dry = type_in(wheel, tmp_path, "study", "laptop", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "20 runs in all" in dry.stdout
    refused = type_in(wheel, tmp_path, "train", "laptop", "rank=x")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "on the command line: rank: 'x', expected a whole number" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_root_of_the_checkout_shows_what_the_package_has():
    assert sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml")) == list(packaged.recipes())
    assert sorted(file.stem for file in (ROOT / "studies").glob("*.yaml")) == list(packaged.studies())


@pytest.mark.parametrize("file", [*packaged.recipes().values(), *packaged.studies().values()], ids=str)
def test_each_has_a_line_with_its_description_and_cost(file):
    about, cost = packaged.summary(file)
    assert about
    assert re.search(r"\d.*(hour|minute)|an hour", cost)
    runs = re.search(r"(\d+) runs", cost)
    if runs:
        assert f"Runs: {runs[1]} " in file.read_text()


def test_a_user_s_file_has_precedence_over_a_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings.read("laptop", ["rank=3"]).settings.output == "runs/laptop"
    assert study.read("laptop").name == "laptop"
    assert study.question("laptop").startswith("Question: does NA-LoRA's mask choose")
    (tmp_path / "laptop").mkdir()
    assert settings.read("laptop").settings.model == "smollm2-135m", "a folder is no run's file"
    (tmp_path / "laptop").rmdir()
    (tmp_path / "laptop").write_text("model: mine\ntask: gsm8k\n")
    assert settings.read("laptop").settings.model == "mine"


def test_a_recipe_finds_its_data_where_it_is_copied_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = packaged.RECIPES / "sums.jsonl"
    copied = tmp_path / "elsewhere" / "mine.yaml"
    copied.parent.mkdir()
    copied.write_text((packaged.RECIPES / "laptop.yaml").read_text())
    assert settings.read("laptop").settings.task == settings.read(copied).settings.task == str(own)
    (copied.parent / "sums.jsonl").write_text(own.read_text())
    assert settings.read(copied).settings.task == str(copied.parent / "sums.jsonl")
    (tmp_path / "sums.jsonl").write_text(own.read_text())
    assert settings.read(copied).settings.task == "sums.jsonl"


def test_a_mistyped_name_is_answered_with_the_nearest():
    with pytest.raises(nalora.NALoRAError, match=r"found no such file.*did you mean laptop\?"):
        settings.read("labtop")
