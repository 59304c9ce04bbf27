"""Tables: the content of the cells, and the frequency of marks that the caption promises."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from nalora.errors import NALoRAError
from nalora.report.tables import Column, Record, escape_latex, escape_markdown, latex, markdown, tabulate


def drawn(means, seeds=5, spread=1.0, chance=None, measure="accuracy"):
    chance = chance or random.Random(0)
    return [Record(label, s, {measure: chance.gauss(m, spread)}) for label, m in means.items() for s in range(seeds)]


def marks(table, column=0):
    return {label: cells[column].mark for label, cells in table.rows.items()}


def rate(means, wanted, seeds=5, tables=300):
    """Return the share of tables with the `wanted` marks."""
    chance = random.Random(11)
    return sum(marks(tabulate(drawn(means, seeds, chance=chance))) == wanted for _ in range(tables)) / tables


def test_equal_methods_are_marked_5_times_in_100():
    assert 0.02 <= 1 - rate({"a": 1.0, "b": 1.0}, {"a": "", "b": ""}) <= 0.085


def test_more_equal_methods_are_marked_no_more_often():
    unmarked = rate(dict.fromkeys("abcdef", 1.0), dict.fromkeys("abcdef", ""))
    assert 1 - unmarked <= 0.06


def test_a_clear_difference_is_marked_nearly_always():
    assert rate({"a": 50.0, "b": 40.0, "c": 30.0}, {"a": "best", "b": "second", "c": ""}) > 0.99


def test_behind_a_clear_best_equal_seconds_are_not_marked():
    assert rate({"a": 50.0, "b": 30.0, "c": 30.0}, {"a": "best", "b": "", "c": ""}) > 0.9


def test_no_second_is_marked_where_the_best_is_not():
    means = {"a": 50.0, "b": 50.0, "c": 30.0}
    assert rate(means, dict.fromkeys(means, "")) > 0.9


def test_of_two_rows_the_last_is_not_called_second():
    assert marks(tabulate(drawn({"a": 50.0, "b": 30.0}))) == {"a": "best", "b": ""}


def test_lower_is_better_for_a_loss_and_where_set():
    assert marks(tabulate(drawn({"a": 50.0, "b": 30.0}, measure="target_loss")))["b"] == "best"
    said = tabulate(drawn({"a": 50.0, "b": 30.0}), [Column("accuracy", lower=True)])
    assert marks(said)["b"] == "best"
    assert "accuracy ↓" in markdown(said)


def test_a_wide_third_row_keeps_the_best_unmarked():
    """Best and second differ significantly, but the third has a large variance."""
    values = {"a": [10.0, 10.1, 10.2], "b": [8.0, 8.1, 8.3], "c": [1.0, 7.0, 14.0]}
    records = [Record(label, seed, {"x": v}) for label, each in values.items() for seed, v in enumerate(each)]
    assert set(marks(tabulate(records)).values()) == {""}
    assert marks(tabulate(records, unranked=["c"])) == {"a": "best", "b": "", "c": ""}
    assert "Not compared: c." in tabulate(records, unranked=["c"]).caption


def test_one_seed_marks_nothing_and_the_caption_explains_it():
    table = tabulate([Record("LoRA", 0, {"accuracy": 0.4}), Record("NA-LoRA", 0, {"accuracy": 0.9})])
    assert set(marks(table).values()) == {""}
    assert "One seed (n = 1)." in table.caption
    assert "fewer than 3 seeds cannot show" in table.caption
    assert "±" not in markdown(table)


def test_the_caption_names_the_columns_left_open():
    records = [
        Record(label, seed, {"clear": base + seed, "open": seed * 10.0 * (-1) ** base})
        for label, base in (("a", 100), ("b", 1))
        for seed in range(4)
    ]
    records = [r._replace(measures={**r.measures, "clear": r.measures["clear"] + (r.seed % 2) * 0.1}) for r in records]
    records[0] = records[0]._replace(measures={**records[0].measures, "clear": 100.5})
    caption = tabulate(records).caption
    assert "Bold: significantly better than every other row" in caption
    assert "No mark for open." in caption
    assert "underlined" not in caption
    assert "n = 4" in caption


def test_cells_are_mean_and_sample_deviation():
    records = [Record("LoRA", seed, {"gsm8k": v}) for seed, v in enumerate([0.5, 0.6, 0.7])]
    table = tabulate([*records, Record("PiSSA", 0, {"gsm8k": 0.55})], [Column("gsm8k", "GSM8K, %", scale=100)])
    assert markdown(table).splitlines()[:4] == [
        "|  | GSM8K, % ↑ |",
        "| --- | ---: |",
        "| LoRA | 60.00 ± 10.00 (n = 3) |",
        "| PiSSA | 55.00 (n = 1) |",
    ]
    assert "n as stated" in table.caption


def test_a_diverged_run_is_counted_and_not_averaged():
    records = drawn({"a": 50.0, "b": 40.0, "c": 30.0})
    records[0] = records[0]._replace(measures={"accuracy": math.nan})
    table = tabulate(records)
    assert "| a | not finite (1 of 5) |" in markdown(table)
    assert marks(table) == {"a": "", "b": "best", "c": ""}


def test_a_missing_measure_is_a_dash():
    table = tabulate([Record("a", 0, {"x": 1.0}), Record("b", 0, {"y": 2.0})])
    assert "| a | 1.000 | – |" in markdown(table)


@pytest.mark.parametrize(
    ("values", "shown"),
    [((75.163, 2.0), "75.16"), ((0.68114, 0.2), "0.6811"), ((12345.6, 1.0), "12346"), ((0, 0), "0.0")],
)
def test_the_largest_mean_has_four_digits(values, shown):
    records = [Record(label, 0, {"x": float(v)}) for label, v in zip("ab", values, strict=True)]
    assert f"| a | {shown} |" in markdown(tabulate(records))


def test_one_run_twice_is_refused():
    with pytest.raises(NALoRAError, match="two values for seed 3"):
        tabulate([Record("a", 3, {"x": 1.0})] * 2)


def test_an_empty_table_has_a_caption():
    assert tabulate([]).caption == "No results."


def test_markdown_cannot_be_broken_by_names():
    table = tabulate([Record("a|b*c_<u>\n`d`", 0, {"x|y": 1.0})])
    rows = markdown(table).splitlines()[:3]
    assert rows[2] == r"| a\|b\*c\_\<u\> \`d\` | 1.000 |"
    assert all(row.replace(r"\|", "").count("|") == 3 for row in rows)


def test_latex_is_escaped_and_balanced():
    records = drawn({"50% & $_#^~\\{κ}": 50.0, "b": 40.0, "c": 30.0}, measure="a_b")
    text = latex(tabulate(records, title="100 % of <it>"))
    assert r"50\% \& \$\_\#\textasciicircum{}\textasciitilde{}\textbackslash{}\{$\kappa$\}" in text
    assert r"a\_b $\uparrow$" in text
    assert r"& \textbf{" in text
    assert r"& \underline{" in text
    assert text.isascii()
    stripped = text.replace(r"\{", "").replace(r"\}", "")
    assert stripped.count("{") == stripped.count("}")
    assert stripped.replace(r"\$", "").count("$") % 2 == 0
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    assert all(line.replace(r"\&", "").count("&") == 1 and line.endswith(r" \\") for line in body.strip().splitlines())


def test_escapes_leave_plain_text_alone():
    assert escape_latex("NA-LoRA r=8, lr 1e-3") == escape_markdown("NA-LoRA r=8, lr 1e-3") == "NA-LoRA r=8, lr 1e-3"


def test_rows_and_columns_keep_their_order():
    records = [Record(label, 0, {"z": 1.0, "a": 2.0}) for label in ("pissa", "lora", "dora")]
    lines = markdown(tabulate(records)).splitlines()
    assert lines[0] == "|  | z ↑ | a ↑ |"
    assert [line.split()[1] for line in lines[2:5]] == ["pissa", "lora", "dora"]
    assert all(a != b for a, b in pairwise(lines))


def test_a_label_in_brackets_is_no_latex_option():
    assert escape_latex("[run] *") == "{[}run{]} {*}"


def test_a_column_that_is_neither_good_nor_bad_has_no_arrow_and_no_marks():
    table = tabulate(drawn({"a": 50.0, "b": 30.0}, measure="flips"), [Column("flips", ranked=False)])
    assert set(marks(table).values()) == {""}
    assert "| flips |" in markdown(table)
    assert "arked" not in table.caption


def test_a_reference_row_needs_no_seeds():
    records = [Record("base", 0, {"accuracy": 4.0}), *drawn({"a": 50.0, "b": 30.0})]
    table = tabulate(records, unranked=["base"])
    assert "| base | 4.00 |" in markdown(table)
    assert "n = 5" in table.caption
    assert marks(table) == {"base": "", "a": "best", "b": ""}
