"""Merge an adapter into its base model, layer by layer in float32, and compare the result with the adapted model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.models.target_modules import first_sentence

# The largest difference of two logits, relative to the largest logit, that rounding the merged weights explains.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Texts of different kinds, for comparing two forms of a model.
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Question: Anna has 12 apples and gives 5 of them to Ben. How many apples does she have left?\nAnswer:",
    "def is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n",
    "Übersetze ins Englische: „Das Wetter ist heute schön.“\n",
)
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Answers:
    """The logits of each prompt, and the tokens that greedy decoding continues it with."""

    logits: list[Tensor]
    tokens: list[list[int]]


@dataclass(frozen=True)
class Agreement:
    """How far two forms of a model agree.

    Args:
        difference: the largest difference of two logits; NaN if one is NaN.
        largest: the largest absolute logit.
        same: the number of greedy tokens before the first difference, over all prompts.
        tokens: the number of greedy tokens.
        tolerance: the largest `difference` / `largest` that is accepted.
    """

    difference: float
    largest: float
    same: int
    tokens: int
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; not for numbers that are not finite."""
        return self.is_finite and self.difference <= self.tolerance * self.largest

    @property
    def is_finite(self) -> bool:
        """Whether all logits of both forms are finite, which an overflow of float16 (above 65504) is not."""
        return math.isfinite(self.difference) and math.isfinite(self.largest)

    def __str__(self) -> str:
        return (
            f"largest difference of logits {self.difference:.2g} (largest logit {self.largest:.3g}, relative tolerance"
            f" {self.tolerance:g}), {self.same} of {self.tokens} greedy tokens equal"
        )


@torch.no_grad()
def answer(model: nn.Module, tokenizer: Any, prompts: Sequence[str] = PROMPTS) -> Answers:
    """Return what a language model answers to the prompts."""
    generator: Any = model
    device = next(model.parameters()).device
    logits, tokens = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        made = generator.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS, do_sample=False,
            num_beams=1, pad_token_id=tokenizer.pad_token_id, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        is_decoder = not generator.config.is_encoder_decoder
        # All positions of the prompt for a decoder; the first generated one for an encoder-decoder.
        positions = model(ids).logits[0] if is_decoder else made.logits[0]
        logits.append(positions.float().cpu())
        tokens.append(made.sequences[0, ids.shape[1] if is_decoder else 0 :].tolist())
    return Answers(logits, tokens)


def compare(one: Answers, other: Answers, dtype: torch.dtype) -> Agreement:
    """Return how far two models agree, with the tolerance for weights of this dtype."""
    pairs = list(zip(one.logits, other.logits, strict=True))
    same = 0
    for tokens, others in zip(one.tokens, other.tokens, strict=True):
        shortest = min(len(tokens), len(others))
        same += next((index for index in range(shortest) if tokens[index] != others[index]), shortest)
    return Agreement(
        # Python's max passes over NaN unless it comes first.
        float(torch.stack([(a - b).abs().max() for a, b in pairs]).max()),
        float(torch.stack([a.abs().max() for a, _ in pairs]).max()),
        same,
        max(sum(map(len, answers.tokens)) for answers in (one, other)),
        TOLERANCES[dtype],
    )


def merge(
    model: nn.Module, dtype: torch.dtype, report: Callable[[str, int, int], None] = lambda what, done, total: None
) -> nn.Module:
    """Return the base model with a PEFT model's adapter merged into its weights, in `dtype`.

    Each layer is merged in float32 and rounded once. PEFT adds the rounded update to the rounded weight otherwise. The
    embedding and the output layer stop sharing their weights if one of them is adapted or trained as a whole.

    Raises:
        NALoRAError: an adapter that changes more than weights, so that it cannot be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped: Any = model
    config = wrapped.active_peft_config
    name = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "is_prompt_learning", False):
        raise _not_mergeable(name, "it adds tokens or prefixes, which are no weights of the model")
    if getattr(config, "layer_replication", None):
        raise _not_mergeable(name, "layer_replication: several layers with updates of their own share one weight")
    _untie_adapted(model)
    # A layer inside another one (of experts) is merged by that one.
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for done, layer in enumerate(layers, 1):
        weights = [weight for weight in layer.get_base_layer().parameters(recurse=False) if weight.is_floating_point()]
        layer.float()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                layer.merge(safe_merge=True)
        except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
            # PEFT raises a plain RuntimeError for lora_bias on a layer without a bias; torch raises those of its own.
            if isinstance(error, RuntimeError) and "merge" not in str(error):
                raise
            raise _not_mergeable(name, first_sentence(error)) from error
        for weight in weights:
            weight.data = weight.data.to(dtype)
        report("layers", done, len(layers))
    merged: nn.Module = wrapped.unload()
    _say_untied(merged)
    return merged.to(dtype).eval()


def dequantised(model: nn.Module) -> nn.Module:
    """Return a model loaded in 4 bits by bitsandbytes with dense layers of equal weights.

    Call it before the first forward pass, which repacks 4-bit weights on a CPU. transformers' own `dequantize` rounds
    the weights to bfloat16.
    """
    import bitsandbytes

    for name, layer in list(model.named_modules()):
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            dense.weight, dense.bias = nn.Parameter(weight, requires_grad=False), layer.bias
            model.set_submodule(name, dense)
    quantised: Any = model
    quantised.hf_quantizer.remove_quantization_config(model)
    return model


def _untie_adapted(model: nn.Module) -> None:
    """Give the embedding and the output layer weights of their own if one of them is adapted and they share theirs."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: Any = model
    ends = [base.get_base_model().get_input_embeddings(), base.get_base_model().get_output_embeddings()]
    inner = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if any(end is None for end in ends) or inner[0].weight is not inner[1].weight:
        return
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        inner[1].weight = nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)


def _say_untied(model: nn.Module) -> None:
    """Let the configuration say that the embedding and the output layer have weights of their own, if they have.

    An adapter unties them, and so does PEFT's `modules_to_save`, which trains a copy of one of them. A configuration
    that still ties them would make `from_pretrained` ignore the weights of the output layer.
    """
    base: Any = model
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if all(end is not None for end in ends) and ends[0].weight is not ends[1].weight:
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False


def _not_mergeable(tuner: str, reason: str) -> NALoRAError:
    return NALoRAError(
        f"the tuner {tuner}",
        found=f"an adapter that PEFT cannot merge ({reason})",
        expected="a tuner whose update can be added to the weights",
        fix="export --to peft",
    )
