"""Your own data: what is trained on, what is held out, how answers are scored, and a whole run on a file."""

from __future__ import annotations

import json

import pytest
import tiny

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs import settings
from nalora.runs.encoding import Encoder
from nalora.studies.store import key
from nalora.training.run import train


def written(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(file)


def sums(count, start=0):
    """Arithmetic in the style of SVAMP: a body, a question and a number."""
    return [{"Body": f"Tom has {n} apples.", "Question": f"{n} + 1 =", "Answer": n + 1.0} for n in range(start, count)]


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "sums.jsonl", sums(50))


def test_rows_are_split_by_their_question(file, tmp_path):
    task = tasks.get(file)
    train, test = task.training_set(), task.test_examples()
    assert len(train) + len(test) == 50
    assert 1 <= len(test) <= 15
    assert not {e.id for e in train} & {e.id for e in test}
    # More rows move none to the other side, and copies of a question are on one side.
    more = tasks.get(written(tmp_path / "more.jsonl", [*sums(80), *sums(50)]), test_share=0.1)
    before = tasks.get(file, test_share=0.1)
    assert {e.question for e in before.test_examples()} <= {e.question for e in more.test_examples()}
    assert not {e.question for e in more.training_set()} & {e.question for e in more.test_examples()}


def test_a_test_file_is_used_and_its_questions_are_not_trained_on(file, tmp_path):
    task = tasks.get(file, test=written(tmp_path / "test.jsonl", sums(10)))
    assert len(task.test_examples()) == 10
    assert len(task.training_set()) == 40
    assert task.dropped_test_questions == 10
    with pytest.raises(NALoRAError, match="each of the 50 training rows in the test set"):
        tasks.get(file, test=file).training_set()


def test_a_folder_with_both_splits(tmp_path):
    written(tmp_path / "train.jsonl", sums(20))
    written(tmp_path / "test.jsonl", sums(25, start=20))
    task = tasks.get(f"{tmp_path}/")
    assert (len(task.training_set()), len(task.test_examples())) == (20, 5)


def test_numbers_are_compared_by_value(file):
    task = tasks.get(file)
    assert task.measures == ("number",)
    example = task.test_examples()[0]
    assert task.score(example, [f"So the answer is {float(example.target):.2f}."]) == {"number": 1.0}
    assert task.score(example, ["no idea"]) == {"number": 0.0}


def test_measures_are_chosen(file, tmp_path):
    task = tasks.get(file, measure=["exact_match", "regex"], pattern=r"(\d+)")
    example = task.test_examples()[0]
    assert task.score(example, [f"{example.target}."]) == {"exact_match": 1.0, "regex": 1.0}
    own = tmp_path / "score.py"
    own.write_text("def score(question, expected, output):\n    return (question in output) / 2\n")
    task = tasks.get(file, score=str(own))
    assert task.score(example, [example.question]) == {"score": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "acuracy"}, "no such measure"),
        ({"measure": "regex"}, "a regular expression"),
        ({"test_share": 1.5}, "between 0 and 1"),
        ({"test_share": 0.1, "test": "x.jsonl"}, "none with test"),
        ({"score": "none.py"}, "no such file"),
        ({"columns": {"question": "query"}}, "no column 'query'"),
        ({"test": "missing.jsonl"}, "no such file"),
        ({"colums": {}}, "no option 'colums'"),
    ],
)
def test_wrong_options_are_refused(file, options, message):
    with pytest.raises(NALoRAError, match=message):
        tasks.get(file, **options)


def test_rows_that_cannot_be_read_are_refused_with_their_lines(tmp_path):
    rows = [*sums(3), {"Question": "?", "Body": "x"}, *sums(1), {"Question": "", "Body": "x", "Answer": 1}]
    file = written(tmp_path / "sums.jsonl", rows)
    with pytest.raises(NALoRAError) as error:
        tasks.get(file)
    assert f"{file}:4: 'Answer' is missing" in error.value.found
    assert f"{file}:6: 'Question' is empty" in error.value.found


