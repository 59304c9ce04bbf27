"""The training set of a run does not contain the examples held out for validation."""

from __future__ import annotations

import tiny

from nalora import tasks
from nalora.models import loading
from nalora.runs.inputs import prepare
from nalora.runs.settings import check
from nalora.tasks.splits import hold_out

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 4}


def test_held_out_texts_are_not_trained_on(tmp_path):
    run = check({
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "settings": SUMS, "train_size": 40,
        "test_size": 4, "validation_size": 12, "device": "cpu", "max_length": 128,
    })  # fmt: skip
    task = tasks.get(run.settings.task, **run.task_options)
    trained, held = hold_out(task.train_examples(), 12)
    inputs = prepare(task, loading.load(run.settings.model_spec("causal")), run.settings)
    texts = [inputs.collator(rows)["input_ids"][0].tolist() for rows in ([row] for row in inputs.dataset.rows)]
    tokenizer = tiny.tokenizer()
    expected = [[*tokenizer(each.prompt + each.target).input_ids, tokenizer.eos_token_id] for each in trained]
    assert texts == expected
    assert len(held) == 12
    assert inputs.summary()["examples"] == len(trained)
