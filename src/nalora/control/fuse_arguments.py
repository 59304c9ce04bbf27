"""What `nalora.fuse` refuses before it changes anything."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor

from nalora.control.observer import is_observed
from nalora.errors import NALoRAError, refuse_first, require
from nalora.kernels.fused.replaced_forward import replaced_by

_WHERE = "fuse(model)"


def check_arguments(model: Any, base: str, *, keep_base: bool) -> None:
    """Raise NALoRAError for a model that cannot be fused, or for options that contradict each other."""
    _check_model(model)
    require(base in ("keep", "fp8"), "fuse(base=…)", base, "'keep' or 'fp8'", "leave base out")
    if keep_base and base != "fp8":
        raise NALoRAError(
            _WHERE,
            found="keep_base=True without base='fp8'",
            expected="a base in FP8, whose original weights it keeps",
            fix="leave keep_base out, or add base='fp8'",
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        inner = isinstance(getattr(model, "model", None), nn.Module)
        raise NALoRAError(
            _WHERE,
            found=f"a {type(model).__name__}",
            expected="a torch.nn.Module with PEFT LoRA layers",
            fix="nalora.fuse(trainer.model)" if inner else "pass the model",
        )
    modules = [*model.modules()]
    if not any(isinstance(module, LoraLayer) for module in modules):
        raise NALoRAError(
            _WHERE,
            found=f"a {type(model).__name__} without LoRA layers",
            expected="a torch.nn.Module with PEFT LoRA layers",
            fix="model = peft.get_peft_model(model, peft.LoraConfig(target_modules='all-linear'))",
        )
    sharded = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), "")
    problems = (
        (any(map(is_observed, modules)), "a model with NA-LoRA attached", "call fuse(model) before attach"),
        (
            any(replaced_by(module) is not None for module in modules),
            "a model that is fused already, as a whole or in part",
            "call undo() on the result of the first call",
        ),
        (bool(sharded), f"{sharded}, which is sharded (FSDP, tensor parallelism)", "train with DDP, or without fuse"),
        (
            any(isinstance(module, nn.DataParallel) for module in modules),
            "a model in DataParallel, whose replicas would compute with the weights of one device",
            "train with DistributedDataParallel, or without fuse",
        ),
    )
    refuse_first(_WHERE, "a whole model on its device, without a controller and fused once", problems)
