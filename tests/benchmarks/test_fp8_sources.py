"""The rounding of benchmarks/fp8_sources.py is that of an FP8 base, and each of its parts can be switched off."""

from __future__ import annotations

import copy

import agreement
import fp8_sources
import pytest
import tiny
import torch
from fp8_gradients import loss_and_gradients

import nalora

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def models():
    return tiny.llama(torch.float32, ffn=64), [tiny.tokens()]


def difference(models, rounding):
    model, batches = models
    reference = loss_and_gradients(model, batches)
    with fp8_sources.rounded(model, rounding):
        result = agreement.compare(loss_and_gradients(model, batches), reference)
    assert agreement.compare(loss_and_gradients(model, batches), reference).gradient_error == 0
    return result


def test_rounding_all_three_is_what_an_fp8_base_does(models):
    model, batches = models
    fused = copy.deepcopy(model)
    nalora.fuse(fused, base="fp8")
    with fp8_sources.rounded(model, fp8_sources.VARIANTS["all three"]):
        ours = loss_and_gradients(model, batches)
    reference = loss_and_gradients(model, batches)
    ours, fused = (agreement.compare(each, reference) for each in (ours, loss_and_gradients(fused, batches)))
    assert ours.gradient_error == pytest.approx(fused.gradient_error, rel=0.3)
    assert ours.loss_difference == pytest.approx(fused.loss_difference, rel=0.5, abs=1e-4)


def test_each_part_alone_changes_less_than_all_three(models):
    errors = {name: difference(models, rounding) for name, rounding in fp8_sources.VARIANTS.items() if "4" not in name}
    alone = [errors[name].gradient_error for name in errors if "alone" in name]
    assert all(0 < error < errors["all three"].gradient_error for error in alone)
    assert errors["output gradients alone"].loss_difference == 0  # forward is exact
    assert difference(models, fp8_sources.Rounding()).gradient_error == pytest.approx(0, abs=1e-6)


def test_scales_per_block_are_finer():
    x = torch.randn(3, 2 * fp8_sources.BLOCK) * torch.tensor([1.0, 1e6]).repeat_interleave(fp8_sources.BLOCK)
    coarse, fine = (function(x)[:, : fp8_sources.BLOCK] for function in (fp8_sources.by_row, fp8_sources.by_block))
    exact = x[:, : fp8_sources.BLOCK]
    assert (fine - exact).norm() < 0.1 * (coarse - exact).norm()
