"""Write a model with its tokenizer as one GGUF file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nalora.errors import NALoRAError
from nalora.models.gguf_architectures import Architecture
from nalora.models.gguf_vocabulary import Vocabulary

Precision = Literal["f32", "f16", "bf16", "q8_0"]
# The name of each precision among gguf's types of tensors, and of files.
_TENSORS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_LARGEST_F16 = 65504
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}


def write_gguf(
    path: Path,
    architecture: Architecture,
    vocabulary: Vocabulary,
    weights: Mapping[str, Tensor],
    *,
    precision: Precision = "f16",
    name: str = "",
    chat_template: str | None = None,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """Write the file.

    Vectors (norms and biases) are always float32. With ``q8_0``, matrices whose rows are no multiple of 32 values long
    are float16, as in llama.cpp's own files.

    Args:
        path: of the new file.
        architecture: of the model.
        vocabulary: of its tokenizer, with a token for each row of the embedding.
        weights: all parameters by their names in transformers; those that share memory are written once.
        precision: of the matrices.
        name: of the model, shown by programs that load the file.
        chat_template: in Jinja.
        report: called with (description, done, total) after each tensor.

    Raises:
        NALoRAError: a parameter that llama.cpp does not have, or that float16 cannot hold.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture.name)
    try:
        _add_header(writer, architecture, vocabulary, precision, name, chat_template)
        names = dict(_named(architecture, weights))
        extra = dict(architecture.additional())
        tensors = {file_name: weights[source] for source, file_name in names.items()} | extra
        for file_name, tensor in tensors.items():
            kind = _kind(tensor, precision)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data_type: Any = "float32"  # any but uint8, which would be taken for a quantised shape
            writer.add_tensor_info(file_name, list(tensor.shape), data_type, tensor.numel() // block * size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        sources = {file_name: source for source, file_name in names.items()}
        for done, (file_name, tensor) in enumerate(tensors.items(), 1):
            kind = _kind(tensor, precision)
            # Changed in the precision of the model, or in float32 where a number is added.
            changed = architecture.changed(sources.get(file_name, ""), tensor.detach().cpu())
            values = changed.float().contiguous()
            if kind == gguf.GGMLQuantizationType.F16 and values.abs().max() > _LARGEST_F16:
                raise NALoRAError(
                    sources.get(file_name, file_name),
                    found=f"a weight of {values.abs().max():.3g}",
                    expected=f"weights up to {_LARGEST_F16}, which float16 can hold",
                    fix="give --precision bf16 or f32",
                )
            writer.write_tensor_data(gguf.quantize(values.numpy(), kind))
            report("tensors", done, len(tensors))
    finally:
        writer.close()


def _add_header(
    writer: Any, architecture: Architecture, vocabulary: Vocabulary, precision: str, name: str, template: str | None
) -> None:
    import gguf

    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILES[precision]])
    for setting, value in architecture.settings().items():
        value = gguf.RopeScalingType(value) if setting == "rope_scaling_type" else value
        getattr(writer, f"add_{setting}")(value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "gpt2":
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    for special, token in vocabulary.special.items():
        getattr(writer, f"add_{special}_token_id")(token)
    writer.add_add_bos_token(vocabulary.adds["bos"])
    writer.add_add_eos_token(vocabulary.adds["eos"])
    if template:
        writer.add_chat_template(template)


def _named(architecture: Architecture, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that are written, with their names in the file; a tied head has the embedding's memory."""
    name_in_file = architecture.tensor_names()
    written: set[tuple[int, torch.Size]] = set()
    for source, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place in written:
            continue
        written.add(place)
        if file_name := name_in_file(source):
            yield source, file_name


def _kind(tensor: Tensor, precision: str) -> Any:
    """Return gguf's type for a tensor."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if tensor.ndim < 2:
        return kinds.F32
    kind = kinds[_TENSORS[precision]]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if tensor.shape[-1] % block == 0 else kinds.F16
