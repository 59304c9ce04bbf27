"""What is published follows from the kept runs: no number is typed in by hand."""

from __future__ import annotations

import importlib
import json
import re
from html import escape
from pathlib import Path

import pytest
import yaml

from nalora.studies.answer import answer, write
from nalora.studies.conduct import so_far
from nalora.studies.page import write_page_of
from nalora.studies.study import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/answer.json"))


def script(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("name", STUDIES)
def test_an_answer_follows_from_its_runs(name, store, tmp_path):
    study = read(ROOT / "studies" / f"{name}.yaml")
    progress = so_far(study, store)
    found = answer(progress.schedule, progress.results, progress.failed)
    write(found, tmp_path)
    kept = RESULTS / name / "answer.json"
    assert found.markdown() == kept.with_suffix(".md").read_text()
    assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads(kept.read_text())


def test_the_findings_tables_are_the_answers(store):
    page = (ROOT / "docs" / "findings.md").read_text()
    assert "<!-- arms -->\n|" in page
    assert script("findings_page.findings").filled(page, store) == page


def test_a_control_with_one_seed_has_no_difference(tmp_path):
    one = {"method": "na-lora", "baseline": "random", "seeds": 1, "difference": 0.1, "interval": None}
    part = {"controls": {"test loss": [{**one, "verdict": "too few seeds"}]}}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "answer.json").write_text(json.dumps([part]))
    assert (
        script("findings_page.findings").controls(tmp_path)[-1]
        == "| small: na-lora | random | one seed so far | too few seeds |"
    )


def test_later_seeds_are_compared_alone():
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
    told = script("findings_page.later_seeds").later_seeds({"sums": part, "words": unasked})
    assert told[1:] == [
        "  sums: worse than lora: turned (+0.0107) (corrected over 2).",
        "  sums: worse than same: turned (+0.0109) (one comparison).",
    ]


def test_a_report_of_the_restored_store_shows_the_answer(store, tmp_path):
    page = write_page_of(ROOT / "studies" / "judgement.yaml", store, tmp_path / "page.html").read_text()
    (kept,) = json.loads((RESULTS / "judgement" / "answer.json").read_text())
    assert kept["sentences"]
    assert [sentence for sentence in kept["sentences"] if escape(sentence) not in page] == []
    repeated = [Path(run) for run in re.findall(r"nalora train (\S+) output=", page)]
    assert repeated
    assert all(run.is_file() for run in repeated)


def test_links_from_the_findings_lead_to_files():
    page = (ROOT / "docs" / "findings.md").read_text()
    links = re.findall(r"\]\((\.\./results/[^)]*)\)", page)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_the_published_scaled_lora_has_factors_that_acted(store):
    """Its factors are those of a run whose mask and step scales both acted, on SiLU, without the mean preserved."""
    scaled = {
        tuple(run[name] for name in ("like", "gate_scale", "up_scale", "down_scale", "mask_mean"))
        for file in store.glob("*/run.yaml")
        if (run := yaml.safe_load(file.read_text()))["method"] == "lora-scaled"
    }
    assert scaled == {(None, 1.230, 1.173, 1.115, 0.373)}
    source = store / "5d21487960e18e82"
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
    assert script("findings_page.picture").digest() in (ROOT / "docs" / "figures" / "findings.svg").read_text()


def test_the_readme_repeats_the_findings():
    answers = "".join(path.read_text() for path in RESULTS.glob("*/answer.md"))
    told = re.findall(r"0\.\d{4} ± 0\.\d{4}", (ROOT / "README.md").read_text())
    assert told
    assert all(each in answers for each in told)


def test_kept_runs_do_not_name_the_machine_that_made_them():
    tables = [file.read_text() for file in RESULTS.glob("*/runs.csv")]
    assert sum(len(text.splitlines()) - 1 for text in tables) >= 644
    # An absolute path, at the beginning of a word.
    assert [path[0] for text in tables for path in re.finditer(r"(^|[\s\"'=,])/\w[^,]*", text)] == []


def test_restored_numbers_are_json_for_every_reader(store):
    """Not Python's own NaN and Infinity."""

    def refuse(word):
        raise AssertionError(word)

    files = [file for file in store.rglob("*.json*") if file.suffix in (".json", ".jsonl")]
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        for part in text.split("\n") if file.suffix == ".jsonl" else [text]:
            if part:
                json.loads(part, parse_constant=refuse)
