"""Replayed passes of any Trainer: what is refused, what is wrapped, and that the training is the plain Trainer's."""

from __future__ import annotations

import logging
import math
import time

import pytest
import tiny
import torch
from test_trainer import assert_bit_equal, collate, make_trainer, rows, token_loss, untouched
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.integrations import graphed_trainer
from nalora.integrations import replayable as obstacles
from nalora.integrations.graphed_trainer import graph_trainer, is_padded_on_right
from nalora.integrations.replayable import replayable

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


def loss(outputs, labels, num_items_in_batch=None):
    return token_loss(outputs, labels, num_items_in_batch)


def make(folder, model=None, *, collator=collate, declared=True, **settings):
    trainer = make_trainer(folder, model, **settings)
    trainer.data_collator = collator
    trainer.compute_loss_func = replayable(loss) if declared else token_loss
    return trainer


class EagerStep:
    """Runs every step eagerly, on its own copies of a batch like a graph does."""

    made: list[EagerStep]

    def __init__(self, step, warmup, warm_later, gradients_of, most_shapes):
        self.step, self.options, self.inputs, self.batches = step, (warmup, warm_later, most_shapes), {}, []
        self.gradients_of = gradients_of
        type(self).made.append(self)

    def __call__(self, batch):
        assert all(parameter.grad is None for parameter in self.gradients_of), "a replay overwrites gradients"
        self.batches.append(sorted(batch))
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        inputs = self.inputs.setdefault(shape, {name: torch.empty_like(tensor) for name, tensor in batch.items()})
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)
        return self.step(inputs).clone()


@pytest.fixture
def eager(monkeypatch):
    """Graphs without a GPU: the steps that were built."""
    EagerStep.made = []
    monkeypatch.setattr(graphed_trainer, "GraphedStep", EagerStep)
    monkeypatch.setattr(obstacles, "device_type", lambda trainer: "cuda")
    return EagerStep.made


def state(trainer):
    return tiny.adapter_state(trainer.model)


def left(examples):
    """Padded on the left."""
    batch = collate(examples)
    for row in range(len(examples)):
        pads = int((batch["attention_mask"][row] == 0).sum())
        for tensor in batch.values():
            tensor[row] = tensor[row].roll(pads)
    return batch


def unpadded(examples):
    """Without a mask, cut to four tokens."""
    ids = torch.stack([each["input_ids"][:4] for each in examples])
    return {"input_ids": ids, "labels": ids.clone()}


# ---- the training is the plain Trainer's -----------------------------------------------------------------------------


@pytest.mark.parametrize("collator", [left, unpadded])
def test_the_same_training_bit_for_bit(tmp_path, eager, collator):
    """With dropout, several shapes and evaluation in between."""

    def trained(graphs):
        settings = dict(eval_strategy="steps", eval_steps=3, eval_dataset=rows(8, seed=5), dtype=torch.float32)
        trainer = make(tmp_path, tiny.llama(torch.float32, lora_dropout=0.2), collator=collator, **settings)
        if graphs:
            graph_trainer(trainer)
        trainer.train()
        return state(trainer), [line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history]

    (plain, losses), (replayed, same) = trained(False), trained(True)
    assert_bit_equal([plain], [replayed])
    assert losses == same
    (step,) = eager
    assert len(step.batches) == 12
    assert not any("right_padded_mask" in names for names in step.batches)


def test_batches_padded_on_the_right_run_without_a_mask_and_train_the_same(tmp_path, eager, monkeypatch):
    plain = make(tmp_path)
    plain.train()
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **options):
        seen.append(attn_mask is None)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    graphed = make(tmp_path)
    graph_trainer(graphed)
    graphed.train()
    assert seen
    assert all(seen)
    assert tiny.largest_difference(state(plain), state(graphed)) < 1e-9
    assert all("right_padded_mask" in names and "attention_mask" not in names for names in eager[0].batches)
    assert graphed.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
@pytest.mark.parametrize("collator", [collate, left])
def test_na_lora_with_graphs_is_na_lora(tmp_path, eager, apply_to, collator):
    def trained(graphs):
        trainer = make(tmp_path, collator=collator)
        controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to), cuda_graphs=graphs)
        trainer.train()
        return state(trainer), controller.state_dict()["tensors"]

    plain, replayed = trained(False), trained(True)
    assert len(eager) == 1
    if collator is left:
        assert_bit_equal(plain, replayed)
    assert tiny.largest_difference(plain[0], replayed[0]) < 1e-9
    for name, tensor in plain[1].items():
        torch.testing.assert_close(replayed[1][name], tensor, rtol=1e-9, atol=1e-12)


