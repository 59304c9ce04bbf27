"""Chat style: rows and prompts equal `apply_chat_template`, token for token, and end with the template's end of turn.

The templates are short ones in the style of the models that they are named after.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nalora
from nalora.control.tokens import IGNORED_LABEL
from nalora.evaluation.generation import AnswerGenerator
from nalora.runs.encoding import Encoder
from nalora.tasks import Example

# The template, the tokenizer's BOS and EOS, and the token that ends a turn.
STYLES = {
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
        " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    ),
    "qwen": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        None, "<|endoftext|>", "<|im_end|>",
    ),
    "qwen-thinking": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        None, "<|endoftext|>", "<|im_end|>",
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<bos>", "<eos>", "<end_of_turn>",
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        "<s>", "</s>", "</s>",
    ),
}  # fmt: skip
SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "<pad>",
)  # fmt: skip


@functools.cache
def tokenizer(style: str, gpt2: bool = False) -> transformers.PreTrainedTokenizerFast:
    """One of bytes and their merges, which adds BOS to every text.

    It writes line breaks of any number as one token; cut as GPT-2 does, the last one before a word stands apart.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    template, bos, eos, _ = STYLES[style]
    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    made.pre_tokenizer = bytes_of if gpt2 else pre_tokenizers.Sequence([words, bytes_of])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train_from_iterator(["assistant\n\n\n\nuser\n\nWhat is the answer? It is\n\n 12 and 12."] * 20, trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    names = dict(bos_token=bos, eos_token=eos, pad_token="<pad>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    fast.chat_template = template
    return fast


def messages(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def applied(chat, *turns: str, prompt: bool, tokenize: bool = True):
    if not tokenize:
        return chat.apply_chat_template(messages(*turns), add_generation_prompt=prompt, tokenize=False)
    return list(chat.apply_chat_template(messages(*turns), add_generation_prompt=prompt, return_dict=True)["input_ids"])


TEXT = st.one_of(st.text(max_size=40), st.text(" \n\tab12?", max_size=12))


@pytest.mark.parametrize("gpt2", [False, True])
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(question=TEXT.filter(bool), answer=TEXT)
@example(question="What is 6 and 6?", answer="It is 12.")
@example(question="What?", answer="\n\n12")
def test_a_row_is_what_the_template_gives(style, gpt2, question, answer):
    chat = tokenizer(style, gpt2)
    row = Encoder(chat, style="chat").row(Example("a", f"Q: {question}\nA: ", answer, question=question))
    assert row["input_ids"] == applied(chat, question, answer, prompt=False)
    trained = sum(label != IGNORED_LABEL for label in row["labels"])
    masked = len(row["labels"]) - trained
    assert row["labels"] == [IGNORED_LABEL] * masked + row["input_ids"][masked:]
    # Masked are the tokens that end within the prompt: a letter of such a token is one byte.
    prompt = applied(chat, question, prompt=True, tokenize=False).encode()
    ends = itertools.accumulate(len(token) for token in chat.convert_ids_to_tokens(row["input_ids"]))
    assert masked == sum(end <= len(prompt) for end in ends)
    assert chat.convert_tokens_to_ids(STYLES[style][3]) in row["labels"][-2:]
    if chat.bos_token and chat.bos_token not in question + answer:
        assert row["input_ids"].count(chat.bos_token_id) == 1


@pytest.mark.parametrize("style", STYLES)
def test_ordinary_answers_leave_the_prompt_whole(style):
    encoder = Encoder(tokenizer(style), style="chat")
    row = encoder.row(Example("a", "Q: What is 6 and 6?\nA: ", "It is 12.", question="What is 6 and 6?"))
    prompt = encoder.prompt([{"role": "user", "content": "What is 6 and 6?"}])
    assert prompt == applied(tokenizer(style), "What is 6 and 6?", prompt=True) == row["input_ids"][: len(prompt)]
    assert row["labels"].count(IGNORED_LABEL) == len(prompt)
    assert "Q:" not in tokenizer(style).decode(row["input_ids"])


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(TEXT.filter(bool), min_size=1, max_size=5).filter(lambda turns: len(turns) % 2))
def test_prompts_are_what_the_template_gives(style, turns):
    assert Encoder(tokenizer(style), style="chat").prompt(messages(*turns)) == applied(
        tokenizer(style), *turns, prompt=True
    )


@pytest.mark.parametrize("style", STYLES)
def test_answers_stop_at_the_template_s_end_of_turn(style):
    chat = tokenizer(style)
    end = chat.convert_tokens_to_ids(STYLES[style][3])
    encoder = Encoder(chat, style="chat")
    assert {end, chat.eos_token_id} == {*encoder.end_tokens}
    assert encoder.end_texts == []
    model = writing_model(chat, [*chat("It is 12.", add_special_tokens=False).input_ids, end, end, end])
    writer = AnswerGenerator(model, encoder, max_new_tokens=24)
    ((_, (text,), tokens, finished),) = writer.answer([Example("a", "Q: What?\nA: ", question="What?")])
    assert (text, finished) == ("It is 12.", True)
    assert tokens == len(chat("It is 12.", add_special_tokens=False).input_ids) + 1


def writing_model(chat, ids: list[int]):
    """A model that generates these tokens after any prompt."""
    config = transformers.LlamaConfig(
        vocab_size=len(chat), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=None, bos_token_id=None, pad_token_id=chat.pad_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    written = iter(ids)

    def following(_module, _arguments, output):
        output.logits = torch.nn.functional.one_hot(torch.tensor([[next(written)]]), len(chat)).float()
        return output

    model.register_forward_hook(following)
    return model


def test_an_end_without_a_special_token_stops_as_text():
    own = tokenizer.__wrapped__("qwen")
    own.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ###' }}{% endfor %}"
    own.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    encoder = Encoder(own, style="chat")
    assert (encoder.end_tokens, encoder.end_texts) == ([own.eos_token_id], ["###"])
    ids = own("It is 12. ### More", add_special_tokens=False).input_ids
    writer = AnswerGenerator(writing_model(own, ids + [5] * 24), encoder, max_new_tokens=24)
    ((_, (text,), _, finished),) = writer.answer([Example("a", "What?")])
    assert (text.strip(), finished) == ("It is 12.", True)


def test_a_template_without_an_end_of_turn_ends_with_the_sequence():
    own = tokenizer.__wrapped__("qwen")
    own.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    own.chat_template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    row = Encoder(own, style="chat").row(Example("a", "hi", "yes"))
    assert own.decode(row["input_ids"]) == "[user]hi[assistant]yes<|endoftext|>"
    assert row["labels"][-1] == own.eos_token_id


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "without a chat template"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{% for m in messages %}{{ m.nothing.at_all }}{% endfor %}", "a chat template that fails"),
        # As templates that open a thought for generation and leave it out of finished turns.
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant><think>{% endif %}",
            "continues with '<think>' where an assistant's turn has 'answer'",
        ),
    ],
)
def test_unusable_templates_are_refused(template, message):
    own = tokenizer.__wrapped__("qwen")
    own.chat_template = template
    with pytest.raises(nalora.NALoRAError, match=message) as raised:
        Encoder(own, style="chat")
    assert "\n" not in str(raised.value)
    Encoder(own)


