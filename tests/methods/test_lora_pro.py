"""LoRA-Pro's two modes against a loop over modules in float64, and in whole runs."""

from __future__ import annotations

import copy
import io
import json

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

import nalora
from nalora import methods
from nalora.methods.lora import lora_layers
from nalora.methods.lora_pro import LoRAPro, pairs_of, replace_gradients
from nalora.methods.lora_pro_optimizer import LoRAProAdamW, Pair
from nalora.methods.method import Adapter, Start
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

MODES = ("efficient", "full")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}


def base():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def llama(dtype=torch.float64, **lora):
    """Ranks 3 and 4 and, with rsLoRA, two scalings; B = 0."""
    torch.manual_seed(4)
    given = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": {"q_proj": 3}} | lora
    return peft.get_peft_model(base().to(dtype), peft.LoraConfig(**given), autocast_adapter_dtype=False)


def trainer_of(model, tmp_path, **settings):
    arguments = {"learning_rate": 1e-3, "weight_decay": 0.1, "optim": "adamw_torch"} | settings
    return transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **arguments)
    )


def backward(model, step):
    ids = torch.randint(1, 32, (4, 12), generator=torch.Generator().manual_seed(step))
    model(input_ids=ids, labels=ids).loss.backward()


class StraightLine:
    """The equations one module after the other, with matrices inverted and the Sylvester equation written out."""

    def __init__(self, A, B, s):
        self.A, self.B, self.s = A, B, s
        self.inverse_b = torch.linalg.inv(B.T @ B) if B.any() else torch.zeros(B.shape[1], B.shape[1]).double()
        self.inverse_a = torch.linalg.inv(A @ A.T)

    def stars(self, g_A, g_B):
        A, B, s = self.A, self.B, self.s
        eye = torch.eye(A.shape[0], dtype=A.dtype)
        right = -(self.inverse_b @ g_A @ A.T) / s**2
        whole = torch.kron(B.T @ B, eye) + torch.kron(eye, A @ A.T)
        X = torch.linalg.solve(whole, right.flatten()).view_as(right)
        outside = torch.eye(B.shape[0], dtype=B.dtype) - B @ self.inverse_b @ B.T
        return self.inverse_b @ g_A / s**2 + X @ A, outside @ g_B @ self.inverse_a / s**2 - B @ X

    def moves(self, g_A, g_B):
        return self.s * self.B @ g_A + self.s * g_B @ self.A


def factors_of(model):
    return {
        name: (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])
        for name, layer in lora_layers(model)
    }


