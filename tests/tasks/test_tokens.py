"""No task trains on its prompts: the loss covers the tokens of the target and its end, for every tokenizer family."""

from __future__ import annotations

import json

import pytest
import tiny

from nalora import tasks
from nalora.control.tokens import IGNORED_LABEL
from nalora.runs.encoding import Encoder
from nalora.tasks import sources

HUB = {
    "meta-math/MetaMathQA": [{"query": "What is 2+3?", "response": "It is 5.\nThe answer is: 5", "type": "GSM_AnsAug"}],
    "m-a-p/CodeFeedback-Filtered-Instruction": [{"query": "Add.", "answer": "So:\n```python\nx = 1\n```\nDone."}],
    "WizardLM": [{"instruction": "Name a fruit.", "output": "An apple."}],
}


@pytest.fixture
def task(request, tmp_path, monkeypatch):
    def rows(task, dataset, split, name=None):
        return next(found for key, found in HUB.items() if key in dataset)

    monkeypatch.setattr(sources, "hub_rows", rows)
    name, options = request.param
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na fine film\t1\n")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "It is 2\n#### 2"}))
    return tasks.get(name, **{key: tmp_path if value == "FOLDER" else value for key, value in options.items()})


@pytest.mark.parametrize(
    "task",
    [
        ("gsm8k", {"train_set": "metamathqa"}),
        ("gsm8k", {"train_set": "metamathqa", "prompt": "alpaca"}),
        ("gsm8k", {"train_set": "gsm8k", "data_dir": "FOLDER"}),
        ("humaneval", {}),
        ("mt-bench", {}),
        ("sst2", {"data_dir": "FOLDER"}),
        ("sst2", {"data_dir": "FOLDER", "prompt": "decoder"}),
        ("gym/chain_sum", {"train_size": 3, "test_size": 3}),
    ],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_the_loss_covers_the_targets_only(task, kind):
    tokenizer = tiny.tokenizer()
    encoder = Encoder(tokenizer, kind)
    examples = task.train_examples()
    assert examples
    for example in examples:
        row = encoder.row(example)
        learnt = [label for label in row["labels"] if label != IGNORED_LABEL]
        assert learnt == [*tokenizer(example.target).input_ids, tokenizer.eos_token_id]
        prompt = tokenizer(example.prompt).input_ids
        assert row["input_ids"][: len(prompt)] == prompt
        if kind == "causal":
            assert row["labels"][: len(prompt)] == [IGNORED_LABEL] * len(prompt)
        assert example.target
        assert example.target not in example.prompt
