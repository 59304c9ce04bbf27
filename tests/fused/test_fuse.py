"""`nalora.fuse`: PEFT's results in any loop, undone completely; with an FP8 base, what it says and refuses."""

from __future__ import annotations

import copy
import io
import logging

import peft
import pytest
import tiny
import torch
import transformers
from torch.optim import AdamW

import nalora
from nalora.control import fused_model
from nalora.kernels.fused import fp8_base, fp8_refusals
from nalora.kernels.fused.foreign import hooks_of
from nalora.kernels.statistics import engines

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def llama(dtype=torch.float32, tied=False, layers=2, **lora):
    """A model whose sizes are multiples of 16, as FP8 products need."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1,
        pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return tiny.with_lora(transformers.LlamaForCausalLM(config).to(dtype), **lora).to(DEVICE)


def batch(seed=0):
    ids = tiny.tokens(seed=seed).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def train(model, steps=4):
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    losses = []
    for step in range(steps):
        for half in range(2):
            loss = model(**batch(2 * step + half)).loss
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(tiny.trainable(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, tiny.adapter_state(model)


def replaced(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("rank", [4, 40])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_training_is_that_of_pefts_layers(rank, checkpointing):
    models = [llama(r=rank) for _ in range(2)]
    for model in models:
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    nalora.fuse(models[1])
    (plain, weights), (fused, fused_weights) = (train(model) for model in models)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert tiny.largest_difference(weights, fused_weights) < 2e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_may_be_stored_transposed(compiled):
    """As an initialisation leaves them that assigns a transposed matrix, or a part of a decomposition."""
    if compiled and not engines.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    model = llama()
    for parameter in tiny.trainable(model):
        parameter.data = parameter.data.T.contiguous().T
    agreement = nalora.fuse(model, compile_layers=compiled).check(batch())
    assert agreement.loss == pytest.approx(agreement.reference_loss, rel=1e-6)
    assert agreement.gradients < 1e-5


def test_ffns_and_groups_are_fused_and_undone():
    model = llama()
    layers = nalora.fuse(model)
    # An FFN and seven linear layers in each of two decoder layers.
    assert len(replaced(model)) == 2 * (1 + 7)
    assert "14 of 14 LoRA layers, 6 of them in 2 FFNs" in str(layers)
    layers.undo()
    assert not replaced(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not hasattr(model, "nalora_layers")
    nalora.fuse(model).undo()


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"lora_dropout": 0.5}, "lora_dropout in training"),
        ({"use_dora": True}, "Dora"),
        ({"lora_bias": True}, "lora_bias"),
    ],
    ids=["dropout", "dora", "bias"],
)
def test_other_layers_are_left_to_peft_and_named(lora, reason):
    model = llama(**lora)
    torch.manual_seed(1)
    expected = model(**batch()).loss
    layers = nalora.fuse(model)
    torch.manual_seed(1)
    assert torch.equal(model(**batch()).loss, expected)
    assert f"left to PEFT: 14 layers: {reason}" in str(layers)


def test_the_check_measures_the_users_own_batch(capsys):
    model = llama()
    model(**batch()).loss.backward()
    before = [p.grad.clone() for p in tiny.trainable(model)]
    layers = nalora.fuse(model)
    agreement = layers.check(batch(1))
    assert agreement.loss == pytest.approx(agreement.reference_loss, rel=1e-6)
    assert agreement.gradients < 1e-5
    assert agreement.lowest_cosine > 0.99999
    assert "PEFT's layers" in capsys.readouterr().out
    assert all(torch.equal(p.grad, b) for p, b in zip(tiny.trainable(model), before, strict=True))
    assert len(replaced(model)) == 16
    with pytest.raises(nalora.NALoRAError, match="add labels"):
        layers.check({"input_ids": batch()["input_ids"]})


def test_the_check_sees_a_wrong_layer(monkeypatch):
    from nalora.kernels.fused import lora_linear

    model = llama()
    layers = nalora.fuse(model)
    exact = lora_linear.scaled_rows
    monkeypatch.setattr(lora_linear, "scaled_rows", lambda stacked, *rest: exact(stacked * 1.5, *rest))
    agreement = layers.check(batch())
    assert agreement.largest == pytest.approx(0.5, abs=0.01)
    assert "lora_A" in agreement.parameter


def test_copies_and_pickles_have_pefts_forward():
    model = llama()
    nalora.fuse(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for parameter in tiny.trainable(other):
            parameter.data.zero_()
        # A copy that ran the original's layers would have its adapters' outputs.
        plain = other.get_base_model() if hasattr(other, "get_base_model") else other
        with other.disable_adapter():
            expected = other(**batch()).loss
        assert torch.allclose(other(**batch()).loss, expected)
        assert plain is not model


def test_arguments_are_checked():
    with pytest.raises(nalora.NALoRAError, match="without LoRA layers"):
        nalora.fuse(torch.nn.Linear(2, 2))
    with pytest.raises(nalora.NALoRAError, match="Module with PEFT"):
        nalora.fuse("model")
    model = llama()
    with pytest.raises(nalora.NALoRAError, match="'keep' or 'fp8'"):
        nalora.fuse(model, base="fp4")
    nalora.fuse(model)
    with pytest.raises(nalora.NALoRAError, match="fused already"):
        nalora.fuse(model)


# ---- with NA-LoRA ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["keep", "fp8"])
def test_na_lora_on_a_fused_model(base):
    """The controller fuses the layers again with its statistics, and gives the fused layers back."""
    model = llama()
    layers = nalora.fuse(model, base=base)
    optimizer = AdamW(tiny.trainable(model), lr=3e-3)
    controller = nalora.attach(model, optimizer, apply_to="update")
    with pytest.raises(nalora.NALoRAError, match="detach"):
        layers.undo()
    model(**batch()).loss.backward()
    optimizer.step()
    assert 0 < controller.metrics()["mask_mean"] <= 1
    assert controller._window.groups[0].tokens.tolist() == [0, 0]  # committed
    controller.detach()
    assert len(replaced(model)) == 16
    hooked = [name for name, module in model.base_model.named_modules() if module._forward_hooks]
    assert all(name.endswith("norm") for name in hooked)  # those of fused layers


def test_an_attach_that_fails_leaves_the_fused_layers():
    model = llama(target_modules=["q_proj", "v_proj"])
    nalora.fuse(model)
    before = replaced(model)
    assert before
    with pytest.raises(nalora.NALoRAError):
        nalora.attach(model, AdamW(tiny.trainable(model)))
    assert replaced(model) == before


# ---- with a base in FP8 ----------------------------------------------------------------------------------------------


def test_an_fp8_base_trains_like_the_plain_one_within_its_rounding():
    plain, fused = llama(), llama()
    layers = nalora.fuse(fused, base="fp8")
    assert "base in FP8: 14 linear layers" in str(layers)
    losses, weights = train(plain)
    fp8_losses, fp8_weights = train(fused)
    assert fp8_losses == pytest.approx(losses, rel=0.02)
    assert fp8_losses != losses
    for name, weight in weights.items():
        assert torch.nn.functional.cosine_similarity(weight.flatten(), fp8_weights[name].flatten(), 0) > 0.97


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_fp8_layers_are_pefts_layers_on_the_same_fp8_base(checkpointing):
    model = llama()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    agreement = nalora.fuse(model, base="fp8").check(batch())
    assert "same FP8 base" in agreement.reference
    # Both quantise activations and gradients, of which the fused layers quantise some together with one scale.
    assert agreement.loss == pytest.approx(agreement.reference_loss, rel=2e-3)
    assert agreement.lowest_cosine > 0.98


def test_the_kept_base_is_compared_with_and_put_back():
    model = llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    assert "originals kept" in str(layers)
    agreement = layers.check(batch())
    assert agreement.reference == "PEFT's layers"
    assert 1e-4 < agreement.gradients < 0.3
    assert agreement.lowest_cosine > 0.95
    assert isinstance(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").base_layer, fp8_base.FP8Linear)
    expected = model.state_dict()
    layers.undo()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert expected.keys() == model.state_dict().keys()
    model.merge_and_unload()


def test_without_a_kept_base_undoing_is_refused_and_the_adapter_is_saved(tmp_path):
    model = llama()
    layers = nalora.fuse(model, base="fp8")
    with pytest.raises(nalora.NALoRAError, match="keep_base=True"):
        layers.undo()
    with pytest.raises(nalora.NALoRAError, match="cannot be merged"):
        model.merge_and_unload()
    train(model, steps=1)
    model.save_pretrained(tmp_path / "adapter")
    fresh = llama().unload()
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").to(DEVICE)
    expected = tiny.adapter_state(model)
    assert all(torch.equal(dict(loaded.named_parameters())[name], weight) for name, weight in expected.items())
    assert not any(p.dtype in (torch.uint8, torch.int32) for p in model.state_dict().values())


def test_evaluation_and_generation_use_the_fp8_base():
    model = llama()
    with torch.no_grad():
        exact = model.eval()(**batch()).loss
    nalora.fuse(model, base="fp8")
    with torch.no_grad():
        assert model(**batch()).loss.item() == pytest.approx(exact.item(), rel=0.02)
        assert model(**batch()).loss != exact
    model.generate(input_ids=batch()["input_ids"][:1], max_new_tokens=3, do_sample=False)


def test_output_layers_trained_layers_and_tied_weights_keep_their_precision():
    model = llama(target_modules=["q_proj", "lm_head"])
    layers = nalora.fuse(model, base="fp8")
    assert "output layers keep their precision" in str(layers)
    assert type(model.base_model.model.lm_head.base_layer) is torch.nn.Linear
    # Layers without an adapter are small here.
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    model = llama(target_modules=["q_proj"])
    model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    assert "its weight is trained" in str(nalora.fuse(model, base="fp8"))


def test_large_layers_without_an_adapter_are_converted(monkeypatch):
    monkeypatch.setattr(fp8_base, "_SMALLEST", 32)
    model = llama(target_modules=["q_proj", "v_proj"])
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    # q, gate, up and down and o of two layers; k and v have 16 outputs, v has an adapter.
    assert len(layers._base.converted) == 2 * 6
    assert type(model.base_model.model.lm_head) is torch.nn.Linear
    layers.check(batch())
    layers.undo()
    assert not any(isinstance(module, fp8_base.FP8Linear) for module in model.modules())


def test_what_cannot_be_fp8_is_refused_by_name_and_left_unchanged(monkeypatch):
    def refused(model, match):
        before = [type(module) for module in model.modules()]
        with pytest.raises(nalora.NALoRAError, match=match):
            nalora.fuse(model, base="fp8")
        assert [type(module) for module in model.modules()] == before
        assert not replaced(model)

    refused(tiny.llama(torch.float32).to(DEVICE), "layers.0.mlp.gate_proj.base_layer: found a weight of shape .56, 32")
    model = llama()
    weight = model.base_model.model.model.layers[1].mlp.down_proj.base_layer.weight
    weight.data[0, 0] = float("nan")
    refused(model, "layers.1.mlp.down_proj.base_layer: found a weight that is not finite")
    model = llama()
    model.base_model.model.model.layers[1].mlp.down_proj.base_layer.register_forward_hook(lambda *_: None)
    refused(model, "forward hooks on the layer")
    with torch.device("meta"):
        refused(tiny.with_lora(torch.nn.Sequential(torch.nn.Linear(32, 32)), ["0"], lora_b=0), "not loaded")

    class Linear8bitLt(torch.nn.Linear):
        pass

    model = llama()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.base_layer.__class__ = Linear8bitLt
    refused(model, "up_proj.base_layer: found Linear8bitLt, which is quantised")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(nalora.NALoRAError, match="NVIDIA A100, of compute capability 8.0"):
        fp8_refusals.refuse_unless_supported(torch.device("cuda"))
    with pytest.raises(nalora.NALoRAError, match="a model on mps"):
        fp8_refusals.refuse_unless_supported(torch.device("mps"))


@pytest.mark.parametrize("options", [{}, {"compile_layers": True}])
def test_a_copy_of_a_fused_model_is_fused_again(options, graphs):
    """The copy has the method of a replaced forward, and inert hooks in place of ours."""
    model = llama()
    nalora.fuse(model)
    copied = copy.deepcopy(model)
    assert not any(map(hooks_of, copied.modules()))
    nalora.fuse(copied, **options)
    expected = model.eval()(**batch()).loss
    with torch.no_grad():
        torch.testing.assert_close(copied.eval()(**batch()).loss, expected)
    assert train(copied.train(), steps=1)[0] == pytest.approx(train(model.train(), steps=1)[0], rel=1e-5)


def test_a_backward_inside_autocast_of_a_pass_outside_of_it():
    models = [llama(dtype) for dtype in (torch.float32, torch.float32)]
    nalora.fuse(models[0])
    gradients = []
    for model in models:
        loss = model(**batch()).loss
        with torch.autocast(DEVICE, torch.bfloat16):
            loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.dtype is torch.float32
        # PEFT's own backward pass rounds to bf16 there.
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0.05, atol=0.05 * gradient.abs().max().item())


@pytest.mark.parametrize(("dropout", "warned"), [(0.1, True), (0.0, False)])
def test_a_model_of_which_nothing_is_fused_is_warned_about(dropout, warned, caplog):
    with caplog.at_level(logging.WARNING, "nalora"):
        layers = nalora.fuse(llama(lora_dropout=dropout))
    assert ("no LoRA layer is fused, all are left to PEFT: lora_dropout in training" in caplog.text) is warned
    assert repr(layers) == str(layers)


def test_fp8_without_triton_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(fused_model, "has_triton", lambda: False)
    model = llama()
    with pytest.raises(nalora.NALoRAError, match=r'fuse\(base="fp8"\): found no package triton.*leave base out'):
        nalora.fuse(model, base="fp8")
    nalora.fuse(model).undo()
