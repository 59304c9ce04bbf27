"""Padding is left out with the mask of a block's own tower."""

from __future__ import annotations

import pytest
import tiny
import torch
from architectures import architecture
from torch import nn

import nalora
from nalora import NALoRAConfig, NALoRAError


def attached(model, **settings):
    model = tiny.with_lora(model, **settings)
    return model, nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1), NALoRAConfig(scaling=False))


def counted(controller) -> dict[str, int]:
    return {
        name.removeprefix("base_model.model."): tokens
        for group in controller._window.groups
        for name, tokens in zip(group.names, group.tokens.tolist(), strict=True)
    }


def mask_of(*lengths: int, size: int) -> torch.Tensor:
    return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()


SOURCE, TARGET = mask_of(8, 5, 3, size=8), mask_of(8, 2, 4, size=8)


@pytest.mark.parametrize("name", ["T5 v1.0", "T5 v1.1"])
@pytest.mark.parametrize("decoder_mask", ["labels", "mask", "both"])
def test_encoder_and_decoder_each_by_their_own_mask(name, decoder_mask):
    """Same shape on both sides, so that a wrong mask would not even be noticed by its shape."""
    model, controller = attached(architecture(name))
    ids = tiny.tokens(3, 8)
    labels = tiny.tokens(3, 8, seed=1)
    arguments = dict(input_ids=ids, attention_mask=SOURCE, labels=labels)
    if decoder_mask != "mask":
        labels[TARGET == 0] = -100
    if decoder_mask != "labels":
        arguments["decoder_attention_mask"] = TARGET
    model(**arguments).loss.backward()
    assert len(counted(controller)) == 4
    for block, tokens in counted(controller).items():
        assert tokens == (16 if block.startswith("encoder") else 14), block


def test_encoder_and_decoder_lengths_differ():
    model, controller = attached(architecture("T5 v1.1"))
    labels = tiny.tokens(3, 5, seed=1)
    labels[1, 2:] = -100
    model(input_ids=tiny.tokens(3, 8), attention_mask=SOURCE, labels=labels).loss.backward()
    assert {block.split(".")[0]: tokens for block, tokens in counted(controller).items()} == {
        "encoder": 16,
        "decoder": 12,
    }


def test_prompt_tokens_with_ignored_labels_are_real_tokens_of_a_decoder():
    model, controller = attached(architecture("Llama"))
    labels = tiny.tokens(3, 8)
    labels[:, :4] = -100
    model(input_ids=tiny.tokens(3, 8), attention_mask=SOURCE, labels=labels).loss.backward()
    assert set(counted(controller).values()) == {16}


def test_the_text_mask_does_not_apply_to_the_vision_tower():
    """Two images of 4 patches + 1 class token and two texts of 5 tokens: shapes agree, towers do not."""
    model, controller = attached(architecture("CLIP"))
    model(
        input_ids=tiny.tokens(2, 5), attention_mask=mask_of(5, 2, size=5), pixel_values=torch.randn(2, 3, 32, 32)
    ).logits_per_image.sum().backward()
    assert {block.split(".")[0]: tokens for block, tokens in counted(controller).items()} == {
        "text_model": 7,
        "vision_model": 10,
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "GPT-2", "Gemma3", "OPT", "Phi3"])
def test_masks_of_many_makes(name, attention):
    model = architecture(name)
    model.set_attn_implementation(attention)
    model, controller = attached(model)
    output = model(input_ids=tiny.tokens(3, 8), attention_mask=SOURCE)
    output.logits.sum().backward()
    assert set(counted(controller).values()) == {16}


def test_vision_models_have_no_mask():
    model, controller = attached(architecture("ViT"))
    model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
    assert set(counted(controller).values()) == {10}


class Masked(nn.Module):
    """A model that passes no mask to its layers, and accepts any mask itself."""

    def __init__(self):
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8))

    def forward(self, x, attention_mask=None):
        return self.ffn(x)


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        (None, 12),
        (mask_of(4, 1, 2, size=4), 7),
        (mask_of(4, 1, 2, size=4).bool(), 7),
        (mask_of(4, 1, 2, size=4)[:, None, None, :].bool(), 7),
        ((1.0 - mask_of(4, 1, 2, size=4)[:, None, None, :].float()) * torch.finfo(torch.float32).min, 7),
        (
            {"full_attention": mask_of(4, 1, 2, size=4)[:, None, :, None] & mask_of(4, 1, 2, size=4)[:, None, None, :]},
            7,
        ),
    ],
)
@pytest.mark.parametrize("positional", [False, True])
def test_every_form_of_mask(mask, tokens, positional):
    model, controller = attached(Masked(), target_modules=["0", "2"])
    x = torch.randn(3, 4, 8)
    output = model.base_model.model(x, mask) if positional else model.base_model.model(x, attention_mask=mask)
    output.sum().backward()
    assert list(counted(controller).values()) == [tokens]


def test_a_mask_of_another_shape_is_an_error():
    model, _ = attached(Masked(), target_modules=["0", "2"])
    with pytest.raises(NALoRAError, match=r"token mask of shape \(3, 5\) for gate outputs with tokens \(3, 4\)"):
        model.base_model.model(torch.randn(3, 4, 8), attention_mask=torch.ones(3, 5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(8, 5, 3), (8, 8), (8,), (2, 1)])
@pytest.mark.parametrize("pads_on_the_left", [True, False])
def test_a_boolean_mask_is_read_by_what_it_means(causal, lengths, pads_on_the_left):
    """In MPT, True masks a key; in all other models it means attention."""
    from nalora.control.tokens import _as_token_mask

    real = mask_of(*lengths, size=max(lengths)).bool()
    if pads_on_the_left:
        real = real.flip(1)
    size = real.shape[1]
    seen = real[:, None, None, :].expand(-1, 1, size, size)
    if causal:
        seen = seen & torch.ones(size, size).tril().bool()
    assert torch.equal(_as_token_mask(seen), real)
    if causal:
        assert torch.equal(_as_token_mask(~seen), real)
