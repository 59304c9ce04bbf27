"""AdaLoRA: ranks really allocated, at the right steps, to exactly the budget; resumed bit for bit; saved as LoRA."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
import transformers
from methods.small import llama, tokens

import nalora
from nalora import methods
from nalora.integrations.adalora import STATE_FILE
from nalora.methods.lora import lora_layers
from nalora.methods.method import Adapter, Start
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train

RANK, LAYERS = 4, 14


def trainer(folder, *, steps=8, dtype=torch.float32, dropout=0.0, options=None, **arguments):
    method = methods.get("adalora")(**options or {})
    model = method.prepare(llama(dtype), Adapter(rank=RANK, alpha=8, dropout=dropout), Start(steps=steps))
    rows = [{"input_ids": row, "labels": row} for row in tokens(32)]
    settings = dict(learning_rate=1e-2, max_steps=steps, per_device_train_batch_size=4, report_to="none")
    settings |= dict(use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no")
    args = transformers.TrainingArguments(str(folder), **settings | arguments)
    made = transformers.Trainer(model, args, train_dataset=rows)
    method.attach(made)
    return made


def singular_values(model):
    return torch.cat([layer.lora_E["default"].detach().flatten() for _, layer in lora_layers(model)])


class At(transformers.TrainerCallback):
    """Calls back at the end of every step, with its number."""

    def __init__(self, say):
        self.say = say

    def on_step_end(self, args, state, control, **_):
        self.say(state.global_step, control)


def test_it_starts_as_the_model_and_only_factors_learn():
    for dtype in (torch.float32, torch.bfloat16):
        model = methods.get("adalora")().prepare(llama(dtype), Adapter(rank=RANK), Start(steps=10))
        torch.testing.assert_close(model(tokens()).logits, llama(dtype)(tokens()).logits, rtol=0, atol=1e-5)
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert {name.split(".")[-2] for name in learning} == {"lora_A", "lora_B", "lora_E"}
        assert {p.dtype for p in learning.values()} == {torch.float32}
        assert {layer.r["default"] for _, layer in lora_layers(model)} == {6}


def test_ranks_are_allocated_after_every_step_and_end_at_the_budget(tmp_path, monkeypatch):
    made = trainer(tmp_path, steps=10)
    called, budgets = [], {}
    allocate, mask = made.model.base_model.update_and_allocate, made.model.base_model.rankallocator.mask_to_budget

    def allocate_and_note(step):
        assert all(p.grad is not None for p in made.model.parameters() if p.requires_grad)
        called.append(step)
        allocate(step)

    def mask_and_note(model, budget):
        budgets[called[-1]] = budget
        return mask(model, budget)

    monkeypatch.setattr(made.model.base_model, "update_and_allocate", allocate_and_note)
    monkeypatch.setattr(made.model.base_model.rankallocator, "mask_to_budget", mask_and_note)
    left = {}
    made.add_callback(At(lambda step, control: left.update({step: int(singular_values(made.model).ne(0).sum())})))
    made.train()
    assert called == list(range(1, 11))
    # t_i = 1 and t_f = 3 of 10 steps: from step 2 to 7 the budget falls with the cube of what is left of the way.
    first, last = 6 * LAYERS, RANK * LAYERS
    falling = {step: int(last + (first - last) * (1 - (step - 1) / 6) ** 3) for step in range(2, 8)}
    assert budgets == falling
    assert left == {1: first} | falling | dict.fromkeys((8, 9, 10), last)


def test_allocation_every_few_steps_still_ends_at_the_budget(tmp_path):
    made = trainer(tmp_path, steps=10, options={"every": 4, "initial_rank": 8, "target_rank": 2})
    made.train()
    assert singular_values(made.model).numel() == 8 * LAYERS
    assert singular_values(made.model).ne(0).sum() == 2 * LAYERS


def test_a_step_that_float16_skips_is_not_scored(tmp_path, monkeypatch):
    made = trainer(tmp_path, steps=8)
    called = []
    allocate = made.model.base_model.update_and_allocate
    monkeypatch.setattr(
        made.model.base_model, "update_and_allocate", lambda step: (called.append(step), allocate(step))
    )
    skipped = property(lambda accelerator: made.state.global_step in (2, 5, 7))  # steps 3, 6 and 8
    monkeypatch.setattr(type(made.accelerator), "optimizer_step_was_skipped", skipped)
    made.train()
    # The last pruning, at step 6, and the masks after it need no gradients.
    assert called == [1, 2, 4, 5, 6, 7, 8]
    assert singular_values(made.model).ne(0).sum() == RANK * LAYERS


def test_a_pass_without_labels_has_no_loss_to_add_to(tmp_path):
    """A look at the logits while training, as a callback may take one."""
    made = trainer(tmp_path)
    made.model.train()
    assert made.model(input_ids=torch.arange(4, 12)[None]).logits.isfinite().all()


def test_the_trainer_reports_how_many_steps_there_are(tmp_path):
    made = trainer(tmp_path, steps=10, max_steps=6)  # prepared for 10
    made.train()
    config = made.model.peft_config["default"]
    assert (config.total_step, config.tinit, config.tfinal) == (6, 1, 2)
    assert singular_values(made.model).ne(0).sum() == RANK * LAYERS


@pytest.mark.parametrize("passes", [1, 4])
def test_the_orthogonality_is_in_the_loss_once_whatever_the_passes(tmp_path, passes):
    """With B and A's gradients of the task at zero (E = 0), all that moves A is the penalty."""
    made = trainer(
        tmp_path, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", options={"orthogonality": 0.7},
        per_device_train_batch_size=8 // passes, gradient_accumulation_steps=passes,
    )  # fmt: skip
    pairs = [(layer.lora_A["default"], layer.lora_B["default"]) for _, layer in lora_layers(made.model)]
    before = [[p.detach().double().requires_grad_() for p in pair] for pair in pairs]
    penalty = sum(
        (a @ a.T - torch.eye(6, dtype=a.dtype)).norm() + (b.T @ b - torch.eye(6, dtype=b.dtype)).norm()
        for a, b in before
    ) / (2 * LAYERS)
    (0.7 * penalty).backward()
    made.add_callback(At(lambda step, control: setattr(control, "should_training_stop", True)))
    made.train()
    assert made.state.global_step == 1
    for now, then in zip(pairs, before, strict=True):
        for p, was in zip(now, then, strict=True):
            torch.testing.assert_close(p.double() - was, -1e-2 * was.grad, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_lora_with_the_same_outputs(tmp_path, dtype):
    made = trainer(tmp_path, steps=10, dtype=dtype, learning_rate=5e-2)
    made.train()
    model, ids = made.model.eval().float(), tokens()
    methods.get("adalora")().save(model, tmp_path / "adapter")
    expected = model(ids).logits
    base = llama(dtype).float()
    assert (expected - base(ids).logits).abs().max() > 1e-2
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert loaded.peft_config["default"].peft_type == "LORA"
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-5)
    # No penalty is in the loss of the adapter that was saved.
    logits = expected[:, :-1].flatten(0, 1)
    plain = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss, plain)
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop", [1, 4, 6, 7])
def test_a_run_stopped_anywhere_and_resumed_is_the_whole_run(tmp_path, stop):
    """Before the first pruning, between two, at the last and after it; the steps are 1 + 5 + 2."""

    def allocator(made):
        scores, state = made.model.base_model.rankallocator, {}
        for kind in ("ipt", "exp_avg_ipt", "exp_avg_unc"):
            state |= {f"{kind}/{name}": tensor for name, tensor in getattr(scores, kind).items()}
        return state

    def run(folder, until, seen, **resume):
        made = trainer(folder, dropout=0.1)

        def look(step, control):
            seen[step] = {name: p.detach().clone() for name, p in made.model.named_parameters()} | allocator(made)
            if step == until:
                control.should_save = control.should_training_stop = True

        made.add_callback(At(look))
        made.train(**resume)

    whole, halves = {}, {}
    run(tmp_path / "whole", 8, whole)
    run(tmp_path / "halves", stop, halves)
    checkpoint = tmp_path / "halves" / f"checkpoint-{stop}"
    assert max(halves) == stop
    run(tmp_path / "halves", 8, halves, resume_from_checkpoint=str(checkpoint))
    assert list(whole) == list(halves) == list(range(1, 9))
    assert any("exp_avg_unc" in name for name in whole[5])
    for step, state in whole.items():
        assert state.keys() == halves[step].keys()
        assert all(torch.equal(tensor, halves[step][name]) for name, tensor in state.items()), step
    (checkpoint / STATE_FILE).unlink()
    with pytest.raises(nalora.NALoRAError, match="next allocation"):
        run(tmp_path / "halves", 8, {}, resume_from_checkpoint=str(checkpoint))


