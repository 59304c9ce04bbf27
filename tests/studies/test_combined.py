"""Combined tables: tasks and models side by side, averages of complete rows, marks of the study's own test alone."""

from __future__ import annotations

import math

import dummies
import pytest
from typer.testing import CliRunner

from nalora.cli import app
from nalora.errors import NALoRAError
from nalora.report.tables import latex, markdown
from nalora.studies import combined
from nalora.studies.answer import answer
from nalora.studies.combined import Answered, combined_tables
from nalora.studies.schedule import Schedule
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Result
from nalora.studies.study import parse

LLAMAS = ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf"]
# Accuracy by arm; DoRA is far ahead, and its seeds vary as LoRA's do.
MEANS = {"lora": 0.70, "dora": 0.75, "rslora": 0.70}
NOISE = {0: 0.010, 1: -0.012, 2: 0.004}


def study(name="synthetic", **changes):
    content = {
        "name": name,
        "settings": {"model": LLAMAS[0], "rank": 8},
        "arms": {"lora": {"method": "lora"}, "dora": {"method": "dora"}, "rslora": {"method": "rslora"}},
        "over": {"task": ["gsm8k", "humaneval"]},
        "learning_rates": [1e-4], "seeds": [0, 1, 2],
    }  # fmt: skip
    return parse({**content, **changes})


def result(cell, seed, shift=0.0):
    """Rows of the same seed share its noise, up to a little of their own."""
    settings = dict(cell.settings)
    own = {"lora": 0.0, "dora": 0.0005 * seed, "rslora": -0.0007 * (seed - 1)}[cell.arm.name]
    value = MEANS[cell.arm.name] + NOISE[seed] + own + (0.1 if settings.get("task") == "humaneval" else 0.0) + shift
    measures = (
        {"rating": 10 * value} if settings.get("task") == "mt-bench" else {"accuracy": value, "strict": value / 2}
    )
    return Result(1.0, {VALIDATION: 1.0, TEST: 2 - value}, measures, 1.0)


def answered(described, *, leave_out=lambda cell, seed: False, results=None):
    schedule = Schedule(described, "store")
    found = {
        job.key: (results or result)(cell, job.settings["seed"])
        for cell in schedule.cells
        for job in schedule.final(cell, 1e-4)
        if not leave_out(cell, job.settings["seed"])
    }
    return Answered(described, answer(schedule, found, {}))


def test_tasks_are_columns_and_the_last_one_is_their_average():
    table = combined_tables([answered(study())])["Test answers"]
    assert [column.title for column in table.columns] == ["gsm8k %", "humaneval %", "Average %"]
    assert [*table.rows] == ["lora", "dora", "rslora"]
    for label, (gsm8k, humaneval, average) in table.rows.items():
        assert gsm8k.mean == pytest.approx(100 * MEANS[label], abs=0.2)
        assert average.values == {
            seed: pytest.approx((gsm8k.values[seed] + humaneval.values[seed]) / 2) for seed in (0, 1, 2)
        }
    assert "gsm8k: accuracy; humaneval: accuracy" in table.caption, "the main measure is the first"
    assert "(n = 3)" in table.caption


def test_only_what_the_study_s_own_test_allows_is_marked_and_no_average():
    found = answered(study())
    table = combined_tables([found])["Test answers"]
    own = [part.table.rows["dora"][1].mark for part in found.answer.parts]
    assert own == ["best", "best"]
    assert [cell.mark for cell in table.rows["dora"]] == ["best", "best", ""]
    assert not any(cell.mark for label in ("lora", "rslora") for cell in table.rows[label])
    few = combined_tables([answered(study(seeds=[0, 1]))])["Test answers"]
    assert not any(cell.mark for cells in few.rows.values() for cell in cells)
    assert "Nothing is marked" in few.caption


