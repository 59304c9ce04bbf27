"""What would be trained on and what would be left out equals what a training encodes."""

from __future__ import annotations

import json

import pytest
import tiny

from nalora import tasks
from nalora.runs import data_summary
from nalora.runs.data_summary import also_tested, count_tokens, example_parts
from nalora.runs.encoding import Encoder, encode


@pytest.fixture
def task(tmp_path):
    rows = [{"prompt": "x" * (n % 13 + 1) + f"{n}", "completion": "y" * (n % 5 + 1)} for n in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    return tasks.get(str(tmp_path / "a.jsonl"), test=str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_rows_that_are_too_long_are_those_that_a_training_drops(task, kind, monkeypatch):
    monkeypatch.setattr(data_summary, "REPORTED_ROWS", 30)
    encoder, reported = Encoder(tiny.tokenizer(), kind), []
    train = task.training_set()
    quantiles, too_long = count_tokens(task, train, encoder, 12, lambda *progress: reported.append(progress))
    trained = encode(train, encoder, 12)
    assert too_long.rows == trained.dropped > 3
    assert len(too_long.first) == 3
    assert reported == [("tokenising", done, 76) for done in (30, 60, 76)]
    everything = encode(train, encoder, 100)
    for name, side in zip(quantiles, ("input_ids", "labels"), strict=True):
        lengths = sorted(sum(value != -100 for value in row[side]) for row in everything.rows)
        assert [quantiles[name][0], quantiles[name][-1]] == [lengths[0], lengths[-1]]
        assert quantiles[name][1] == lengths[len(lengths) // 2 - 1 + len(lengths) % 2]
    left_out = also_tested(task.also_tested)
    assert (left_out.rows, [where.rpartition(":")[2] for where in left_out.first]) == (4, ["1", "2", "3"])


def test_the_parts_of_an_example_are_its_row(task):
    example = task.train_examples()[0]
    row = Encoder(tiny.tokenizer()).row(example)
    parts = example_parts(example, Encoder(tiny.tokenizer()))
    assert [(part.text, part.trained, part.tokens) for part in parts] == [("x0", False, 2), ("y</s>", True, 2)]
    assert sum(part.tokens for part in parts) == len(row["input_ids"])
    parts = example_parts(example, Encoder(tiny.tokenizer(), "seq2seq"))
    assert [(part.text, part.trained) for part in parts] == [("x0", False), ("y</s>", True)]
    assert "".join(part.text for part in example_parts(example, None)) == "x0y"