def test_a_run_from_its_settings_to_an_adapter(tmp_path):
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 48, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "method": "adalora", "orthogonality": 0.1, "steps": 30, "batch_size": 8, "micro_batch_size": 4,
        "learning_rate": 1e-2, "device": "cpu", "save_every": 10, "log_every": 1, "output": str(tmp_path / "run"),
    }  # fmt: skip
    result = train(check(settings))
    rows = [json.loads(line) for line in RunFolder(settings["output"]).metrics.read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.15
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    model = peft.PeftModel.from_pretrained(base, RunFolder(settings["output"]).adapter)
    layers = [layer for _, layer in lora_layers(model)]
    left = sum(int(layer.lora_A["default"].weight.abs().sum(1).ne(0).sum()) for layer in layers)
    assert left == 4 * len(layers)
    assert result["trainable_parameters"] == sum(6 * (layer.in_features + layer.out_features + 1) for layer in layers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_rank": 0}, "target_rank"),
        ({"initial_rank": -3}, "initial_rank"),
        ({"warmup_share": 1.0}, "warmup_share"),
        ({"final_share": -0.1}, "final_share"),
        ({"every": 0}, "every"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": 0.0}, "beta2"),
        ({"orthogonality": -1.0}, "orthogonality"),
    ],
)
def test_settings_out_of_range(options, said):
    with pytest.raises(nalora.NALoRAError, match=said):
        methods.get("adalora")(**options)


@pytest.mark.parametrize(
    ("options", "rank", "steps", "said"),
    [
        ({"initial_rank": 4}, 4, 100, "nothing would be pruned"),
        ({"initial_rank": 12}, 4, 100, "a rank of at most 8"),  # grouped keys have 8 rows
        ({}, 4, 1, "two steps or more"),
        ({"warmup_share": 0.6, "final_share": 0.4}, 4, 100, "60 of them before the first pruning and 40 after"),
        ({"warmup_share": 0.0, "final_share": 0.9}, 4, 10, "two steps or more"),
    ],
)
def test_what_cannot_be_trained(options, rank, steps, said):
    with pytest.raises(nalora.NALoRAError, match=said):
        methods.get("adalora")(**options).prepare(llama(), Adapter(rank=rank), Start(steps=steps))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_shortest_run_that_is_allowed_prunes_to_the_budget(tmp_path, share):
    steps = 2 if share == 0 else 4
    made = trainer(tmp_path, steps=steps, options={"warmup_share": 0.0, "final_share": share})
    made.train()
    assert singular_values(made.model).ne(0).sum() == RANK * LAYERS


def test_na_lora_cannot_be_combined_with_it():
    with pytest.raises(nalora.NALoRAError, match="allocated by the products of weights and gradients"):
        methods.get("na-lora").build(on="adalora")
