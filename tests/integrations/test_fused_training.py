"""`nalora.fuse` in other people's training loops: the losses of PEFT's layers, and an ordinary adapter."""

from __future__ import annotations

import peft
import pytest
import tiny
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import nalora

STEPS = 6


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")


def adapted_model(base: str) -> peft.PeftModel:
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def in_a_plain_loop(model, _, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            ids = tiny.tokens(length=8, seed=2 * step + micro)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained_losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def in_trainer(model, folder, checkpointing):
    rows = [{"input_ids": ids, "labels": ids} for ids in tiny.tokens(batch=8 * STEPS, length=8).tolist()]
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    return trained_losses(Trainer(model, arguments, train_dataset=Dataset.from_list(rows)))


def in_trl(model, folder, checkpointing):
    from transformers import AutoTokenizer

    rows = [{"prompt": f"{a} plus {a} is", "completion": f" {2 * a}"} for a in range(8 * STEPS)]
    arguments = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, gradient_checkpointing=checkpointing,
        bf16=False,  # TRL's default rounds away what is compared here
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    return trained_losses(
        SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base") / "base")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("trained", [in_a_plain_loop, in_trainer, in_trl])
def test_fused_training_is_pefts(trained, checkpointing, base, tmp_path):
    plain_model, model = adapted_model(base), adapted_model(base)
    plain = trained(plain_model, tmp_path / "plain", checkpointing)
    layers = nalora.fuse(model)
    fused_forward = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").forward
    losses = trained(model, tmp_path / "fused", checkpointing)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert len(set(losses)) > 1
    assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").forward == fused_forward
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    plain_model.save_pretrained(tmp_path / "plain-adapter")
    expected = load_file(tmp_path / "plain-adapter" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    # AdamW's first steps are the signs of gradients, so rounding moves elements whose gradient is nearly 0.
    apart = sum((saved[name] - expected[name]).square().sum() for name in saved).sqrt()
    assert apart < 1e-3 * sum(weight.square().sum() for weight in expected.values()).sqrt()
    layers.undo()


@pytest.mark.parametrize("trained", [in_a_plain_loop, in_trainer, in_trl])
def test_an_fp8_base_is_trained_on_and_never_saved(trained, base, tmp_path):
    pytest.importorskip("triton")
    model = adapted_model(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}
    plain = trained(adapted_model(base), tmp_path / "plain", False)
    layers = nalora.fuse(model, base="fp8", keep_base=True)
    losses = trained(model, tmp_path / "fp8", False)
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses != plain
    written = [load_file(file) for file in tmp_path.glob("fp8/**/*.safetensors")]
    model.save_pretrained(tmp_path / "adapter")
    written.append(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert {tensor.dtype for tensors in written for tensor in tensors.values()} == {torch.float32}
    assert all(".lora_" in name for tensors in written for name in tensors)
    layers.undo()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