def test_an_average_is_left_out_where_one_of_its_cells_is_not_complete():
    def without(cell, seed):
        return cell.arm.name == "dora" and dict(cell.settings)["task"] == "humaneval" and seed == 2

    table = combined_tables([answered(study(), leave_out=without)])["Test answers"]
    assert table.rows["dora"][2].values == {}
    assert table.rows["lora"][2].values.keys() == {0, 1, 2}
    text = markdown(table)
    (row,) = [line for line in text.splitlines() if line.startswith("| dora")]
    assert row.endswith("| – |")
    assert "(n = 2)" in row
    assert "not complete" in text


def test_a_seed_that_diverged_leaves_no_average():
    def diverged(cell, seed):
        if cell.arm.name == "dora" and seed == 1:
            return Result(math.inf, {VALIDATION: math.inf, TEST: math.inf}, {}, 1.0)
        return result(cell, seed)

    table = combined_tables([answered(study(), results=diverged)])["Test answers"]
    assert table.rows["dora"][2].values == {}
    assert "not finite (1 of 3)" in markdown(table)


def test_ratings_and_shares_have_no_average():
    """MT-Bench rates from 1 to 10: the mean with percentages would be of no unit."""
    over = {"task": {"chat": {"task": "mt-bench", "judge_model": "gpt-4"}, "math": {"task": "gsm8k"}}}

    def rated(cell, seed):
        chat = dict(cell.settings)["task"] == "chat"
        return Result(
            1.0, {VALIDATION: 1.0, TEST: 1.0}, {"rating": 6.0 + seed / 10} if chat else {"accuracy": 0.5}, 1.0
        )

    table = combined_tables([answered(study(over=over), results=rated)])["Test answers"]
    assert [column.title for column in table.columns] == ["mt-bench", "gsm8k %"]
    assert "mt-bench: rating" in table.caption


def test_models_are_groups_of_columns_each_with_its_average():
    table = combined_tables([answered(study(over={"model": LLAMAS, "task": ["gsm8k", "humaneval"]}))])["Test answers"]
    heads = [(column.group, column.title) for column in table.columns]
    names = ["gsm8k %", "humaneval %", "Average %"]
    assert heads == [(group, name) for group in ("Llama-3.1-8B", "Llama-2-7b-hf") for name in names]
    in_markdown, in_latex = markdown(table), latex(table)
    assert "Llama-3.1-8B: gsm8k % ↑ |" in in_markdown
    assert r"& \multicolumn{3}{c}{Llama-3.1-8B} & \multicolumn{3}{c}{Llama-2-7b-hf} \\" in in_latex
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-7}" in in_latex
    assert in_latex.count(r"\textbf{") == 4


def test_other_settings_name_the_rows_and_their_columns_are_not_marked():
    over = {"rank": [8, 32], "task": ["gsm8k", "humaneval"]}
    table = combined_tables([answered(study(over=over))])["Test answers"]
    assert [*table.rows] == [f"{arm}, rank {rank}" for rank in (8, 32) for arm in MEANS]
    assert not any(cell.mark for cells in table.rows.values() for cell in cells)
    assert "have no marks" in table.caption


def test_a_study_of_another_setting_has_a_column_for_each_value():
    over = {"optimizer": ["adamw_torch", "sgd"]}
    described = study(over=over, settings={"model": LLAMAS[0], "task": "gsm8k"})
    table = combined_tables([answered(described)])["Test answers"]
    assert [column.title for column in table.columns] == ["optimizer adamw_torch %", "optimizer sgd %"]


def test_differences_have_intervals_and_the_study_s_verdict():
    found = answered(study())
    table = combined_tables([found])["Test answers: differences from lora"]
    comparison = next(each for each in found.answer.parts[0].comparisons["accuracy"] if each.method == "dora")
    low, high = comparison.interval
    text = table.rows["dora"][0].text(2, None)
    assert text == f"{100 * comparison.difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] (n = 3)"
    assert (comparison.verdict, table.rows["dora"][0].mark) == ("better", "best")
    assert table.rows["rslora"][0].mark == ""
    assert "lora" not in table.rows
    loss = combined_tables([found])["Test loss: differences from lora"]
    assert loss.rows["dora"][0].mark == "best", "a lower loss is better"
    assert "Average" not in " ".join(column.title for column in loss.columns)


