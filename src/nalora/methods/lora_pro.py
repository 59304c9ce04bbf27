"""LoRA-Pro: steps of A and B are solved for together, so that W moves as closely along its gradient as they allow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from nalora.distributed.shards import local, shard_like
from nalora.distributed.wrappers import flattens_parameters
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA, leave_out, lora_layers
from nalora.methods.lora_pro_optimizer import LoRAProAdamW, Pair, stacks
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class LoRAPro(LoRA):
    """LoRA whose gradients are replaced before every step, in one of two modes.

    A module without gradients, because a step did not use it, is not changed. The Trainer clips the raw gradients of A
    and B; the replaced gradients are linear in them and are not clipped again.

    Args:
        mode: ``efficient`` passes g_A* and g_B* to the run's optimizer, with LoRA's optimizer state; ``full`` keeps
            Adam's moments of W's m × n gradient (the published Llama results), with the optimizer state and the
            learning rate of full fine-tuning.
    """

    name = "lora-pro"
    title = "LoRA-Pro"
    reference = "Wang et al. 2024, arXiv 2407.18242"
    not_under_na_lora = (
        "its gradients of A and B are solved for together, and scaling rows of one breaks the identity they fulfil"
    )

    mode: Literal["efficient", "full"] = "efficient"

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Prepare as LoRA does. Raises NALoRAError if an adapter is more than s·B·A."""
        wrapped = super().prepare(model, adapter, start)
        pairs_of(wrapped)
        return wrapped

    def optimizer(self, trainer: Any) -> Optimizer:
        """Return the run's optimizer with a hook that replaces gradients, or the optimizer of full mode.

        The hook has no state, so checkpoints are those of the run's optimizer. torch drops hooks when it copies or
        pickles an optimizer: a copy of the trainer's model needs a new optimizer. Raises NALoRAError if the trainer
        flattens parameters or steps inside backward, or for an optimizer that full mode does not support.
        """
        _check_trainer(trainer, self.mode)
        if self.mode == "full":
            return _full(trainer, pairs_of(trainer.model))
        optimizer: Optimizer = trainer.create_optimizer()
        # Looked up at the first step, because FSDP replaces the parameters before it.
        pairs = functools.cache(lambda: pairs_of(trainer.model))
        optimizer.register_step_pre_hook(lambda *_: replace_gradients(pairs()))
        return optimizer


@torch.no_grad()
def replace_gradients(pairs: Sequence[Pair]) -> None:
    """Replace the gradients of A and B by g_A* and g_B*."""
    for stack in stacks(pairs):
        of_a, of_b = zip(*(pair.gradients for pair in stack.pairs if pair.gradients), strict=True)
        g_A, g_B = stack.adjusted(*stack.gradients)
        gradients = [*of_a, *of_b]
        shards = [shard_like(new, old) for new, old in zip([*g_A.unbind(), *g_B.unbind()], gradients, strict=True)]
        torch._foreach_copy_([local(gradient) for gradient in gradients], shards)


def pairs_of(model: nn.Module) -> list[Pair]:
    """Return A, B and scaling of every layer with an adapter.

    Raises NALoRAError for a layer whose adapter is not s·B·A with both factors trained in float32 or wider.
    """
    from nalora.control.replica import feature_sizes

    def has_two_matrices(layer: Any) -> bool:
        """Return False for embeddings, convolutions and experts."""
        return ADAPTER in layer.lora_A and layer.lora_A[ADAPTER].weight.dim() == 2 and feature_sizes(layer) is not None

    layers = dict(lora_layers(model))
    others = [name for name, layer in layers.items() if not has_two_matrices(layer)]
    for name in others:
        raise _unsuitable(name, f"an adapter of a {type(layers[name]).__name__}", leave_out(model, others))
    for name, layer in layers.items():
        if problem := _problem(layer):
            raise _unsuitable(name, *problem)
    return [
        Pair(layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, float(layer.scaling[ADAPTER]))
        for layer in layers.values()
    ]


def _unsuitable(name: str, found: str, fix: str) -> NALoRAError:
    expected = "s·B·A with A and B that are trained in float32"
    return NALoRAError(f"method 'lora-pro' on {name}", found=found, expected=expected, fix=fix)


def _problem(layer: Any) -> tuple[str, str] | None:
    """Return why LoRA-Pro cannot train this layer's adapter, and the fix."""
    variant = layer.lora_variant.get(ADAPTER)
    if variant is not None:
        return f"a LoRA variant, {type(variant).__name__}", "leave use_dora and other variants out"
    if layer.lora_bias.get(ADAPTER):
        return "a trained bias next to B", "leave lora_bias out"
    for name in ("lora_A", "lora_B"):
        factor = getattr(layer, name)[ADAPTER].weight
        if not factor.requires_grad:
            return f"a {name} that is frozen", f"make {name} trainable, or use method 'lora'"
        if factor.dtype not in (torch.float32, torch.float64):
            return f"a {name} in {factor.dtype}", "keep adapters in float32 (autocast_adapter_dtype)"
    return None


def _full(trainer: Any, pairs: Sequence[Pair]) -> LoRAProAdamW:
    args, of_pairs = trainer.args, {id(factor) for pair in pairs for factor in (pair.A, pair.B)}
    decayed = trainer.get_decay_parameter_names(trainer.model)
    others = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in of_pairs]
    groups = [
        {"params": [p for n, p in others if (n in decayed) == decays], "weight_decay": decays * args.weight_decay}
        for decays in (True, False)
    ]
    return LoRAProAdamW(
        pairs,
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
    )


def _check_trainer(trainer: Any, mode: str) -> None:
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    fsdp2 = "set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does"
    not_adamw = mode == "full" and optim not in ("adamw_torch", "adamw_torch_fused")
    in_backward = optim.endswith(("lomo", "layerwise"))
    expected = "whole gradients of A and B when the optimizer steps"
    for applies, found, fix in (
        (trainer.is_deepspeed_enabled, "DeepSpeed, which keeps its own parameters", "launch without DeepSpeed"),
        (flattens_parameters(trainer), "FSDP's first version, which flattens A and B", fsdp2),
        (in_backward, f"the optimizer {optim}, which steps inside backward", "set optimizer to adamw_torch"),
        (
            not_adamw,
            f"the optimizer {optim} in full mode, which is AdamW's own",
            "set optimizer to adamw_torch, or mode to efficient",
        ),
    ):
        if applies:
            raise NALoRAError("method 'lora-pro'", found=found, expected=expected, fix=fix)


METHODS = (LoRAPro,)
