"""Tokens per second for GSM8K's test questions: generation with CUDA graphs compared with transformers' `generate`.

python benchmarks/generation_speed.py --data-dir FOLDER [--model smollm2-135m] [--limit 256]

Both answer the same questions in the same batches, alternating in one process; `generate` also answers single
questions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import harness
import torch

from nalora import tasks
from nalora.evaluation.generation import AnswerGenerator
from nalora.models.loading import ModelSpec, load
from nalora.runs.encoding import Encoder
from nalora.tasks import Example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--label", help="the model's name in the rows")
    parser.add_argument("--limit", type=int, default=256, help="number of questions")
    parser.add_argument("--single", type=int, default=8, help="number of questions that are also answered one by one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()

    loaded = load(ModelSpec(args.model))
    task = tasks.get("gsm8k", data_dir=args.data_dir)
    loaded.model.eval()
    writer = AnswerGenerator(
        loaded.model,
        Encoder(loaded.processor, style="chat"),
        max_new_tokens=task.max_new_tokens,
        batch_tokens=args.batch_tokens,
    )
    if not writer.static:
        raise SystemExit("no CUDA graph here: this benchmark needs a GPU and a decoder")
    examples = task.test_examples()[: args.limit]
    batches = writer.batches(examples)
    singles = [[example] for example in examples[: args.single]]
    variants = {
        "CUDA graph": (True, batches),
        "transformers' generate, same batches": (False, batches),
        "transformers' generate, one by one": (False, singles),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    answers: dict[str, list[str]] = {}
    for static, groups in variants.values():  # warm up
        writer.static = static
        writer.answer(groups[0])
    for _ in range(args.rounds):
        for name, (static, groups) in variants.items():
            writer.static = static
            speed, answers[name] = measured(writer, groups)
            speeds[name].append(speed)
            print(f"{name}: {speed:.0f} tokens/s", flush=True)
    graph, batched = (answers[name] for name in list(variants)[:2])
    same = sum(a == b for a, b in zip(graph, batched, strict=True))
    print(f"{same} of {len(graph)} answers are the same text with and without the graph")
    setting = f"{args.label or args.model}, GSM8K test, {len(examples)} questions"
    harness.append(
        [
            {"question": "generation", "setting": setting, "variant": name, "unit": "tokens/s"}
            | harness.quantiles(values)
            for name, values in speeds.items()
        ],
        args.rows,
    )


def measured(writer: AnswerGenerator, groups: list[list[Example]]) -> tuple[float, list[str]]:
    """Return the generated tokens per second, and the texts."""
    torch.cuda.synchronize()
    began, tokens, texts = time.perf_counter(), 0, []
    for group in groups:
        for answer in writer.answer(group):
            tokens += answer.tokens
            texts += answer.outputs
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began), texts


if __name__ == "__main__":
    main()