def test_several_studies_share_columns_and_rows_with_equal_values():
    first = answered(study("table", over={"model": LLAMAS, "task": ["gsm8k", "humaneval"]}))
    arms = {"lora": {"method": "lora"}, "dora": {"method": "dora", "rank": 4}}
    shifts = {"lora": 0.0, "dora": 0.01}
    second = answered(study("more", arms=arms), results=lambda cell, seed: result(cell, seed, shifts[cell.arm.name]))
    table = combined_tables([first, second])["Test answers"]
    assert len(table.columns) == 6, "the tasks of the first model are the same columns"
    assert [*table.rows] == ["lora", "dora", "rslora", "dora (more)"]
    assert table.rows["dora (more)"][0].mean == pytest.approx(table.rows["dora"][0].mean + 1)
    assert table.rows["dora (more)"][3].values == {}
    shared = [cells[0].mark for cells in table.rows.values()]
    assert not any(shared), "rows of two studies were not tested together"
    assert table.rows["dora"][3].mark == "best"


# ---- commands --------------------------------------------------------------------------------------------------------

FILE = """
name: pair
settings: {model: smollm2-135m, steps: 1, task: gym/chain_sum}
arms: {lora: {method: lora}, na-lora: {method: na-lora}}
over: {task: [gym/chain_sum, gym/word_sorting]}
learning_rates: [1.0e-3]
seeds: [0, 1, 2]
"""


@pytest.fixture
def finished(tmp_path):
    """A store with the runs of a study of two tasks, and the study's file."""
    file = tmp_path / "pair.yaml"
    file.write_text(FILE)
    store = tmp_path / "store"
    from nalora.studies.store import Store
    from nalora.studies.study import read

    Store(store).claim()
    for job in Schedule(read(file), str(store)).open_jobs({}, {}):
        assert ANSWERS in job.parts
        dummies.pretend(job)
    return file, store


def test_the_end_of_a_study_writes_its_combined_tables(finished):
    file, store = finished
    done = CliRunner().invoke(app, ["study", str(file), "--store", str(store), "--so-far"], catch_exceptions=False)
    assert done.exit_code == 0
    text, tex = (path.read_text() for path in combined.files_of("pair", store))
    # The accuracies of these runs exceed 1, so they are no shares and have no average.
    assert "|  | gym/chain\\_sum ↑ | gym/word\\_sorting ↑ |" in text
    assert r"\begin{tabular}{lcc}" in tex
    assert "pair.tables.tex" in done.output.replace("\n", "")


def test_a_file_of_others_is_not_replaced(finished):
    file, store = finished
    combined.files_of("pair", store)[1].write_text("mine")
    with pytest.raises(NALoRAError, match=r"pair\.tables\.tex"):
        CliRunner().invoke(app, ["study", str(file), "--store", str(store), "--so-far"], catch_exceptions=False)
    assert combined.files_of("pair", store)[1].read_text() == "mine"


def test_report_writes_the_tables_of_one_study_or_several(finished, tmp_path):
    file, store = finished
    other = tmp_path / "other.yaml"
    other.write_text(FILE.replace("name: pair", "name: other").replace("seeds: [0, 1, 2]", "seeds: [0, 1]"))
    command = ["report", str(file), "--store", str(store), "--tables", str(tmp_path / "tables")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "tables.md" in done.output
    assert "Test answers of pair." in (tmp_path / "tables" / "tables.md").read_text()
    CliRunner().invoke(app, [*command, str(other)], catch_exceptions=False)
    text = (tmp_path / "tables" / "tables.md").read_text()
    assert "Test answers of pair, other." in text
    assert "| lora (other)" in text
    with pytest.raises(NALoRAError, match="add --tables DIR"):
        CliRunner().invoke(app, ["report", str(file), str(other), "--store", str(store)], catch_exceptions=False)
    empty = ["report", str(file), "--store", str(tmp_path / "none"), "--tables", str(tmp_path / "tables")]
    with pytest.raises(NALoRAError, match="no compared run of pair"):
        CliRunner().invoke(app, empty, catch_exceptions=False)
