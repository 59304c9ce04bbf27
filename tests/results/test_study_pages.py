"""From a store of trained runs each study's page and picture come by one command; what is missing is counted."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import tiny
import yaml

from nalora.errors import NALoRAError
from nalora.evaluation.significance import compare_methods
from nalora.studies.conduct import conduct
from nalora.studies.job import work
from nalora.studies.outcome import Outcome
from nalora.studies.study import read

RUN = {
    "task": "gym/chain_sum", "train_size": 24, "test_size": 4, "steps": 2, "batch_size": 4, "rank": 2, "alpha": 4,
    "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "max_length": 128,
    "device": "cpu", "warmup": 0.0,
}  # fmt: skip
SHARED = {"validation_size": 4, "generate": "none"}
FULL = {"method": "full", "learning_rates": [1e-3]}


class Here:
    """An engine that trains in this process, and after `most` runs reports that nothing more can be done."""

    def __init__(self, most=10**6):
        self.left, self.ended = most, []

    def has_room(self):
        return not self.ended

    def submit(self, job):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        work(job)
        self.ended.append(Outcome(job.key, None))

    def wait(self, seconds):
        ended, self.ended = self.ended, []
        return ended

    def close(self):
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1, tie_word_embeddings=True)


def script(name):
    return importlib.import_module(name)


def study_file(folder, base, name, **content):
    file = folder / f"{name}.yaml"
    settings = {**RUN, "model": base, **content.pop("settings", {})}
    file.write_text(yaml.safe_dump({"name": name, "settings": settings, **SHARED, **content}, sort_keys=False))
    return file


def trained(file, store, most=10**6):
    if most < 10**6:
        with pytest.raises(KeyboardInterrupt):
            conduct(read(file), store, Here(most))
    else:
        conduct(read(file), store, Here())


def test_the_picture_and_table_of_the_gap(tmp_path, base, capsys):
    lora, whole = {"method": "lora"}, {"method": "peft/lora"}
    arms = {
        "lora": lora,
        "full fine-tuning": FULL,
        "r = 4": {**lora, "rank": 4, "alpha": 8},
        "gate whole": {**whole, "modules_to_save": ["gate_proj"]},
        "up whole": {**whole, "modules_to_save": ["up_proj"]},
        "gate alone": {**lora, "target_modules": ["gate_proj"]},
        "up alone": {**lora, "target_modules": ["up_proj"]},
    }
    controls = {"gate whole": ["up whole"], "gate alone": ["up alone"]}
    file = study_file(tmp_path, base, "gap-sources", arms=arms, controls=controls, learning_rates=[1e-2],
                      screening_seeds=[0], seeds=[0, 1, 2])  # fmt: skip
    store, output = tmp_path / "store", tmp_path / "out"
    command = ["--study", str(file), "--store", str(store), "--output", str(output)]

    script("gap_sources").main(command)
    assert "Not finished: gap-sources has 0 of 21 runs, 0 of 7 arms are complete." in capsys.readouterr().out
    assert not (output / "gap.svg").exists(), "there is nothing to draw"

    trained(file, store, most=4)
    script("gap_sources").main(command)
    assert "gap-sources has 4 of 21 runs, 1 of 7 arms is complete." in capsys.readouterr().out
    page = (output / "gap.md").read_text()
    assert "| full fine-tuning | " in page
    assert " | 1 of 3 | " in page
    assert "| r = 4 | | 0 of 3 | | | no finished run |" in page
    assert "is open: 2 of the 2 arms for 'gate whole' lack runs (gate whole: 0 of 3 seeds" in page
    assert "Not finished" in (output / "gap.svg").read_text()

    trained(file, store)
    script("gap_sources").main(command)
    page, picture = (output / "gap.md").read_text(), (output / "gap.svg").read_text()
    assert "Not finished" not in capsys.readouterr().out + page + picture
    assert all(f">{arm}<" in picture for arm in arms), "every form is on the picture"
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in page.splitlines() if row.startswith("| ")}
    counts = {arm: int(rows[arm][1].replace(",", "")) for arm in arms}
    assert counts["r = 4"] == 2 * counts["lora"]
    assert counts["gate alone"] == counts["up alone"] < counts["lora"] < counts["gate whole"]
    assert max(counts, key=counts.get) == "full fine-tuning"
    lora_loss, full_loss, rank_loss = (float(rows[arm][3]) for arm in ("lora", "full fine-tuning", "r = 4"))
    assert float(re.search(r"The gap is (\S+) ", page)[1]) == pytest.approx(lora_loss - full_loss, abs=2e-4)
    share = float(rows["r = 4"][4].removesuffix(" %")) / 100
    assert share * (lora_loss - full_loss) == pytest.approx(lora_loss - rank_loss, abs=3e-4)

    (output / "gap.md").write_text("my notes")
    with pytest.raises(NALoRAError, match="not a page of a study written by nalora"):
        script("gap_sources").main(command)


def compared(gate, others):
    """Comparisons of gates with controls whose losses are higher by the given numbers."""
    noise = {seed: seed / 1e4 for seed in range(5)}
    losses = {name: {seed: 1 + more + (-1) ** seed * 1e-4 * (name != gate) + small for seed, small in noise.items()}
              for name, more in {gate: 0.0, **others}.items()}  # fmt: skip
    return compare_methods(losses, [(gate, name) for name in others], higher_is_better=False)


@pytest.mark.parametrize(
    ("whole", "alone", "words"),
    [
        ({"up": 0.1, "down": 0.1}, {"up": 0.0, "down": 0.0}, "holds: gate whole is better than every control"),
        ({"up": 0.1, "down": 0.0}, {"up": 0.1, "down": 0.1}, "holds: gate alone is better than every control"),
        ({"up": 0.1, "down": 0.0}, {"up": 0.0, "down": 0.1}, "do not decide"),
        ({"up": 0.1, "down": 0.1}, {"up": -0.1, "down": 0.1}, "contradicted: up (compared with gate alone)"),
    ],
)
def test_the_premise_is_judged_by_the_rule_of_the_study(whole, alone, words):
    families = {"gate whole": compared("gate whole", whole), "gate alone": compared("gate alone", alone)}
    assert words in script("gap_sources").verdict_on_premise(families)


def test_the_table_of_claims_at_fixed_and_tuned_rates(tmp_path, base, capsys):
    # One step of full fine-tuning at a fixed rate changes the loss far more than LoRA's, whose B starts at 0.
    arms = {"lora": {"method": "lora"}, "full fine-tuning": {"method": "full"}, "rslora": {"method": "rslora"}}
    over = {"rate": {"1e-3": {"learning_rates": [1e-3]}, "3e-3": {"learning_rates": [3e-3]}}}
    fixed = study_file(tmp_path, base, "papers-regime", arms=arms, over=over, learning_rates=[1e-3], seeds=[0, 1, 2])
    tuned = study_file(tmp_path, base, "equal-cost", arms={name: arms[name] for name in ("lora", "full fine-tuning")},
                       learning_rates=[1e-2, 2e-2], screening_seeds=[0], seeds=[0, 1, 2])  # fmt: skip
    store = tmp_path / "store"
    command = ["--study", str(fixed), "--tuned", str(tuned), "--store", str(store), "--output", str(tmp_path / "out")]
    page = tmp_path / "out" / "claims.md"

    script("papers_regime").main(command)
    out = capsys.readouterr().out
    assert "Not finished: papers-regime has 0 of 18 runs, 0 of 6 arms are complete." in out
    assert "Not finished: equal-cost has 0 of 8 runs, 0 of 2 arms are complete." in out
    assert "| 1e-3 | rslora | not finished | not finished |" in page.read_text()

    trained(fixed, store)
    trained(tuned, store)
    script("papers_regime").main(command)
    assert "Not finished" not in capsys.readouterr().out
    text = page.read_text()
    assert "- 1e-3: 2 of 2 methods compared, " in text
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith(("| 1e-3", "| 3e-3"))]
    assert [row[1] for row in rows] == ["full fine-tuning", "rslora"] * 2
    assert all(re.match(r"\*\*(better|worse|no claim)\*\* [+-]0\.\d{4} \(", row[2]) for row in rows)
    assert rows[0][2].startswith("**better**")
    assert re.search(r"[+-]0\.\d{4} \(.* … .*\), corrected p = ", rows[0][3])
    assert rows[1][3].startswith("not finished"), "no study with tuned rates has this arm"


def one_comparison(difference, noise):
    losses = {"lora": dict.fromkeys(range(5), 1.0)}
    losses["arm"] = {seed: 1 + difference + noise * (-1) ** seed * (1 + seed / 10) for seed in range(5)}
    (one,) = compare_methods(losses, [("arm", "lora")], higher_is_better=False)
    return one


@pytest.mark.parametrize(
    ("fixed", "tuned", "result"),
    [
        ((-0.01, 1e-4), (-0.01, 1e-4), "holds"),
        ((-0.01, 1e-4), (0.01, 1e-4), "turns around"),
        ((-0.01, 1e-4), (-0.001, 0.1), "vanishes"),
        ((-0.001, 0.1), (-0.01, 1e-4), "no claim"),
        ((-0.01, 1e-4), None, "not known yet"),
    ],
)
def test_what_happens_to_a_claim(fixed, tuned, result):
    known = one_comparison(*tuned) if tuned else None
    assert script("papers_regime").outcome(one_comparison(*fixed), known) == result


def test_every_arm_at_a_fixed_rate_has_a_study_with_tuned_rates():
    module = script("papers_regime")
    tuned = {}
    for name in reversed(module.TUNED):
        tuned |= {arm.name: arm for arm in read(module.STUDIES / f"{name}.yaml").arms}
    for arm in read(module.STUDIES / "papers-regime.yaml").arms:
        assert arm.name in tuned
        assert dict(arm.settings) == dict(tuned[arm.name].settings)


def test_rules_are_fitted_frozen_and_judged(tmp_path, base, capsys, monkeypatch):
    """With plans of 3 and 6 steps: the same code, and a few seconds."""
    for module in ("rate_rules", "rate_cases"):
        monkeypatch.setattr(f"nalora.studies.{module}.PLANS", ((3, 1), (6, 2)))
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    over = {"case": {"GSM8K, r = 2": {"rank": 2}, "cipher, r = 4": {"rank": 4}, "word sorting": {"settings": easy}}}
    logged = {"steps": 8, "log_every": 1}
    search = study_file(tmp_path, base, "rate-search", arms={"lora": {"method": "lora"}}, over=over,
                        settings={**logged, "gate_movement_steps": [3, 6]}, learning_rates=[1e-3, 4e-3, 1.6e-2],
                        screening_seeds=[0, 1], drop_rates_worse_than=0.02, seeds=[0, 1])  # fmt: skip
    ranges = study_file(tmp_path, base, "rate-range-test", arms={"lora": {"method": "lora"}}, over=over,
                        settings={**logged, "steps": 12, "schedule": "range_test"}, learning_rates=[0.1],
                        screening_seeds=[0], seeds=[0])  # fmt: skip
    store, output = tmp_path / "store", tmp_path / "out"
    command = ["--study", str(search), "--range-tests", str(ranges), "--store", str(store), "--output", str(output)]
    main = script("rate_search").main

    with pytest.raises(NALoRAError, match="fit the rules first"):
        main(["judge", *command])
    assert main(["fit", *command]) == 1
    assert "Not finished: 0 of 2 cases have all of their learning rates (0 of 12 runs), 0" in capsys.readouterr().out
    assert not output.exists()

    trained(search, store)
    assert main(["fit", *command]) == 1
    assert "Not finished: 2 of 2 cases have all of their learning rates" in capsys.readouterr().out
    trained(ranges, store)
    assert main(["fit", *command]) == 0
    assert "rules fitted on 2 cases; commit it now" in capsys.readouterr().out
    rules = json.loads((output / "rules.json").read_text())
    assert rules["fitted_on"] == ["lora, case GSM8K, r = 2", "lora, case cipher, r = 4"]
    with pytest.raises(NALoRAError, match="rules that were fitted before"):
        main(["fit", *command])

    assert main(["judge", *command]) == 0
    page = (output / "verdict.md").read_text()
    assert re.search(r"The gates' rule \*\*(succeeds|has failed)\*\*: within 0.003 .* in \d of 1 case ", page)
    assert "| lora, case word sorting | " in page
    assert "case GSM8K" not in page
    for family in rules["rules"]:
        assert f"\n| {family} | " in page
    main(["judge", *command])
    assert (output / "verdict.md").read_text() == page, "the same rules and runs give the same page"

    rules["rules"]["gates"]["number"] *= 2
    (output / "rules.json").write_text(json.dumps(rules))
    with pytest.raises(NALoRAError, match="a verdict on other rules"):
        main(["judge", *command])


def test_the_cases_of_the_study_are_split_into_eight_and_ten(tmp_path):
    module = script("rate_search")
    progress = module.so_far(read(module.STUDIES / "rate-search.yaml"), tmp_path / "store")
    fitted, judged = ({cell.name for cell in module.cells_for(progress, command)} for command in ("fit", "judge"))
    assert (len(fitted), len(judged)) == (8, 10)
    assert not fitted & judged
    ranges = module.so_far(read(module.STUDIES / "rate-range-test.yaml"), tmp_path / "store")
    assert {cell.name for cell in ranges.schedule.cells} == fitted | judged
