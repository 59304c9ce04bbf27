"""The page on choosing is what the stored runs say, and what it tells a reader to run is valid."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import tiny
import yaml

from nalora.evaluation.significance import compare_methods
from nalora.runs.settings import check
from nalora.studies.study import read

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "choosing.md", ROOT / "README.md"


def script(name):
    return importlib.import_module(name)


def part(name):
    return PAGE.read_text().partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def block(name):
    return re.search(r"```\w*\n(.*?)```", part(name), re.DOTALL)[1]


def test_the_page_is_made_from_the_store(store):
    page = PAGE.read_text()
    assert all(part(name) for name in ("short", "methods", "rank_costs", "rates", "seeds", "open"))
    assert script("choosing_page.choosing").filled_page(page, store) == page


def test_the_readmes_first_screen_has_the_sentence_of_the_page():
    readme = README.read_text()
    assert script("choosing_page.choosing").filled_readme(readme) == readme
    screen = readme.partition("## Your data")[0]
    sentence = screen.partition("<!-- start -->")[2]
    assert "(docs/choosing.md)" in sentence
    assert "(docs/choosing.md)" in readme.partition("## Where to look")[2]
    shares = re.findall(r"\d+ %", sentence)
    settings = re.findall(r"`(method=[^`]+)`", sentence)
    assert settings
    assert [value for value in (*shares, *settings) if value not in part("short")] == []


def test_the_page_says_what_has_not_been_measured():
    """Each sentence depends on the store: where there is no answer, the page does not claim one."""
    short = part("short")
    assert ("has not been measured" in short) == (not (ROOT / "results" / "gap-sources").is_dir())
    assert ("not judged on a second task yet" in short) == (not (ROOT / "results" / "equal-cost-judged").is_dir())


BEST = {"full fine-tuning": -0.3, "gralora, k = 4": -0.1, "r = 256": -0.2, "gralora, k = 8": -0.05,
        "na-lora, update, random": -0.15}  # fmt: skip


def later_results(folder, store):
    """The finished studies, and made-up answers of three others in which the arms of `BEST` are better than LoRA."""
    made_up = ("equal-cost", "equal-cost-judged", "gap-sources")
    for kept in (ROOT / "results").iterdir():
        if kept.name not in made_up and ((kept / "answer.json").is_file() or kept.name == "repeats.jsonl"):
            (folder / kept.name).symlink_to(kept)
    for name in made_up:
        arms = [arm.name for arm in read(name).arms]
        shift = {arm: BEST.get(arm, place / 1000) for place, arm in enumerate(arms)}
        losses = {arm: {seed: 1 + more * (1 + seed / 100) for seed in range(5)} for arm, more in shift.items()}
        pairs = [(arm, "lora") for arm in arms[1:]]
        rows = compare_methods(losses, pairs, higher_is_better=False)
        part = {
            "settings": {}, "measures": ["test loss"], "values": {arm: [losses[arm]] for arm in arms},
            "comparisons": {"test loss": [row.numbers() for row in rows]},
            "controls": {}, "missing": [],
            "learning_rates": dict.fromkeys(arms, 0.004) | {"gralora, k = 4": 0.008},
            "validation_losses": {arm: {"0.002": 1.1, "0.004": 1.0, "0.008": 1.1} for arm in arms},
        }  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "answer.json").write_text(json.dumps([part]))
    return folder


def test_later_runs_change_the_advice(store, tmp_path):
    """A variant that is better on a second task too, and a rank that is better than 8."""
    module, results = script("choosing_page.choosing"), later_results(tmp_path, store)
    page = module.filled_page(PAGE.read_text(), store, results)
    short = page.partition("<!-- short -->")[2].partition("<!-- /short -->")[0]
    assert "| method | `method=peft/gralora gralora_k=4` | better than LoRA on GSM8K" in short
    assert "also better on a second task" in short
    assert "variant to try next" not in short
    assert "| rank | 8, then 256 | r = 256 is better in `gap-sources`" in short
    assert "| learning rate | 0.008; search 0.004, " in short, "twice LoRA's, as in the study of methods"
    assert "- **Better than LoRA:** gralora, k = 4; gralora, k = 8." in page
    assert "Not measured yet" not in page
    assert "sums (equal-cost-judged): lora | " in page
    assert page.count("| is finished |") == 4, "the three above and fp8-base"
    assert "better than LoRA on two tasks" in " ".join(module.filled_readme(README.read_text(), results).split())

    (results / "equal-cost-judged" / "answer.json").unlink()
    start, variant = script("choosing_page.method_choice").chosen(results)
    assert (start.arm, variant.arm) == ("lora", "gralora, k = 4"), "controls are not recommended"


def test_links_lead_to_files_and_headings():
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert len(links) > 10
    for link in links:
        file, _, anchor = link.partition("#")
        target = PAGE.parent / file
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, link
    assert "(choosing.md)" in (ROOT / "docs" / "findings.md").read_text()


def test_the_study_and_the_commands_of_the_page_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n' * 20)
    Path("choose.yaml").write_text(block("study"))
    study = read("choose.yaml")
    assert study.baseline == script("choosing_page.method_choice").LORA
    assert all(len(arm.learning_rates) > 2 for arm in study.arms_in({}))
    content = yaml.safe_load((ROOT / "recipes" / "my-data.yaml").read_text())
    for name, line in zip(("suggest", "train"), block("commands").splitlines(), strict=False):
        command = line.split()
        assert command[:3] == ["nalora", name, "my-data"]
        given = dict(setting.split("=", 1) for setting in command[3:])
        assert ("learning_rate" in given) is (name == "train")
        check(content | {name: yaml.safe_load(value) for name, value in given.items()})


def test_the_script_of_the_page_runs():
    pytest.importorskip("triton")
    import peft
    import torch
    import transformers

    import nalora

    base = tiny.llama(torch.float32, ffn=64).unload()
    names = {"peft": peft, "torch": torch, "nalora": nalora, "transformers": transformers, "model": base, "steps": 10}
    exec(compile(block("script"), str(PAGE), "exec"), names)
    ids = tiny.tokens(length=8)
    before = [parameter.detach().clone() for parameter in names["trained"]]
    for _ in range(2):  # the first step of the warm-up has a rate of 0
        names["model"](input_ids=ids, labels=ids).loss.backward()
        names["optimizer"].step()
        names["schedule"].step()
    assert any(not torch.equal(old, new) for old, new in zip(before, names["trained"], strict=True))
