"""A training set has no examples held out for validation, and rows that cannot be used are named."""

from __future__ import annotations

import json

import pytest
import tiny
import transformers

from nalora import NALoRAError, tasks
from nalora.evaluation.targets import Request, evaluate_target
from nalora.models import loading
from nalora.runs.encoding import Encoder, encode
from nalora.runs.inputs import prepare
from nalora.runs.settings import check
from nalora.tasks.splits import hold_out
from nalora.training.run import train

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


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("roles", "found", "rows"),
    [
        (("system", "user", "assistant"), "a system message, which the model's chat template does not accept", 2),
        (("user", "assistant", "assistant"), "fails on the turns user, assistant, assistant", 1),
    ],
)
def test_turns_that_a_template_refuses_are_named_before_the_weights_are_loaded(
    roles, found, rows, tmp_path, monkeypatch
):
    base = tiny.saved_llama(tmp_path / "base", layers=1)
    (tmp_path / "base" / "chat_template.jinja").write_text(STRICT)
    turns = [("user", "assistant")] * 20 + [roles] * rows
    chats = [{"messages": [{"role": role, "content": f"{n}"} for role in roles]} for n, roles in enumerate(turns)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings = {
        "model": base, "task": str(tmp_path / "chat.jsonl"), "output": str(tmp_path / "run"), "steps": 1,
        "device": "cpu",
    }  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
        with pytest.raises(NALoRAError) as refused:
            train(check(settings))
    assert refused.value.where == f"{tmp_path / 'chat.jsonl'}:21"
    assert found in refused.value.found
    assert ("2 rows with these turns" in refused.value.found) == (rows == 2)
    assert train(check(settings | {"prompt_style": "plain"}))["steps"] == 1
    with pytest.raises(NALoRAError, match=r"chat\.jsonl:21: found"):
        evaluate_target(str(tmp_path / "run"), Request(style="chat", with_base=False))


def test_an_answer_that_a_template_changes_is_named(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content.split('>')[-1] if m.role == 'assistant' and not loop.last else m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    roles = ("user", "assistant", "user", "assistant")
    chats = [{"messages": [{"role": role, "content": f"{n}>a"} for role in roles]} for n in range(3)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    examples = tasks.get(str(tmp_path / "chat.jsonl")).train_examples()
    with pytest.raises(NALoRAError, match=r"chat\.jsonl:\d: found a template that changes the text of turn 2"):
        encode(examples, Encoder(tokenizer, style="chat"), 100)
