"""How fast are GSM8K's test questions answered, beside plain `generate` one by one, and how many are right?

python benchmarks/evaluation_speed.py --data-dir FOLDER [--model smollm2-135m] [--alone 16]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch

from nalora import tasks
from nalora.evaluation.evaluate import evaluate
from nalora.models.loading import ModelSpec, load
from nalora.runs.encoding import Encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--label", help="what the rows call the model")
    parser.add_argument("--alone", type=int, default=16, help="questions that are also asked one by one")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    parser.add_argument("--summary", type=Path, help="keep the summary here")
    args = parser.parse_args()

    loaded = load(ModelSpec(args.model))
    task = tasks.get("gsm8k", data_dir=args.data_dir)
    with tempfile.TemporaryDirectory() as folder:
        summary = evaluate(loaded, task, Path(folder), style="chat", limit=args.limit, batch_tokens=args.batch_tokens)
    encoder = Encoder(loaded.processor, style="chat")
    began, tokens = time.perf_counter(), 0
    for example in task.test_examples()[: args.alone]:
        prompt = torch.tensor([encoder.prompt([example.prompt])], device=loaded.device)
        written = loaded.model.generate(prompt, max_new_tokens=task.max_new_tokens, do_sample=False)
        tokens += written.shape[1] - prompt.shape[1]
    alone = tokens / (time.perf_counter() - began)

    batched = summary["tokens_per_second"]
    accuracy = summary["measures"]["accuracy"]
    print(json.dumps(summary, indent=2))
    print(f"{batched:.0f} tokens/s in batches, {alone:.0f} one by one: {batched / alone:.1f} times faster")
    print(f"accuracy {accuracy['value']:.4f}, 95 % interval {accuracy['binomial']}")
    setting = f"{args.label or args.model}, GSM8K test, {summary['examples']} questions"
    rows: list[dict[str, Any]] = [
        {"variant": name, "unit": "tokens/s", "p20": value, "p50": value, "p80": value, "samples": n}
        for name, value, n in (("in batches", batched, summary["examples"]), ("one by one", alone, args.alone))
    ]
    for name, measure in summary["measures"].items():
        # An accuracy's quantiles are the ends of its 95 % interval.
        low, high = measure["binomial"]
        rows.append({"variant": name, "unit": "share", "p20": low, "p50": measure["value"], "p80": high,
                     "samples": summary["examples"]})  # fmt: skip
    harness.append([{"question": "evaluation", "setting": setting, **row} for row in rows], args.rows)
    if args.summary:
        args.summary.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
