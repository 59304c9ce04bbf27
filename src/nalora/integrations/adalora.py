"""AdaLoRA on a `transformers.Trainer`: the penalty in the loss, rank allocation at every step, and its state."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from nalora.control.hooks import wrap_method
from nalora.distributed.shards import full_tensor, local, shard_like
from nalora.errors import missing_path
from nalora.models.peft_names import ADAPTER

# In a Trainer's checkpoint: the scores for the next allocation.
STATE_FILE = "adalora_state.safetensors"
_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


def distance_from_orthogonality(model: nn.Module) -> Tensor:
    """Return the mean of ‖AAᵀ − I‖ and ‖BᵀB − I‖ over all layers."""
    norms = []
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            factor = full_tensor(parameter)
            product = factor @ factor.T if ".lora_A." in name else factor.T @ factor
            norms.append(torch.linalg.norm(product - torch.eye(len(product), device=product.device)))
    return torch.stack(norms).mean()


@contextlib.contextmanager
def _gathered(model: Any) -> Iterator[Any]:
    """Yield PEFT's AdaLoRA model, for sharded adapters (FSDP2) with full copies that are written back on exit.

    PEFT ranks all directions together and prunes E in place, neither of which DTensors support; every process does the
    same with the full adapters.
    """
    adapters = {name: parameter for name, parameter in model.model.named_parameters() if ".lora_" in name}
    if not any(isinstance(parameter, DTensor) for parameter in adapters.values()):
        yield model
        return
    copies = {}
    for name, parameter in adapters.items():
        copies[name] = copy = full_tensor(parameter.detach()).clone()
        copy.grad = None if parameter.grad is None else full_tensor(parameter.grad)
    same = {name: getattr(model, name) for name in ("peft_config", "trainable_adapter_name", "rankallocator")}
    stand_in = types.SimpleNamespace(**same, model=types.SimpleNamespace(named_parameters=copies.items))
    stand_in.update_and_allocate = types.MethodType(type(model).update_and_allocate, stand_in)
    yield stand_in
    with torch.no_grad():
        for name, parameter in adapters.items():
            if ".lora_E." in name:
                local(parameter).copy_(shard_like(copies[name], parameter))


class RankAllocation(TrainerCallback):  # type: ignore[misc]
    """Adds the penalty, calls the rank allocator of a trainer's model, and saves its state in the checkpoints.

    PEFT adds the penalty only to models with a task type. PEFT stores the pruned directions in the adapter's
    configuration, where they make its checkpoints useless: the file leaves out pruned directions, although they may be
    restored later, and a resumed run cannot load it. So they are stored here as `kept`, and in PEFT's configuration
    only while PEFT allocates.

    Args:
        trainer: a `transformers.Trainer` of a model with PEFT's AdaLoRA.
        schedule: returns the settings of PEFT's configuration for a number of steps.
        orthogonality: the weight of the penalty.
    """

    def __init__(self, trainer: Any, schedule: Callable[[int], dict[str, int]], orthogonality: float) -> None:
        self.trainer, self.schedule, self.orthogonality = trainer, schedule, orthogonality
        self.model: Any = trainer.model.base_model
        self.config: Any = trainer.model.peft_config[ADAPTER]
        self.kept: dict[str, list[bool]] | None = None
        self.penalty = orthogonality

    def install(self) -> None:
        """Wrap the trainer's methods."""
        self.trainer.model.register_forward_hook(self._add_penalty)
        wrap_method(self.trainer, "training_step", before=self._share_penalty)
        wrap_method(self.trainer, "_save_optimizer_and_scheduler", after=self._save)
        wrap_method(self.trainer, "_load_optimizer_and_scheduler", after=self._resume)
        self.trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the schedule for the trainer's number of steps."""
        for name, value in self.schedule(state.max_steps).items():
            setattr(self.config, name, value)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Score and prune, while the gradients of the step exist; the trainer has not counted the step yet."""
        step = state.global_step + 1
        if self.trainer.accelerator.optimizer_step_was_skipped and step < self.config.total_step - self.config.tfinal:
            return  # float16 overflowed: there are no gradients for the scores
        self.config.rank_pattern = self.kept
        with _gathered(self.model) as model:
            model.update_and_allocate(step)
        self.kept, self.config.rank_pattern = self.config.rank_pattern, None

    def _share_penalty(self, model: Any, inputs: Any, items: Any = None) -> None:
        """Divide the penalty by the passes and processes over which the loss is summed, so that it counts once.

        If a run's trainer weights the passes, the weights of a step sum to 1, also for the penalty.
        """
        trainer, parts = self.trainer, 1
        if trainer.model_accepts_loss_kwargs and items is not None and not getattr(trainer, "weights_passes", False):
            parts = trainer.current_gradient_accumulation_steps
            if trainer.args.average_tokens_across_devices:
                parts *= trainer.accelerator.num_processes
        self.penalty = self.orthogonality / parts

    def _add_penalty(self, model: nn.Module, _: Any, outputs: Any) -> Any:
        # A pass without labels has no loss.
        if model.training and self.penalty and outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] + self.penalty * distance_from_orthogonality(model)
        return outputs

    def _save(self, output_dir: str) -> None:
        if self.trainer.args.should_save:
            scores = self.model.rankallocator
            state = {f"{kind}/{name}": t.cpu() for kind in _SCORES for name, t in getattr(scores, kind).items()}
            state |= {f"kept/{name}": torch.tensor(mask) for name, mask in (self.kept or {}).items()}
            save_file(state, Path(output_dir) / STATE_FILE)

    def _resume(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            fix = "resume from a checkpoint of this method, or start a new run"
            raise missing_path("file", path, "the scores for AdaLoRA's next allocation", fix)
        state: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*_SCORES, "kept")}
        for key, tensor in load_file(path).items():
            kind, _, name = key.partition("/")
            state[kind][name] = tensor
        devices = {name: parameter.device for name, parameter in self.model.model.named_parameters()}
        for kind in _SCORES:
            setattr(self.model.rankallocator, kind, {n: t.to(devices[n]) for n, t in state[kind].items()})
        self.kept = {name: tensor.tolist() for name, tensor in state["kept"].items()} or None
