"""TRL's trainers: attached by the same line, and only trained passes are counted."""

from __future__ import annotations

from collections import Counter

import peft
import pytest
import tiny
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import nalora
from nalora import NALoRAConfig

OFF = NALoRAConfig(mask=False, scaling=False)
CHECKPOINTING = pytest.mark.parametrize(
    "more",
    [
        pytest.param({"gradient_checkpointing": False}, id="no-checkpointing"),
        pytest.param({}, id="checkpointing"),  # TRL's default, not reentrant
        pytest.param({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="reentrant"),
    ],
)

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<u> {{ message.content }} "
    "{% else %}<a> {% generation %}{{ message.content }} <eos>{% endgeneration %} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
WORDS = [f"w{i}" for i in range(tiny.VOCABULARY - 5)]


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<u>", "<a>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    result.chat_template = TEMPLATE
    return result


def sentences(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, size: torch.randint(high, (size,), generator=generator).tolist()  # noqa: E731
    lengths = [shortest + n for n in draw(longest - shortest + 1, count)]
    return [" ".join(WORDS[i] for i in draw(len(WORDS), length)) for length in lengths]


PROMPTS, GOOD, BAD = sentences(16, 2, 6, seed=1), sentences(16, 3, 9, seed=2), sentences(16, 3, 9, seed=3)


class Counts(TrainerCallback):
    """The tokens that the controller has counted at each optimizer step, one number per block."""

    def __init__(self, controller):
        self.controller, self.steps = controller, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(self.controller._window.groups[0].tokens.tolist())


def watch(trainer, controller, real_tokens):
    """Counted and real tokens per optimizer step; `real_tokens(inputs)` reads a batch that the loss was given."""
    counts = Counts(controller)
    trainer.add_callback(counts)
    learned = []
    compute_loss = trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        if model.training:
            learned.append(int(real_tokens(inputs)))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded
    return counts, learned


def per_step(learned: list[int], accumulation: int) -> list[list[int]]:
    """The same for both blocks of the model."""
    return [[sum(learned[i : i + accumulation])] * 2 for i in range(0, len(learned), accumulation)]


def settings(folder, **more) -> dict:
    common = dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.3,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return common | more


def finish(trainer):
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---- SFT -------------------------------------------------------------------------------------------------------------


def texts() -> Dataset:
    return Dataset.from_dict({"text": [f"{a} {b}" for a, b in zip(PROMPTS, GOOD, strict=True)]})


def completions() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "completion": [f" {text}" for text in GOOD]})


def dialogues() -> Dataset:
    turns = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(PROMPTS, GOOD, strict=True)
    ]
    return Dataset.from_dict({"messages": turns})


SFT = {
    "padded": (texts, {}),
    "no-checkpointing": (texts, {"gradient_checkpointing": False}),
    "reentrant": (texts, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "packing": (texts, {"packing": True, "max_length": 24}),
    "packing-wrapped": (texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 24}),
    "padding-free": (texts, {"padding_free": True, "max_length": None}),
    "completion-only": (completions, {"completion_only_loss": True}),
    "assistant-only": (dialogues, {"assistant_only_loss": True}),
    "dft": (texts, {"loss_type": "dft"}),
    "label-smoothing": (texts, {"label_smoothing_factor": 0.1}),
}


def sft(folder, tokenizer, name="padded", **more):
    data, special = SFT[name]
    arguments = SFTConfig(**settings(folder, **special | more))
    return finish(SFTTrainer(tiny.llama(torch.float32), arguments, train_dataset=data(), processing_class=tokenizer))


def real_tokens_of_sft(inputs) -> int:
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    return (inputs["input_ids"] != 0).sum()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", SFT)
def test_sft_counts_each_real_token_once(tmp_path, tokenizer, name):
    trainer = sft(tmp_path, tokenizer, name)
    whole_epoch = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to="update"))
    counts, learned = watch(trainer, controller, real_tokens_of_sft)
    trainer.train()
    assert counts.steps == per_step(learned, 2)
    assert sum(learned) == whole_epoch
    assert controller.metrics()["skipped_updates"] == 0
    assert all("nalora/p_sup" in line for line in trainer.state.log_history if "loss" in line)

    vanilla = sft(tmp_path, tokenizer, name)
    vanilla.train()
    assert tiny.largest_difference(tiny.adapter_state(vanilla.model), tiny.adapter_state(trainer.model)) > 1e-3


@pytest.mark.parametrize("name", ["padded", "packing"])
def test_sft_with_the_controls_off_is_vanilla_bit_for_bit(tmp_path, tokenizer, name):
    ours, vanilla = sft(tmp_path, tokenizer, name), sft(tmp_path, tokenizer, name)
    nalora.attach_trainer(ours, OFF)
    for trainer in (ours, vanilla):
        trainer.train()
    expected = tiny.adapter_state(vanilla.model)
    for key, parameter in tiny.adapter_state(ours.model).items():
        assert torch.equal(parameter, expected[key]), key
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (ours, vanilla)]
    assert losses[0] == losses[1]


