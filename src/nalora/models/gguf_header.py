"""The header of a GGUF file: what it says of the model and its tokenizer, and whether the file is complete.

The `gguf` package's own reader needs 18 s for the 262,144 tokens of Gemma 3; lists are skipped here, which takes less
than a second.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nalora.errors import NALoRAError, missing_path, unusable

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _LIST = 8, 9
# The struct format of each kind of number; 8 is a string and 9 a list.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32


@dataclass(frozen=True)
class Header:
    """Single values by key (lists are left out), the number of weights, and the size that the file should have."""

    values: dict[str, Any]
    weights: int
    size: int

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as ``bos`` or ``eot``; None where the header has none."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.values.get("general.architecture", "unknown"))

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template."""
        value = self.values.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def adds(self, token: str) -> bool | None:
        """Whether ``bos`` or ``eos`` is added to every text; None where neither the file nor llama.cpp decides it.

        Files without the key follow llama.cpp: a SentencePiece tokenizer adds BOS, T5's adds EOS.
        """
        value = self.values.get(f"tokenizer.ggml.add_{token}_token")
        if isinstance(value, bool):
            return value
        usual = {"llama": {"bos": True, "eos": False}, "t5": {"bos": False, "eos": True}}
        return usual.get(str(self.values.get("tokenizer.ggml.model")), {}).get(token)


def read_header(path: Path) -> Header:
    """The header of a file whose weights are all there.

    Raises:
        NALoRAError: no such file, no GGUF file, one that ends too early, or one part of several.
    """
    if not path.is_file():
        raise missing_path("file", path, "a GGUF file", "check the path, or give a folder or hub id")
    there = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = _parsed(_Reader(file, there), path)
    except OSError as error:
        raise unusable(path, "read", error, "a file that can be read", "check its permissions") from error
    except _EndsError:
        raise _truncated(path, f"{there:,} bytes, which end inside the header") from None
    if there < header.size:
        raise _truncated(path, f"{there:,} of {header.size:,} bytes")
    if isinstance(parts := header.values.get("split.count"), int) and parts > 1:
        raise NALoRAError(
            str(path),
            found=f"one of {parts} parts of a model",
            expected="a model in one GGUF file",
            fix="join the parts with llama.cpp's `llama-gguf-split --merge`",
        )
    return header


class _EndsError(Exception):
    """The file ends before what is read."""


class _Reader:
    """Reads little-endian values, and never more than the file holds."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.left = file, size

    def take(self, count: int) -> bytes:
        if count > self.left:  # before reading: a damaged length may be larger than the memory
            raise _EndsError
        self.left -= count
        return self.file.read(count)

    def skip(self, count: int) -> None:
        if count > self.left:
            raise _EndsError
        self.left -= count
        self.file.seek(count, 1)

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))
        return value

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A single value; None for a list, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _LIST:
            raise _EndsError  # no kind that GGUF has: nothing behind it can be read
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise _EndsError  # lists of lists are not part of the format
        return None


def _parsed(reader: _Reader, path: Path) -> Header:
    start = reader.left
    magic = reader.take(4)
    version = reader.number("I") if magic == _MAGIC else None
    if version not in _VERSIONS:
        raise NALoRAError(
            str(path),
            found="no GGUF file" if version is None else f"GGUF version {version}, or one for a big-endian machine",
            expected=f"a little-endian GGUF file of version {' or '.join(map(str, _VERSIONS))}",
            fix="fetch the file again, or convert it with llama.cpp",
        )
    tensors, count = reader.number("Q"), reader.number("Q")
    values: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string()
        value = reader.value(reader.number("I"))
        if value is not None:
            values[key] = value
    weights = end = 0
    for _ in range(tensors):
        reader.string()
        elements = 1
        for _ in range(reader.number("I")):
            elements *= reader.number("Q")
        kind, offset = reader.number("I"), reader.number("Q")
        weights += elements
        end = max(end, offset + _bytes_of(elements, kind))
    alignment = values.get("general.alignment")
    if not isinstance(alignment, int) or alignment < 1:
        alignment = _ALIGNMENT
    header = start - reader.left
    return Header(values, weights, -(-header // alignment) * alignment + end if end else header)


def _bytes_of(elements: int, kind: int) -> int:
    """The size of a tensor; 0 for a kind that the installed `gguf` does not know, which transformers then refuses."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes: dict[int, tuple[int, int]] = {int(known): size for known, size in GGML_QUANT_SIZES.items()}
    block, size = sizes.get(kind, (1, 0))
    return elements // block * size


def _truncated(path: Path, found: str) -> NALoRAError:
    return NALoRAError(
        str(path), found=f"a truncated GGUF file ({found})", expected="the whole file", fix="fetch the file again"
    )
