"""A and B of many modules as few tensors: what LoRA-Pro computes for all modules of one shape at once.

The equations mix all rows of A and of B. Where FSDP2 has dealt them out, stacks hold them whole on every process,
r·(m+n) numbers a module, and a process takes its own share of what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from nalora.distributed.shards import full_tensor
from nalora.errors import NALoRAError
from nalora.methods.lora_pro_equations import Spectrum, adjusted_gradients, gram_of_columns, gram_of_rows, spectrum


@dataclass(frozen=True)
class Pair:
    """One module's A and B, and its LoRA scaling s."""

    A: Tensor
    B: Tensor
    scaling: float

    @property
    def elements(self) -> int:
        """Of the weight that it adapts, m·n."""
        return self.B.shape[0] * self.A.shape[1]


@dataclass(frozen=True)
class Stack:
    """Modules of one shape and scaling; every tensor is a whole copy whose first dimension counts them."""

    pairs: Sequence[Pair]
    scaling: float
    A: Tensor
    B: Tensor
    gradients: tuple[Tensor, Tensor]
    of_b: Spectrum
    of_a: Spectrum

    def adjusted(self, g_A: Tensor, g_B: Tensor) -> tuple[Tensor, Tensor]:
        """(g_A*, g_B*) where the modules now are."""
        return adjusted_gradients(self.A, self.B, g_A, g_B, self.scaling, self.of_b, self.of_a)


def stacks(pairs: Iterable[Pair], elements: int | None = None) -> list[Stack]:
    """All pairs that have gradients; those of a module that was not used in this step are left out.

    Gram matrices are r × r whatever the shape, so all modules of one rank share one eigendecomposition: it is the only
    thing here that waits for the device.

    Args:
        pairs: of all modules.
        elements: of the weights behind one stack, at most; a module with more gets a stack of its own.

    Raises:
        NALoRAError: an A or B that is not finite.
    """
    shapes: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.A.grad is not None and pair.B.grad is not None:
            shapes[pair.A.shape, pair.B.shape, pair.scaling, pair.A.device, pair.A.dtype].append(pair)
    ranks: dict[Hashable, list[list[Pair]]] = defaultdict(list)
    for alike in shapes.values():
        first = alike[0]
        size = len(alike) if elements is None else max(1, elements // first.elements)
        chunks = [alike[i : i + size] for i in range(0, len(alike), size)]
        ranks[first.A.shape[0], first.A.device, first.A.dtype] += chunks
    return [stack for chunks in ranks.values() for stack in _of_one_rank(chunks)]


def _of_one_rank(chunks: list[list[Pair]]) -> list[Stack]:
    factors = [(_stacked([p.A for p in chunk]), _stacked([p.B for p in chunk])) for chunk in chunks]
    grams = [gram_of_columns(B) for _, B in factors] + [gram_of_rows(A) for A, _ in factors]
    try:
        whole = spectrum(torch.cat(grams))
    except LinAlgError as error:
        raise NALoRAError(
            "method 'lora-pro'",
            found="an A or B with numbers that are not finite",
            expected="finite ones, whose Gram matrices have eigenvalues",
            fix="lower the learning rate, or look for the step whose loss is not finite",
        ) from error
    spectra = _split(whole, [len(gram) for gram in grams])
    return [
        Stack(chunk, chunk[0].scaling, A, B, _gradients(chunk), of_b, of_a)
        for chunk, (A, B), of_b, of_a in zip(
            chunks, factors, spectra[: len(chunks)], spectra[len(chunks) :], strict=True
        )
    ]


def _gradients(chunk: list[Pair]) -> tuple[Tensor, Tensor]:
    of_a = [p.A.grad for p in chunk if p.A.grad is not None]
    of_b = [p.B.grad for p in chunk if p.B.grad is not None]
    return _stacked(of_a), _stacked(of_b)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack([full_tensor(each) for each in tensors])


def _split(whole: Spectrum, sizes: list[int]) -> list[Spectrum]:
    return [Spectrum(*parts) for parts in zip(*(torch.split(each, sizes) for each in whole), strict=True)]
