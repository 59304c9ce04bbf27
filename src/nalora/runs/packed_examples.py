"""Whether a model keeps packed examples apart: asked of the model itself, since few say so and none by a setting."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.models.attention import without_cache
from nalora.runs.encoding import Collator, pack

# Long enough for a convolution over four tokens to see past a boundary and for a state to carry on.
_LENGTH = 8


def refuse_encoder_decoder(kind: str) -> None:
    """Refuse to pack for an encoder-decoder: joined inputs and joined targets are of other lengths.

    Raises:
        NALoRAError: the model is one.
    """
    if kind == "seq2seq":
        raise _refusal("an encoder-decoder, whose inputs and targets are apart")


def refuse_unless_kept_apart(model: nn.Module) -> None:
    """Refuse to pack where an example could see the one before it in its row.

    Positions that start anew tell most decoders where an example begins. Models with ALiBi, learnt positions of their
    own or a running state do not ask for them. Two short examples in one row tell: whatever the first one says, the
    second one's logits must stay. Weights, modes and random states are left as they were.

    Raises:
        NALoRAError: they do not.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    found = f"a {kind} model, in which an example sees the one packed before it"
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters):
        raise _refusal(found)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(vocabulary, (3, _LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    with _asked_only(model) as device:
        before, after = (_logits(model, [first, ids[2]], device)[_LENGTH:] for first in ids[:2])
    # Masked attention leaves every bit; experts that get other numbers of tokens may round otherwise.
    rounding = max(1e-5, 4 * torch.finfo(before.dtype).eps)
    # `not <=`, since a model whose logits are NaN shows nothing.
    if not (after - before).abs().max() <= rounding * before.abs().max():
        raise _refusal(found)


def _logits(model: nn.Module, examples: list[list[int]], device: torch.device) -> Tensor:
    """Of each token of one packed row."""
    row = pack([{"input_ids": ids, "labels": ids} for ids in examples], _LENGTH * len(examples))
    batch = {name: each.to(device) for name, each in Collator(0)(row).items() if name != "labels"}
    logits: Tensor = model(**batch).logits[0]
    return logits


@contextlib.contextmanager
def _asked_only(model: nn.Module) -> Iterator[torch.device]:
    """A model that learns nothing from what it is asked inside."""
    device = next(model.parameters()).device
    modes = {name: each.training for name, each in model.named_modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), without_cache(model):
            yield device
    finally:
        for name, each in model.named_modules():
            each.training = modes[name]


def _refusal(found: str) -> NALoRAError:
    return NALoRAError(
        "packing: true",
        found=found,
        expected="a decoder that takes the beginnings of packed examples from their positions",
        fix="leave packing out; batches: like-length leaves few pads as well",
    )