@settings(max_examples=60, deadline=None)
@given(question=TEXT, answer=TEXT)
def test_plain_style_is_as_it_was(question, answer):
    chat = tokenizer("gemma")
    row = Encoder(chat).row(Example("a", f"Q: {question}\nA: ", answer, question=question))
    prompt = chat(f"Q: {question}\nA: ").input_ids
    target = [*chat(answer, add_special_tokens=False).input_ids, chat.eos_token_id]
    assert row == {"input_ids": prompt + target, "labels": [IGNORED_LABEL] * len(prompt) + target}


CONVERSATION = ("What is 6 and 6?", "It is 12.", "And 12 and 12?", "24")


@pytest.mark.parametrize("gpt2", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_every_answer_of_a_conversation_is_trained_on(style, gpt2):
    chat = tokenizer(style, gpt2)
    example = Example("a", "", "24", messages=tuple(messages(*CONVERSATION)))
    row = Encoder(chat, style="chat").row(example)
    assert row["input_ids"] == applied(chat, *CONVERSATION, prompt=False)
    assert all(label in (IGNORED_LABEL, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
    runs = itertools.groupby(row["labels"], key=lambda label: label != IGNORED_LABEL)
    groups = [chat.decode(list(labels)) for trained, labels in runs if trained]
    end = STYLES[style][3]
    assert len(groups) == 2
    texts = [group.strip().removesuffix(end).removeprefix("<think>\n\n</think>").strip() for group in groups]
    assert texts == ["It is 12.", "24"]
    assert all(end in group for group in groups)
