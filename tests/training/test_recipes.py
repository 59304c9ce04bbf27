"""Every recipe is a run that could start, and opens with the command that starts it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

import nalora
from nalora.runs.settings import RunSettings, check, read

RECIPES = sorted((Path(nalora.__file__).parent / "runs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_it_is_understood(file):
    run = read(file)
    assert run.settings.output == f"runs/{file.stem}"
    judge = " judge_model=NAME data_dir=FOLDER" if run.settings.task == "mt-bench" else ""
    data = " task=FILE.jsonl" if file.stem == "my-data" else ""
    command = f"# nalora train {file.stem}{judge}{data} && nalora evaluate runs/{file.stem}"
    assert file.read_text().splitlines()[0] == command


def test_the_papers_protocol_is_there():
    names = {file.stem for file in RECIPES}
    llamas = {f"{model}-{task}" for model in ("llama-3.1-8b", "llama-2-7b") for task in ("math", "code", "chat")}
    assert names >= {*llamas, "t5-base-glue", "clip-vit-b16", "laptop"}
    for name in llamas:
        run = read(next(file for file in RECIPES if file.stem == name), ["rank=32"])
        assert (run.settings.rank, run.settings.alpha, run.settings.batch_size) == (32, 16, 32)
        assert (run.settings.learning_rate, run.settings.warmup, run.settings.schedule) == (2e-5, 0.03, "cosine")


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(RunSettings)])
def test_the_laptop_s_recipe_explains_every_setting(name):
    """Each has a line with a comment; where it is commented out, it can be commented in."""
    text = (Path(nalora.__file__).parent / "runs" / "recipes" / "laptop.yaml").read_text()
    found = re.search(rf"^(# )?({name}: .*\S +# .+)$", text, re.MULTILINE)
    assert found, f"{name} is not explained"
    given = yaml.safe_load(text) | yaml.safe_load(found[2])
    assert getattr(check(given).settings, name) == given[name]


def test_the_recipe_for_own_data_makes_a_pass_over_rows_of_usual_length(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n')
    settings = read("my-data", [f"task={file}"]).settings
    assert (settings.steps, settings.epochs, settings.max_length, settings.task) == (None, 1, 1024, str(file))
    assert (settings.batch_size, settings.prompt_style) == (16, "auto")
