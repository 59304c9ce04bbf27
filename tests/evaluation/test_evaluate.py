"""Scores do not depend on batches or interruptions, and finished outputs are reused."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

import nalora
from nalora.evaluation import evaluate as evaluation
from nalora.evaluation.generation import AnswerGenerator
from nalora.evaluation.identity import Questions
from nalora.evaluation.targets import Request, evaluate_target
from nalora.models.loading import Loaded, ModelSpec, load
from nalora.runs.encoding import Encoder
from nalora.runs.settings import check
from nalora.tasks import Example, Task
from nalora.training.run import train


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    return load(ModelSpec(tiny.saved_llama(tmp_path_factory.mktemp("model")), device="cpu"))


class Echo(Task):
    """Scores by the first letter of the answer."""

    name, title = "echo", "echo"
    max_new_tokens = 6
    asked = 0

    def __init__(self, count=9):
        self.count = count

    def test_examples(self):
        return [Example(f"e{n}", "question " * (1 + n % 4) + str(n), "x") for n in range(self.count)]

    def score(self, example, outputs):
        return {"accuracy": float(bool(outputs[0]) and ord(outputs[0][0]) % 2)}


def evaluate(loaded, task, folder, **options):
    return evaluation.evaluate(loaded, Questions(task, task.test_examples()), folder, Request(**options))


def written(loaded, examples, **options):
    generator = AnswerGenerator(loaded.model, Encoder(loaded.processor), max_new_tokens=8, **options)
    return {a.example.id: a for batch in generator.batches(examples) for a in generator.answer(batch)}


def test_padded_batches_give_the_same_answers_as_single_prompts(loaded):
    examples = [Example(str(n), "ab" * n + "?") for n in (1, 9, 4, 17, 2)]
    together, alone = written(loaded, examples), written(loaded, examples, batch_tokens=1)
    assert {k: a.outputs for k, a in together.items()} == {k: a.outputs for k, a in alone.items()}
    assert {k: a.tokens for k, a in together.items()} == {k: a.tokens for k, a in alone.items()}


def test_answers_equal_greedy_generation(loaded):
    prompt = Encoder(loaded.processor).prompt([{"role": "user", "content": "What is"}])
    expected = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    answer = written(loaded, [Example("a", "What is")])["a"]
    assert answer.outputs == [loaded.processor.decode(expected, skip_special_tokens=True)]


def test_stop_texts_cut_answers_and_conversations_continue(loaded):
    free = written(loaded, [Example("a", "Tell")])["a"].outputs[0]
    stopped = written(loaded, [Example("a", "Tell")], stop=(free[3],))["a"]
    assert stopped.outputs[0] == free[: free.index(free[3])]
    assert stopped.finished
    talk = written(loaded, [Example("a", "Tell", follow_ups=(" more",)), Example("b", "Tell")])
    assert talk["b"].outputs == [free]
    again = written(loaded, [Example("c", "Tell" + free + " more")])["c"]
    assert talk["a"].outputs == [free, again.outputs[0]]


def test_finished_answers_are_not_generated_again(loaded, tmp_path, monkeypatch):
    whole = evaluate(loaded, Echo(), tmp_path / "whole", batch_tokens=60)
    asked = []
    answer = AnswerGenerator.answer

    def counted(self, batch):
        asked.extend(each.id for each in batch)
        if len(asked) > 5:
            raise KeyboardInterrupt
        return answer(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(AnswerGenerator, "answer", counted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(loaded, Echo(), tmp_path / "pieces", batch_tokens=60)
    before = {json.loads(line)["id"] for line in (tmp_path / "pieces" / "outputs.jsonl").read_text().splitlines()}
    assert 0 < len(before) < 9
    del asked[:]
    with monkeypatch.context() as patched:
        patched.setattr(
            AnswerGenerator, "answer", lambda self, batch: asked.extend(e.id for e in batch) or answer(self, batch)
        )
        pieces = evaluate(loaded, Echo(), tmp_path / "pieces", batch_tokens=60)
    assert set(asked).isdisjoint(before)
    for timing in ("seconds", "tokens_per_second"):
        whole.pop(timing)
        pieces.pop(timing)
    assert whole == pieces


@pytest.mark.parametrize(("generate", "file"), [(True, "summary.json"), (False, "losses.json")])
def test_a_smaller_limit_does_not_replace_a_larger_summary(loaded, tmp_path, generate, file):
    def asked(limit):
        summary = evaluate(loaded, Echo(), tmp_path, limit=limit, generate=generate)
        return summary["examples"], json.loads((tmp_path / file).read_text())["examples"]

    assert asked(2) == (2, 2)
    assert asked(4) == (4, 4)
    assert asked(None) == (9, 9)
    assert asked(1) == (1, 9)
    (tmp_path / file).write_text("{damaged")
    assert asked(1) == (1, 1)
    assert json.loads((tmp_path / file).read_text())["questions"] == 9


def test_rows_hold_question_expected_answer_output_and_scores_in_the_order_of_the_questions(loaded, tmp_path):
    evaluate(loaded, Echo(), tmp_path, batch_tokens=60)
    rows = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    examples = Echo().test_examples()
    assert [(row["id"], row["question"], row["expected"]) for row in rows] == [(e.id, e.prompt, "x") for e in examples]
    assert [row["scores"] for row in rows] == [Echo().score(None, row["outputs"]) for row in rows]
    written = (tmp_path / "outputs.jsonl").stat()
    evaluate(loaded, Echo(), tmp_path, limit=4)
    assert (tmp_path / "outputs.jsonl").stat().st_ino == written.st_ino, "complete rows are not written again"
    # Rows of version 0.1 had neither question nor scores: they are completed, and nothing is generated again.
    old = [{key: row[key] for key in ("id", "outputs", "tokens", "finished")} for row in reversed(rows)]
    (tmp_path / "outputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    evaluate(loaded, Echo(), tmp_path)
    assert [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()] == rows


def test_every_measure_has_intervals(loaded, tmp_path):
    summary = evaluate(loaded, Echo(40), tmp_path)
    measured = summary["measures"]["accuracy"]
    for kind in ("binomial", "bootstrap"):
        low, high = measured[kind]
        assert low <= measured["value"] <= high


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(("count", "limit", "found"), [(0, None, "none of 0 questions"), (9, 0, "none of 9 questions")])
def test_no_questions_are_refused_before_anything_is_written(loaded, tmp_path, generate, count, limit, found):
    with pytest.raises(nalora.NALoRAError, match=found):
        evaluate(loaded, Echo(count), tmp_path, limit=limit, generate=generate)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(nalora.NALoRAError, match="no examples"):
        evaluation.summarise(Echo(), [], [])


def test_a_run_is_evaluated_with_its_adapter_and_its_base(tmp_path):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 16, "test_size": 12,
        "settings": {"max_terms": 2, "min_digits": 2}, "output": str(tmp_path / "run"), "steps": 2,
        "batch_size": 8, "device": "cpu", "learning_rate": 1e-2,
    }  # fmt: skip
    train(check(settings))
    summaries = evaluate_target(settings["output"], Request())
    assert list(summaries) == ["base", "adapted"]
    assert summaries["base"]["examples"] == 12
    evaluated = summaries["base"]["evaluated"]
    assert evaluated == summaries["adapted"]["evaluated"]
    assert evaluated["own"] is True
    assert evaluated["style"] == "plain"
    assert evaluated["options"]["test_size"] == 12
    outputs = [json.loads(f.read_text().splitlines()[0]) for f in sorted((tmp_path / "run").rglob("outputs.jsonl"))]
    assert len(outputs) == 2
    assert list(evaluate_target(settings["output"], Request(with_base=False))) == ["adapted"]
    with pytest.raises(nalora.NALoRAError, match="--task NAME"):
        evaluate_target(settings["model"], Request())
    (fewer,) = evaluate_target(settings["output"], Request(options={"test_size": 5}, with_base=False)).values()
    assert fewer["examples"] == 5
    assert fewer["evaluated"]["own"] is False
    assert fewer["evaluated"]["questions"] != evaluated["questions"]
    for task in (None, settings["task"]):
        with pytest.raises(nalora.NALoRAError, match="may have been trained on.*leave test_size out"):
            evaluate_target(settings["output"], Request(task, options={"test_size": 30}))
    other = Request("gym/gcd", options={"train_size": 1, "test_size": 2}, with_base=False)
    assert evaluate_target(settings["output"], other)["adapted"]["examples"] == 2


def test_folders_with_foreign_files_are_refused(loaded, tmp_path):
    (tmp_path / "outputs.jsonl").write_text('{"id": "mine"}')
    with pytest.raises(nalora.NALoRAError, match="files that nalora did not write"):
        evaluate(loaded, Echo(2), tmp_path)
    assert (tmp_path / "outputs.jsonl").read_text() == '{"id": "mine"}'
    assert [each.name for each in tmp_path.iterdir()] == ["outputs.jsonl"]


def test_one_process_at_a_time_evaluates_into_a_folder(loaded, tmp_path):
    class Nested(Echo):
        def score(self, example, outputs):
            with pytest.raises(nalora.NALoRAError, match="using it"):
                evaluate(loaded, Echo(1), tmp_path / "e")
            return super().score(example, outputs)

    evaluate(loaded, Nested(1), tmp_path / "e")
    evaluate(loaded, Echo(2), tmp_path / "e")


def test_evaluations_of_version_0_1_are_continued(loaded, tmp_path):
    before = evaluate(loaded, Echo(2), tmp_path)
    (tmp_path / ".nalora.json").unlink()
    outputs = (tmp_path / "outputs.jsonl").read_bytes()
    after = evaluate(loaded, Echo(3), tmp_path)
    assert (tmp_path / "outputs.jsonl").read_bytes().startswith(outputs)
    assert (before["examples"], after["examples"]) == (2, 3)
