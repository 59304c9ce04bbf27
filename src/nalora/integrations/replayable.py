"""Which Trainers' passes can be replayed from a CUDA graph, and why the others cannot.

A replay repeats the kernels of the captured pass and runs none of its Python code. Whatever decides on the host, or
depends on anything but the tensors of a batch, would be wrong without an error, so it is refused before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from transformers import DataCollatorWithFlattening, Trainer

from nalora.distributed.wrappers import base_of
from nalora.errors import refuse_all

_REPLAYABLE = "_nalora_replayable"
# transformers 5.23 renames the argument; both names are read.
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
_PACKING = ("packing", "padding_free")
_LIGER_FIX = "set liger_kernel_config={'fused_linear_cross_entropy': False, 'cross_entropy': False}"

Function = TypeVar("Function", bound=Callable[..., Any])


def replayable(function: Function) -> Function:
    """Declare that a Trainer's own `compute_loss` (or another function of its passes) may be replayed; a decorator.

    The function must do the same for every batch of a shape: no ``.item()``, ``print`` or logging, no dependence on the
    step or the epoch, no metrics that it collects in Python. A replay runs its kernels and none of its Python code::

        class MyTrainer(Trainer):
            @replayable
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...
    """
    setattr(function, _REPLAYABLE, True)
    return function


def _own_functions(trainer: Any) -> Iterator[str]:
    """Yield the names of functions in the trainer's passes that are neither Trainer's own nor declared replayable."""
    for name in ("training_step", "compute_loss", "_prepare_inputs"):
        function = getattr(trainer, name)
        function = getattr(function, "__func__", function)
        if function is not getattr(Trainer, name) and not getattr(function, _REPLAYABLE, False):
            yield f"{type(trainer).__name__}.{name}"
    if trainer.compute_loss_func is not None and not getattr(trainer.compute_loss_func, _REPLAYABLE, False):
        yield "compute_loss_func"


def device_type(trainer: Any) -> str:
    """Return the type of the trainer's device, such as "cuda"."""
    kind: str = trainer.args.device.type
    return kind


def refuse_setup(trainer: Any, *, own_functions: bool = True) -> None:
    """Raise one NALoRAError with every reason why a trainer's passes cannot be captured or repeated.

    Args:
        trainer: a `transformers.Trainer`.
        own_functions: whether code in its passes that is not known to be replayable is refused, too.
    """
    functions = [*_own_functions(trainer)] if own_functions else []
    args, config = trainer.args, getattr(base_of(trainer.model), "config", None)
    device, processes = device_type(trainer), trainer.accelerator.num_processes
    attention = getattr(config, "_attn_implementation", None)
    dropped = [name for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop") if getattr(config, name, 0)]
    problems = (
        (device != "cuda", f"a Trainer on {device}", "leave cuda_graphs out"),
        (trainer.is_deepspeed_enabled, "a Trainer that runs DeepSpeed", "launch one process without DeepSpeed"),
        (trainer.is_fsdp_enabled, "a Trainer that runs FSDP", "launch one process without FSDP"),
        (processes > 1, f"{processes} processes", "launch one process, or leave cuda_graphs out"),
        (
            args.n_gpu > 1 or getattr(trainer, "is_model_parallel", False),
            "a model that is spread over several GPUs",
            "set CUDA_VISIBLE_DEVICES to one GPU",
        ),
        (
            trainer.accelerator.mixed_precision == "fp16",
            "fp16, whose loss scaling decides on the host",
            "set bf16=True",
        ),
        (
            args.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a replay overwrites gradients",
            f"set it to 1, and multiply per_device_train_batch_size by {args.gradient_accumulation_steps}",
        ),
        (
            any(getattr(args, name, False) for name in _CHECKPOINTING) or _checkpoints(trainer.model),
            "gradient checkpointing, which saves and restores random states on the host",
            "set gradient_checkpointing=False: a model that needs it is large enough without graphs",
        ),
        (
            args.torch_compile or hasattr(trainer.model, "_orig_mod"),
            "torch_compile, which may compile in the middle of a capture",
            "leave one of the two out",
        ),
        (
            any(getattr(owner, name, False) for owner in (args, trainer.data_collator) for name in _PACKING)
            or isinstance(trainer.data_collator, DataCollatorWithFlattening),
            "packing, where no two batches have the same shape",
            "pad batches: DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64)",
        ),
        (
            attention not in (None, "sdpa", "eager"),
            f"attn_implementation={attention!r}, which reads the lengths of sequences on the host",
            "load the model with attn_implementation='sdpa'",
        ),
        (args.use_liger_kernel and _has_liger_loss(args), "Liger's loss, which counts labels on the host", _LIGER_FIX),
        (
            args.torch_empty_cache_steps is not None,
            "torch_empty_cache_steps, which frees memory inside a pass",
            "leave torch_empty_cache_steps out",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size, which starts again after running out of memory",
            "set per_device_train_batch_size",
        ),
        (trainer.model_init is not None, "model_init, which builds another model", "pass Trainer(model=…)"),
        (
            str(getattr(args.optim, "value", args.optim)).endswith("lomo"),
            f"optim={args.optim!s}, which steps the parameters inside backward",
            "use an optimizer that steps after backward, such as optim='adamw_torch'",
        ),
        (bool(dropped), f"{', '.join(dropped)} > 0, which skips layers by a decision on the host", "set it to 0"),
        (
            bool(functions),
            f"{', '.join(functions)}, whose Python code a replay would not run",
            "leave cuda_graphs out, or decorate each of them with nalora.integrations.replayable.replayable"
            " if it reads nothing from the GPU and does the same at every step",
        ),
    )
    expected = "one pass of few shapes for each step, in one process on one CUDA device"
    refuse_all(f"cuda_graphs of {type(trainer).__name__}", expected, problems)


def _has_liger_loss(args: Any) -> bool:
    config = args.liger_kernel_config or {}
    return bool(config.get("fused_linear_cross_entropy", True) or config.get("cross_entropy", False))


def _checkpoints(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
