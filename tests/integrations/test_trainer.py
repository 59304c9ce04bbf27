"""transformers.Trainer: one line attaches the control, and the run is the plain loop's in every setting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.optim import SGD, AdamW
from transformers import (
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.optimization import Adafactor

import nalora
from nalora import NALoRAConfig, NALoRAError
from nalora.control.checkpoint import FILE_NAME

SPACES = pytest.mark.parametrize("apply_to", ["gradient", "update"])
LEARNING_RATE = 3e-3


def rows(count: int, seed: int = 0) -> list[dict]:
    """Sequences of 4 to 13 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 14, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, tiny.VOCABULARY, (n,), generator=generator)} for n in lengths]


def collate(examples: list[dict]) -> dict:
    """Padded on the right to the longest of the batch, pads masked and without a label.

    The first token, which nothing predicts, has no label either: Trainer counted it before transformers 5.10.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in examples], batch_first=True)
    mask = pad([torch.ones_like(each["input_ids"]) for each in examples], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def token_loss(outputs, labels, num_items_in_batch=None):
    """Next-token loss in the model's own dtype; transformers' is float32 whatever the model is."""
    logits = (outputs["logits"] if isinstance(outputs, dict) else outputs.logits)[:, :-1]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def make_trainer(folder, model=None, *, cls=Trainer, arguments=TrainingArguments, data=None, dtype=torch.float64, **kw):
    given = {key: kw.pop(key) for key in ("optimizers", "callbacks", "eval_dataset", "compute_metrics") if key in kw}
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.3,
        weight_decay=0.1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = cls(
        model if model is not None else tiny.llama(dtype),
        arguments(**settings | kw),
        train_dataset=rows(48) if data is None else data,
        data_collator=collate,
        compute_loss_func=token_loss,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def plain_loop(apply_to, *, steps=12, max_norm=0.3, make_optimizer=None, clip_first=False, loss=token_loss, model=None):
    """What Trainer does with `make_trainer`'s settings, written out around `nalora.attach`."""
    model = model if model is not None else tiny.llama()
    make_optimizer = make_optimizer or (lambda p: AdamW(p, lr=LEARNING_RATE, weight_decay=0.1))
    optimizer = make_optimizer(tiny.trainable(model))
    controller = nalora.attach(model, optimizer, NALoRAConfig(apply_to=apply_to))
    data = rows(4 * steps)
    for start in range(0, len(data), 4):
        batch = collate(data[start : start + 4])
        labels = batch.pop("labels")
        loss(model(**batch), labels).backward()
        if clip_first:
            torch.nn.utils.clip_grad_norm_(tiny.trainable(model), max_norm)
        elif max_norm:
            controller.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return tiny.adapter_state(model), controller.state_dict()["tensors"]


def train(trainer, apply_to="gradient", **config):
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to, **config))
    trainer.train()
    return tiny.adapter_state(trainer.model), controller.state_dict()["tensors"]


def train_vanilla(trainer):
    trainer.train()
    return tiny.adapter_state(trainer.model)


def difference(one, other) -> float:
    """Over adapters and controller states."""
    return max(
        tiny.largest_difference(*({k: v.double() for k, v in x.items() if v.any()} for x in pair))
        for pair in zip(one, other, strict=True)
    )


def assert_bit_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), key


# ---- the order of things ---------------------------------------------------------------------------------------------


@SPACES
@pytest.mark.parametrize("max_grad_norm", [0.3, 0.0])
def test_trainer_is_the_plain_loop(tmp_path, apply_to, max_grad_norm):
    trainer = make_trainer(tmp_path, max_grad_norm=max_grad_norm)
    ours = train(trainer, apply_to)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert len(norms) == 12
    assert min(norms) > 0.3
    assert difference(ours, plain_loop(apply_to, max_norm=max_grad_norm)) < 1e-9
    vanilla = train_vanilla(make_trainer(tmp_path, max_grad_norm=max_grad_norm))
    assert tiny.largest_difference(vanilla, ours[0]) > 1e-3


