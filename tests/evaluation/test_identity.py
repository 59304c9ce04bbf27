"""Results are reused for the same weights and the same questions, and for nothing else."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path

import pytest
import tiny
import transformers
from safetensors.torch import load_file, save_file

from nalora.evaluation import identity
from nalora.evaluation.generation import AnswerGenerator
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs.settings import check
from nalora.tasks.math import GSM8K
from nalora.training.run import train

CHAT = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(GSM8K, "max_new_tokens", 4)
    folder = tiny.saved_llama(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ask(tmp_path):
    """Evaluate in a folder with earlier results; a new folder must give the same result."""
    others = count()

    def asked(target, who="model", **request):
        def summary(output):
            found = evaluate_target(target, Request(**request), output=output, device="cpu")[who]
            return {name: value for name, value in found.items() if "second" not in name and name != "folder"}

        kept = summary(tmp_path / "kept")
        assert kept == summary(tmp_path / f"anew-{next(others)}")
        return kept

    return asked


def questions(folder: Path, *numbers: int) -> str:
    (folder / "gsm8k").mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {n} and {n}?", "answer": f"#### {n + n}"} for n in numbers]
    (folder / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def change_weights(file: Path) -> None:
    """Write other weights into a file of the same size and modification time."""
    before = file.stat()
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_the_same_questions_in_another_folder_are_not_evaluated_again(model, tmp_path, monkeypatch):
    first = {"task": "gsm8k", "data_dir": questions(tmp_path / "a", 1, 2)}
    before = evaluate_target(model, Request(**first), output=tmp_path / "kept", device="cpu")["model"]
    monkeypatch.setattr(AnswerGenerator, "answer", lambda self, batch: pytest.fail("evaluated again"))
    moved = {"task": "gsm8k", "data_dir": questions(tmp_path / "b", 1, 2)}
    for request in (first, moved):
        after = evaluate_target(model, Request(**request), output=tmp_path / "kept", device="cpu")["model"]
        assert after["evaluated"] == before["evaluated"] | {"data": "a" if request is first else "b"}
        assert after == {name: before[name] for name in after} | {"evaluated": after["evaluated"]}


def test_other_questions_and_an_edited_file_are_evaluated(model, tmp_path, ask):
    here = ask(model, task="gsm8k", data_dir=questions(tmp_path / "a", 1, 2))
    there = ask(model, task="gsm8k", data_dir=questions(tmp_path / "b", 7, 8))
    edited = ask(model, task="gsm8k", data_dir=questions(tmp_path / "a", 1, 3))
    assert len({each["target_loss"]["value"] for each in (here, there, edited)}) == 3


def test_replaced_weights_of_a_model_are_evaluated(model, tmp_path, ask):
    request = {"task": "gsm8k", "data_dir": questions(tmp_path / "a", 1, 2)}
    before = ask(model, **request)
    change_weights(Path(model) / "model.safetensors")
    assert ask(model, **request)["target_loss"] != before["target_loss"]


def test_another_style_and_another_template_are_evaluated(model, tmp_path, ask):
    request = {"task": "gsm8k", "data_dir": questions(tmp_path / "a", 1, 2)}
    losses = [ask(model, style=style, **request)["target_loss"]["value"] for style in ("plain", "chat")]
    (template,) = Path(model).glob("chat_template.jinja")
    template.write_text(template.read_text().replace("<", "["))
    losses.append(ask(model, style="chat", **request)["target_loss"]["value"])
    assert len(set(losses)) == 3


def test_options_that_do_not_change_the_questions_change_the_key(model, ask):
    options = {"train_size": 2, "test_size": 3, "settings": {"max_terms": 2}}
    written = [
        ask(model, task="gym/chain_sum", options={**options, "max_new_tokens": most})["tokens"] for most in (2, 5)
    ]
    assert written[0] < written[1]


def test_another_adapter_and_another_base_model_are_evaluated(model, tmp_path, ask):
    run = tmp_path / "run"
    train(check({
        "model": model, "task": "gym/chain_sum", "train_size": 8, "test_size": 3, "settings": {"max_terms": 2},
        "max_new_tokens": 4, "output": str(run), "steps": 2, "batch_size": 4, "device": "cpu", "learning_rate": 1e-2,
    }))  # fmt: skip
    losses = {who: [ask(str(run), who)["target_loss"]["value"]] for who in ("base", "adapted")}
    for changed in (run / "adapter" / "adapter_model.safetensors", Path(model) / "model.safetensors"):
        change_weights(changed)
        for who, found in losses.items():
            found.append(ask(str(run), who)["target_loss"]["value"])
    assert len(set(losses["adapted"])) == 3
    assert losses["base"][0] == losses["base"][1] != losses["base"][2]


def test_images_of_other_content_under_the_same_names_are_other_questions(tmp_path):
    from nalora import tasks

    image = pytest.importorskip("PIL.Image")

    def digest(folder, shade):
        for split in ("train", "test"):
            (folder / split / "one").mkdir(parents=True, exist_ok=True)
            image.new("L", (8, 8), shade).save(folder / split / "one" / "0.png")
        task = tasks.get("digits", data_dir=folder)
        return identity.digest_of_examples(task, task.test_examples())

    assert digest(tmp_path / "a", 3) == digest(tmp_path / "b", 3) != digest(tmp_path / "b", 200)
