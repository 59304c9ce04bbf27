"""Which kind of model a configuration describes, known before any weight is loaded."""

from __future__ import annotations

from typing import Any

from nalora.errors import NALoRAError


def is_encoder_only(config: Any) -> bool:
    """Whether the model reads texts in both directions and writes none, as BERT does.

    transformers loads several of these as decoders all the same: BERT with a language-modelling head then sees the
    tokens that it is to predict.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = any(getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder", "causal"))
    return getattr(config, "model_type", None) in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def refuse_unless_it_writes(name: str, kind: str, config: Any) -> None:
    """Refuse a model that cannot write text for a task of texts, before its weights are loaded.

    Args:
        name: of the model, as the user gave it.
        kind: what the task needs; models of pictures are not this function's concern.
        config: of the model.

    Raises:
        NALoRAError: an encoder without a decoder, or an encoder-decoder where the task needs a decoder.
    """
    if kind == "clip":
        return
    model_type = getattr(config, "model_type", "unknown")
    if is_encoder_only(config):
        raise NALoRAError(
            f"model {name!r}",
            found=f"{model_type}, an encoder without a decoder",
            expected="a model that writes text: a decoder such as Llama, or an encoder-decoder such as T5",
            fix="give another model",
        )
    if kind == "causal" and getattr(config, "is_encoder_decoder", False):
        raise NALoRAError(
            f"model {name!r}",
            found=f"{model_type}, an encoder-decoder",
            expected="a decoder, which this task needs",
            fix="give a decoder, or choose a task that encoder-decoders can do (gym/FAMILY or one of GLUE)",
        )
