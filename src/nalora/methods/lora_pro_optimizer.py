"""LoRA-Pro over many modules at once, and its full mode: Adam on the gradient that W follows, projected onto A and B.

The equations mix all rows of A and of B. Where FSDP2 shards them, stacks hold the whole matrices on every process,
r·(m+n) numbers per module, and each process uses its own shard of the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.optim import Optimizer

from nalora.distributed.shards import (
    all_rows,
    full_tensor,
    local,
    local_rows,
    shard_like,
    sum_over_shards,
    zeros_like_shards,
)
from nalora.errors import NALoRAError
from nalora.methods.lora_pro_equations import (
    Spectrum,
    adjusted_gradients,
    equivalent_gradient,
    gradients_of_factors,
    spectrum,
)

# Elements of the m × n directions that are computed at once: 256 MiB in float32, for any model.
STACK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Pair:
    """One module's A and B, and its LoRA scaling s."""

    A: Tensor
    B: Tensor
    scaling: float

    @property
    def gradients(self) -> tuple[Tensor, Tensor] | None:
        """The gradients of A and B; None if the module was not used in this step."""
        return None if self.A.grad is None or self.B.grad is None else (self.A.grad, self.B.grad)


@dataclass(frozen=True)
class Stack:
    """Modules of one shape and scaling, as whole tensors whose first dimension counts the modules."""

    pairs: Sequence[Pair]
    scaling: float
    A: Tensor
    B: Tensor
    gradients: tuple[Tensor, Tensor]
    of_b: Spectrum
    of_a: Spectrum

    def adjusted(self, g_A: Tensor, g_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (g_A*, g_B*) at the current A and B."""
        return adjusted_gradients(self.A, self.B, g_A, g_B, self.scaling, self.of_b, self.of_a)


def stacks(pairs: Iterable[Pair], elements: int | None = None) -> list[Stack]:
    """Return the pairs that have gradients, in stacks of at most `elements` m·n weights (or of one module).

    Gram matrices are r × r for any shape, so all modules of one rank share one eigendecomposition, the only operation
    here that waits for the device. Raises NALoRAError if A or B is not finite.
    """
    shapes: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.gradients is not None:
            shapes[pair.A.shape, pair.B.shape, pair.scaling, pair.A.device, pair.A.dtype].append(pair)
    ranks: dict[Hashable, list[list[Pair]]] = defaultdict(list)
    for same_shape in shapes.values():
        first = same_shape[0]
        weights = first.B.shape[0] * first.A.shape[1]
        size = len(same_shape) if elements is None else max(1, elements // weights)
        chunks = [same_shape[i : i + size] for i in range(0, len(same_shape), size)]
        ranks[first.A.shape[0], first.A.device, first.A.dtype] += chunks
    return [stack for chunks in ranks.values() for stack in _of_one_rank(chunks)]


def _of_one_rank(chunks: list[list[Pair]]) -> list[Stack]:
    factors = [(_stacked(pair.A for pair in chunk), _stacked(pair.B for pair in chunk)) for chunk in chunks]
    grams = [B.mT @ B for _, B in factors] + [A @ A.mT for A, _ in factors]
    try:
        joint = spectrum(torch.cat(grams))
    except LinAlgError as error:
        raise NALoRAError(
            "method 'lora-pro'",
            found="an A or B with numbers that are not finite",
            expected="finite numbers, whose Gram matrices have eigenvalues",
            fix="lower the learning rate, or look for the step whose loss is not finite",
        ) from error
    sizes = [len(gram) for gram in grams]
    spectra = [Spectrum(*parts) for parts in zip(*(torch.split(part, sizes) for part in joint), strict=True)]
    result = []
    for number, (chunk, (A, B)) in enumerate(zip(chunks, factors, strict=True)):
        g_A, g_B = (_stacked(parts) for parts in zip(*(p.gradients for p in chunk if p.gradients), strict=True))
        of_b, of_a = spectra[number], spectra[len(chunks) + number]
        result.append(Stack(chunk, chunk[0].scaling, A, B, (g_A, g_B), of_b, of_a))
    return result


def _stacked(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([full_tensor(tensor) for tensor in tensors])


class LoRAProAdamW(Optimizer):
    """AdamW on the part of W's gradient that A and B can follow.

    One step of a module: Ĝ = s·B·g_A* + s·g_B*·A enters Adam's moments, m × n each; D is Adam's direction; with
    g_A = s·Bᵀ·D and g_B = s·D·Aᵀ as gradients, the same equations give the step, A ← A − lr·g_A* and
    B ← B − lr·g_B*. The learning rate is therefore that of a step of W, as in full fine-tuning. Weight decay is
    decoupled, on A and B. The moments take 2·m·n numbers per module, as in full fine-tuning.

    Where FSDP2 shards A and B, the moments are sharded like B: a process has its rows of them, and g_A is a sum over
    processes. Everything that a copy or a checkpoint needs is in `param_groups` and `state`.

    Args:
        pairs: A, B and s of every module.
        others: parameter groups with ordinary AdamW steps.
        lr: learning rate.
        betas: Adam's β.
        eps: Adam's ε.
        weight_decay: default weight decay; groups in `others` can override it.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        others: Iterable[dict[str, Any]] = (),
        *,
        lr: float = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        factors = {
            "params": [factor for pair in pairs for factor in (pair.A, pair.B)],
            "scalings": [pair.scaling for pair in pairs],
        }
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "scalings": None}
        super().__init__([factors, *others], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            step = self._step_others if group["scalings"] is None else self._step_pairs
            step(group)
        return loss

    def _step_pairs(self, group: dict[str, Any]) -> None:
        """Step modules by their number of steps, since the bias correction depends on it."""
        factors = group["params"]
        by_count: dict[int, list[Pair]] = defaultdict(list)
        for A, B, scaling in zip(factors[::2], factors[1::2], group["scalings"], strict=True):
            pair = Pair(A, B, scaling)
            if pair.gradients is not None:
                by_count[self._state(A, B, A.shape[1])["step"]].append(pair)
        for same_count in by_count.values():
            for stack in stacks(same_count, STACK_ELEMENTS):
                self._step_stack(stack, group)

    def _step_stack(self, stack: Stack, group: dict[str, Any]) -> None:
        first = stack.pairs[0].B
        g_A, g_B = stack.adjusted(*stack.gradients)
        rows = local_rows(stack.B, first)
        followed = equivalent_gradient(stack.A, rows, g_A, local_rows(g_B, first), stack.scaling)
        self._to_direction([pair.A for pair in stack.pairs], list(followed.unbind()), group)
        for pair in stack.pairs:
            # Not read, but FSDP treats checkpoints as incomplete if a parameter has no state.
            self.state[pair.B]["step"] = self.state[pair.A]["step"]
        of_a, of_b = gradients_of_factors(stack.A, rows, followed, stack.scaling)
        g_A, g_B = stack.adjusted(sum_over_shards(of_a, first), all_rows(of_b, first))
        parameters = [pair.A for pair in stack.pairs] + [pair.B for pair in stack.pairs]
        directions = [
            shard_like(new, like) for new, like in zip([*g_A.unbind(), *g_B.unbind()], parameters, strict=True)
        ]
        self._move(parameters, directions, group)

    def _step_others(self, group: dict[str, Any]) -> None:
        by_count: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_count[self._state(parameter, parameter)["step"]].append(parameter)
        for parameters in by_count.values():
            directions = [local(p.grad).clone() for p in parameters if p.grad is not None]
            self._to_direction(parameters, directions, group)
            self._move(parameters, directions, group)

    def _state(self, owner: Tensor, like: Tensor, columns: int | None = None) -> dict[str, Any]:
        """Return the state of a parameter, or of a pair under its A; new moments are shaped and sharded as `like`."""
        state: dict[str, Any] = self.state[owner]
        if not state:
            shape = like.shape if columns is None else (like.shape[0], columns)
            state |= {
                "step": 0,
                "exp_avg": zeros_like_shards(shape, like),
                "exp_avg_sq": zeros_like_shards(shape, like),
            }
        return state

    def _to_direction(self, owners: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Update the owners' moments with the gradients, and overwrite these with Adam's direction.

        In place, because a second m × n buffer would be the largest allocation of a step.
        """
        beta1, beta2 = group["betas"]
        states = [self.state[owner] for owner in owners]
        count = states[0]["step"] + 1
        for state in states:
            state["step"] = count
        means = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        torch._foreach_copy_(gradients, squares)
        torch._foreach_sqrt_(gradients)
        torch._foreach_div_(gradients, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(gradients, group["eps"])
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, means)
        torch._foreach_div_(gradients, 1 - beta1**count)

    def _move(self, parameters: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
        own = [local(parameter) for parameter in parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(own, directions, alpha=-group["lr"])
