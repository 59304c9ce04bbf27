"""AdaLoRA on a `transformers.Trainer`: its penalty in the loss, its ranks allocated at every step and resumed."""

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

# In a Trainer's checkpoint: what the next allocation goes by.
STATE_FILE = "adalora_state.safetensors"
_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


def distance_from_orthogonality(model: nn.Module) -> Tensor:
    """The mean of ‖AAᵀ − I‖ and ‖BᵀB − I‖ over all layers."""
    found = []
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            factor = full_tensor(parameter)
            product = factor @ factor.T if ".lora_A." in name else factor.T @ factor
            found.append(torch.linalg.norm(product - torch.eye(len(product), device=product.device)))
    return torch.stack(found).mean()


@contextlib.contextmanager
def _put_together(model: Any) -> Iterator[Any]:
    """PEFT's AdaLoRA model; where FSDP2 has dealt out its adapters, one of whole copies, put back when it is left.

    PEFT ranks all directions against each other and prunes E in place, neither of which DTensors can do; every process
    does the same on the whole adapters instead.
    """
    dealt = {name: each for name, each in model.model.named_parameters() if ".lora_" in name}
    if not any(isinstance(each, DTensor) for each in dealt.values()):
        yield model
        return
    copies = {}
    for name, parameter in dealt.items():
        copies[name] = copy = full_tensor(parameter.detach()).clone()
        copy.grad = None if parameter.grad is None else full_tensor(parameter.grad)
    said = {name: getattr(model, name) for name in ("peft_config", "trainable_adapter_name", "rankallocator")}
    stand_in = types.SimpleNamespace(**said, model=types.SimpleNamespace(named_parameters=copies.items))
    stand_in.update_and_allocate = types.MethodType(type(model).update_and_allocate, stand_in)
    yield stand_in
    with torch.no_grad():
        for name, parameter in dealt.items():
            if ".lora_E." in name:
                local(parameter).copy_(shard_like(copies[name], parameter))


class RankAllocation(TrainerCallback):  # type: ignore[misc]
    """Adds the penalty, calls the rank allocator of a trainer's model, and keeps its state in the checkpoints.

    PEFT adds the penalty only to models that it was told the task of; without one its forward pass goes past it.
    PEFT notes which directions it has pruned in the adapter's configuration, where they make its checkpoints useless:
    pruned directions are left out of the file, although they may come back, and a resumed run cannot load it. So
    that note is kept here, and PEFT's configuration has it only while PEFT allocates.

    Args:
        trainer: a `transformers.Trainer` of a model with PEFT's AdaLoRA.
        schedule: the settings of PEFT's configuration for so many steps.
        orthogonality: the weight of the penalty.
    """

    def __init__(self, trainer: Any, schedule: Callable[[int], dict[str, int]], orthogonality: float) -> None:
        self.trainer, self.schedule, self.orthogonality = trainer, schedule, orthogonality
        self.model: Any = trainer.model.base_model
        self.config: Any = trainer.model.peft_config[ADAPTER]
        self.kept: dict[str, list[bool]] | None = None
        self.penalty = orthogonality

    def install(self) -> None:
        """Follow the trainer."""
        self.trainer.model.register_forward_hook(self._add_penalty)
        wrap_method(self.trainer, "training_step", before=self._share_penalty)
        wrap_method(self.trainer, "_save_optimizer_and_scheduler", after=self._save)
        wrap_method(self.trainer, "_load_optimizer_and_scheduler", after=self._resume)
        self.trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lay the schedule over as many steps as the trainer says it will take."""
        for name, value in self.schedule(state.max_steps).items():
            setattr(self.config, name, value)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Score and prune; the gradients of the step are still there, and the trainer has not counted it yet."""
        step = state.global_step + 1
        if self.trainer.accelerator.optimizer_step_was_skipped and step < self.config.total_step - self.config.tfinal:
            return  # float16 overflowed: there are no gradients to score by
        self.config.rank_pattern = self.kept
        with _put_together(self.model) as model:
            model.update_and_allocate(step)
        self.kept, self.config.rank_pattern = self.config.rank_pattern, None

    def _share_penalty(self, model: Any, inputs: Any, items: Any = None) -> None:
        """The orthogonality counts once in a step, over however many passes and processes the loss is summed.

        Where a run's trainer weights the passes, the weights of a step add up to 1, the penalty's with them.
        """
        trainer, parts = self.trainer, 1
        if trainer.model_accepts_loss_kwargs and items is not None and not getattr(trainer, "weights_passes", False):
            parts = trainer.current_gradient_accumulation_steps
            if trainer.args.average_tokens_across_devices:
                parts *= trainer.accelerator.num_processes
        self.penalty = self.orthogonality / parts

    def _add_penalty(self, model: nn.Module, _: Any, outputs: Any) -> Any:
        # A pass without labels, such as a look at the logits, has no loss to add to.
        if model.training and self.penalty and outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] + self.penalty * distance_from_orthogonality(model)
        return outputs

    def _save(self, output_dir: str) -> None:
        if self.trainer.args.should_save:
            scores = self.model.rankallocator
            state = {f"{kind}/{name}": t.cpu() for kind in _SCORES for name, t in getattr(scores, kind).items()}
            state |= {f"kept/{name}": torch.tensor(each) for name, each in (self.kept or {}).items()}
            save_file(state, Path(output_dir) / STATE_FILE)

    def _resume(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            raise missing_path(
                "file",
                path,
                "what AdaLoRA's next allocation goes by",
                "resume from a checkpoint that this method wrote, or start anew",
            )
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*_SCORES, "kept")}
        for key, tensor in load_file(path).items():
            kind, _, name = key.partition("/")
            found[kind][name] = tensor
        devices = {name: parameter.device for name, parameter in self.model.model.named_parameters()}
        for kind in _SCORES:
            setattr(self.model.rankallocator, kind, {n: t.to(devices[n]) for n, t in found[kind].items()})
        self.kept = {name: tensor.tolist() for name, tensor in found["kept"].items()} or None
