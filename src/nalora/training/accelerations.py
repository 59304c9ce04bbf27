"""Optional accelerations of a training: CUDA graphs and Liger's kernels.

CUDA graphs replay the forward and backward passes of small models, whose steps otherwise wait for Python. Optimizer,
clipping, control and logging stay the Trainer's own, so every method can be trained this way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError, missing_package
from nalora.kernels.cuda_graphs import GraphedStep
from nalora.models.attention import unmasked_attention
from nalora.runs.settings import RunSettings

_WARMUP = 2


def graph_passes(trainer: Any) -> None:
    """Replay the passes of a trainer that is about to train, whose batches are padded on the right."""
    plain = trainer.training_step

    def one_pass(batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "num_items_in_batch"}
        with unmasked_attention(trainer.model):
            loss: Tensor = plain(trainer.model_wrapped, inputs, batch.get("num_items_in_batch"))
        return loss

    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    step = GraphedStep(one_pass, warmup=_WARMUP, warm_later=0, gradients_of=trainable)

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        batch = trainer._prepare_inputs(inputs)
        if num_items_in_batch is not None:
            batch["num_items_in_batch"] = torch.as_tensor(num_items_in_batch, device=trainer.args.device)
        loss = step(batch)
        if (controller := getattr(trainer, "nalora_controller", None)) is not None:
            controller.note_replay()
        return loss

    trainer.training_step = training_step


def refuse_unless_graphs_fit(settings: RunSettings, device: str, dtype: str, accumulated: int, processes: int) -> None:
    """Raise NALoRAError for a run whose passes cannot be replayed."""
    obstacles = (
        (not device.startswith("cuda"), f"a run on {device}", "leave cuda_graphs out"),
        (dtype == "float16", "float16, whose loss scaling decides on the host", "use bfloat16"),
        (accumulated > 1, f"{accumulated} passes in a step, to be added up", "raise micro_batch_size"),
        (processes > 1, f"{processes} processes", "launch one"),
        (settings.packing, "packing, where no two batches have one shape", "leave packing out: batches: like-length"),
        (settings.gradient_checkpointing, "gradient checkpointing, which reads random states", "leave one out"),
    )  # fmt: skip
    expected = "one pass of few shapes for each step, on one GPU"
    for _, found, fix in (obstacle for obstacle in obstacles if obstacle[0]):
        raise NALoRAError("cuda_graphs: true", found=found, expected=expected, fix=fix)


def refuse_unless_liger_runs(device: str) -> None:
    """Raise NALoRAError if Liger's kernels are not installed, or the device is not a GPU."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise missing_package("liger: true", "liger_kernel", "for its kernels", instead=", or leave liger out")
    if not device.startswith("cuda"):
        expected = "Liger's kernels on a GPU"
        raise NALoRAError("liger: true", found=f"a run on {device}", expected=expected, fix="leave liger out")


@contextlib.contextmanager
def liger_contained(model: nn.Module) -> Iterator[None]:
    """Undo at the end what Liger replaces in the module of the model's class.

    Without this every model that the process builds later has Liger's layers: another run's, or this one's evaluation.
    """
    module: Any = sys.modules[type(model).__module__]
    names = dict(vars(module))
    # Liger also replaces the `forward` of classes by one that computes the loss.
    forwards = {
        kind: vars(kind)["forward"] for kind in names.values() if isinstance(kind, type) and "forward" in vars(kind)
    }
    try:
        yield
    finally:
        for name, value in names.items():
            if vars(module)[name] is not value:
                setattr(module, name, value)
        for kind, forward in forwards.items():
            if vars(kind)["forward"] is not forward:
                setattr(kind, "forward", forward)  # noqa: B010 - of a class that mypy does not know
