"""The short answer of docs/choosing.md: a table, commands, a study and a script; and the README's sentence."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tables.arm_states import LORA, State, shown_share, states

from choosing_page import rank_choice
from choosing_page.method_choice import JUDGED, Choice, as_typed, run_file
from choosing_page.rate_losses import GRIDS
from choosing_page.recommendation import Start
from choosing_page.seeds_needed import SIZES, needed, paired, shown
from choosing_page.step_costs import MethodCosts, Row
from nalora.errors import counted
from nalora.evaluation.significance import FEWEST_SEEDS

WIDTH = 125


def short_table(start: Start, results: Path, rows: list[Row], costs: MethodCosts) -> list[str]:
    """Return what to start with and why, a row for each choice."""
    rank = int(start.settings["rank"])
    by_rank = rank_choice.ranks(states(results, rank_choice.NAME), rank)
    with_rank, why_rank = rank_choice.advice(by_rank, rank)
    judged = states(results, JUDGED)
    chosen = [("method", start.method)] + ([("variant to try next", start.variant)] if start.variant else [])
    lines = ["| | start with | why |", "|---|---|---|"]
    lines += [f"| {what} | `{as_typed(choice.settings)}` | {_why(choice, judged, costs)} |" for what, choice in chosen]
    cost = rank_choice.cost(rows)
    lines.append(f"| rank | {with_rank} | {why_rank}{f'; {cost}' if cost else ''} |")
    tried = ", ".join(f"{rate:g}" for rate in start.searched)
    lines.append(f"| learning rate | {start.first_rate:g}; search {tried} | {_why_rate(start)} |")
    lines.append(f"| seeds | {FEWEST_SEEDS} or more for a comparison | {_why_seeds(results)} |")
    return lines


def _why(choice: Choice, judged: list[State], costs: MethodCosts) -> str:
    if choice.arm == LORA:
        return "the baseline; no variant with as many parameters is significantly better on two tasks so far"
    state = choice.state
    time, memory = costs.ratios(choice.settings)
    cost = f"{time} of LoRA's step time, {memory} of its memory" if time[0].isdigit() else "step time not measured yet"
    return (
        f"better than LoRA on GSM8K: {state.difference}, {shown_share(state.share)} of the gap to full fine-tuning, "
        f"{counted(state.seeds, 'seed')}; {second_task(choice, judged)}; {cost}"
    )


def second_task(choice: Choice, judged: list[State]) -> str:
    """Return what is known about a variant on the second task."""
    if choice.confirmed:
        return "also better on a second task"
    other = next((state for state in judged if state.arm == choice.arm), None)
    if other is None:
        return "not judged on a second task yet"
    return f"on a second task {other.verdict}"


def _why_rate(start: Start) -> str:
    best = [grid.best for grid in start.of_lora]
    return (
        f"LoRA at {start.rate:g} is at most {start.rise:.4f} above the best rate of each of its "
        f"{counted(len(best), 'grid')}; the best rates were {min(best):g} to {max(best):g}. All are of "
        f"{start.settings['model']}: other models need a search of their own"
    )


def _why_seeds(results: Path) -> str:
    """The range over the studies of the seeds that the second smallest difference needs."""
    size = SIZES[1]
    seeds = [needed(by_arm, size) for name in GRIDS if (by_arm := paired(results, name))]
    return f"a true difference of {size:g} in test loss needs {shown(min(seeds))} to {shown(max(seeds))}, by task"


def commands(start: Start) -> list[str]:
    """Return the commands for a data file: a rate from the first steps, one run, then a search with every rate."""
    shared = f"rank={start.settings['rank']} alpha={start.settings['alpha']}"
    method = as_typed(start.method.settings)
    run = f"my-data task=questions.jsonl {method} {shared} batch_size={start.settings['batch_size']}"
    return [
        "```",
        f"nalora suggest {run}",
        f"nalora train {run} learning_rate={start.first_rate:g}",
        "nalora study choose.yaml --dry-run",
        "nalora study choose.yaml",
        "```",
    ]


def study_file(start: Start) -> list[str]:
    """Return a study that searches the rates of the method, and of the variant to try."""
    names = ("model", "rank", "alpha", "batch_size")
    shared = ", ".join(f"{name}: {start.settings[name]}" for name in names)
    lines = ["```yaml", "name: choose", f"settings: {{task: questions.jsonl, {shared}}}", "arms:"]
    lines.append(f"  {start.method.arm}: {{{run_file(start.method.settings)}}}")
    if start.variant:
        rates = ", ".join(f"{rate:g}" for rate in start.rates_of(start.variant, start.rates))
        lines.append(f'  "{start.variant.arm}": {{{run_file(start.variant.settings)}, learning_rates: [{rates}]}}')
    lines += [
        f"learning_rates: [{', '.join(f'{rate:g}' for rate in start.searched)}]",
        "drop_rates_worse_than: 0.02",
        f"screening_seeds: {list(range(FEWEST_SEEDS))}",
        f"seeds: {list(range(FEWEST_SEEDS))}",
        "```",
    ]
    return lines


def script(start: Start) -> list[str]:
    """Return the same for a script with PEFT."""
    rank, alpha = start.settings["rank"], start.settings["alpha"]
    lines = [
        "```python",
        f'config = peft.LoraConfig(r={rank}, lora_alpha={alpha}, target_modules="all-linear")',
        "model = peft.get_peft_model(model, config)",
        "layers = nalora.fuse(model)  # optional: the same function in less time; print(layers) lists what is fused",
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]",
        f"optimizer = torch.optim.AdamW(trained, lr={start.rate:g}, weight_decay=0.0)  # of {start.settings['model']}",
        "schedule = transformers.get_cosine_schedule_with_warmup(optimizer, int(0.03 * steps), steps)",
        "# In every step: torch.nn.utils.clip_grad_norm_(trained, 1.0); optimizer.step(); schedule.step()",
    ]
    for choice in (start.method, start.variant):
        if choice and choice.settings["method"] == "peft/gralora":
            k, rate = choice.settings["gralora_k"], start.rates_of(choice, [start.rate])[0]
            config = f'peft.GraloraConfig(r={rank}, alpha={alpha}, gralora_k={k}, target_modules="all-linear")'
            lines += ["", f"# GraLoRA, without nalora.fuse, at lr={rate:g}:", f"# config = {config}"]
    return [*lines, "```"]


def sentence(start: Start, results: Path) -> list[str]:
    """Return the README's sentence."""
    rank, model = start.settings["rank"], start.settings["model"]
    low, high = start.searched[0], start.searched[-1]
    method = as_typed(start.method.settings)
    text = f"**Where to start:** `{method}` with r = {rank} and a searched learning rate "
    text += f"(for {model} {low:g} to {high:g}, first {start.first_rate:g})"
    if start.method.confirmed:
        text += f", which is better than LoRA on two tasks ({start.method.state.difference} on GSM8K)"
    elif start.variant:
        state, judged = start.variant.state, second_task(start.variant, states(results, JUDGED))
        text += f"; then `{as_typed(start.variant.settings)}`, which closes {shown_share(state.share)} of the gap to "
        text += f"full fine-tuning on GSM8K ({counted(state.seeds, 'seed')}, {judged})"
    text += ". Costs, ranks and how sure this is: [choosing](docs/choosing.md)."
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
