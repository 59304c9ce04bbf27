from __future__ import annotations

import json

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import sources

EGGS = {"question": "How many eggs?", "answer": "She has 16 - 7 = <<16-7=9>>9.\nNine times 2 is <<9*2=18>>18.\n#### 18"}
DEBT = {"question": "What is left?", "answer": "He owes.\n#### -1,250"}
METAMATHQA = [
    {"type": "MATH_AnsAug", "query": "What is $x$?", "response": "The answer is: $x$"},
    {"type": "GSM_AnsAug", "query": "How many?", "response": "It is 9.\n#### 9\nThe answer is: 9"},
    {"type": "GSM_SV", "query": "What is x?", "response": "x is 4.\n#### 4\nThe answer is: 4"},
    {"type": "GSM_FOBAR", "query": "And y?", "response": "y is 5.\n#### 5\nThe answer is: 5"},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    for split, rows in (("train", [EGGS]), ("test", [EGGS, DEBT])):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def hub_rows(task, dataset, split, name=None):
        asked.append((dataset, split, name))
        return METAMATHQA if dataset == "meta-math/MetaMathQA" else [EGGS, DEBT]

    monkeypatch.setattr(sources, "hub_rows", hub_rows)
    return asked


def test_files_of_gsm8k_are_used_for_training_and_testing(folder):
    task = tasks.get("gsm8k", data_dir=folder)
    (train,) = task.train_examples()
    assert (train.id, train.prompt, train.target) == ("gsm8k-train-0", "Q: How many eggs?\nA: ", EGGS["answer"])
    assert [example.id for example in task.test_examples()] == ["gsm8k-test-0", "gsm8k-test-1"]


def test_files_may_lie_in_the_folder_itself(folder):
    assert len(tasks.get("gsm8k", data_dir=folder / "gsm8k").train_examples()) == 1


def test_the_hub_gives_metamathqa_and_the_test_split(hub):
    task = tasks.get("gsm8k")
    assert [example.target for example in task.train_examples()] == [row["response"] for row in METAMATHQA[1:]]
    assert len(task.test_examples()) == 2
    assert hub == [("meta-math/MetaMathQA", "train", None), ("openai/gsm8k", "test", "main")]


def test_the_hub_gives_gsm8k_for_training_if_chosen(hub):
    assert len(tasks.get("gsm8k", train_set="gsm8k").train_examples()) == 2
    assert hub == [("openai/gsm8k", "train", "main")]


@pytest.mark.parametrize("limit", [0, 2, 3, 4, None])
def test_metamathqa_is_limited_in_file_order(hub, limit):
    examples = tasks.get("gsm8k", limit=limit).train_examples()
    assert [example.id for example in examples] == ["metamathqa-1", "metamathqa-2", "metamathqa-3"][:limit]


def test_metamathqa_is_cut_before_it_repeats_the_answer(hub):
    assert tasks.get("gsm8k", cut_answer=True).train_examples()[0].target == "It is 9.\n#### 9"


def test_examples_held_out_of_training_can_be_scored(hub, folder):
    for task in (tasks.get("gsm8k"), tasks.get("gsm8k", cut_answer=True), tasks.get("gsm8k", data_dir=folder)):
        for example in task.train_examples():
            assert task.score(example, [example.target])["accuracy"] == 1
            assert task.score(example, ["#### 77"])["accuracy"] == 0


@pytest.mark.parametrize("file", ["metamathqa/MetaMathQA-395K.json", "MetaMathQA-395K.json", "MetaMathQA.jsonl"])
def test_metamathqa_is_read_from_its_file(tmp_path, file):
    (tmp_path / "metamathqa").mkdir()
    jsonl = "\n".join(map(json.dumps, METAMATHQA))
    (tmp_path / file).write_text(jsonl if file.endswith("jsonl") else json.dumps(METAMATHQA))
    assert len(tasks.get("gsm8k", data_dir=tmp_path).train_examples()) == 3


def test_the_calculators_notes_can_be_removed(folder):
    (train,) = tasks.get("gsm8k", data_dir=folder, calculator=False).train_examples()
    assert train.target == "She has 16 - 7 = 9.\nNine times 2 is 18.\n#### 18"


def test_alpaca_is_the_other_prompt(folder):
    prompt = tasks.get("gsm8k", data_dir=folder, prompt="alpaca").test_examples()[0].prompt
    assert prompt.startswith("Below is an instruction")
    assert prompt.endswith("### Instruction:\nHow many eggs?\n\n### Response:\n")


@pytest.mark.parametrize(
    ("index", "output", "accuracy", "accuracy_published"),
    [
        (0, "Nine.\n#### 18", 1, 1),
        (0, "She makes $18.00 a day", 1, 0),
        (0, "#### 18.5", 0, 1),
        (0, "#### 17", 0, 0),
        (0, "", 0, 0),
        (1, "#### -1250", 1, 0),
        (1, "nothing", 0, 0),
    ],
)
def test_both_readers_score_the_answer(folder, index, output, accuracy, accuracy_published):
    task = tasks.get("gsm8k", data_dir=folder)
    scores = task.score(task.test_examples()[index], [output])
    assert scores == {"accuracy": accuracy, "accuracy_published": accuracy_published}
    assert set(scores) == set(task.measures)


def test_the_references_are_right_and_no_stop_text_cuts_them(folder):
    task = tasks.get("gsm8k", data_dir=folder)
    for example in task.test_examples():
        assert task.score(example, [example.target])["accuracy"] == 1
        assert not any(stop in example.target for stop in task.stop)


def test_examples_can_be_written_to_a_file(folder):
    example = tasks.get("gsm8k", data_dir=folder).test_examples()[0]
    assert json.loads(json.dumps(example.facts)) == {"answer": "#### 18"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_set": "math"}, "one of metamathqa, gsm8k"),
        ({"prompt": "chat"}, "one of qa, alpaca"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_options_are_refused_by_name(options, words):
    with pytest.raises(NALoRAError, match=words):
        tasks.get("gsm8k", **options)


def test_missing_and_damaged_files_are_named(folder):
    with pytest.raises(NALoRAError, match="MetaMathQA-395K.json"):
        tasks.get("gsm8k", data_dir=folder, train_set="metamathqa").train_examples()
    (folder / "gsm8k" / "test.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(NALoRAError, match="row 0: found no text 'answer' among question"):
        tasks.get("gsm8k", data_dir=folder).test_examples()
    (folder / "MetaMathQA-395K.json").write_text("[")
    with pytest.raises(NALoRAError, match="no JSON"):
        tasks.get("gsm8k", data_dir=folder, train_set="metamathqa").train_examples()
