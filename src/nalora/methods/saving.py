"""Adapters written in another form than they were trained in: as plain LoRA, which every library loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from nalora.processes import is_first_process


def write_lora(model: nn.Module, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """Let the first process write an adapter of these tensors, with settings that differ from the model's own.

    Args:
        model: wrapped by PEFT, with one adapter.
        folder: as `save_pretrained`'s.
        tensors: by the names that PEFT gives them in a file.
        settings: of `peft.LoraConfig`.
    """
    if not is_first_process():
        return
    import peft

    wrapped: Any = model
    trained = wrapped.active_peft_config
    # These say where the adapter sits; all other settings say how it was trained.
    names = ("base_model_name_or_path", "revision", "task_type", "target_modules", "lora_dropout", "fan_in_fan_out")
    config = peft.LoraConfig(**{name: getattr(trained, name) for name in names} | settings, inference_mode=True)
    base = type(wrapped.get_base_model())
    mapping = None if config.task_type else {"base_model_class": base.__name__, "parent_library": base.__module__}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
