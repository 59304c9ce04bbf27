"""Memory and time of training on a large file of one's own: a million rows of about 1 kB, as JSON lines.

python benchmarks/own_data.py --rows 1000000      # about 10 minutes on one core, 1 GB in a temporary folder

The same training, of a random Llama of two layers with a tokenizer of words, is run on a thousand rows and on all rows,
each in a process of its own. The difference of their peaks is what the data takes. A million rows have 200 million
tokens, too many to be kept: rows are tokenised again when they are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

_FEW = 1_000
_WORDS = "a of to sum number apple house river where how many are left after every second day then there"


def write(file: Path, rows: int) -> None:
    """Write rows of about 1 kB, no two with the same question."""
    text = " ".join(random.Random(0).choices(_WORDS.split(), k=100_000))
    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            start = number * 7 % 400_000
            row = {"prompt": f"Row {number}: {text[start : start + 700]}", "completion": text[start : start + 230]}
            out.write(json.dumps(row) + "\n")


def save_model(folder: Path) -> str:
    """Save a random Llama of two layers with a tokenizer of words, which is faster than byte pairs."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", ":", *_WORDS.split()])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(model: str, data: str, output: str) -> None:
    """Train a few steps; print the peak of this process's memory in MiB and the seconds without the steps."""
    from nalora.runs.settings import check
    from nalora.training.run import train as train_run

    settings = {"model": model, "task": data, "output": output, "steps": 20, "batch_size": 1, "device": "cpu"}
    began = time.perf_counter()
    result = train_run(check({**settings, "validation_size": 500 if Path(data).stat().st_size > 10**8 else 0}))
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({**result, "peak": peak, "seconds": time.perf_counter() - began - result["seconds"]}))


def measured(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--train", *arguments]
    # Rows are tokenised one at a time, for which a pool of threads only waits.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--train", nargs=3)
    arguments = parser.parse_args()
    if arguments.train:
        return train(*arguments.train)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = save_model(folder / "model")
        results = {}
        for count in (_FEW, arguments.rows):
            file = folder / f"{count}.jsonl"
            write(file, count)
            results[count] = measured(model, str(file), str(folder / f"run-{count}"))
        size = file.stat().st_size / 1e9
    few, all_rows = results[_FEW], results[arguments.rows]
    print(few, all_rows, sep="\n")
    setting = f"{arguments.rows:,} rows, {size:.2f} GB of JSON lines, tokenizer of words"
    samples = {
        "memory above the same training on 1,000 rows": ("MiB", all_rows["peak"] - few["peak"]),
        "reading, checking and tokenising": ("s", all_rows["seconds"]),
    }
    harness.append([
        {"question": "own data", "setting": setting, "variant": variant, "unit": unit, **harness.quantiles([value]),
         "peak_gib": round(all_rows["peak"] / 1024, 3)}
        for variant, (unit, value) in samples.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
