"""Kernels belong to the part of a step that their names and operators say; tiles of a sweep compute the same."""

from __future__ import annotations

import harness
import kernel_groups
import profile_step
import pytest
import rank_tiles
import torch

from nalora.kernels.statistics.triton_engine import Tile

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
KERNELS = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matrix products",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm": "matrix products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "liger_cross_entropy_kernel": "loss",
    "_fl_forward_kernel": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>": "loss",
    "_rms_norm_forward_kernel": "norms",
    "_block_rms_norm_backward_kernel": "norms",
    "_rms_layernorm_forward": "norms",
    f"{ELEMENTWISE}rsqrt_kernel_cuda": "norms",
    "_triton_rope": "rope",
    "_rope_embedding_QK": "rope",
    f"{ELEMENTWISE}CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >": "residual adds",
    "_forward_kernel": "activation and gate",
    "_backward_kernel": "activation and gate",
    "_swiglu_fwd_kernel": "activation and gate",
    "_DWf_DW_dfg_kernel": "activation and gate",
    f"{ELEMENTWISE}silu_kernel": "activation and gate",
    "_accumulate": "NA-LoRA's statistics",
    "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>": "four-bit dequantisation",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor": "optimizer",
    "Memcpy DtoD (Device -> Device)": "casts and copies",
    f"{ELEMENTWISE}bfloat16_copy_kernel_cuda": "casts and copies",
    "triton_red_fused_add_mul_2": "compiled, several parts",
    "void at::native::vectorized_gather_kernel<16, long>": "other",
}


@pytest.mark.parametrize(("kernel", "group"), KERNELS.items())
def test_group_of_a_kernel(kernel, group):
    assert kernel_groups.group_of(kernel) == group


def test_every_group_of_the_table_is_tested():
    reached = set(KERNELS.values()) | {"clipping", "FP8 quantisation", "elementwise products"}
    assert reached == {*kernel_groups.GROUPS, kernel_groups.OTHER}


def test_operators_decide_before_names():
    reduction = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float"
    assert kernel_groups.group_of(reduction) == "other"
    assert kernel_groups.group_of(reduction, ("aten::linalg_vector_norm", "clip_grad_norm_")) == "clipping"
    assert kernel_groups.group_of(reduction, ("aten::add_", "Optimizer.step#AdamW.step")) == "optimizer"


@pytest.mark.parametrize(("dimension", "rank", "group"), [
    (8, 8, "LoRA products"), (24, 8, "LoRA products"), (1024, 8, "matrix products"), (128, 128, "LoRA products"),
    (None, 8, "matrix products"),
])  # fmt: skip
def test_products_of_adapters_are_told_by_their_rank(dimension, rank, group):
    assert kernel_groups.group_of("nvjet_tst_64x8", ("aten::mm",), dimension, rank) == group


def test_times_by_group():
    kernels = [
        profile_step.Kernel("nvjet_a", 0, 10, ("aten::mm",), 4096),
        profile_step.Kernel("nvjet_b", 10, 12, ("aten::mm",), 8),
        profile_step.Kernel("_forward_kernel", 20, 25), profile_step.Kernel("strange", 24, 27),
    ]  # fmt: skip
    times, counts, unknown = profile_step.by_group(kernels, rank=8)
    assert times == {"matrix products": 10, "LoRA products": 2, "activation and gate": 5, "other": 3}
    assert counts["LoRA products"] == 1
    assert unknown == {"strange": 3}
    # The last two overlap by one: 12 + 7 of 27 microseconds.
    assert profile_step.union(sorted((kernel.start, kernel.end) for kernel in kernels)) == 19


def test_tiles_are_swept_through_the_modules_functions(monkeypatch):
    narrow, wide = Tile(16, 32, 2, 2), Tile(32, 64, 4, 3)
    monkeypatch.setattr(rank_tiles, "tiles", lambda: [narrow, wide])
    monkeypatch.setattr(rank_tiles, "milliseconds", lambda run: {"p50": 1.0})
    case = rank_tiles.Case(8, 40, 128, "cpu", torch.float32)
    before = rank_tiles.gated.tile_of
    # A forward program of 32 channels would write beyond the slots of the counts.
    assert [*rank_tiles.sweep(case, "forward", harness.TimeLimit(None))][1:] == [wide]
    assert [*rank_tiles.sweep(case, "backward", harness.TimeLimit(None))][1:] == [narrow, wide]
    assert rank_tiles.gated.tile_of is before


def test_a_tile_with_another_result_is_left_out(monkeypatch, capsys):
    other = Tile(32, 64, 4, 3)
    monkeypatch.setattr(rank_tiles, "tiles", lambda: [other])
    case = rank_tiles.Case(8, 32, 64, "cpu", torch.float32)
    plain = case.forward
    monkeypatch.setattr(
        case, "forward", lambda: [h * (1 + (other == rank_tiles.gated.tile_of("forward", 8))) for h in plain()]
    )
    assert other not in rank_tiles.sweep(case, "forward", harness.TimeLimit(None), timed=False)
    assert "another result" in capsys.readouterr().out
