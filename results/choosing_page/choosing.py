"""docs/choosing.md, and its sentence in the README, from the stored answers and benchmarks/rows.csv.

Nothing on the page is typed by hand that a later run could change: verdicts, numbers and "not finished" are filled in.
"""

from __future__ import annotations

from pathlib import Path

from tables.arm_states import states
from tables.generated import fill
from tables.noise import trainings
from tables.run_tables import read_tables
from tables.stored_answers import study

from choosing_page import rank_choice
from choosing_page.how_sure import accuracy, measured, open_questions, remaining, scope, state
from choosing_page.method_choice import STUDY, elsewhere, summary, table
from choosing_page.na_lora_record import na_lora
from choosing_page.rate_losses import best_rates, grids, rate_table, sides
from choosing_page.recommendation import start
from choosing_page.seeds_needed import seeds_table
from choosing_page.short_answer import commands, script, sentence, short_table, study_file
from choosing_page.step_costs import Row, fused_layers, method_costs, rank_table, read_rows

HERE = Path(__file__).parents[1]
PAGE = HERE.parent / "docs" / "choosing.md"
README = HERE.parent / "README.md"


def write(store: Path) -> Path:
    """Update the page and the README's sentence, and return the page's path."""
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8"), store), encoding="utf-8")
    README.write_text(filled_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    return PAGE


def filled_page(page: str, store: Path, results: Path = HERE) -> str:
    """Return the page with every generated part filled in."""
    rows, runs = read_rows(), read_tables(results)
    chosen, costs, every = start(results), method_costs(rows), grids(results)
    rank = int(chosen.settings["rank"])
    arms = {arm.name: arm.settings for arm in study(STUDY).arms}
    return fill(
        page,
        {
            "scope": scope(runs),
            "short": short_table(chosen, results, rows, costs),
            "commands": commands(chosen),
            "study": study_file(chosen),
            "script": script(chosen),
            "summary": summary(states(results, STUDY), arms),
            "methods": table(states(results, STUDY), arms, costs),
            "costs": [f"Step and memory: {costs.setting}, r = 8, PEFT's layers; {costs.machine}"],
            "elsewhere": elsewhere(results),
            "na_lora": na_lora(results, trainings(results), store),
            "fused": fused(rows),
            "rank": rank_choice.section(results, rank),
            "rank_costs": rank_table(rows),
            "best_rates": best_rates(every),
            "rates": rate_table(every),
            "sides": sides(every),
            "other_models": other_models(results),
            "seeds": seeds_table(results),
            "measured": measured(runs),
            "remaining": remaining(results),
            "accuracy": accuracy(results),
            "open": open_questions(results),
        },
    )


def filled_readme(readme: str, results: Path = HERE) -> str:
    """Return the README with the sentence of the page."""
    return fill(readme, {"start": sentence(start(results), results)})


def fused(rows: list[Row]) -> list[str]:
    """Return what fused layers save, whatever the choice."""
    found = fused_layers(rows)
    if found is None:
        return []
    name, setting, time, memory = found
    return [
        f"{name} with Liger's kernels, cuDNN's attention and CUDA graphs takes {time:.2f} of the time and",
        f"{memory:.2f} of the memory of PEFT's LoRA ({setting}; the newest run of [performance](performance.md)).",
    ]


def other_models(results: Path) -> list[str]:
    """Return the rates that the study of larger models searches."""
    rates, name = study("table-1").learning_rates, "table-1"
    return [
        f"Larger models: [`{name}`](studies.md) searches {min(rates):g} to {max(rates):g} for LoRA on 7B and 8B "
        f"models; it {state(results, name)}."
    ]
