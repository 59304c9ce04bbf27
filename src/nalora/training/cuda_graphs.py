"""Forward and backward passes of a Trainer as CUDA graphs: for small models, whose steps wait for Python.

The optimizer, clipping, control and logging stay the Trainer's own, so every method trains this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nalora.errors import NALoRAError
from nalora.kernels.cuda_graphs import GraphedStep
from nalora.models.attention import unmasked_attention
from nalora.runs.settings import RunSettings

_WARMUP = 2


def graph_passes(trainer: Any) -> None:
    """Replay the passes of a trainer that is about to train, whose batches are padded on the right."""
    plain = trainer.training_step

    def one_pass(batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: each for name, each in batch.items() if name != "num_items_in_batch"}
        with unmasked_attention(trainer.model):
            loss: Tensor = plain(trainer.model_wrapped, inputs, batch.get("num_items_in_batch"))
        return loss

    learning = [each for each in trainer.model.parameters() if each.requires_grad]
    step = GraphedStep(one_pass, warmup=_WARMUP, warm_later=0, gradients_of=learning)

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
    """Refuse what a replay cannot do.

    Raises:
        NALoRAError: with what stands in the way.
    """
    obstacles = (
        (not device.startswith("cuda"), f"a run on {device}", "leave cuda_graphs out"),
        (dtype == "float16", "float16, whose loss scaling decides on the host", "use bfloat16"),
        (accumulated > 1, f"{accumulated} passes in a step, to be added up", "raise micro_batch_size"),
        (processes > 1, f"{processes} processes", "launch one"),
        (settings.packing, "packing, where no two batches have one shape", "leave packing out: batches: like-length"),
        (settings.gradient_checkpointing, "gradient checkpointing, which asks for random states", "leave one out"),
    )  # fmt: skip
    for stands, found, fix in obstacles:
        if stands:
            raise NALoRAError(
                "cuda_graphs: true", found=found, expected="one pass of few shapes for each step, on one GPU", fix=fix
            )
