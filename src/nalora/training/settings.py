"""What a run is told to do: one flat YAML file, checked as a whole before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nalora import methods, tasks
from nalora.errors import NALoRAError, did_you_mean, noted
from nalora.methods import optimizers
from nalora.methods.method import Adapter, Method
from nalora.models.loading import ModelSpec
from nalora.training.conversion import converted


@dataclass(frozen=True)
class RunSettings:
    """A run's own settings; those of its method and its task stand beside them in the file.

    Args:
        model: ``smollm2-135m``, a hub id, a local folder or a ``.gguf`` file.
        task: what is learnt and asked, see `nalora tasks`.
        method: how, see `nalora methods`.
        output: the run's folder.
        data_dir: a folder with the task's files, in place of the hub.
        seed: of the adapter, the order of the data and dropout.
        rank: r.
        alpha: α; the LoRA scaling is α/r.
        dropout: on the adapters' inputs.
        target_modules: names of layers, or ``all-linear``.
        learning_rate: the highest.
        epochs: passes over the training set; not asked where `steps` is given.
        steps: optimizer steps.
        batch_size: examples in one optimizer step, over all devices.
        micro_batch_size: examples in one forward pass on one device.
        schedule: how the learning rate falls.
        warmup: the share of the steps in which it rises, from 0 to 1; 1 is the whole run.
        weight_decay: decoupled.
        max_norm: gradients are clipped to this norm; 0 leaves them.
        optimizer: one of transformers' names, or ``muon``.
        max_length: tokens of prompt and target together.
        too_long: what happens to longer examples: left out, or cut at the end.
        packing: several examples in one row, each attending to itself alone.
        batches: examples drawn by chance, or those of like length together, which leaves few pads.
        prompt_style: prompts as the task writes them, or questions and answers in the tokenizer's chat template.
        train_limit: the first so many examples that fit.
        validation_size: examples of the training set that are not learnt from, to choose settings by.
        dtype: of the base model's weights.
        device: where; the best there is by default.
        attention: transformers' attention implementation.
        quantise: 4bit or 8bit base weights.
        revision: of the model on the hub.
        trust_remote_code: whether code from the hub may run.
        gradient_checkpointing: recompute activations in the backward pass.
        cuda_graphs: replay the passes of batches of one length: for small models on a GPU, whose steps wait for Python.
        fused_adapters: LoRA layers as single functions, those of one input together: the same numbers but for rounding,
            with fewer passes over memory. Layers that are more than plain LoRA (DoRA, dropout) stay PEFT's.
        liger: Liger's kernels for norms, rotary embedding, activation and loss while training on a GPU.
        log_every: steps between rows of metrics.
        save_every: steps between checkpoints, one at the end included; 0: none by steps.
        save_minutes: minutes of wall clock between checkpoints, longer where they would take more than 5 % of the
            time; 0: none by the clock.
        snapshot_every: steps between snapshots of what was trained, for `nalora diagnose` (all are kept; the first and
            the last step too); 0: none.
        diagnose_every: steps between comparisons of the gates with the comparison before, during training; 0: none.
        probe_size: training examples that these look at.
        report_to: loggers of transformers, such as wandb or tensorboard.
    """

    model: str
    task: str
    method: str = "lora"
    output: str | None = None
    data_dir: str | None = None
    seed: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    learning_rate: float = 1e-4
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    warmup: float = 0.03
    weight_decay: float = 0.0
    max_norm: float = 1.0
    optimizer: str = "adamw_torch"
    max_length: int = 1024
    too_long: Literal["drop", "cut"] = "drop"
    packing: bool = False
    batches: Literal["random", "like-length"] = "random"
    prompt_style: Literal["plain", "chat"] = "plain"
    train_limit: int | None = None
    validation_size: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    attention: str | None = None
    quantise: Literal["4bit", "8bit"] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    cuda_graphs: bool = False
    fused_adapters: bool = False
    liger: bool = False
    log_every: int = 10
    save_every: int = 0
    save_minutes: float = 5.0
    snapshot_every: int = 0
    diagnose_every: int = 0
    probe_size: int = 64
    report_to: str | list[str] = "none"

    def model_spec(self, kind: Any) -> ModelSpec:
        """The model that the run asks for."""
        names = ("dtype", "device", "attention", "quantise", "revision", "trust_remote_code")
        return ModelSpec(self.model, kind, **{name: getattr(self, name) for name in names})

    def adapter(self) -> Adapter:
        """The adapter that the run asks for."""
        return Adapter(self.rank, self.alpha, self.dropout, self.target_modules)


@dataclass(frozen=True)
class Run:
    """A run that can start: everything in the file was understood."""

    settings: RunSettings
    method: Method
    task_options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All settings with their values, flat as in the file."""
        return dataclasses.asdict(self.settings) | self.method.settings() | self.task_options