def test_a_run_on_a_file_is_trained_and_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "sums.jsonl", sums(40))
    run = settings.check({
        "model": tiny.saved_llama(tmp_path / "base"), "task": "sums.jsonl", "output": str(tmp_path / "run"), "steps": 3,
        "batch_size": 4, "max_length": 64, "max_new_tokens": 4, "device": "cpu", "validation_size": 5,
    })  # fmt: skip
    assert run.settings.prompt_style == "auto"
    train(run)
    results = dict(evaluate_target(tmp_path / "run", Request()))
    assert set(results["adapted"]["measures"]) == {"number"}
    assert results["adapted"]["examples"] == len(tasks.get("sums.jsonl").test_examples())
    assert list((tmp_path / "run" / "evaluations" / "sums.jsonl").iterdir())


def test_optional_columns_may_be_missing_in_the_first_row(tmp_path):
    rows = [{"instruction": "Add.", "output": "2"}, {"instruction": "Add.", "input": "1 + 2", "output": "3"}]
    task = tasks.get(
        written(
            tmp_path / "a.jsonl", [*rows, *({**row, "instruction": f"Add {n}."} for n in range(20) for row in rows)]
        )
    )
    questions = {example.question for example in (*task.train_examples(), *task.test_examples())}
    assert {"Add.", "Add.\n\n1 + 2"} <= questions


def test_data_files_are_known_by_their_content(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (written(tmp_path / name / "train.jsonl", sums(count)) for name, count in (("a", 20), ("b", 30)))
    run = {"model": "smollm2-135m", "output": "x"}
    keys = [key(settings.check({**run, "task": file})) for file in (one, other)]
    assert keys[0] != keys[1]
    written(tmp_path / "b" / "train.jsonl", sums(20))
    assert key(settings.check({**run, "task": other})) == keys[0]


def test_the_code_of_a_score_is_part_of_an_evaluation(file, tmp_path):
    own = tmp_path / "score.py"
    contents = []
    for value in (0, 1):
        own.write_text(f"def score(question, expected, output):\n    return {value}\n")
        task = tasks.get(file, score=str(own))
        contents.append(task.content(task.test_examples()))
    assert contents[0] != contents[1]
    (tmp_path / "score.pyc").write_bytes(own.read_bytes())
    with pytest.raises(NALoRAError, match="no such file"):
        tasks.get(file, score=str(tmp_path / "score.pyc"))


def test_texts_are_trained_on_without_turns_and_have_no_answers(tmp_path):
    task = tasks.get(written(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(20)]))
    chat = tiny.tokenizer()
    chat.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    row = Encoder(chat, style="auto").row(task.train_examples()[0])
    assert chat.decode(row["input_ids"], skip_special_tokens=True).startswith("text")
    assert task.models == ("causal",)
    with pytest.raises(NALoRAError, match="texts without questions"):
        task.prepare_scoring()


def test_another_task_on_the_command_line_drops_the_settings_of_the_file_s_task(file):
    run = settings.read("laptop", [f"task={file}"])
    assert run.task_options == {}
    assert settings.read("laptop").task_options


def test_every_row_is_evaluated_of_data_that_was_not_trained_on(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tiny.saved_llama(tmp_path / "base")
    run = settings.check(
        {"model": str(base), "task": file, "output": "run", "steps": 1, "batch_size": 2, "device": "cpu"}
    )
    train(run)
    other, one = written(tmp_path / "other.jsonl", sums(60, start=50)), written(tmp_path / "one.jsonl", sums(1))
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_bytes((tmp_path / "sums.jsonl").read_bytes())
    held_out = len(tasks.get(file).test_examples())
    cases = [
        ("run", None, {}, held_out, "50 rows, the others"), ("run", str(renamed), {}, held_out, "50 rows"),
        ("run/adapter", file, {}, held_out, "50 rows"), ("run", other, {}, 10, "10 rows"),
        (str(base), other, {}, 10, "10 rows"), (str(base), one, {}, 1, "1 row"),
        (str(base), file, {"test_share": 0.3}, len(tasks.get(file, test_share=0.3).test_examples()), "50 rows"),
        (str(base), file, {"test": other}, 10, "10 rows"),
    ]  # fmt: skip
    for target, task, options, count, rows in cases:
        lines = []
        request = Request(task, options={"max_new_tokens": 1, **options}, with_base=False, generate=False)
        (summary,) = evaluate_target(target, request, notify=lines.append, device="cpu").values()
        assert summary["examples"] == count, (target, task)
        assert lines == [lines[0]]
        assert lines[0].startswith(f"evaluating {count} of {rows}")
    with pytest.raises(NALoRAError, match=r"test=.*sums.jsonl makes every row a test row"):
        tasks.get(file, test_share=1)
