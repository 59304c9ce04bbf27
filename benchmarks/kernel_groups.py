"""Which part of a training step a GPU kernel belongs to, by its name and by the operator that launched it."""

from __future__ import annotations

import re

PRODUCTS, LORA, OTHER = "matrix products", "LoRA products", "other"
# In the order in which they are tried: a name of two groups belongs to the first. Patterns are searched in lower case.
GROUPS = {
    "attention": r"flash|fmha|attention|sdpa",
    "loss": r"cross_?entropy|nll_loss|log_?softmax|softmax|_ce_loss|logprob|logsumexp|^_fl_",
    "norms": r"rms_?(layer)?norm|layer_?norm|_rms_|rsqrt|pow_tensor|meanops",
    "rope": r"rope|rotary|neg_kernel|negfunctor|catarray",
    "clipping": r"lpnorm|normfunctor|normops",
    "optimizer": r"adam",
    "activation and gate": r"swiglu|geglu|gelu|silu|_fg_kernel|dwf_dw|sigmoid|^_(forward|backward)_kernel",
    "NA-LoRA's statistics": r"^_?(accumulate|statistics|sums|by_expert)",
    "four-bit dequantisation": r"dequant|nf4",
    "FP8 quantisation": r"quantis|quantiz|to_fp8|fp8_(cast|scale|transpose)|amax",
    PRODUCTS: r"gemm|gemv|nvjet|cutlass|cublas|matmul|splitkreduce|wgmma|xmma|scaled_mm",
    "casts and copies": r"copy|memcpy|memset|cast|fill|transpose|convert",
    "residual adds": r"functor_?add|addfunctor|add_kernel",
    "elementwise products": r"mulfunctor|multiplies|functor_?mul",
    # What torch.compile fuses is named after all operators inside.
    "compiled, several parts": r"^triton_",
}
# Kernels of one name can serve several parts: these operators and ranges around the launch decide before the name.
OPERATORS = {
    "attention": r"scaled_dot_product|_flash_attention|_efficient_attention|cudnn_attention",
    "loss": r"cross_entropy|nll_loss|log_softmax",
    "clipping": r"clip_grad",
    "optimizer": r"_fused_adam|optimizer\.step",
    "casts and copies": r"_foreach_(copy|mul)",
}
_GROUPS = {group: re.compile(pattern) for group, pattern in GROUPS.items()}
_OPERATORS = {group: re.compile(pattern) for group, pattern in OPERATORS.items()}


def group_of(kernel: str, operators: tuple[str, ...] = (), smallest_dimension: int | None = None, rank: int = 0) -> str:
    """Return the part of the step that a kernel belongs to.

    Args:
        kernel: its name as the profiler reports it.
        operators: names of the operators and ranges around its launch, innermost first.
        smallest_dimension: the smallest dimension of the operator's matrices, where they are known.
        rank: the adapters' rank. A matrix product with a dimension of at most three ranks is one of an adapter: the
            fused layers stack up to three adapters that have the same input.
    """
    names = [operator.lower() for operator in operators]
    for group, pattern in _OPERATORS.items():
        if any(pattern.search(name) for name in names):
            return group
    name = kernel.lower()
    for group, pattern in _GROUPS.items():
        if pattern.search(name):
            is_adapter = smallest_dimension is not None and smallest_dimension <= 3 * rank
            return LORA if group == PRODUCTS and is_adapter else group
    return OTHER
