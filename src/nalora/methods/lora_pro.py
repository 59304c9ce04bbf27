"""LoRA-Pro: steps of A and B solved for together, so that W moves as near to its own gradient as they allow."""

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
from nalora.methods.lora_pro_optimizer import LoRAProAdamW
from nalora.methods.lora_pro_stacks import Pair, stacks
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class LoRAPro(LoRA):
    """LoRA whose gradients are replaced before every step, in one of two ways.

    A gradient that is missing, of a module that was not used in a step, leaves that module alone. Trainer clips
    the raw gradients of A and B before; what the equations make of them is linear in them and not clipped again.

    Args:
        mode: ``efficient`` hands g_A* and g_B* to the optimizer that the run names, which keeps LoRA's state;
            ``full`` keeps Adam's moments on W's m × n gradient (the published Llama numbers), as much state as full
            fine-tuning has, and wants a learning rate for W.
    """

    name = "lora-pro"
    title = "LoRA-Pro"
    reference = "Wang et al. 2024, arXiv 2407.18242"
    not_under_na_lora = (
        "its gradients of A and B are solved for together, and scaling rows of one breaks the identity they fulfil"
    )

    mode: Literal["efficient", "full"] = "efficient"

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """As LoRA.

        Raises:
            NALoRAError: an adapter that is more than s·B·A.
        """
        wrapped = super().prepare(model, adapter, start)
        pairs_of(wrapped)
        return wrapped

    def optimizer(self, trainer: Any) -> Optimizer:
        """The run's optimizer with its gradients replaced, or the one of full mode.

        What replaces them has no state, so checkpoints are the stock optimizer's. It is a hook, and torch leaves hooks
        out when it copies or pickles an optimizer: a copy of the trainer's model asks for an optimizer of its own.

        Raises:
            NALoRAError: a trainer that flattens parameters or steps inside backward, or an optimizer that full mode
                cannot stand for.
        """
        _refuse_unless_steps_are_whole(trainer, self.mode)
        if self.mode == "full":
            return _full(trainer, pairs_of(trainer.model))
        optimizer: Optimizer = trainer.create_optimizer()
        # Looked up at the first step: FSDP puts parameters of its own in the place of those that are there now.
        pairs = functools.cache(lambda: pairs_of(trainer.model))
        optimizer.register_step_pre_hook(lambda *_: replace_gradients(pairs()))
        return optimizer


@torch.no_grad()
def replace_gradients(pairs: Sequence[Pair]) -> None:
    """Put g_A* and g_B* in the place of the gradients of A and B."""
    for stack in stacks(pairs):
        found = (*(p.A.grad for p in stack.pairs), *(p.B.grad for p in stack.pairs))
        g_A, g_B = stack.adjusted(*stack.gradients)
        known = [each for each in found if each is not None]
        shares = [shard_like(new, old) for new, old in zip([*g_A.unbind(), *g_B.unbind()], known, strict=True)]
        torch._foreach_copy_([local(each) for each in known], shares)


def pairs_of(model: nn.Module) -> list[Pair]:
    """A, B and scaling of every layer with an adapter.

    Raises:
        NALoRAError: a layer whose adapter is not s·B·A with both factors learning in float32 or more.
    """
    layers = dict(lora_layers(model))
    if others := [name for name, layer in layers.items() if not _has_two_matrices(layer)]:
        kind = type(layers[others[0]]).__name__
        _refuse(others[0], f"an adapter of a {kind}", leave_out(model, others))
    return [_pair(name, layer) for name, layer in layers.items()]


def _has_two_matrices(layer: Any) -> bool:
    """Not so for embeddings, convolutions and experts."""
    from nalora.control.replica import feature_sizes

    return ADAPTER in layer.lora_A and layer.lora_A[ADAPTER].weight.dim() == 2 and feature_sizes(layer) is not None


def _pair(name: str, layer: Any) -> Pair:
    A, B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    variant = layer.lora_variant.get(ADAPTER)
    if variant is not None:
        _refuse(name, f"a LoRA variant, {type(variant).__name__}", "leave use_dora and other variants out")
    if layer.lora_bias.get(ADAPTER):
        _refuse(name, "a bias that learns beside B", "leave lora_bias out")
    for letter, factor in (("A", A), ("B", B)):
        if not factor.requires_grad:
            _refuse(name, f"a lora_{letter} that does not learn", f"let lora_{letter} learn, or use method 'lora'")
        if factor.dtype not in (torch.float32, torch.float64):
            _refuse(name, f"a lora_{letter} in {factor.dtype}", "keep adapters in float32 (autocast_adapter_dtype)")
    return Pair(A, B, float(layer.scaling[ADAPTER]))


def _refuse(name: str, found: str, fix: str) -> None:
    raise NALoRAError(
        f"method 'lora-pro' on {name}", found=found, expected="s·B·A with A and B that learn in float32", fix=fix
    )


def _full(trainer: Any, pairs: Sequence[Pair]) -> LoRAProAdamW:
    args, of_pairs = trainer.args, {id(factor) for pair in pairs for factor in (pair.A, pair.B)}
    decayed = trainer.get_decay_parameter_names(trainer.model)
    rest = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in of_pairs]
    others = [
        {"params": [p for n, p in rest if (n in decayed) == decays], "weight_decay": decays * args.weight_decay}
        for decays in (True, False)
    ]
    return LoRAProAdamW(
        pairs,
        [group for group in others if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
    )


def _refuse_unless_steps_are_whole(trainer: Any, mode: str) -> None:
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    refusals = (
        (trainer.is_deepspeed_enabled, "DeepSpeed, which keeps its own parameters", "launch without DeepSpeed"),
        (
            flattens_parameters(trainer),
            "FSDP's first version, which flattens A and B",
            "set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does",
        ),
        (
            optim.endswith(("lomo", "layerwise")),
            f"the optimizer {optim}, which steps inside backward",
            "set optimizer to adamw_torch",
        ),
        (
            mode == "full" and optim not in ("adamw_torch", "adamw_torch_fused"),
            f"the optimizer {optim} in full mode, which is AdamW's own",
            "set optimizer to adamw_torch, or mode to efficient",
        ),
    )
    for applies, found, fix in refusals:
        if applies:
            raise NALoRAError(
                "method 'lora-pro'",
                found=found,
                expected="whole gradients of A and B when the optimizer steps",
                fix=fix,
            )


METHODS = (LoRAPro,)
