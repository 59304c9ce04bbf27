"""Check that a model isolates packed examples from each other, by running it: few models declare it."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.models.attention import without_cache
from nalora.runs.encoding import Collator, join

# Long enough for a convolution over four tokens to cross the boundary and for a recurrent state to carry over.
_LENGTH = 8


def refuse_encoder_decoder(kind: str) -> None:
    """Raise NALoRAError for an encoder-decoder: packed inputs and packed targets have different lengths."""
    if kind == "seq2seq":
        raise _refusal("an encoder-decoder, whose inputs and targets are separate")


def refuse_unless_isolated(model: nn.Module) -> None:
    """Raise NALoRAError if an example can attend to the one before it in a packed row.

    Positions that restart at 0 mark the beginning of an example for most decoders, but models with ALiBi, learned
    positions without position_ids or a recurrent state ignore them. Two short examples in one row show it: the logits
    of the second must not depend on the first. Weights, modes and random states are left unchanged.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    refusal = _refusal(f"a {kind} model, in which an example sees the one packed before it")
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(parameter.name == "position_ids" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise refusal
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    first, other, second = torch.randint(vocabulary, (3, _LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    device = next(model.parameters()).device
    if device.type == "meta":  # without weights, in a dry run
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), without_cache(model):
            before, after = (_logits(model, [ids, second], device)[_LENGTH:] for ids in (first, other))
    finally:
        for module, mode in modes.items():
            module.training = mode
    # Masked attention changes no bit; experts that receive other numbers of tokens may round differently.
    rounding = max(1e-5, 4 * torch.finfo(before.dtype).eps)
    # `not <=`, so that NaN logits are refused as well.
    if not (after - before).abs().max() <= rounding * before.abs().max():
        raise refusal


def _logits(model: nn.Module, examples: list[list[int]], device: torch.device) -> Tensor:
    """Return the logits of each token of one packed row."""
    row = join([{"input_ids": ids, "labels": ids} for ids in examples])
    batch = {name: tensor.to(device) for name, tensor in Collator(0)([row]).items() if name != "labels"}
    logits: Tensor = model(**batch).logits[0]
    return logits


def _refusal(found: str) -> NALoRAError:
    return NALoRAError(
        "packing: true",
        found=found,
        expected="a decoder that takes the beginnings of packed examples from their positions",
        fix="leave packing out; batches: like-length also leaves little padding",
    )
