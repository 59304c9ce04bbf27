"""What is published is what the kept runs say: nothing between them is typed in by hand."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from nalora.studies.answer import answer, in_markdown, write
from nalora.studies.conduct import so_far
from nalora.studies.page import write_page_of
from nalora.studies.study import read

ROOT = Path(__file__).parents[2]
STORE = ROOT / "results" / "store"
STUDIES = sorted(path.stem for path in STORE.glob("[!.]*.json"))


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", STUDIES)
def test_an_answer_is_what_its_runs_say(name, tmp_path):
    study = read(ROOT / "studies" / f"{name}.yaml")
    progress = so_far(study, STORE)
    parts = answer(progress.schedule, progress.results, progress.failed)
    write(study, parts, tmp_path)
    assert in_markdown(study, parts) == (STORE / f"{name}.md").read_text()
    assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads((STORE / f"{name}.json").read_text())


def test_the_findings_tables_are_the_answers():
    page = (ROOT / "docs" / "findings.md").read_text()
    assert "<!-- arms -->\n|" in page
    assert script("findings").filled(page) == page


def test_a_control_with_one_seed_is_told_without_a_difference(tmp_path):
    one = {"method": "na-lora", "baseline": "random", "seeds": 1, "difference": 0.1, "interval": None}
    part = {"controls": {"test loss": [{**one, "verdict": "too few seeds"}]}}
    (tmp_path / "small.json").write_text(json.dumps([part]))
    assert script("findings").controls(tmp_path)[-1] == "| small: na-lora | random | one seed so far | too few seeds |"


def test_later_seeds_speak_for_themselves():
    lora = {str(seed): 1.0 for seed in range(10)}
    # Far better in the seeds that were looked at, a little worse in those that were not.
    turned = {seed: 0.5 if int(seed) < 5 else 1.01 + int(seed) / 1e4 for seed in lora}
    same = {seed: 1 + (-1) ** int(seed) / 1e3 for seed in lora}
    early = {seed: 0.5 for seed in lora if int(seed) < 5}
    arms = {"lora": lora, "turned": turned, "same": same, "early": early}
    part = {
        "measures": ["accuracy", "test loss"],
        "values": {arm: [{}, by_seed] for arm, by_seed in arms.items()},
        "comparisons": {"test loss": [{"method": arm, "baseline": "lora"} for arm in ("turned", "same", "early")]},
        "controls": {"test loss": [{"method": "turned", "baseline": "same"}, {"method": "same", "baseline": "early"}]},
    }
    unasked = part | {"values": {"lora": [{}, early], "early": [{}, early]}}
    told = script("later_seeds").later_seeds({"sums": part, "words": unasked})
    assert told[1:] == [
        "  sums: worse than lora: turned (+0.0107) (corrected over 2).",
        "  sums: worse than same: turned (+0.0109) (one comparison).",
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*.html")), ids=lambda file: file.stem)
def test_a_report_shows_these_numbers(file, tmp_path):
    def answer_in(page):
        return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["answer"]

    fresh = write_page_of(ROOT / "studies" / f"{file.stem}.yaml", STORE, tmp_path / "page.html")
    assert answer_in(file.read_text()) == answer_in(fresh.read_text())
    repeated = [Path(run) for run in re.findall(r"nalora train (\S+) output=", file.read_text())]
    assert repeated
    assert all((ROOT / run).is_file() and not run.is_absolute() for run in repeated)
    assert f"(../results/{file.name})" in (ROOT / "docs" / "findings.md").read_text()


def test_the_published_scaled_lora_has_factors_that_acted():
    """Its factors are those of a run whose mask and step scales both acted, on SiLU, without the mean preserved."""
    scaled = {
        tuple(run[name] for name in ("like", "gate_scale", "up_scale", "down_scale", "mask_mean"))
        for file in STORE.glob("*/run.yaml")
        if (run := yaml.safe_load(file.read_text()))["method"] == "lora-scaled"
    }
    assert scaled == {(None, 1.230, 1.173, 1.115, 0.373)}
    source = STORE / "5d21487960e18e82"
    run = yaml.safe_load((source / "run.yaml").read_text())
    told = {"method": "na-lora", "task": "gsm8k", "learning_rate": 0.004, "seed": 0, "apply_to": "update"}
    acted = {"model": "smollm2-135m", "target_modules": "all-linear", "mask": True, "scaling": True}
    assert (told | acted | {"preserve_mean": False}).items() <= run.items()
    rows = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    means = [
        sum(row[f"nalora/{name}"] for row in rows) / len(rows)
        for name in ("scale_gate", "scale_up", "scale_down", "mask_mean")
    ]
    assert [round(mean, 3) for mean in means] == [1.230, 1.173, 1.115, 0.373]


def test_the_picture_is_of_these_numbers():
    assert script("picture").digest() in (ROOT / "docs" / "figures" / "findings.svg").read_text()


def test_the_readme_repeats_the_findings():
    answers = "".join(path.read_text() for path in STORE.glob("*.md"))
    told = re.findall(r"0\.\d{4} ± 0\.\d{4}", (ROOT / "README.md").read_text())
    assert told
    assert all(each in answers for each in told)


def test_kept_runs_do_not_say_where_they_were_made():
    files = [file for name in ("run.yaml", "environment.json") for file in STORE.glob(f"*/{name}")]
    assert len(files) >= 800
    # A path from the root, at the beginning of a word.
    assert [file for file in files if re.search(r"(^|[\s\"'=])/\w", file.read_text())] == []


def test_kept_numbers_are_json_for_every_reader():
    """Not Python's own NaN and Infinity."""

    def refuse(word):
        raise AssertionError(word)

    files = [file for file in STORE.rglob("*.json*") if file.suffix in (".json", ".jsonl")]
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        for part in text.split("\n") if file.suffix == ".jsonl" else [text]:
            if part:
                json.loads(part, parse_constant=refuse)