def test_a_resumed_training_ends_the_same(tmp_path, eager):
    settings = dict(save_strategy="steps", save_steps=5, collator=left)
    whole = make(tmp_path, **settings)
    nalora.attach_trainer(whole, apply_to="update", cuda_graphs=True)
    whole.train()
    resumed = make(tmp_path / "resumed", collator=left)
    nalora.attach_trainer(resumed, apply_to="update", cuda_graphs=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert len(eager[-1].batches) == 7
    assert_bit_equal([state(whole)], [state(resumed)])


class Act(TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.act()


def test_parameters_that_are_frozen_or_moved_are_captured_anew(tmp_path, eager):
    def trained(graphs):
        trainer = make(tmp_path, collator=left)
        frozen = tiny.trainable(trainer.model)[0]
        moved = tiny.trainable(trainer.model)[1]
        trainer.add_callback(Act(4, lambda: frozen.requires_grad_(False)))
        trainer.add_callback(Act(8, lambda: setattr(moved, "data", moved.data.clone())))
        if graphs:
            graph_trainer(trainer)
        trainer.train()
        return state(trainer)

    assert_bit_equal([trained(False)], [trained(True)])
    assert [len(step.batches) for step in eager] == [4, 4, 4]


def test_the_graphs_are_freed_after_training_and_captured_anew_by_the_next(tmp_path, eager):
    trainer = make(tmp_path, data=rows(8))
    graph_trainer(trainer)
    passes = trainer.training_step.__self__
    trainer.train()
    assert passes.step is None
    trainer.train()
    assert [len(step.batches) for step in eager] == [2, 2]


class ScheduleFree(torch.optim.SGD):
    """An optimizer with a training mode, which Trainer leaves for evaluation."""

    training = False
    stepped_in_training = True

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def step(self, closure=None):
        self.stepped_in_training &= self.training
        return super().step(closure)


def test_training_mode_returns_after_evaluation_although_a_replay_runs_no_python(tmp_path, eager, monkeypatch):
    """A replay does not call `model.train()`: here no pass does."""
    model = tiny.llama()
    optimizer = ScheduleFree(tiny.trainable(model), lr=0.1)
    settings = dict(eval_strategy="steps", eval_steps=1, eval_dataset=rows(4), optimizers=(optimizer, None))
    trainer = make(tmp_path, model, data=rows(16), **settings)
    graph_trainer(trainer)
    modes = []
    monkeypatch.setattr(EagerStep, "__call__", lambda self, batch: modes.append(model.training) or torch.zeros(()))
    trainer.train()
    assert modes == [True] * 4
    assert optimizer.stepped_in_training


def test_a_user_s_trainer_captures_few_shapes_and_a_run_all_of_them(tmp_path, eager):
    trainer = make(tmp_path, data=rows(4))
    undo = graph_trainer(trainer)
    trainer.train()
    undo()
    graph_trainer(trainer, right_padded=True, most_shapes=None, eager_first=0)
    trainer.train()
    assert [step.options for step in eager] == [(2, 1, graphed_trainer.MOST_SHAPES), (2, 0, None)]


@pytest.mark.parametrize(
    ("mask", "labels", "expected"),
    [
        ([[1, 1, 1], [1, 0, 0]], [[5, 5, 5], [5, -100, -100]], True),
        ([[1, 1, 1], [0, 0, 1]], [[5, 5, 5], [-100, -100, 5]], False),
        ([[1, 0, 1]], [[5, -100, 5]], False),
        ([[1, 1, 0]], [[5, 5, 5]], False),
        ([[1, 1, 0]], None, False),
        ([[1, 1, 0]], [5], False),
        ([[[1, 1, 0]]], [[[5, 5, -100]]], False),
    ],
    ids=["right", "left", "hole", "labelled padding", "no labels", "label of a row", "more dimensions"],
)
def test_which_batches_need_no_mask(mask, labels, expected):
    labels = None if labels is None else torch.tensor(labels)
    assert is_padded_on_right(torch.tensor(mask), labels) is expected


def test_batches_with_position_ids_keep_their_mask(tmp_path, eager):
    def positioned(examples):
        batch = collate(examples)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}

    trainer = make(tmp_path, collator=positioned, data=rows(8))
    graph_trainer(trainer)
    trainer.train()
    assert all({"attention_mask", "position_ids"} <= {*names} for names in eager[0].batches)


def sometimes_nan(outputs, labels, num_items_in_batch=None):
    """A loss that is not a number for some batches, with gradients that are."""
    loss = token_loss(outputs, labels, num_items_in_batch)
    return loss + torch.where(labels.max() % 3 == 0, torch.nan, 0.0)


@pytest.mark.parametrize("logging_steps", [1, 4])
@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite_are_logged_as_trainer_does_but_not_read(
    tmp_path, eager, monkeypatch, filtered, logging_steps
):
    read, isnan = [], torch.isnan
    monkeypatch.setattr(torch, "isnan", lambda loss: (read.append(loss), isnan(loss))[1])

    def trained(graphs):
        evaluation = dict(eval_strategy="steps", eval_steps=5, eval_dataset=rows(4, seed=5))
        trainer = make(
            tmp_path, per_device_train_batch_size=1, max_steps=12, logging_steps=logging_steps,
            logging_nan_inf_filter=filtered, data=rows(12), **evaluation,
        )  # fmt: skip
        trainer.compute_loss_func = replayable(sometimes_nan)
        if graphs:
            graph_trainer(trainer)
        values, evaluate = set(), trainer.evaluate

        def noted(*args, **options):
            values.add(trainer.args.logging_nan_inf_filter)
            return evaluate(*args, **options)

        trainer.evaluate = noted
        read.clear()
        trainer.train()
        assert values == {filtered} == {trainer.args.logging_nan_inf_filter}
        return [line["loss"] for line in trainer.state.log_history if "loss" in line], len(read)

    (plain, reads), (graphed, none) = trained(False), trained(True)
    assert graphed == pytest.approx(plain, nan_ok=True)
    assert any(map(math.isnan, plain)) is not filtered
    assert (reads, none) == (12 if filtered else 0, 0)


@pytest.mark.parametrize("chosen", [False, True])
def test_batches_are_copied_while_the_passes_run(tmp_path, eager, chosen):
    trainer = make(tmp_path, data=rows(8), accelerator_config={"non_blocking": chosen})
    undo = graph_trainer(trainer)
    assert trainer.get_train_dataloader()._non_blocking
    undo()
    assert trainer.get_train_dataloader()._non_blocking is chosen


# ---- putting back ----------------------------------------------------------------------------------------------------


def test_detaching_brings_the_vanilla_trainer_back(tmp_path, eager):
    trainer = make(tmp_path, collator=left)
    controller = nalora.attach_trainer(trainer, cuda_graphs=True)
    assert "training_step" in vars(trainer)
    controller.detach()
    assert "training_step" not in vars(trainer)
    assert untouched(trainer)
    trainer.train()
    vanilla = make(tmp_path, collator=left)
    vanilla.train()
    assert_bit_equal([state(trainer)], [state(vanilla)])
    assert not eager


def test_undoing_keeps_what_others_wrapped_and_is_harmless_twice(tmp_path, eager):
    trainer = make(tmp_path, data=rows(8))
    undo = graph_trainer(trainer)
    inner, calls = trainer.training_step, []
    trainer.training_step = lambda *args: calls.append(1) or inner(*args)
    undo()
    undo()
    trainer.train()
    assert len(calls) == 2
    assert not eager


def test_a_training_step_of_the_instance_is_put_back(tmp_path, eager):
    trainer = make(tmp_path, data=rows(8))
    own = trainer.training_step = replayable(lambda *args: Trainer.training_step(trainer, *args))
    graph_trainer(trainer)()
    assert trainer.training_step is own


def test_a_refusal_leaves_no_trace(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(NALoRAError, match="a Trainer on cpu.*Fix: leave cuda_graphs out"):
        nalora.attach_trainer(trainer, cuda_graphs=True)
    assert untouched(trainer)
    assert "training_step" not in vars(trainer)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Flat(DataCollatorWithFlattening):
    pass


REFUSED = {
    "accumulation": ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3.*batch_size by 3"),
    "checkpointing": ({"gradient_checkpointing": True}, "gradient checkpointing.*gradient_checkpointing=False"),
    "compile": ({"torch_compile": True}, "torch_compile.*leave one"),
    "cache": ({"torch_empty_cache_steps": 1}, "leave torch_empty_cache_steps out"),
    "batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size.*set per_device_train_batch_size"),
    "lomo": ({"optim": "adalomo"}, "inside backward.*adamw_torch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_replayed_are_named_with_their_fix(tmp_path, eager, case):
    settings, message = REFUSED[case]
    trainer = make(tmp_path, **settings)
    with pytest.raises(NALoRAError, match=message):
        graph_trainer(trainer)


def set_on(path, value):
    *owners, name = path.split(".")

    def change(trainer, monkeypatch):
        owner = trainer
        for each in owners:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, name, value, raising=False)

    return change


def liger(trainer, monkeypatch):
    monkeypatch.setattr(trainer.args, "use_liger_kernel", True)


CHANGED = {
    "deepspeed": (set_on("is_deepspeed_enabled", True), "DeepSpeed.*without DeepSpeed"),
    "fsdp": (set_on("is_fsdp_enabled", True), "FSDP.*without FSDP"),
    "data parallel": (set_on("args._n_gpu", 2), "several GPUs.*CUDA_VISIBLE_DEVICES"),
    "model parallel": (set_on("is_model_parallel", True), "several GPUs"),
    "packing": (set_on("args.packing", True), "packing.*pad_to_multiple_of"),
    "padding free": (set_on("data_collator", type("C", (), {"padding_free": True})()), "packing"),
    "flattening": (set_on("data_collator", Flat()), "packing"),
    "flash": (set_on("model.config._attn_implementation", "flash_attention_2"), "flash_attention_2.*'sdpa'"),
    "layerdrop": (set_on("model.config.encoder_layerdrop", 0.1), "encoder_layerdrop > 0.*set it to 0"),
    "model_init": (set_on("model_init", lambda: None), "model_init.*model="),
    "liger": (liger, "Liger's loss.*liger_kernel_config="),
    "compiled": (set_on("model._orig_mod", 1), "torch_compile"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_trainers_that_cannot_be_replayed_are_named_with_their_fix(tmp_path, eager, monkeypatch, case):
    change, message = CHANGED[case]
    trainer = make(tmp_path)
    graph_trainer(trainer)()
    with monkeypatch.context() as changed:
        change(trainer, changed)
        with pytest.raises(NALoRAError, match=message):
            graph_trainer(trainer)
    graph_trainer(trainer)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("num_processes", 2, "2 processes"), ("mixed_precision", "fp16", "fp16.*bf16=True")],
)
def test_processes_and_fp16(tmp_path, eager, monkeypatch, name, value, message):
    trainer = make(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), name, value)
    with pytest.raises(NALoRAError, match=message):
        graph_trainer(trainer)


def test_every_problem_of_a_setup_is_named_in_one_error_with_its_fix(tmp_path, monkeypatch):
    settings = {"gradient_accumulation_steps": 3, "gradient_checkpointing": True}
    trainer = make(tmp_path, cls=ReadsTheLoss, **settings)
    liger(trainer, monkeypatch)
    with pytest.raises(NALoRAError) as error:
        nalora.attach_trainer(trainer, cuda_graphs=True)
    assert "found 5 problems: a Trainer on cpu (leave cuda_graphs out)" in str(error.value)
    for part in (
        "gradient_accumulation_steps=3: a replay overwrites gradients (set it to 1, and multiply",
        "(set gradient_checkpointing=False", "Liger's loss, which counts labels on the host (set liger_kernel_config",
        "ReadsTheLoss.compute_loss, whose Python code a replay would not run (leave cuda_graphs out, or decorate",
        "Fix: correct each of them",
    ):  # fmt: skip
        assert part in str(error.value)
    assert str(error.value).count("found") == 1


def test_a_model_that_checkpoints_by_itself_is_refused(tmp_path, eager):
    trainer = make(tmp_path)
    trainer.model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(NALoRAError, match="gradient checkpointing"):
        graph_trainer(trainer)


def test_liger_without_its_loss_is_allowed(tmp_path, eager, monkeypatch):
    trainer = make(tmp_path)
    liger(trainer, monkeypatch)
    trainer.args.liger_kernel_config = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    graph_trainer(trainer)


def test_a_setup_that_changes_after_the_call_is_refused_when_training_starts(tmp_path, eager):
    trainer = make(tmp_path)
    graph_trainer(trainer)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(NALoRAError, match="gradient_accumulation_steps=2"):
        trainer.train()


class ReadsTheLoss(Trainer):
    """Collects a metric in Python, which a replay would not do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        computed = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.collected.append(computed.item())
        return computed


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Declared(Trainer):
    @replayable
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(("cls", "name"), [(ReadsTheLoss, "compute_loss"), (OwnStep, "training_step")])
def test_a_subclass_with_its_own_pass_is_refused_by_the_function_s_name(tmp_path, eager, cls, name):
    with pytest.raises(NALoRAError, match=rf"{cls.__name__}\.{name}, whose Python code.*replayable"):
        graph_trainer(make(tmp_path, cls=cls))


def test_an_own_loss_function_must_be_declared(tmp_path, eager):
    with pytest.raises(NALoRAError, match="compute_loss_func"):
        graph_trainer(make(tmp_path, declared=False))
    graph_trainer(make(tmp_path, cls=Declared))


def test_trl_s_trainer_is_refused(tmp_path, eager):
    """Its loss collects entropy and accuracy on the host in every pass."""
    trl = pytest.importorskip("trl")
    trainer = make(tmp_path)
    trainer.__class__ = trl.SFTTrainer
    with pytest.raises(NALoRAError, match=r"SFTTrainer\.compute_loss"):
        obstacles.refuse_setup(trainer)


def test_a_second_call_is_refused(tmp_path, eager):
    trainer = make(tmp_path)
    graph_trainer(trainer)
    with pytest.raises(NALoRAError, match=r"Trainer\.training_step"):
        graph_trainer(trainer)


def test_a_model_in_place_of_a_trainer_is_refused():
    with pytest.raises(NALoRAError, match=r"expected a transformers\.Trainer"):
        graph_trainer(tiny.llama())


def test_batches_with_numbers_are_refused_by_name(tmp_path, eager):
    trainer = make(tmp_path, collator=lambda examples: {**collate(examples), "max_length_q": 7})
    graph_trainer(trainer)
    with pytest.raises(NALoRAError, match="'max_length_q'.*a int.*data collator"):
        trainer.train()


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def padded_to_16(examples):
    """One length, padded on the right."""
    batch = collate(examples)
    more = (0, 16 - batch["input_ids"].shape[1])
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: torch.nn.functional.pad(tensor, more, value=fill[name]) for name, tensor in batch.items()}


def trained_on_gpu(folder, graphs, *, method=None, collator=padded_to_16, dropout=0.0, **settings):
    model = tiny.llama(torch.float32, lora_dropout=dropout)
    trainer = make(folder, model, collator=collator, use_cpu=False, data=rows(80), **settings)
    if method:
        nalora.attach_trainer(trainer, apply_to=method, cuda_graphs=graphs)
    elif graphs:
        graph_trainer(trainer)
    start = time.perf_counter()
    trainer.train()
    torch.cuda.synchronize()
    print(f"graphs={graphs} {method} {time.perf_counter() - start:.2f} s for {trainer.state.global_step} steps")
    return state(trainer), [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("method", [None, "gradient", "update"])
@pytest.mark.parametrize("collator", [padded_to_16, left, collate], ids=["right", "left", "ragged"])
def test_twenty_replayed_steps_are_the_eager_steps(tmp_path, method, collator):
    eager, replayed = (trained_on_gpu(tmp_path, graphs, method=method, collator=collator) for graphs in (False, True))
    assert len(eager[1]) == 20
    assert replayed[1] == pytest.approx(eager[1], rel=1e-3)
    assert tiny.largest_difference(eager[0], replayed[0]) < 1e-2


@pytest.mark.gpu
@gpu
def test_dropout_draws_the_same_numbers_in_a_replay(tmp_path):
    """A graph advances the device's generator as its kernels would."""
    eager, replayed = (trained_on_gpu(tmp_path, graphs, dropout=0.3) for graphs in (False, True))
    assert replayed[1] == pytest.approx(eager[1], rel=1e-3)
    without = trained_on_gpu(tmp_path, True)
    assert without[1] != pytest.approx(eager[1], rel=1e-3)


@pytest.mark.gpu
@gpu
def test_evaluation_between_replayed_steps(tmp_path):
    quiet = trained_on_gpu(tmp_path, True)
    settings = dict(eval_strategy="steps", eval_steps=1, eval_dataset=rows(4, seed=5))
    assert trained_on_gpu(tmp_path, True, **settings)[1] == pytest.approx(quiet[1], rel=1e-4)


@pytest.mark.gpu
@gpu
def test_a_declared_loss_that_reads_the_gpu_is_reported_when_it_is_captured(tmp_path):
    trainer = make(tmp_path, tiny.llama(torch.float32), collator=padded_to_16, use_cpu=False)
    trainer.compute_loss_func = replayable(lambda *args, **options: loss(*args, **options) * loss(*args).item())
    graph_trainer(trainer)
    with pytest.raises(NALoRAError, match="cannot be captured"):
        trainer.train()


@pytest.mark.gpu
@gpu
def test_more_shapes_than_allowed_run_eagerly_and_are_logged_once(tmp_path, caplog):
    trainer = make(tmp_path, tiny.llama(torch.float32), use_cpu=False, data=rows(80))
    graph_trainer(trainer, most_shapes=1, eager_first=0)
    with caplog.at_level(logging.WARNING, logger="nalora"):
        trainer.train()
    assert sum("1 shapes" in record.message for record in caplog.records) == 1
