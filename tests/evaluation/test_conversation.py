"""Conversations: the tokens of the chat template over turns, streaming, Ctrl-C, and a context that is full."""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch

import nalora
from nalora.evaluation.conversation import Conversation, PromptForm, prompt_form
from nalora.evaluation.generation import Sampling
from nalora.models.loading import ModelSpec, load
from nalora.runs.encoding import Encoder
from nalora.runs.settings import check
from nalora.runs.targets import Target, resolve
from nalora.training.run import train

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = load(
        ModelSpec(tiny.saved_llama(tmp_path_factory.mktemp("base"), layers=1, initializer_range=0.3), device="cpu")
    )
    made.processor.chat_template = TEMPLATE
    return made


def chat_form(loaded):
    return PromptForm(Encoder(loaded.processor, style="chat"))


def reference(loaded, messages, **options):
    """What transformers generates for the template's own tokens."""
    text = loaded.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = loaded.processor(text, add_special_tokens=False, return_tensors="pt").input_ids
    options = {"do_sample": False} | options
    made = loaded.model.generate(ids, max_new_tokens=12, pad_token_id=0, **options)
    return loaded.processor.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_every_turn_is_the_answer_to_the_whole_conversation(loaded):
    talk = Conversation(loaded, chat_form(loaded), max_new_tokens=12, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("hello", "why?", "and then?"):
        messages.append({"role": "user", "content": text})
        parts = []
        reply = talk.answer(text, parts.append)
        assert reply.text == "".join(parts) == reference(loaded, messages)
        assert len(parts) > 1
        messages.append({"role": "assistant", "content": reply.text})
    assert talk.messages == messages


def test_sampling_is_that_of_transformers_and_repeats_with_its_seed(loaded):
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    one, again, other = (
        Conversation(loaded, chat_form(loaded), s, 12) for s in (sampling, sampling, Sampling(0.8, 0.9, 4))
    )
    said = [[talk.answer(text).text for text in ("a", "b")] for talk in (one, again, other)]
    assert said[0] == said[1] != said[2]
    torch.manual_seed(3)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    assert said[0][0] == reference(loaded, [{"role": "user", "content": "a"}], **options)


def test_ctrl_c_ends_the_answer_and_keeps_what_was_written(loaded):
    talk = Conversation(loaded, chat_form(loaded), max_new_tokens=12)
    written = []

    def write(part):
        written.append(part)
        if len(written) == 3:
            raise KeyboardInterrupt

    reply = talk.answer("hello", write)
    assert reply.text == "".join(written) == reference(loaded, talk.turns[:1])[: len(reply.text)]
    assert talk.turns[-1] == {"role": "assistant", "content": reply.text}
    before = talk.turns
    # Before the first token nothing is added.
    talk._generator.generate = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    assert talk.answer("more") == ("", 0, True, 0)
    assert talk.turns == before


def test_the_oldest_turns_leave_a_full_context_and_one_message_that_is_too_long_is_refused(loaded):
    talk = Conversation(loaded, chat_form(loaded), max_new_tokens=8, system="Brief.")  # of 512 positions
    dropped = [talk.answer(f"{number} " + 150 * "x").dropped for number in range(4)]
    assert dropped == [0, 0, 1, 2]
    assert len(talk.turns) == 8, "all turns can still be saved"
    fresh = Conversation(loaded, chat_form(loaded), max_new_tokens=8, system="Brief.")
    fresh.turns = talk.turns[4:6]
    assert fresh.answer("3 " + 150 * "x").text == talk.turns[-1]["content"]
    before = talk.turns
    with pytest.raises(nalora.NALoRAError, match="expected fewer than 512"):
        talk.answer(600 * "x")
    assert talk.turns == before
    # A long message that fits gets the room that is left.
    assert talk.answer(470 * "x").dropped == 4


def test_a_text_that_ends_answers_is_not_written(loaded):
    whole = reference(loaded, [{"role": "user", "content": "hello"}])
    stop = whole[4:7]
    parts = []
    form = PromptForm(Encoder(loaded.processor, style="chat"), stops=(stop,))
    reply = Conversation(loaded, form, max_new_tokens=12).answer("hello", parts.append)
    assert reply.text == "".join(parts) == whole[: whole.index(stop)]
    assert reply.finished


def test_forms_by_template_style_and_training(loaded, tmp_path):
    target = Target("m", "model", loaded.spec)
    plain = tiny.tokenizer()
    assert prompt_form(target, loaded.processor, "causal").encoder.is_chat
    form = prompt_form(target, plain, "causal", dialogue=True)
    assert "no chat template" in form.notice
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}
    ]  # fmt: skip
    assert plain.decode(form.tokens(messages)) == "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant: "
    raw = prompt_form(target, loaded.processor, "causal", "plain")
    assert loaded.processor.decode(raw.tokens(messages[:1])) == "a"
    with pytest.raises(nalora.NALoRAError, match="chat template"):
        prompt_form(target, plain, "causal", "chat")
    with pytest.raises(nalora.NALoRAError, match="a model of images"):
        prompt_form(target, plain, "clip")


def test_a_run_is_asked_as_it_was_trained(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(20)))
    base = tiny.saved_llama(tmp_path / "base", layers=1)
    train(check({"model": base, "task": str(data), "steps": 1, "batch_size": 2, "output": str(tmp_path / "run")}))
    target = resolve(str(tmp_path / "run"))
    form = prompt_form(target, tiny.tokenizer(), "causal")
    assert form.plain("7 + 7?") == "Q: 7 + 7?\nA: "
    assert "\nQ:" in form.stops
    assert r"Q: …\nA: " in form.notice
    # Its data is not needed to talk to it.
    shutil.move(data, tmp_path / "gone.jsonl")
    assert prompt_form(target, tiny.tokenizer(), "causal", dialogue=True).before == "User: "