def test_a_run_trained_again_is_kept_whole_and_the_earlier_losses_are_remembered(tmp_path, monkeypatch):
    collect = script("collect")
    monkeypatch.setattr(collect, "HERE", tmp_path / "store")
    for training, loss in (("first", 0.5), ("second", 0.7), ("second", 0.7)):
        run = tmp_path / training / "run0"
        evaluation = run / "evaluations" / "gym" / "sums-validation" / f"adapted-{training}"
        evaluation.mkdir(parents=True, exist_ok=True)
        evaluation.joinpath("losses.json").write_text(json.dumps({"target_loss": {"value": loss}}))
        (run / "run.yaml").write_text(f"method: lora\noutput: {run}\n")
        (run / "environment.json").write_text(
            '{"command": "study x.yaml --store /there/store --per-gpu 4",\n  "working_directory": "../../there"\n}'
        )
        for name in ("result.json", "metrics.jsonl"):
            (run / name).write_text(training)
        monkeypatch.setattr("sys.argv", ["collect.py", str(tmp_path / training)])
        collect.main()
    kept = tmp_path / "store" / "run0"
    assert kept.joinpath("result.json").read_text() == "second"
    assert [path.parent.name for path in kept.rglob("losses.json")] == ["adapted-second"]
    assert kept.joinpath("run.yaml").read_text() == "method: lora\noutput: runs/run0\n"
    environment = json.loads(kept.joinpath("environment.json").read_text())
    assert environment == {"command": "study x.yaml --store results/store --per-gpu 4"}
    (line,) = (tmp_path / "repeats.jsonl").read_text().splitlines()
    assert json.loads(line) == {"run": "run0", "losses": {"gym/sums-validation": 0.5}}
    told = " ".join(script("findings").repeats(tmp_path / "store"))
    assert "1 runs were trained again" in told
    assert "validation losses lie 0.2000 apart (median of 1; at most 0.2000)." in told
