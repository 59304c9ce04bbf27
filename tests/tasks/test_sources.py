"""Malformed data is refused with the file and the row; unusual but valid data is read."""

from __future__ import annotations

import csv
import json

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks.sources import json_rows, jsonl_rows, tsv_rows

QUESTION = {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}
REFERENCE = {"question_id": 81, "choices": [{"turns": ["One.", "Two."]}]}
PROMPT = {"name": "single-v1", "system_prompt": "", "prompt_template": "{question}"}
PROBLEM = {
    "task_id": 601, "text": "Add.", "code": "def f(): pass", "test_list": ["assert f() is None"], "test_setup_code": "",
}  # fmt: skip
FUNCTION = {
    "task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass",
    "canonical_solution": "    pass\n",
}  # fmt: skip
METAMATHQA = {"type": "GSM_SV", "query": "x?", "response": "4"}


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def lines(*rows):
    return "\n".join(map(json.dumps, rows))


def learnt(name, **options):
    return lambda folder: tasks.get(name, data_dir=folder, **options).train_examples()


def asked(name, **options):
    return lambda folder: tasks.get(name, data_dir=folder, **options).test_examples()


def judged(folder):
    return tasks.get("mt-bench", data_dir=folder, judge_model="judge").prepare_scoring()


WIZARDLM, QUESTIONS = "alpaca_evol_instruct_70k.json", "question.jsonl"
CODEFEEDBACK = "CodeFeedback-Filtered-Instruction.jsonl"
REFUSED = [
    # file, its text, its reader, the expected message
    ("test.jsonl", "[1, 2]", asked("gsm8k"), r"test.jsonl:1: found \[1, 2\]; expected a JSON object"),
    ("test.jsonl", '\n"x"', asked("gsm8k"), r"test.jsonl:2: found 'x'; expected a JSON object"),
    ("test.jsonl", "{'a': 1}", asked("gsm8k"), "test.jsonl:1: found no JSON"),
    ("test.jsonl", '{"question": "caf\xe9"}'.encode("latin-1"), asked("gsm8k"), "the byte 0xe9, which is not UTF-8"),
    ("dev.tsv", "sentence\tlabel\ncaf\xe9\t1\n".encode("latin-1"), asked("sst2"), "the byte 0xe9, which is not UTF-8"),
    ("dev.tsv", "sentence\tlabel\nshort\n", asked("sst2"), "sst2 test, row 0: found no 'label'"),
    ("MetaMathQA-395K.json", '"x"', learnt("gsm8k"), "found 'x'; expected one JSON list"),
    ("MetaMathQA-395K.json", '{"a": 1}', learnt("gsm8k"), "row 0: found no text 'type' among a"),
    ("MetaMathQA-395K.json", '["a", "b"]', learnt("gsm8k"), "row 0: found 'a'; expected a JSON object"),
    ("MetaMathQA-395K.json", lines(without(METAMATHQA, "query")), learnt("gsm8k"), "no text 'query' among type"),
    (WIZARDLM, json.dumps([{"instruction": "a"}]), learnt("mt-bench"), f"{WIZARDLM}, row 0: found no text 'output'"),
    (WIZARDLM, '[{"instruction": null, "output": "b"}]', learnt("mt-bench"), "row 0: found no text 'instruction'"),
    (WIZARDLM, '["a"]', learnt("mt-bench"), "row 0: found 'a'; expected a JSON object"),
    (WIZARDLM, "[", learnt("mt-bench"), "no JSON"),
    (QUESTIONS, lines({**QUESTION, "turns": ["One?"]}), asked("mt-bench"), r"'turns' of \['One\?'\]; .* 2 texts"),
    (QUESTIONS, lines({**QUESTION, "turns": [1, 2]}), asked("mt-bench"), "a list of 2 texts or more"),
    (QUESTIONS, lines(without(QUESTION, "category")), asked("mt-bench"), "row 0: found no text 'category'"),
    (QUESTIONS, lines(without(QUESTION, "question_id")), asked("mt-bench"), "no whole number 'question_id'"),
    ("judge_prompts.jsonl", lines(without(PROMPT, "prompt_template")), judged, "no text 'prompt_template'"),
    ("reference_gpt-4.jsonl", lines({**REFERENCE, "choices": []}), judged, "no list 'turns'"),
    ("reference_gpt-4.jsonl", lines(without(REFERENCE, "choices")), judged, "no list 'choices'"),
    (CODEFEEDBACK, lines({"query": "a"}), learnt("humaneval"), "Instruction, row 0: found no text 'answer'"),
    (CODEFEEDBACK, lines({"answer": "```\nb\n```"}), learnt("mbpp"), "row 0: found no text 'query'"),
    ("HumanEval.jsonl", lines(without(FUNCTION, "test")), asked("humaneval"), "row 0: found no text 'test'"),
    ("mbpp.jsonl", lines(without(PROBLEM, "task_id")), asked("mbpp"), "MBPP, row 0: found no whole number 'task_id'"),
    *(
        ("mbpp.jsonl", lines(without(PROBLEM, name)), learnt("mbpp", train_set="mbpp"), f"MBPP/601: found no .*{name}")
        for name in ("code", "text", "test_list", "test_setup_code")
    ),
    (
        "mbpp.jsonl",
        lines({**PROBLEM, "code": "def f(:"}),
        learnt("mbpp", train_set="mbpp"),
        "601, code: found no Python",
    ),
    ("mbpp.jsonl", lines({**PROBLEM, "test_list": ["("]}), learnt("mbpp", train_set="mbpp"), "601, tests: found no Py"),
]


@pytest.mark.parametrize(("file", "text", "read", "words"), REFUSED)
def test_malformed_data_is_refused_with_file_and_row(tmp_path, file, text, read, words):
    sound = {
        "question.jsonl": lines({**QUESTION, "category": "math"}), "reference_gpt-4.jsonl": lines(REFERENCE),
        "judge_prompts.jsonl": lines({**PROMPT, "name": "single-math-v1"}),
    }  # fmt: skip
    for name, content in {**sound, file: text}.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NALoRAError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path, mark):
    file = tmp_path / "rows"
    file.write_text(f'{mark}{{"a": "é"}}\n\n{{"a": "b"}}\n', encoding="utf-8")
    assert jsonl_rows(file) == json_rows(file) == [{"a": "é"}, {"a": "b"}]
    file.write_text(f'{mark}[{{"a": "é"}},\n {{"a": "b"}}]', encoding="utf-8")
    assert json_rows(file) == [{"a": "é"}, {"a": "b"}]
    file.write_text(f"{mark}a\tb\né\t1\n", encoding="utf-8")
    assert tsv_rows(file) == [{"a": "é", "b": "1"}]


def test_json_lines_under_the_name_of_a_json_list_are_read(tmp_path):
    (tmp_path / WIZARDLM).write_text(lines({"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}))
    assert [each.target for each in learnt("mt-bench")(tmp_path)] == ["b", "d"]


def test_a_long_field_is_read_and_the_limit_is_restored(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\n{'a' * 200_000}\t1\n")
    assert len(asked("sst2")(tmp_path)[0].prompt) > 200_000
    assert csv.field_size_limit() == before