# Limits that a type does not say: (setting, holds, what is expected).
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((name, lambda v: v > 0, "a positive number") for name in ("learning_rate", "alpha", "epochs")),
    *(
        (name, lambda v: v >= 1, "1 or more")
        for name in ("rank", "batch_size", "max_length", "log_every", "probe_size")
    ),
    *((name, lambda v: v is None or v >= 1, "1 or more") for name in ("steps", "micro_batch_size", "train_limit")),
    *(
        (name, lambda v: v >= 0, "0 or more")
        for name in (
            "weight_decay",
            "max_norm",
            "save_every",
            "save_minutes",
            "snapshot_every",
            "diagnose_every",
            "seed",
            "validation_size",
        )
    ),
    ("dropout", lambda v: 0 <= v < 1, "a number in [0, 1)"),
    ("warmup", lambda v: 0 <= v <= 1, "a share between 0 and 1"),
)


def read(file: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a YAML file and ``key=value`` arguments describe.

    Raises:
        NALoRAError: no such file, no YAML, or settings that are not right: all of them in one message.
    """
    import yaml

    path = Path(file)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise NALoRAError(str(path), found=found, expected="a run's YAML file", fix="see recipes/")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise NALoRAError(str(path), found=line, expected="YAML", fix="one `key: value` a line") from error
    if not isinstance(given, dict):
        raise NALoRAError(str(path), found=type(given).__name__, expected="`key: value` lines", fix="see recipes/")
    if "arms" in given:
        raise NALoRAError(str(path), found="a study", expected="a run's YAML file", fix=f"nalora study {path}")
    given |= key_values(overrides)
    if given.get("output") is None:
        given["output"] = str(Path("runs") / path.stem)
    return check(given, where=str(path))


def key_values(arguments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments of the command line, their values read as YAML.

    Raises:
        NALoRAError: an argument without =.
    """
    import yaml

    found: dict[str, Any] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise NALoRAError(argument, found="no =", expected="key=value", fix=f"write {argument}=VALUE")
        found[key] = yaml.safe_load(value) if value else None
    return found


def check(given: dict[str, Any], where: str = "run") -> Run:
    """Understand settings.

    Raises:
        NALoRAError: every problem at once.
    """
    problems: list[str] = []
    own = _types()
    method: type[Method] | None = None
    task_keys: list[str] = []
    options: dict[str, Any] = {}
    with noted(problems):
        method = methods.get(str(given.get("method", "lora")))
    with noted(problems):
        task_keys = tasks.options(str(given["task"])) if "task" in given else []
    with noted(problems):
        options = method.options(given) if method else {}
    # Else a strange setting may be one of the method or the task that was meant: only a slip in a known one is told.
    all_known = not problems and "task" in given
    known = [*own, *options, *task_keys]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in own or key in options:
            hint = own[key] if key in own else options[key]
            values[key] = converted(key, value, hint, problems)
        elif key in task_keys:
            values[key] = value
        elif all_known and method and (owners := _methods_with(key)):
            problems.append(f"{key}: a setting of {', '.join(owners)}; the method of this run is {method.name}")
        elif (near := did_you_mean(key, known, "", cutoff=0.6 if all_known else 0.9)) or all_known:
            problems.append(f"{key}: no such setting" + (f" ({near})" if near else ""))
    problems += [f"{name}: missing" for name in ("model", "task") if name not in given]
    for name, holds, expected in _LIMITS:
        if isinstance(values.get(name), int | float) and not holds(values[name]):
            problems.append(f"{name}: {values[name]!r}, expected {expected}")
    if isinstance(optimizer := values.get("optimizer"), str):
        with noted(problems):
            optimizers.refuse_unknown(optimizer)
    batch, micro = values.get("batch_size", 32), values.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro >= 1 and batch % micro:
        problems.append(f"batch_size: {batch} is no multiple of micro_batch_size, {micro}")
    if values.get("fused_adapters") is True and values.get("kernels") == "fused":
        problems.append("fused_adapters: true beside kernels: fused, which fuses them too; leave one out")
    prepared = None
    if method and not problems:
        with noted(problems):
            prepared = method.build(**{key: value for key, value in values.items() if key in options})
    if problems or prepared is None:
        raise NALoRAError(
            where,
            found=f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: " + "; ".join(problems),
            expected="settings that a run has",
            fix="correct them; recipes/laptop.yaml explains every setting",
        )
    settings = RunSettings(**{key: value for key, value in values.items() if key in own})
    return Run(settings, prepared, {key: value for key, value in values.items() if key in task_keys})


@functools.cache
def _types() -> dict[str, Any]:
    """The settings that every run has, with their types. Kept: a study asks for each of its runs."""
    return typing.get_type_hints(RunSettings)


def _methods_with(setting: str) -> list[str]:
    """Methods that have this setting: of one without it, the wrong method is the likelier mistake."""
    return [name for name in methods.names() if setting in methods.get(name).options({})]
