"""Answers and their number of tokens do not depend on the other rows of a batch."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers

from nalora.evaluation.generation import AnswerGenerator
from nalora.runs.encoding import Encoder
from nalora.tasks import Example

EXAMPLES = [Example(str(n), "ab" * n + "?") for n in (1, 9, 4, 17, 2)]


def answers(model, encoder, examples=EXAMPLES, *, alone=False, static=False, **options):
    """Return (text, tokens, finished) of each example, in one batch or one by one."""
    writer = AnswerGenerator(model, encoder, max_new_tokens=24, batch_tokens=1 if alone else 32_768, **options)
    writer.static = static
    found = {a.example.id: a for batch in writer.batches(examples) for a in writer.answer(batch)}
    return [(found[each.id].outputs[0], found[each.id].tokens, found[each.id].finished) for each in examples]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tiny.tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=len(tiny.tokenizer()), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.5,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).double().eval()


def test_an_encoder_with_absolute_positions_gives_the_same_answers_in_a_batch(bart):
    encoder = Encoder(tiny.tokenizer(), "seq2seq")
    alone = answers(bart, encoder, alone=True)
    assert len({text for text, _, _ in alone}) > 2, "prompts make a difference"
    assert answers(bart, encoder) == alone


@pytest.mark.parametrize("static", [False, True], ids=["generate", "static"])
@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_tokens_end_with_the_first_stop_text(llama, pad, static):
    tokenizer = tiny.tokenizer()
    free = [text for text, _, _ in answers(llama, Encoder(tokenizer))]
    tokenizer.pad_token = pad
    # A letter that occurs more than once in the first answer and never in some other.
    stop = next(letter for letter in free[0] if free[0].count(letter) > 1 and any(letter not in text for text in free))
    expected = [(t.split(stop)[0], t.index(stop) + 1, True) if stop in t else (t, 24, False) for t in free]
    for alone in (True, False):
        assert answers(llama, Encoder(tokenizer), alone=alone, static=static, stop=(stop,)) == expected


def test_the_stop_text_that_starts_first_cuts_the_answer(llama):
    encoder = Encoder(tiny.tokenizer())
    ((free, _, _),) = answers(llama, encoder, EXAMPLES[:1])
    stop = (free[4:6], free[3:6])
    assert answers(llama, encoder, EXAMPLES[:1], stop=stop) == [(free[:3], 6, True)]
