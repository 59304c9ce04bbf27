"""Variants leave nothing of theirs behind, compute what PEFT computes, and are not timed if they do not."""

from __future__ import annotations

import contextlib

import agreement
import patches
import peers
import pytest
import torch
import training_step
import variants
from transformers.models.llama import modeling_llama as llama

from nalora.control import fused_model
from nalora.kernels.statistics import engines


def state_of(model):
    """Everything a library replaces: names of the module, forwards of its classes, attributes of the modules."""
    names = {name: value for name, value in vars(llama).items() if not name.startswith("__")}
    classes = {name: vars(kind).get("forward") for name, kind in names.items() if isinstance(kind, type)}
    return names, classes, {name: dict(vars(module)) for name, module in model.named_modules()}


def test_nothing_of_liger_is_left(training):
    liger = pytest.importorskip("liger_kernel.transformers")
    before, exact = state_of(training.model), agreement.gradients(training)
    norm = training.model.get_base_model().model.norm
    with patches.contained(training.model) as causal:
        liger.apply_liger_kernel_to_llama(model=causal)
        assert llama.apply_rotary_pos_emb is liger.liger_rotary_pos_emb
        assert "forward" in vars(norm)
        assert "forward" in vars(causal)
    assert state_of(training.model) == before
    again = agreement.gradients(training)
    assert again.loss == exact.loss
    assert all(torch.equal(again.by_parameter[name], gradient) for name, gradient in exact.by_parameter.items())


def test_a_failing_variant_is_undone(training):
    before = state_of(training.model)

    def fail():
        with patches.contained(training.model) as causal:
            llama.LlamaMLP.forward = lambda self, x: x
            causal.model.layers[0].mlp.forward = lambda x: x
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert state_of(training.model) == before


@pytest.mark.parametrize("name", ["NA-LoRA, fused LoRA layers", "NA-LoRA, model untouched"])
def test_variants_agree_with_peft(training, name):
    before = state_of(training.model)
    variant = variants.of_plain_base(training, peers.Kernels())[name]
    reference = agreement.gradients(training)
    _, result = agreement.check(training, variant.enter, reference)
    assert result.beyond(agreement.TOLERANCES["float32"]) is None
    assert state_of(training.model)[:2] == before[:2]


def test_torchs_loss_agrees(training):
    if not patches.has_torch_loss():
        pytest.skip("this PyTorch has no linear_cross_entropy")
    reference = agreement.gradients(training)
    enter = training.within(lambda: patches.torch_loss(training.model))
    _, result = agreement.check(training, enter, reference)
    assert result.beyond(agreement.TOLERANCES["float32"]) is None


def test_a_wrong_gradient_in_one_layer_is_found(training):
    reference = agreement.gradients(training)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"
    wrong = reference.by_parameter | {name: -reference.by_parameter[name]}
    result = agreement.compare(agreement.Gradients(reference.loss, wrong), reference)
    assert result.worst_layer == "model.layers.1.mlp.up_proj"
    assert "gradients differ" in result.beyond(agreement.TOLERANCES["fp8"]._replace(gradients=1e-3))
    missing = {other: gradient for other, gradient in wrong.items() if other != name}
    incomplete = agreement.compare(agreement.Gradients(reference.loss, missing), reference)
    assert incomplete.beyond(agreement.TOLERANCES["fp8"]) is not None


def test_a_variant_that_disagrees_is_not_timed(tiny_step, monkeypatch, capsys):
    name, made = "NA-LoRA, model untouched", variants.of_plain_base

    def doubled(training, kernels):
        @contextlib.contextmanager
        def patch():
            with patches.contained(training.model) as causal:
                mlp = causal.model.layers[0].mlp
                plain = mlp.forward
                mlp.forward = lambda x: 2 * plain(x)
                yield

        found = made(training, kernels)
        return found | {name: found[name]._replace(enter=training.within(patch))}

    monkeypatch.setattr(variants, "of_plain_base", doubled)
    args = tiny_step(name)
    training_step.run(args)
    rows = {row["variant"]: row for row in training_step.harness.read(args.rows)}
    assert rows[name]["note"].startswith("not timed: ")
    assert rows[name]["p50"] == ""
    assert rows["PEFT LoRA"]["p50"] != ""


def test_missing_peers_are_reported(tiny_step, capsys):
    args = tiny_step("Unsloth", "NA-LoRA, model untouched")
    training_step.run(args)
    rows = {row["variant"]: row for row in training_step.harness.read(args.rows)}
    assert rows["Unsloth"]["note"].startswith("missing: ModuleNotFoundError")
    assert "missing: unsloth" in capsys.readouterr().out
    assert float(rows["NA-LoRA, model untouched"]["worst_cosine"]) == 1.0


@pytest.mark.skipif(not engines.can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_fused_compiled_and_fp8_layers_are_rows_of_one_run(tiny_step):
    names = [
        "nalora.fuse", "nalora.fuse, compiled layers", "nalora.fuse, FP8 base",
        "nalora.fuse, compiled layers, FP8 base",
        "NA-LoRA, fused LoRA layers", "NA-LoRA, fused LoRA layers, FP8 base", "PEFT LoRA, compiled layers",
    ]  # fmt: skip
    args = tiny_step(*names, no_compiled=False, no_fp8=False)
    training_step.run(args)
    rows = training_step.harness.read(args.rows)
    assert {row["variant"] for row in rows if row["p50"]} == {variants.BASELINE, *names}
    assert len({row["run"] for row in rows}) == 1
    errors = {row["variant"]: float(row["gradient_error"]) for row in rows if row["variant"] in names}
    assert all(error < 1e-5 for name, error in errors.items() if "FP8" not in name)
    assert all(1e-3 < error < 0.2 for name, error in errors.items() if "FP8" in name)


@pytest.mark.skipif(not engines.can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_compiled_layers_are_undone(training):
    before = state_of(training.model)
    variant = variants.of_plain_base(training, peers.Kernels())["nalora.fuse, compiled layers"]
    assert variant.compiled
    with variant.enter() as step:
        assert nalora_layers(training).compiles_layers
        step()
    assert state_of(training.model)[:2] == before[:2]
    assert nalora_layers(training) is None


def nalora_layers(training):
    return fused_model.fused_layers(training.model)
