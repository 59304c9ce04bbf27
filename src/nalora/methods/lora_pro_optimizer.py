"""LoRA-Pro's full mode: Adam's moments of the gradient that W follows, projected back onto A and B at every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nalora.distributed.shards import all_rows, local, local_rows, shard_like, sum_over_shards, zeros_like_shards
from nalora.methods.lora_pro_equations import equivalent_gradient, gradients_of_factors
from nalora.methods.lora_pro_stacks import Pair, Stack, stacks

# Elements of the m × n directions that are formed at once: 256 MiB in float32, whatever the model.
STACK_ELEMENTS = 2**26


class LoRAProAdamW(Optimizer):
    """AdamW on W's share that A and B can follow.

    One step of a module: Ĝ = s·B·g_A* + s·g_B*·A enters Adam's moments, m × n each; D is Adam's direction; with
    g_A = s·Bᵀ·D and g_B = s·D·Aᵀ in place of the gradients the same equations give the step, A ← A − lr·g_A* and
    B ← B − lr·g_B*. The learning rate is therefore that of a step of W, as in full fine-tuning. Weight decay is
    decoupled, on A and B. The moments take 2·m·n numbers per module, as much as full fine-tuning's.

    Where FSDP2 has dealt out A and B, the moments are dealt out as B is: a process has its rows of them, and D enters
    g_A as a sum over processes.

    Everything that a copy or a checkpoint needs is in `param_groups` and `state`.

    Args:
        pairs: A, B and s of every module.
        others: parameter groups that AdamW steps as usual.
        lr: learning rate.
        betas: Adam's.
        eps: Adam's ε.
        weight_decay: of A and B; other groups may say their own.
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
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            step = self._step_others if group["scalings"] is None else self._step_pairs
            step(group)
        return loss

    def _step_pairs(self, group: dict[str, Any]) -> None:
        """Modules that were left out of some step have a count of their own, and so a bias correction."""
        factors = group["params"]
        by_count: dict[int, list[Pair]] = defaultdict(list)
        for A, B, scaling in zip(factors[::2], factors[1::2], group["scalings"], strict=True):
            if A.grad is not None and B.grad is not None:
                state = self._state(A, B, A.shape[1])
                by_count[state["step"]].append(Pair(A, B, scaling))
        for alike in by_count.values():
            for stack in stacks(alike, STACK_ELEMENTS):
                self._step_stack(stack, group)

    def _step_stack(self, stack: Stack, group: dict[str, Any]) -> None:
        first = stack.pairs[0].B
        g_A, g_B = stack.adjusted(*stack.gradients)
        rows = local_rows(stack.B, first)
        followed = equivalent_gradient(stack.A, rows, g_A, local_rows(g_B, first), stack.scaling)
        self._to_direction([pair.A for pair in stack.pairs], list(followed.unbind()), group)
        for pair in stack.pairs:
            # Nothing reads it; but FSDP's checkpoints are taken for incomplete where a parameter has no state.
            self.state[pair.B]["step"] = self.state[pair.A]["step"]
        of_a, of_b = gradients_of_factors(stack.A, rows, followed, stack.scaling)
        g_A, g_B = stack.adjusted(sum_over_shards(of_a, first), all_rows(of_b, first))
        parameters = [pair.A for pair in stack.pairs] + [pair.B for pair in stack.pairs]
        directions = [shard_like(each, of) for each, of in zip([*g_A.unbind(), *g_B.unbind()], parameters, strict=True)]
        self._move(parameters, directions, group)

    def _step_others(self, group: dict[str, Any]) -> None:
        by_count: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_count[self._state(parameter, parameter)["step"]].append(parameter)
        for alike in by_count.values():
            directions = [local(p.grad).clone() for p in alike if p.grad is not None]
            self._to_direction(alike, directions, group)
            self._move(alike, directions, group)

    def _state(self, owner: Tensor, like: Tensor, columns: int | None = None) -> dict[str, Any]:
        """Of a parameter, or of a pair under its A: moments shaped and dealt out as `like`, with so many columns."""
        state: dict[str, Any] = self.state[owner]
        if not state:
            shape = like.shape if columns is None else (like.shape[0], columns)
            state["step"] = 0
            state["exp_avg"] = zeros_like_shards(shape, like)
            state["exp_avg_sq"] = zeros_like_shards(shape, like)
        return state

    def _to_direction(self, owners: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Let the gradients enter the owners' moments, and write Adam's direction in their place.

        In place, since a second buffer of m × n would be the largest thing that a step allocates.
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
        own = [local(each) for each in parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(own, directions, alpha=-group["lr"])