def test_settings_as_keywords_are_the_configuration(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(NALoRAError, match=r"attach_trainer\(keepratio=….*did you mean keep_ratio"):
        nalora.attach_trainer(trainer, keepratio=0.5)
    controller = nalora.attach_trainer(trainer, apply_to="update", keep_ratio=0.5)
    assert controller.config == NALoRAConfig(apply_to="update", keep_ratio=0.5)


def test_the_control_comes_before_clipping_not_after(tmp_path):
    ours = train(make_trainer(tmp_path))
    assert difference(ours, plain_loop("gradient", clip_first=True)) > 1e-4


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 2 * token_loss(outputs, labels, num_items_in_batch) + 1
        return (loss, outputs) if return_outputs else loss


class OwnClipping(Trainer):
    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


@SPACES
def test_a_subclass_keeps_its_own_loss(tmp_path, apply_to):
    ours = train(make_trainer(tmp_path, cls=OwnLoss), apply_to)
    expected = plain_loop(apply_to, loss=lambda *both: 2 * token_loss(*both) + 1)
    assert difference(ours, expected) < 1e-9


def test_a_subclass_that_clips_itself_is_controlled_before_it(tmp_path):
    ours = train(make_trainer(tmp_path, cls=OwnClipping))
    assert difference(ours, plain_loop("gradient")) < 1e-9


class OwnNorm(Trainer):
    """Logs a norm without calling the accelerator, as Trainer does for parameters on several device meshes."""

    def _get_grad_norm(self, model, grad_norm=None):
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def test_without_clipping_the_norm_that_is_logged_is_that_of_the_controlled_gradients(tmp_path):
    settings = dict(max_grad_norm=0, learning_rate=0.0)
    vanilla, own, whole = (make_trainer(tmp_path, cls=cls, **settings) for cls in (OwnNorm, OwnNorm, Trainer))
    vanilla.train()
    assert difference(train(own), train(whole)) < 1e-9
    norms = [
        [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        for trainer in (vanilla, own, whole)
    ]
    assert norms[1] == pytest.approx(norms[2])
    assert norms[0][-1] > 1.01 * norms[1][-1]


@SPACES
def test_accumulation_over_padded_batches(tmp_path, apply_to):
    whole = train(make_trainer(tmp_path, per_device_train_batch_size=8), apply_to)
    split = make_trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert difference(whole, train(split, apply_to)) < 1e-9


class Counted(TrainerCallback):
    """The contents of the window of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(self.controller._window.groups[0].tokens.tolist())


@SPACES
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path, apply_to, reentrant):
    settings = dict(gradient_accumulation_steps=2, data=rows(32))
    off = train(make_trainer(tmp_path, **settings), apply_to)

    settings |= dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    counted = Counted()
    trainer = make_trainer(tmp_path, callbacks=[counted], **settings)
    recomputed = []
    trainer.model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj").register_forward_hook(
        lambda *_: recomputed.append(torch._C._current_graph_task_id() != -1)
    )
    counted.controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to))
    trainer.train()
    assert sum(recomputed) == 8
    lengths = [len(row["input_ids"]) for row in rows(32)]
    assert counted.steps == [[sum(lengths[start : start + 8])] * 2 for start in range(0, 32, 8)]
    on = tiny.adapter_state(trainer.model), counted.controller.state_dict()["tensors"]
    assert difference(off, on) < 1e-9


# ---- optimizers and precision ----------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw_torch": lambda p: AdamW(p, lr=LEARNING_RATE, weight_decay=0.1),
    "adamw_torch_fused": lambda p: AdamW(p, lr=LEARNING_RATE, weight_decay=0.1, fused=True),
    "sgd": lambda p: SGD(p, lr=LEARNING_RATE, weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p, lr=LEARNING_RATE, weight_decay=0.1, scale_parameter=False, relative_step=False),
}


@SPACES
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimizer_that_trainer_builds(tmp_path, optim, apply_to):
    settings = dict(optim=optim, data=rows(24))
    ours = train(make_trainer(tmp_path, **settings), apply_to)
    assert difference(ours, plain_loop(apply_to, steps=6, make_optimizer=OPTIMIZERS[optim])) < 1e-9
    vanilla = train_vanilla(make_trainer(tmp_path, **settings))
    assert tiny.largest_difference(vanilla, ours[0]) > (1e-3 if optim != "sgd" else 1e-5)


@SPACES
def test_an_optimizer_given_to_the_trainer(tmp_path, apply_to):
    model = tiny.llama()
    optimizer = SGD(tiny.trainable(model), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ours = train(make_trainer(tmp_path, model, optimizers=(optimizer, schedule)), apply_to)
    expected = plain_loop(apply_to, make_optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9))
    assert difference(ours, expected) < 1e-9


def test_an_optimizer_without_the_adapters_is_refused_and_leaves_no_trace(tmp_path):
    model = tiny.llama()
    optimizer = SGD([parameter for name, parameter in model.named_parameters() if "self_attn.q" in name], lr=0.1)
    trainer = make_trainer(tmp_path, model, optimizers=(optimizer, None))
    with pytest.raises(NALoRAError, match="is not in SGD"):
        nalora.attach_trainer(trainer)
    assert untouched(trainer)


@SPACES
def test_bf16_trains_with_float32_statistics(tmp_path, apply_to):
    settings = dict(bf16=True, dtype=torch.float32, data=rows(24))
    trainer = make_trainer(tmp_path, **settings)
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to))
    seen = set()
    gate = trainer.model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj")
    gate.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.train()
    assert seen == {torch.bfloat16}
    state = controller.state_dict()["tensors"]
    assert {tensor.dtype for key, tensor in state.items() if key.endswith(("/mask", "/scales"))} == {torch.float32}
    assert controller.metrics()["skipped_updates"] == 0
    vanilla = train_vanilla(make_trainer(tmp_path, **settings))
    assert tiny.largest_difference(vanilla, tiny.adapter_state(trainer.model)) > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@SPACES
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_fp16_overflow_leaves_no_trace(tmp_path, apply_to, optim):
    """The third of five steps overflows under GradScaler: skipped, and nothing of it reaches the fourth."""
    counted = Counted()
    settings = dict(optim=optim, fp16=True, use_cpu=False, dtype=torch.float32, data=rows(20))
    trainer = make_trainer(tmp_path, callbacks=[counted], **settings)
    controller = counted.controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to))
    snapshots = []
    trainer.add_callback(
        OnStepBegin(lambda: snapshots.append((tiny.adapter_state(trainer.model), controller.state_dict()["tensors"])))
    )
    tiny.trainable(trainer.model)[0].register_hook(lambda grad: grad * float("inf") if len(snapshots) == 3 else grad)
    trainer.train()
    lengths = [len(row["input_ids"]) for row in rows(20)]
    assert counted.steps == [[sum(lengths[start : start + 4])] * 2 for start in range(0, 20, 4)]
    assert_bit_equal(snapshots[2], snapshots[3])
    assert difference(snapshots[3], snapshots[4]) > 1e-4
    assert [value.item() for key, value in snapshots[4][1].items() if key.endswith("/updates")] == [3, 3]
    assert controller.metrics()["skipped_updates"] == 0


class OnStepBegin(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_begin(self, args, state, control, **kwargs):
        self.act()


def test_torch_compile(tmp_path):
    torch._dynamo.reset()
    # One length, so that there is one graph.
    data = [{"input_ids": ids} for ids in tiny.tokens(16, 12)]
    settings = dict(data=data, dtype=torch.float32)
    eager = train(make_trainer(tmp_path, **settings))
    compiled = train(make_trainer(tmp_path, torch_compile=True, torch_compile_backend="aot_eager", **settings))
    assert difference(eager, compiled) < 1e-4
    vanilla = train_vanilla(make_trainer(tmp_path, **settings))
    assert tiny.largest_difference(vanilla, compiled[0]) > 1e-3
    torch._dynamo.reset()


# ---- logs ------------------------------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Hears what TensorBoard, W&B and trackio hear."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def test_metrics_are_in_the_trainers_own_logs(tmp_path):
    recorder = Recorder()
    settings = dict(eval_strategy="steps", eval_steps=2, eval_dataset=rows(4, seed=5), logging_steps=2)
    trainer = make_trainer(tmp_path, data=rows(16), callbacks=[recorder], **settings)
    controller = nalora.attach_trainer(trainer)
    trainer.train()
    names = {f"nalora/{name}" for name in controller.metrics()}
    assert {"nalora/p_sup", "nalora/a", "nalora/scale_gate", "nalora/mask_mean", "nalora/skipped_updates"} <= names
    for lines in (trainer.state.log_history, recorder.lines):
        training = [line for line in lines if "loss" in line]
        others = [line for line in lines if "loss" not in line]
        assert (len(training), len(others)) == (2, 3)  # two evaluations and the closing summary
        assert all(names <= line.keys() for line in training)
        assert not any(key.startswith("nalora/") for line in others for key in line)
        assert {name: training[-1][f"nalora/{name}"] for name in controller.metrics()} == controller.metrics()
        assert training[0]["nalora/mask_mean"] > training[1]["nalora/mask_mean"]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def make_resumable(folder, **more):
    """2 epochs of 5 batches, accumulation 2: optimizer steps of 2, 2 and 1 batches; shuffled, with dropout."""
    settings = dict(
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="random",
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=1,
        data=rows(20),
    )
    model = tiny.llama(torch.float32, lora_dropout=0.2)
    return make_trainer(folder, model, **settings | more)


@SPACES
def test_resuming_from_every_checkpoint_ends_bit_for_bit_the_same(tmp_path, apply_to):
    uninterrupted = make_resumable(tmp_path)
    expected = train(uninterrupted, apply_to)
    assert uninterrupted.state.global_step == 6
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")} == {1, 2, 3, 4, 5, 6}
    for step in range(1, 7):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert {FILE_NAME, "optimizer.pt", "adapter_model.safetensors"} <= {each.name for each in checkpoint.iterdir()}
        torch.manual_seed(1000 + step)
        resumed = make_resumable(tmp_path / f"from-{step}", save_strategy="no")
        controller = nalora.attach_trainer(resumed, NALoRAConfig(apply_to=apply_to))
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.global_step == 6
        assert_bit_equal(expected, (tiny.adapter_state(resumed.model), controller.state_dict()["tensors"]))
    # The state matters: without it the same resumption goes elsewhere.
    forgetful = make_resumable(tmp_path / "forgetful", save_strategy="no")
    controller = nalora.attach_trainer(forgetful, NALoRAConfig(apply_to=apply_to))
    fresh = controller.state_dict()
    controller.load = lambda folder: controller.load_state_dict(fresh)
    forgetful.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert tiny.largest_difference(expected[0], tiny.adapter_state(forgetful.model)) > 1e-4


def test_the_last_checkpoint_is_found_by_itself(tmp_path):
    expected = train(make_resumable(tmp_path / "whole"))
    stopped = make_resumable(tmp_path / "run", max_steps=6)
    nalora.attach_trainer(stopped)
    stopped.add_callback(StopAt(4))
    stopped.train()
    resumed = make_resumable(tmp_path / "run", max_steps=6)
    controller = nalora.attach_trainer(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_equal(expected, (tiny.adapter_state(resumed.model), controller.state_dict()["tensors"]))


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def overwrite(path: Path) -> None:
    path.write_bytes(b"not safetensors at all")


@pytest.mark.parametrize("damage", [remove, truncate, overwrite])
def test_a_missing_or_damaged_state_is_a_hard_error(tmp_path, damage):
    train(make_resumable(tmp_path, max_steps=2))
    damage(tmp_path / "checkpoint-1" / FILE_NAME)
    resumed = make_resumable(tmp_path)
    nalora.attach_trainer(resumed)
    with pytest.raises(NALoRAError, match=FILE_NAME):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_saving_the_model_alone(tmp_path):
    train(make_resumable(tmp_path, save_only_model=True, max_steps=2))
    files = {each.name for each in (tmp_path / "checkpoint-1").iterdir()}
    assert "adapter_model.safetensors" in files
    assert not {FILE_NAME, "optimizer.pt"} & files
    resumed = make_resumable(tmp_path)
    nalora.attach_trainer(resumed)
    with pytest.raises(NALoRAError, match="no controller state"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_checkpointed_adapter_is_an_ordinary_lora_adapter(tmp_path):
    train(make_resumable(tmp_path / "ours", max_steps=1))
    train_vanilla(make_resumable(tmp_path / "plain", max_steps=1))
    ours, plain = (tmp_path / which / "checkpoint-1" for which in ("ours", "plain"))
    saved, expected = (load_file(folder / "adapter_model.safetensors") for folder in (ours, plain))
    assert {k: (t.dtype, t.shape) for k, t in saved.items()} == {k: (t.dtype, t.shape) for k, t in expected.items()}
    assert (ours / "adapter_config.json").read_text() == (plain / "adapter_config.json").read_text()
    assert {each.name for each in ours.iterdir()} - {each.name for each in plain.iterdir()} == {FILE_NAME}


# ---- evaluation ------------------------------------------------------------------------------------------------------


@SPACES
def test_evaluation_during_training_changes_nothing(tmp_path, apply_to):
    quiet = train(make_trainer(tmp_path, dtype=torch.float32, data=rows(24)), apply_to)
    evaluating = make_trainer(
        tmp_path,
        dtype=torch.float32,
        data=rows(24),
        eval_dataset=rows(8, seed=5),
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    assert_bit_equal(quiet, train(evaluating, apply_to))
    assert len([line for line in evaluating.state.log_history if "eval_loss" in line]) == 7


def test_the_best_model_at_the_end_is_the_checkpoint_of_the_same_run(tmp_path):
    quiet = train(make_trainer(tmp_path / "quiet", data=rows(24)))
    choosing = make_trainer(
        tmp_path / "best",
        data=rows(24),
        eval_dataset=rows(8, seed=5),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        greater_is_better=True,  # the worst one: not the last step's, so that loading is seen
    )
    controller = nalora.attach_trainer(choosing)
    last = {}
    choosing.add_callback(OnSave(lambda: last.update(tiny.adapter_state(choosing.model))))
    choosing.train()
    assert_bit_equal(quiet, (last, controller.state_dict()["tensors"]))
    assert Path(choosing.state.best_model_checkpoint).name == "checkpoint-2"
    best = load_file(Path(choosing.state.best_model_checkpoint) / "adapter_model.safetensors")
    for name, parameter in tiny.adapter_state(choosing.model).items():
        assert torch.equal(parameter, best[name.replace(".default", "")])


class OnSave(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_save(self, args, state, control, **kwargs):
        self.act()


def test_predicting_with_generate_changes_nothing(tmp_path):
    def make(**more):
        settings = dict(cls=Seq2SeqTrainer, arguments=Seq2SeqTrainingArguments, data=rows(16), dtype=torch.float32)
        return make_trainer(tmp_path, **settings | more)

    quiet = train(make())
    generating = make(
        eval_dataset=rows(4, seed=5),
        eval_strategy="steps",
        eval_steps=1,
        compute_metrics=lambda predictions: {"width": predictions.predictions.shape[1]},
        predict_with_generate=True,
        generation_max_length=18,
    )
    generated = []
    generate = generating.model.generate
    generating.model.generate = lambda *args, **kwargs: generated.append(1) or generate(*args, **kwargs)
    assert_bit_equal(quiet, train(generating))
    assert len(generated) == 4


# ---- again, and off again --------------------------------------------------------------------------------------------


def untouched(trainer) -> bool:
    """Neither the trainer nor its model carries anything of nalora."""
    followed = {"_clip_grad_norm", "log", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"}
    hooks = [
        hook
        for module in trainer.model.modules()
        for store in (module._forward_hooks, module._forward_pre_hooks)
        for hook in store.values()
        if type(hook).__module__.startswith("nalora")
    ]
    gradient_hooks = [p._post_accumulate_grad_hooks for p in trainer.model.parameters() if p.requires_grad]
    callbacks = [each for each in trainer.callback_handler.callbacks if type(each).__module__.startswith("nalora")]
    return not (
        followed & vars(trainer).keys()
        or "clip_grad_norm_" in vars(trainer.accelerator)
        or hooks
        or callbacks
        or any(gradient_hooks)
    )


@SPACES
def test_training_twice_continues_where_it_stopped(tmp_path, apply_to):
    trainer = make_trainer(tmp_path, data=rows(24))
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=apply_to))
    trainer.train()
    first = controller.state_dict()["tensors"]
    trainer.train()
    second = controller.state_dict()["tensors"]
    updates = [key for key in first if key.endswith("/updates")]
    assert [first[key].item() for key in updates] == [6, 6]
    assert [second[key].item() for key in updates] == [12, 12]

    model = tiny.llama()
    optimizer = AdamW(tiny.trainable(model), lr=LEARNING_RATE, weight_decay=0.1)
    plain = nalora.attach(model, optimizer, NALoRAConfig(apply_to=apply_to))
    for _ in range(2):
        for start in range(0, 24, 4):
            batch = collate(rows(24)[start : start + 4])
            token_loss(model(**batch), batch["labels"]).backward()
            plain.clip_grad_norm_(0.3)
            optimizer.step()
            optimizer.zero_grad()
    expected = tiny.adapter_state(model), plain.state_dict()["tensors"]
    assert difference((tiny.adapter_state(trainer.model), second), expected) < 1e-9


@SPACES
def test_detaching_brings_the_vanilla_trainer_back(tmp_path, apply_to):
    def train_on(trainer, controller):
        if controller is not None:
            controller.detach()
            assert untouched(trainer)
        trainer.train()
        return tiny.adapter_state(trainer.model)

    detached = make_trainer(tmp_path, data=rows(24), dtype=torch.float32)
    assert untouched(detached)
    controller = nalora.attach_trainer(detached, NALoRAConfig(apply_to=apply_to))
    assert not untouched(detached)
    vanilla = make_trainer(tmp_path, data=rows(24), dtype=torch.float32)
    assert_bit_equal([train_on(vanilla, None)], [train_on(detached, controller)])

    # After a controlled run as well, and from there on as any other trainer that has these adapters.
    trained = make_trainer(tmp_path, data=rows(24), dtype=torch.float32, optim="sgd")
    controller = nalora.attach_trainer(trained, NALoRAConfig(apply_to=apply_to))
    trained.train()
    copy = tiny.llama(torch.float32)
    copy.load_state_dict(trained.model.state_dict())
    vanilla = make_trainer(tmp_path, copy, data=rows(24), optim="sgd")
    assert_bit_equal([train_on(vanilla, None)], [train_on(trained, controller)])
    assert not any("nalora/a" in line for line in trained.state.log_history)
    nalora.attach_trainer(trained).detach()


def test_a_run_that_broke_off_leaves_nothing_to_the_next(tmp_path):
    """A forward pass that ends in an error has counted tokens which no gradient belongs to."""
    trainer = make_trainer(tmp_path, data=rows(24, seed=9))
    controller = nalora.attach_trainer(trainer)
    down = trainer.model.get_submodule("base_model.model.model.layers.1.mlp.down_proj")
    failing = down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    failing.remove()
    trainer.train_dataset = rows(24)
    trainer.train()
    ours = tiny.adapter_state(trainer.model), controller.state_dict()["tensors"]
    assert difference(ours, plain_loop("gradient", steps=6)) < 1e-9


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "DeepSpeed": lambda trainer: setattr(trainer, "is_deepspeed_enabled", True),
    "FSDP1": lambda trainer: run_fsdp(trainer, FullyShardedDataParallelPlugin(fsdp_version=1)),
    "CPU offload": lambda trainer: run_fsdp(trainer, FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)),
    "DataParallel": lambda trainer: setattr(trainer.args, "_n_gpu", 2),
    "model_init": lambda trainer: setattr(trainer, "model_init", tiny.llama),
    "adalomo": lambda trainer: setattr(trainer.args, "optim", SimpleNamespace(value="adalomo")),
}


def run_fsdp(trainer, plugin):
    """As a launch on several GPUs would have it; on the CPU Accelerate drops the plugin."""
    trainer.is_fsdp_enabled = True
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_controlled_is_refused_by_name(tmp_path, name):
    trainer = make_trainer(tmp_path)
    REFUSED[name](trainer)
    with pytest.raises(NALoRAError, match=name):
        nalora.attach_trainer(trainer)
    assert untouched(trainer)


def test_nothing_to_control_is_reported_when_attaching(tmp_path):
    without_lora = make_trainer(tmp_path, tiny.llama().unload())
    with pytest.raises(NALoRAError, match="no LoRA layers"):
        nalora.attach_trainer(without_lora)
    attention_only = make_trainer(tmp_path, tiny.llama(target_modules=["q_proj", "v_proj"]))
    with pytest.raises(NALoRAError, match="q_proj, v_proj alone"):
        nalora.attach_trainer(attention_only)
    assert untouched(attention_only)
    twice = make_trainer(tmp_path)
    nalora.attach_trainer(twice)
    with pytest.raises(NALoRAError, match="another controller"):
        nalora.attach_trainer(twice)


def test_what_is_no_trainer_is_named(tmp_path):
    model = tiny.llama()
    for wrong, found in (
        (model, "found a model"),
        (None, "found a NoneType"),
        (NALoRAConfig(), "found a NALoRAConfig"),
    ):
        with pytest.raises(NALoRAError, match=rf"{found}; expected a transformers.Trainer.*attach\(model, optimizer\)"):
            nalora.attach_trainer(wrong)
