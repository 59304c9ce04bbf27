"""The demo on a tiny random Llama: the real data, the real training, the files and the table it leaves."""

from __future__ import annotations

import io
import json

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nalora import demo

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def load_tiny():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config), tokenizer


def run(folder, **options) -> tuple[bool, str]:
    screen = io.StringIO()
    settings = dict(steps=2, folder=folder, load=load_tiny) | options
    finished = demo.run(Console(file=screen, width=160), **settings)
    return finished, screen.getvalue()


def rows_of(folder, method) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"{method}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    finished, screen = run(folder, steps=3)
    assert finished
    return folder, screen


@pytest.fixture(scope="module")
def results(finished_run):
    record = json.loads((finished_run[0] / "result.json").read_text())
    return {result["method"]: result for result in record["results"]}


def test_every_method_starts_from_the_same_place(results):
    assert list(results) == ["lora", "na_lora_gradient", "na_lora_update"]
    assert len({result["first_loss"] for result in results.values()}) == 1
    assert len({result["held_out_before"] for result in results.values()}) == 1


def test_every_method_goes_its_own_way(results):
    assert len({result["held_out_after"] for result in results.values()}) == 3
    assert all(result["held_out_after"] < result["held_out_before"] for result in results.values())


def test_plain_lora_is_trained_as_if_nalora_were_not_there(results):
    model, tokenizer = load_tiny()
    batches, held_out = demo.make_data(tokenizer, 3, seed=0)
    model, _ = demo.with_adapter(model, seed=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=demo.LEARNING_RATE, weight_decay=0.0)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, demo.MAX_NORM)
        optimizer.step()
    assert demo.evaluate(model, held_out) == results["lora"]["held_out_after"]


def test_the_files_hold_every_step(finished_run, results):
    folder, _ = finished_run
    for method, result in results.items():
        rows = rows_of(folder, method)
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert rows[0]["loss"] == result["first_loss"]
        assert sum(row["loss"] for row in rows) / 3 == pytest.approx(result["last_loss"])
        assert {name: rows[-1][name] for name in result["metrics"]} == result["metrics"]
    assert results["lora"]["metrics"] == {}
    shares = [results["na_lora_update"]["metrics"][name] for name in ("p_sup", "p_res", "p_pos")]
    assert sum(shares) == pytest.approx(1)
    assert results["na_lora_update"]["metrics"]["skipped_updates"] == 0


def test_the_table_shows_the_results(finished_run, results):
    _, screen = finished_run
    for method in demo.METHODS:
        result = results[method.name]
        line = next(line for line in screen.splitlines() if method.title in line and "→" in line)
        assert f"{result['first_loss']:.3f} → {result['last_loss']:.3f}" in line
        assert f"{result['held_out_before']:.3f} → {result['held_out_after']:.3f}" in line
        if result["metrics"]:
            scales = [result["metrics"][f"scale_{name}"] for name in ("gate", "up", "down")]
            assert "/".join(f"{scale:.2f}" for scale in scales) in line
    assert "not that one method is better" in screen


def test_the_same_seed_gives_the_same_losses_and_another_seed_does_not(finished_run, tmp_path):
    folder, _ = finished_run
    run(tmp_path / "same", steps=3)
    run(tmp_path / "other", steps=3, seed=1)
    for method in demo.METHODS:
        losses, same, other = (
            [row["loss"] for row in rows_of(each, method.name)]
            for each in (folder, tmp_path / "same", tmp_path / "other")
        )
        assert losses == same
        assert losses != other


def test_ctrl_c_keeps_what_is_finished(tmp_path, monkeypatch):
    train = demo.train

    def interrupted(model, batches, config):
        for row in train(model, batches, config):
            yield row
            if config and config.apply_to == "update":
                raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    finished, screen = run(tmp_path)
    assert not finished
    assert "Stopped; what was finished:" in screen
    record = json.loads((tmp_path / "result.json").read_text())
    assert not record["finished"]
    assert [result["method"] for result in record["results"]] == ["lora", "na_lora_gradient"]
    assert len(rows_of(tmp_path, "na_lora_update")) == 1


def test_ctrl_c_while_loading_ends_without_a_table(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    finished, screen = run(tmp_path, load=interrupted)
    assert not finished
    assert screen.strip() == "Stopped before a method was finished."


def test_training_and_held_out_questions_are_disjoint():
    tokenizer = byte_tokenizer()
    train, held_out = demo.make_data(tokenizer, 20, seed=0)

    def texts(batches):
        return {
            tokenizer.decode(ids[mask == 1])
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        }

    assert len(train) == 20
    assert sum(len(batch["input_ids"]) for batch in held_out) == demo.HELD_OUT
    assert not texts(train) & texts(held_out)


def test_the_loss_reads_the_answers_alone():
    tokenizer = byte_tokenizer()
    pairs = [("What is 1 + 1?", "2"), ("Spell sun backward.", "nus")]
    batch = demo._batch(tokenizer, pairs)
    for ids, mask, labels, (question, answer) in zip(*batch.values(), pairs, strict=True):
        assert tokenizer.decode(labels[labels != -100]) == answer + "<|end|>"
        assert question in tokenizer.decode(ids[labels == -100])
        assert (labels[mask == 0] == -100).all()
        assert (ids[mask == 0] == tokenizer.pad_token_id).all()
