"""Examples on the page: which questions it holds, and how large they may become."""

from __future__ import annotations

import json

from nalora.report import examples as examples_module
from nalora.report.data import read_runs
from nalora.report.examples import examples
from report.run_folders import write_evaluation, write_run


def test_every_question_has_the_answers_of_base_and_runs(tmp_path):
    runs = read_runs([write_run(tmp_path, name=name, seed=i) for i, name in enumerate(("one", "two"))])
    (shown,) = examples(runs)
    assert (shown["task"], shown["measure"], shown["judged"], shown["total"]) == (
        "gym/chain_sum",
        "accuracy",
        True,
        100,
    )
    row = shown["rows"][3]
    assert (row["question"], row["expected"]) == ("What is 3 + 6?", "9")
    assert list(row["answers"]) == ["base", "run-0", "run-1"]
    assert row["answers"]["run-0"] == ["9", 1.0]
    assert row["answers"]["base"] == ["10", 0.0]


def test_the_page_holds_evenly_spaced_questions_of_many(tmp_path, monkeypatch):
    run = write_run(tmp_path)
    for folder in run.glob("evaluations/**/*-0123456789"):
        write_evaluation(folder, 300, of=1000)
    (shown,) = examples(read_runs([run]))
    assert shown["total"] == 1000
    assert [row["question"].split()[2] for row in shown["rows"]] == [str(i) for i in range(0, 1000, 5)]
    monkeypatch.setattr(examples_module, "MOST_TEXT", 2000)
    (shown,) = examples(read_runs([run]))
    assert 10 < len(shown["rows"]) < 200
    assert len(json.dumps([[r["question"], r["expected"], r["answers"]] for r in shown["rows"]])) < 2 * 2000 + 4000


def test_long_texts_are_cut_and_control_characters_replaced(tmp_path):
    run = write_run(tmp_path)
    (file,) = run.glob("evaluations/**/adapted-*/outputs.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["outputs"] = ["\x1b[31m" + "x" * 5000]
    rows[1]["outputs"] = ["\ud800"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shown,) = examples(read_runs([run]))
    text = shown["rows"][0]["answers"]["run-0"][0]
    assert text.startswith("�[31mxx")
    assert text.endswith("x …")
    assert len(text) < 2010
    assert shown["rows"][1]["answers"]["run-0"][0] == "�"


def test_runs_without_answers_have_no_examples(tmp_path):
    run = write_run(tmp_path)
    for file in run.rglob("outputs.jsonl"):
        file.unlink()
    assert examples(read_runs([run])) == []
