"""The exact decomposition of one block's utility mismatch, summed over tokens without keeping tensors of z's size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nalora.activations import Activation
from nalora.diagnostics.measures import token_slices
from nalora.equations import channel_utility, gate_sensitivity, mismatch_bound, mismatch_decomposition

TERMS = ("residual_through_view", "selection_mismatch", "view_mismatch")
# Elements of a slice of tokens: what fits a CPU's cache, and what fills a GPU. A dozen float64 temporaries of a slice
# take 24 MiB and 192 MiB.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 18, 1 << 21


class States(NamedTuple):
    """z and u of the target and of the LoRA run at one block, each [..., width]; u is None where φ(z) has no factor."""

    z_target: Tensor
    u_target: Tensor | None
    z_lora: Tensor
    u_lora: Tensor | None


class MismatchSums:
    """Sums over tokens of eq:exact_selection_decomp and eq:selection_amplification_bound for one block.

    All in float64: two similar models differ in the last digits of float32, and energies are squares of differences.
    (MPS has no float64: there a slice is computed in float32 and added up in float64 on the CPU.)

    Attributes:
        tokens: number of tokens.
        products: Σ of the inner products between the three terms, [3, 3]; energies on the diagonal.
        total: Σ ‖U_tar − U_lora‖², from the utilities themselves and not from the terms.
        actual: Σ ‖U_tar − U_lora‖.
        bound: Σ of the corollary's upper bound on that norm.
        channel_energy: Σ of the squared selection mismatch of each channel.
        derivative: Σ |φ′(z_lora)| of each channel, the paper's statistic.
        utility: Σ |φ′(z_lora)|·|u_lora| of each channel.
        selection: Σ |s′(z_lora)·z_lora|·|u_lora| of each channel, eq:sensitivity_weighted_mismatch without Δz.
    """

    def __init__(self, width: int, activation: Activation, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        on_mps = device.type == "mps"
        self._dtype = torch.float32 if on_mps else torch.float64

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device="cpu" if on_mps else device)

        self.activation, self.tokens = activation, 0
        self.products = zeros(3, 3)
        self.total, self.actual, self.bound = zeros(), zeros(), zeros()
        self.channel_energy, self.derivative = zeros(width), zeros(width)
        self.utility, self.selection = zeros(width), zeros(width)

    @torch.no_grad()
    def add(self, states: States, token_mask: Tensor | None = None) -> None:
        """Add the tokens of one batch; `token_mask` is true for real tokens."""
        # A view without memory: a gate that multiplies nothing has u = 1, so Δu = 0.
        one = torch.ones_like(states.z_lora[..., :1]).expand_as(states.z_lora)
        tensors = [(one if state is None else state).detach() for state in states]
        elements = _CPU_ELEMENTS if states.z_lora.device.type == "cpu" else _GPU_ELEMENTS
        for tokens in token_slices(tensors, token_mask, elements):
            self._add_slice(*(state.to(self._dtype) for state in tokens))

    def _add_slice(self, z_target: Tensor, u_target: Tensor, z_lora: Tensor, u_lora: Tensor) -> None:
        phi, selection = self.activation.phi, self.activation.selection
        terms = mismatch_decomposition(z_target, u_target, z_lora, u_lora, phi=phi, selection=selection)
        difference = channel_utility(phi(z_target), u_target) - channel_utility(phi(z_lora), u_lora)
        squared = difference.square().sum(-1)
        bound = mismatch_bound(z_target, u_target, z_lora, u_lora, phi=phi, selection=selection)
        slope = self.activation.derivative(z_lora)
        sensitivity = gate_sensitivity(slope)
        # φ = s·z, so s′·z = φ′ − s.
        deciding = (slope - selection(z_lora)).abs()
        flat = torch.stack([term.flatten() for term in terms])
        self.tokens += len(z_lora)
        for total, new in (
            (self.products, flat @ flat.T),
            (self.total, squared.sum()),
            (self.actual, squared.sqrt().sum()),
            (self.bound, bound.sum()),
            (self.channel_energy, terms.selection_mismatch.square().sum(0)),
            (self.derivative, sensitivity.sum(0)),
            (self.utility, (sensitivity * u_lora.abs()).sum(0)),
            (self.selection, (deciding * u_lora.abs()).sum(0)),
        ):
            total.add_(new.to(total.device).to(total.dtype))  # in this order: MPS cannot convert to float64
