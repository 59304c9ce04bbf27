"""Kernels of Unsloth and Axolotl on the same model, from a folder that prepare_peers.py fills and git ignores.

Both projects patch a model when they load it, and load it with packages that a benchmark need not have. Their kernels
are functions of a block (`self`) and its input, which are called here from the forward of a Llama's own classes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patches
import torch
from transformers.models.llama import modeling_llama as llama

# The options Unsloth compiles decoder layers with; its default with torch 2.11 and later.
UNSLOTH_COMPILE = {"epilogue_fusion": True, "shape_padding": True, "triton.cudagraphs": False}
Kernels = types.SimpleNamespace


def load(folder: Path | None, *, interpreted: bool = False) -> tuple[Kernels, dict[str, str]]:
    """Import the peers' kernels; return those that are there and, for each missing one, why.

    Args:
        folder: appended to the import path, so that installed packages precede it.
        interpreted: whether Triton's interpreter runs the kernels on the CPU.
    """
    if folder is not None:
        sys.path.append(str(folder))
    if interpreted:
        os.environ["UNSLOTH_ALLOW_CPU"] = "1"
        # Launchers select the CUDA device of their tensors.
        torch.cuda.device = lambda *_: contextlib.nullcontext()
    sources: dict[str, Callable[[], Any]] = {
        "liger": _liger, "unsloth": _unsloth, "axolotl": lambda: _axolotl(interpreted), "bitsandbytes": _bitsandbytes
    }  # fmt: skip
    kernels, missing = Kernels(), {}
    for name, source in sources.items():
        try:
            setattr(kernels, name, source())
        # Whatever a foreign module raises at import is a reason to go on without it, and to say so.
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if not patches.has_torch_loss():
        missing["linear_cross_entropy"] = f"torch {torch.__version__} has no nn.functional.linear_cross_entropy"
    return kernels, missing


def _liger() -> Any:
    import liger_kernel.transformers

    return liger_kernel.transformers


def _bitsandbytes() -> Any:
    import bitsandbytes

    return bitsandbytes


def _unsloth() -> Kernels:
    from unsloth.kernels import fast_lora, rms_layernorm, rope_embedding
    from unsloth_zoo.fused_losses.cross_entropy_loss import unsloth_fused_ce_loss

    return Kernels(
        ffn=fast_lora.apply_lora_mlp_swiglu, qkv=fast_lora.apply_lora_qkv, output=fast_lora.apply_lora_o,
        norm=rms_layernorm.fast_rms_layernorm, rope=rope_embedding.fast_rope_embedding, loss=unsloth_fused_ce_loss,
    )  # fmt: skip


def _axolotl(interpreted: bool) -> Kernels:
    with _bitsandbytes_or_stand_in():
        from axolotl.kernels import lora, swiglu
    if interpreted:
        # Its forward allocates with device="cuda" by name.
        swiglu.torch = _TorchOnCPU()
    return Kernels(ffn=lora.apply_lora_mlp_swiglu, qkv=lora.apply_lora_qkv, output=lora.apply_lora_o)


class _TorchOnCPU:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes, device=None, **options) -> torch.Tensor:
        return torch.empty(*sizes, **options)


@contextlib.contextmanager
def _bitsandbytes_or_stand_in() -> Iterator[None]:
    """Let Axolotl's modules be imported without bitsandbytes, whose functions they name and a bf16 base never calls."""
    try:
        import bitsandbytes.functional  # noqa: F401
    except ImportError:
        package, functional = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.functional")
        names = ("cdequantize_blockwise_fp32", "cdequantize_blockwise_fp16_nf4", "cdequantize_blockwise_bf16_nf4")
        functional.lib = Kernels(**dict.fromkeys(names))
        functional.QuantState, functional.get_ptr, package.functional = type("QuantState", (), {}), None, functional
        sys.modules |= {"bitsandbytes": package, "bitsandbytes.functional": functional}
        try:
            yield
        finally:
            del sys.modules["bitsandbytes"], sys.modules["bitsandbytes.functional"]
    else:
        yield


def attention(kernels: Kernels) -> Callable[..., Any]:
    """Return LlamaAttention's forward with a peer's projections; the attention itself is transformers'."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **options):
        shape = hidden_states.shape[:-1]
        heads = (each.view(*shape, -1, self.head_dim).transpose(1, 2) for each in kernels.qkv(self, hidden_states))
        query, key, value = heads
        query, key = llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        implementation = self.config._attn_implementation
        attend = llama.ALL_ATTENTION_FUNCTIONS.get_interface(implementation, llama.eager_attention_forward)
        result, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **options
        )  # fmt: skip
        return kernels.output(self, result.reshape(*shape, -1).contiguous()), weights

    return forward


@contextlib.contextmanager
def lora_kernels(model: torch.nn.Module, kernels: Kernels) -> Iterator[None]:
    """Compute FFNs and projections by a peer's LoRA kernels."""
    with patches.contained(model):
        llama.LlamaMLP.forward = lambda self, x: kernels.ffn(self, x)
        llama.LlamaAttention.forward = attention(kernels)
        yield


@contextlib.contextmanager
def unsloth(model: torch.nn.Module, kernels: Kernels, *, compiled: bool = False) -> Iterator[None]:
    """Use Unsloth's LoRA kernels, norms, rotary embedding and loss, with `compiled` in compiled decoder layers."""

    def layer(self, hidden_states, **options):
        # As Unsloth trains: the norm's output is kept for the LoRA kernels, its gradient is written in place.
        def normed(norm):
            return kernels.norm(norm, hidden_states, save_output=True, reuse_grad=True)

        attended, _ = self.self_attn(hidden_states=normed(self.input_layernorm), **options)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(normed(self.post_attention_layernorm))

    def loss(hidden, weight, labels):
        return kernels.loss(
            trainer=None, hidden_states=hidden, lm_head_weight=weight, lm_head_bias=None, labels=labels,
            logit_softcapping=0, logit_scale_multiply=0, logit_scale_divide=0,
        )  # fmt: skip

    with lora_kernels(model, kernels), patches.contained(model) as causal:
        # All sequences of a batch have the same positions: one row of cosines and sines serves all.
        llama.apply_rotary_pos_emb = lambda q, k, cos, sin, **_: kernels.rope(q, k, cos[0], sin[0])
        llama.LlamaRMSNorm.forward = lambda self, x: kernels.norm(self, x)
        llama.LlamaDecoderLayer.forward = layer
        patches.loss_from_hidden_states(causal, loss)
        with patches.compiled_layers(model, UNSLOTH_COMPILE) if compiled else contextlib.nullcontext():
            yield