def relative(one, other):
    return ((one - other).norm() / other.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_efficient_mode_is_the_runs_optimizer_on_adjusted_gradients(tmp_path, rslora, optim):
    """SGD shows the size of what it is handed, which AdamW does not."""
    model = llama(use_rslora=rslora)
    other = copy.deepcopy(model)
    optimizer = LoRAPro().optimizer(trainer_of(model, tmp_path, optim=optim))
    kinds = {"adamw_torch": torch.optim.AdamW, "sgd": torch.optim.SGD}
    assert type(optimizer) is kinds[optim]
    reference = kinds[optim]([p for p in other.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
    scalings = {s for *_, s in factors_of(model).values()}
    assert scalings == ({8 / 2, 8 / 3**0.5} if rslora else {8 / 4, 8 / 3})
    for step in range(10):
        backward(model, step)
        backward(other, step)
        optimizer.step()
        with torch.no_grad():
            for A, B, s in factors_of(other).values():
                stars = StraightLine(A, B, s).stars(A.grad, B.grad)
                A.grad.copy_(stars[0])
                B.grad.copy_(stars[1])
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        if step == 0:
            one = tiny.adapter_state(model)
            assert tiny.largest_difference(one, tiny.adapter_state(other)) < 1e-10
    assert tiny.largest_difference(tiny.adapter_state(model), tiny.adapter_state(other)) < 1e-6


def test_full_mode_keeps_adams_moments_of_how_w_moves_and_projects_its_step(tmp_path):
    model = llama()
    optimizer = LoRAPro(mode="full").optimizer(trainer_of(model, tmp_path))
    dummies = {
        name: torch.zeros(B.shape[0], A.shape[1], dtype=A.dtype, requires_grad=True)
        for name, (A, B, _) in factors_of(model).items()
    }
    # A step of 1 from zero: what AdamW leaves in the dummy is its direction, negated.
    adams = {name: torch.optim.AdamW([dummy], lr=1.0, weight_decay=0.0) for name, dummy in dummies.items()}
    for step in range(10):
        backward(model, step)
        expected = {}
        with torch.no_grad():
            for name, (A, B, s) in factors_of(model).items():
                line = StraightLine(A.clone(), B.clone(), s)
                dummies[name].zero_().grad = line.moves(*line.stars(A.grad, B.grad))
                adams[name].step()
                direction = -dummies[name]
                g_A, g_B = line.stars(s * B.T @ direction, s * direction @ A.T)
                expected[name] = (A * (1 - 1e-3 * 0.1) - 1e-3 * g_A, B * (1 - 1e-3 * 0.1) - 1e-3 * g_B)
        optimizer.step()
        optimizer.zero_grad()
        for name, (A, B, _) in factors_of(model).items():
            state, adam = optimizer.state[A], adams[name].state[dummies[name]]
            assert state["step"] == adam["step"] == step + 1
            for moment in ("exp_avg", "exp_avg_sq"):
                assert relative(state[moment], adam[moment]) < 1e-8, (name, step)
            assert relative(A, expected[name][0]) < 1e-8
            assert relative(B, expected[name][1]) < 1e-8


def test_full_mode_steps_everything_else_as_adamw(tmp_path):
    model, plain = llama(modules_to_save=["lm_head", "norm"]), llama(modules_to_save=["lm_head", "norm"])
    ours = LoRAPro(mode="full").optimizer(trainer_of(model, tmp_path))
    theirs = trainer_of(plain, tmp_path).create_optimizer()
    for optimizer, each in ((ours, model), (theirs, plain)):
        for step in range(3):
            for name, p in each.named_parameters():
                if p.requires_grad:
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p)
                    if "norm" in name and step == 1:
                        p.grad = None
            optimizer.step()
    saved = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    assert len(saved) == 6  # the head and five norms, which do not decay
    for name in saved:
        assert relative(model.get_parameter(name), plain.get_parameter(name)) < 1e-12, name


@pytest.mark.parametrize("mode", MODES)
def test_a_module_without_gradients_is_left_alone(tmp_path, mode):
    model = llama()
    optimizer = LoRAPro(mode=mode).optimizer(trainer_of(model, tmp_path))
    before = tiny.adapter_state(model)
    for step in range(2):
        backward(model, step)
        for name, p in model.named_parameters():
            if "layers.1.mlp" in name and step == 0:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        changed = {n for n, p in tiny.adapter_state(model).items() if not torch.equal(p, before[n])}
        expected = {n for n in before if "lora_B" in n and ("layers.1.mlp" not in n or step == 1)}
        assert expected <= changed
        assert step == 1 or not any("layers.1.mlp" in name for name in changed)
    counts = {A: optimizer.state[A]["step"] for A, _, _ in factors_of(model).values()}
    assert sorted({int(count) for count in counts.values()}) == [1, 2]


def test_one_eigendecomposition_serves_all_modules_of_a_rank(monkeypatch):
    model, calls = llama(), []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: calls.append(len(gram)) or eigh(gram))
    backward(model, 0)
    replace_gradients(pairs_of(model))
    # q_proj of two layers has rank 3, the six others rank 4; each has two Gram matrices.
    assert sorted(calls) == [4, 24]


def test_stacks_of_full_mode_are_cut_without_a_difference(tmp_path, monkeypatch):
    import nalora.methods.lora_pro_optimizer as module

    one, other = llama(), llama()
    for elements, model in ((1, one), (2**26, other)):
        monkeypatch.setattr(module, "STACK_ELEMENTS", elements)
        optimizer = LoRAPro(mode="full").optimizer(trainer_of(model, tmp_path))
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert tiny.largest_difference(tiny.adapter_state(one), tiny.adapter_state(other)) < 1e-9


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_full_mode_continues_where_it_was(tmp_path, how):
    model = llama(torch.float32)
    optimizer = LoRAPro(mode="full").optimizer(trainer_of(model, tmp_path))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if how == "deepcopy":
        model_too, optimizer_too = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        model_too = copy.deepcopy(model)
        optimizer_too = LoRAPro(mode="full").optimizer(trainer_of(model_too, tmp_path))
        optimizer_too.load_state_dict(torch.load(file, weights_only=True))
    for each, steps in ((model, optimizer), (model_too, optimizer_too)):
        backward(each, 3)
        steps.step()
    assert all(torch.equal(p, tiny.adapter_state(model_too)[n]) for n, p in tiny.adapter_state(model).items())


def test_a_closure_is_called_with_gradients():
    A, B = torch.randn(2, 6, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    optimizer = LoRAProAdamW([Pair(A, B, 2.0)], lr=1e-1)

    def closure():
        optimizer.zero_grad()
        loss = (2.0 * B @ A - 1).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(100)]
    assert losses[-1] < 0.01 * losses[0]


# ---- what cannot work


@pytest.mark.parametrize(
    ("lora", "found"),
    [
        ({"use_dora": True}, "a LoRA variant"),
        ({"lora_bias": True}, "a trained bias"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "an adapter of a Embedding"),
    ],
)
def test_adapters_that_are_more_than_a_product_are_refused(lora, found):
    with pytest.raises(nalora.NALoRAError, match=found):
        pairs_of(llama(**lora))


def test_factors_that_do_not_learn_or_are_short_are_refused():
    model = llama()
    next(p for n, p in model.named_parameters() if "lora_A" in n).requires_grad_(False)
    with pytest.raises(nalora.NALoRAError, match="a lora_A that is frozen"):
        pairs_of(model)
    with pytest.raises(nalora.NALoRAError, match="in torch.bfloat16"):
        pairs_of(llama(torch.bfloat16))


def test_convolutions_are_refused():
    model = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    with pytest.raises(nalora.NALoRAError, match="an adapter of a Conv2d"):
        pairs_of(model)


def test_trainers_that_step_otherwise_are_refused(tmp_path):
    model = llama()
    with pytest.raises(nalora.NALoRAError, match="sgd in full mode"):
        LoRAPro(mode="full").optimizer(trainer_of(model, tmp_path, optim="sgd"))
    with pytest.raises(nalora.NALoRAError, match="steps inside backward"):
        LoRAPro().optimizer(trainer_of(model, tmp_path, optim="lomo"))
    for flag, found in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        trainer = trainer_of(model, tmp_path)
        setattr(trainer, flag, True)
        with pytest.raises(nalora.NALoRAError, match=found):
            LoRAPro().optimizer(trainer)


def test_adapters_that_are_not_finite_are_named(tmp_path):
    model = llama()
    optimizer = LoRAPro().optimizer(trainer_of(model, tmp_path))
    backward(model, 0)
    model.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(nalora.NALoRAError, match="not finite"):
        optimizer.step()


def test_na_lora_cannot_be_combined_with_it():
    with pytest.raises(nalora.NALoRAError, match="solved for together"):
        methods.get("na-lora").build(on="lora-pro")


def test_a_model_s_copy_has_gradients_of_its_own(tmp_path):
    model = llama()
    optimizer = LoRAPro().optimizer(trainer_of(model, tmp_path))
    twin = copy.deepcopy(model)
    backward(model, 0)
    backward(twin, 0)
    before = [p.grad.clone() for p in tiny.trainable(twin)]
    optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(tiny.trainable(twin), before, strict=True))


