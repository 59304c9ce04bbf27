"""LoRA+: two learning rates, and what each of them moves."""

from __future__ import annotations

import pytest
import torch
import transformers
from methods.small import llama, tokens

import nalora
from nalora import methods
from nalora.methods.lora_plus import lora_plus_groups
from nalora.methods.method import Adapter, Start


def trainer(method, folder, **arguments):
    model = method.prepare(llama(), Adapter(rank=4), Start())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # so that A has a gradient at the first step
            parameter.data.normal_(generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    settings = dict(learning_rate=1e-2, max_steps=1, per_device_train_batch_size=8, lr_scheduler_type="constant")
    settings |= dict(report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", max_grad_norm=0.0)
    args = transformers.TrainingArguments(str(folder), **settings | arguments)
    made = transformers.Trainer(model, args, train_dataset=rows)
    made.optimizer = method.optimizer(made)
    return made


def after_one_step(name, folder, **options):
    made = trainer(methods.get(name)(**options), folder, optim="sgd")
    before = {n: p.detach().clone() for n, p in made.model.named_parameters() if p.requires_grad}
    made.train()
    return {n: p.detach().double() - before[n].double() for n, p in made.model.named_parameters() if n in before}


def test_one_step_moves_b_so_many_times_as_far_and_a_as_far(tmp_path):
    plain, plus = after_one_step("lora", tmp_path), after_one_step("lora+", tmp_path, ratio=8.0)
    assert sum("lora_B" in name for name in plain) == sum("lora_A" in name for name in plain) == 14
    for name, moved in plain.items():
        assert moved.abs().max() > 0
        if "lora_B" in name:
            # The step is ratio × exactly; what it is added to rounds both sums.
            torch.testing.assert_close(plus[name], 8 * moved, rtol=0, atol=5e-6)
        else:
            assert torch.equal(plus[name], moved), name


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "rmsprop"])
def test_every_optimizer_gets_both_learning_rates_and_the_weight_decay(tmp_path, optim):
    made = trainer(methods.get("lora+")(), tmp_path, optim=optim, weight_decay=0.1)
    names = {id(p): n for n, p in made.model.named_parameters()}
    low, high = made.optimizer.param_groups
    assert (low["lr"], high["lr"]) == (1e-2, 16 * 1e-2)
    assert low["weight_decay"] == high["weight_decay"] == 0.1
    assert all("lora_A" in names[id(p)] for p in low["params"])
    assert all("lora_B" in names[id(p)] for p in high["params"])
    learning = [p for p in made.model.parameters() if p.requires_grad]
    assert len(low["params"]) + len(high["params"]) == len(learning)
    made.train()  # and the class that was asked for steps with them
    assert type(made.optimizer.optimizer).__name__.lower() == optim.removesuffix("_torch")


def test_the_schedule_keeps_the_ratio(tmp_path):
    made = trainer(methods.get("lora+")(ratio=4.0), tmp_path, max_steps=4, lr_scheduler_type="linear")
    seen = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, *, optimizer, **_):
            seen.append([group["lr"] for group in optimizer.param_groups])

    made.add_callback(Look())
    made.train()
    assert len(seen) == 4
    assert seen[0][0] == pytest.approx(0.75e-2)
    assert all(high == pytest.approx(4 * low) for low, high in seen)


def test_the_magnitude_of_dora_trains_with_a():
    model = methods.get("dora")().prepare(llama(), Adapter(rank=4), Start())
    names = {id(p): n for n, p in model.named_parameters()}
    low, high = lora_plus_groups(model, lr=1.0, ratio=16.0, weight_decay=0.0)
    assert sum("magnitude" in names[id(p)] for p in low["params"]) == 14
    assert all("lora_B" in names[id(p)] for p in high["params"])


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_ratio_that_is_not_positive(ratio):
    with pytest.raises(nalora.NALoRAError, match="λ > 0"):
        methods.get("lora+")(ratio=ratio)


def test_an_optimizer_with_groups_of_its_own(tmp_path, monkeypatch):
    made = trainer(methods.get("lora")(), tmp_path)
    monkeypatch.setattr(made, "get_optimizer_cls_and_kwargs", lambda args, model: (torch.optim.SGD, {"params": []}))
    with pytest.raises(nalora.NALoRAError, match="groups the parameters itself"):
        methods.get("lora+")().optimizer(made)
