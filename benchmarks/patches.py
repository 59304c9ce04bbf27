"""Kernels of libraries in place of a Llama's own, for the length of a context; nothing of them reaches another variant.

Libraries replace functions of `modeling_llama`, the `forward` of its classes and attributes of a model's modules, and
none undoes it. `contained` undoes all three, so that one model serves every variant of a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama as llama

from nalora.training.accelerations import liger_contained


@contextlib.contextmanager
def contained(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Undo at the end what was replaced in `modeling_llama`, its classes and the modules of this model.

    `liger_contained` undoes the replacement in the module and its classes. A training run discards its model and needs
    no more; here the next variant uses the same model, whose norms Liger has changed one by one.
    """
    causal = model.get_base_model()
    before = {module: dict(vars(module)) for module in model.modules()}
    with liger_contained(causal):
        try:
            yield causal
        finally:
            for module, attributes in before.items():
                for name in [name for name in vars(module) if name not in attributes]:
                    del vars(module)[name]
                vars(module).update(attributes)


@contextlib.contextmanager
def liger(model: torch.nn.Module, *, loss: bool = True, ffn: bool = True) -> Iterator[None]:
    """Use Liger's norms and rotary embedding, with `loss` its fused loss, with `ffn` its activation product."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    # Triton's interpreter cannot run these two kernels of Liger: it passes a Python float where they call .to().
    interpreted = next(model.parameters()).device.type == "cpu"
    with contained(model) as causal:
        apply_liger_kernel_to_llama(
            model=causal, fused_linear_cross_entropy=loss, cross_entropy=False,
            swiglu=ffn and not interpreted, rms_norm=not interpreted,
        )  # fmt: skip
        yield


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """Prefer cuDNN's attention to the flash attention that PyTorch chooses by default."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        yield


@contextlib.contextmanager
def compiled_layers(model: torch.nn.Module, options: dict[str, bool] | None = None) -> Iterator[None]:
    """Compile every decoder layer, each as its own region; the layers share one compiled function."""
    with contained(model):
        torch._dynamo.reset()
        # One recompilation a layer would reach the default limit of 8 and fall back to eager without a word.
        with torch._dynamo.config.patch(recompile_limit=64):
            llama.LlamaDecoderLayer.forward = torch.compile(llama.LlamaDecoderLayer.forward, options=options)
            yield
        torch._dynamo.reset()


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_from_hidden_states(causal: torch.nn.Module, loss: Loss) -> None:
    """Compute the model's loss as loss(hidden states, output weight, labels), without its logits."""

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **options) -> CausalLMOutputWithPast:
        hidden = causal.model(input_ids=input_ids, **options).last_hidden_state
        return CausalLMOutputWithPast(loss=loss(hidden, causal.lm_head.weight, labels))

    causal.forward = forward


def has_torch_loss() -> bool:
    """Return whether this PyTorch has `linear_cross_entropy`: 2.13 has, 2.11 does not."""
    return hasattr(torch.nn.functional, "linear_cross_entropy")


@contextlib.contextmanager
def torch_loss(model: torch.nn.Module) -> Iterator[None]:
    """Use PyTorch's chunked loss, which keeps no tensor of tokens × vocabulary."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        following = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return torch.nn.functional.linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype), weight, following, ignore_index=-100,
            options=torch.nn.LinearCrossEntropyOptions(),
        )  # fmt: skip

    with contained(model) as causal:
        loss_from_hidden_states(causal, loss)
        yield