def test_prepare_is_lora_s():
    one = methods.get("lora-pro")().prepare(base(), Adapter(rank=4), Start(seed=5))
    other = methods.get("lora")().prepare(base(), Adapter(rank=4), Start(seed=5))
    assert all(torch.equal(p, tiny.adapter_state(other)[n]) for n, p in tiny.adapter_state(one).items())


# ---- whole runs


@pytest.fixture
def run(tmp_path):
    """Settings of a run; full mode's learning rate is that of W."""
    folder = tiny.saved_llama(tmp_path / "base")

    def settings(mode, name="run", **changes):
        return {
            "model": folder, "task": "gym/chain_sum", "settings": SUMS, "train_size": 64, "test_size": 8,
            "output": str(tmp_path / name), "steps": 8, "batch_size": 8, "log_every": 1, "device": "cpu",
            "max_length": 128, "method": "lora-pro", "mode": mode,
            "learning_rate": 1e-3 if mode == "efficient" else 2e-4,
        } | changes  # fmt: skip

    return settings


def adapter(settings):
    return load_file(RunFolder(settings["output"]).adapter / "adapter_model.safetensors")


def losses(settings):
    return [json.loads(line)["loss"] for line in RunFolder(settings["output"]).metrics.read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_falls_and_stock_peft_loads_and_merges_what_was_saved(run, mode):
    settings = run(mode, steps=40, learning_rate=1e-2 if mode == "efficient" else 3e-3)
    train(check(settings))
    assert losses(settings)[-1] < losses(settings)[0] - 0.15
    stock = transformers.AutoModelForCausalLM.from_pretrained(settings["model"]).eval()
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        untrained = stock(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(stock, RunFolder(settings["output"]).adapter).eval()
        logits = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()(input_ids=ids).logits
    assert (logits - untrained).abs().max() > 1e-2
    assert (logits - merged).abs().max() < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_the_same_to_the_bit(run, mode):
    whole, halves = run(mode, "whole", save_every=4), run(mode, save_every=4)
    train(check(whole))
    train(check(halves))
    folder = RunFolder(halves["output"])
    folder.result.unlink()
    (folder.checkpoints / "checkpoint-8" / "complete").unlink()
    train(check(halves), resume=True)
    assert all(torch.equal(tensor, adapter(halves)[name]) for name, tensor in adapter(whole).items())
    assert losses(whole) == losses(halves)


@pytest.mark.parametrize("mode", MODES)
def test_four_small_passes_are_one_large_pass(run, mode):
    """LoRA's difference is 1e-5. Adam's first step is one of signs, after which columns of a small B may be equal:
    (BᵀB)⁻¹ makes 1e-2 of the rounding in such a direction."""
    small, large = run(mode, "small", micro_batch_size=2), run(mode, "large", micro_batch_size=8)
    train(check(small))
    train(check(large))
    assert tiny.largest_difference(adapter(small), adapter(large)) < 5e-2
    assert losses(small) == pytest.approx(losses(large), rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_in_float64_they_are_the_same(tmp_path, mode):
    """Where rounding is out of the way: 2e-15 was measured."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 32, (48, 12))]
    ended = []
    for small, accumulated in ((2, 4), (8, 1)):
        model = llama()
        trainer = trainer_of(
            model, tmp_path, max_steps=6, per_device_train_batch_size=small, gradient_accumulation_steps=accumulated
        )
        trainer.train_dataset = rows
        trainer.optimizer = LoRAPro(mode=mode).optimizer(trainer)
        trainer.train()
        ended.append(tiny.adapter_state(model))
    assert tiny.largest_difference(*ended) < 1e-10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_recomputed_and_bfloat16_bases_train(run, mode, changes):
    plain, other = run(mode, "plain"), run(mode, **changes)
    train(check(plain))
    train(check(other))
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in adapter(other).values())
    assert losses(other) == pytest.approx(losses(plain), rel=1e-4 if "dtype" not in changes else 2e-2)