def test_sft_wraps_the_model_itself(tmp_path, tokenizer):
    """`peft_config=` makes the adapter inside the trainer; the saved checkpoint carries the state."""
    arguments = SFTConfig(**settings(tmp_path, save_strategy="steps", save_steps=2, max_steps=2))
    trainer = finish(
        SFTTrainer(
            tiny.llama(torch.float32).unload(),
            arguments,
            train_dataset=texts(),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
        )
    )
    controller = nalora.attach_trainer(trainer)
    trainer.train()
    assert controller.metrics()["mask_mean"] < 1
    assert (tmp_path / "checkpoint-2" / "nalora_state.safetensors").is_file()


# ---- DPO -------------------------------------------------------------------------------------------------------------


def policy(reference: str) -> tuple[torch.nn.Module, dict]:
    """A model and the trainer's other arguments, from which it takes its reference model."""
    model = tiny.llama(torch.float32)
    if reference == "disabled":
        return model.unload(), {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear")}
    return model, {"ref_model": tiny.llama(torch.float32).unload()} if reference == "model" else {}


def dpo(folder, tokenizer, reference, **more):
    data = Dataset.from_dict({"prompt": PROMPTS, "chosen": [f" {t}" for t in GOOD], "rejected": [f" {t}" for t in BAD]})
    model, extra = policy(reference)
    arguments = DPOConfig(**settings(folder, **more))
    return finish(DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, **extra))


@pytest.mark.parametrize("reference", ["disabled", "adapter", "model"])
@CHECKPOINTING
def test_dpo_counts_the_policy_alone(tmp_path, tokenizer, reference, more):
    trainer = dpo(tmp_path, tokenizer, reference, **more)
    assert ("ref" in trainer.model.peft_config) == (reference == "adapter")
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to="update"))
    counts, learned = watch(trainer, controller, lambda inputs: inputs["attention_mask"].sum())
    trainer.train()
    assert len(counts.steps) == 4
    assert counts.steps == per_step(learned, 2)

    vanilla = dpo(tmp_path, tokenizer, reference, **more)
    vanilla.train()
    before, after = tiny.adapter_state(vanilla.model), tiny.adapter_state(trainer.model)
    assert tiny.largest_difference(before, after) > 1e-3
    if reference == "adapter":
        frozen = {k: v for k, v in trainer.model.state_dict().items() if ".ref." in k}
        assert frozen
        for key, value in frozen.items():
            assert torch.equal(value, vanilla.model.state_dict()[key])


# ---- GRPO ------------------------------------------------------------------------------------------------------------


def grpo(folder, tokenizer, reference, **more):
    def many_different_words(completions, **kwargs):
        return [len(set(text.split())) + 0.1 * len(text) for text in completions]

    arguments = GRPOConfig(
        **settings(
            folder,
            num_generations=2,
            max_completion_length=6,
            beta=0.1,
            num_iterations=2,
            max_steps=4,
            temperature=1.0,
            **more,
        )
    )
    model, extra = policy(reference)
    return finish(
        GRPOTrainer(
            model,
            args=arguments,
            reward_funcs=many_different_words,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            **extra,
        )
    )


def real_tokens_of_grpo(inputs):
    return inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()


@pytest.mark.parametrize("reference", ["disabled", "adapter"])
@CHECKPOINTING
def test_grpo_counts_neither_generation_nor_scoring(tmp_path, tokenizer, reference, more):
    trainer = grpo(tmp_path, tokenizer, reference, **more)
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to="update"))
    counts, learned = watch(trainer, controller, real_tokens_of_grpo)
    passes = Counter()
    score = trainer._get_per_token_logps_and_entropies

    def scored(*args, **kwargs):
        gate = trainer.model.get_submodule("base_model.model.model.layers.0.mlp.gate_proj")
        adapter = "none" if gate.disable_adapters else gate.active_adapters[0]
        passes["learning" if torch.is_grad_enabled() else "scoring", adapter] += 1
        return score(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = scored
    trainer.train()
    assert len(counts.steps) == 4
    assert counts.steps == per_step(learned, 2)
    # Two generations, each for two steps of two micro-batches: old and reference log-probabilities once for each.
    base = "none" if reference == "disabled" else "ref"
    assert passes == {("scoring", "default"): 2, ("scoring", base): 2, ("learning", "default"): 8}

    vanilla = grpo(tmp_path, tokenizer, reference, **more)
    vanilla.train()
    assert tiny.largest_difference(tiny.adapter_state(vanilla.model), tiny.adapter_state(trainer.model)) > 1e-4
