"""Check that two commits train the same adapters, byte for byte, for changes that must not change any number.

    python benchmarks/same_adapters.py BEFORE AFTER [--steps 20] [--model smollm2-135m]

Each commit is checked out into a temporary git worktree and trains SmolLM2-135M on a small data set through the command
line, one run at a time, on one CPU thread: LoRA, and NA-LoRA on gradients and on updates. One line per run reports
whether the files of the two adapters are identical. Exits with 1 if some are not, with 2 if a run fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = {
    "lora": ["method=lora"],
    "na-lora, gradient": ["method=na-lora", "apply_to=gradient"],
    "na-lora, update": ["method=na-lora", "apply_to=update"],
}
SETTINGS = """\
task: sst2
data_dir: sst2
prompt: decoder
rank: 4
learning_rate: 1.0e-3
batch_size: 2
max_length: 64
dtype: float32
device: cpu
log_every: 1
save_minutes: 0
"""
# `python -m nalora.cli` of the checkout in the first argument. An operation that is not deterministic is an error: it
# would make the files differ at random.
START = """
import runpy, sys, torch, nalora
source = sys.argv.pop(1)
assert nalora.__file__.startswith(source), f"{nalora.__file__} is not in {source}"
torch.use_deterministic_algorithms(True)
runpy.run_module("nalora.cli", run_name="__main__", alter_sys=True)
"""
SUBJECTS = ("film", "story", "plot", "cast", "ending", "music")
QUALITIES = (("warm", 1), ("dull", 0), ("clever", 1), ("clumsy", 0), ("moving", 1), ("tired", 0))


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the worktrees are removed
    commits = {"before": arguments.before, "after": arguments.after}
    names = {side: _git("rev-parse", "--short", f"{commit}^{{commit}}") for side, commit in commits.items()}
    started = time.monotonic()
    all_identical = True
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        _write_task(place, arguments.model, arguments.steps)
        with _checkout(names["before"], place / "before"), _checkout(names["after"], place / "after"):
            for title, settings in RUNS.items():
                adapters = [_train(place, side, title, settings) for side in ("before", "after")]
                identical, sentence = _compared(*adapters)
                all_identical &= identical
                print(f"{title}: {sentence} ({names['before']}, {names['after']}, {arguments.steps} steps)", flush=True)
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(0 if all_identical else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check that two commits train the same adapters, byte for byte.")
    parser.add_argument("before", metavar="BEFORE", help="a commit, tag or branch")
    parser.add_argument("after", metavar="AFTER", help="another one")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: 20)")
    parser.add_argument("--model", default="smollm2-135m", help="name or folder of the model (default: smollm2-135m)")
    return parser.parse_args()


def _write_task(place: Path, model: str, steps: int) -> None:
    """Write the run's file, and a data set of 36 sentences in the format of SST-2."""
    (place / "sst2").mkdir()
    for split, verb in (("train", "is"), ("dev", "was")):
        rows = [f"the {subject} {verb} {word}\t{label}" for subject in SUBJECTS for word, label in QUALITIES]
        (place / "sst2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    folder = Path(model)
    named = folder.resolve() if folder.exists() else model
    (place / "run.yaml").write_text(f"model: {named}\nsteps: {steps}\n{SETTINGS}", encoding="utf-8")


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[None]:
    """Add a worktree of a commit, and remove it at the end."""
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _train(place: Path, side: str, title: str, settings: list[str]) -> Path:
    """Train with one commit and return the adapter's folder."""
    output = place / "runs" / side / title.replace(", ", "-")
    source = str(place / side / "src")
    variables = {
        "PYTHONPATH": source,
        "PYTHONHASHSEED": "0",  # PEFT writes target_modules, a set, in the order of its hashes
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    line = [sys.executable, "-c", START, source, "train", "run.yaml", *settings, f"output={output}"]
    done = subprocess.run(line, cwd=place, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        print(f"{title}, {side}: {done.stdout}{done.stderr}", file=sys.stderr)
        sys.exit(2)
    return output / "adapter"


def _compared(before: Path, after: Path) -> tuple[bool, str]:
    """Return whether both folders contain the same files with the same bytes, and a description."""
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (before, after)]
    names = sorted({*contents[0], *contents[1]})
    different = [name for name in names if contents[0].get(name) != contents[1].get(name)]
    if different:
        return False, f"different in {', '.join(different)}"
    return True, f"identical ({len(names)} files, {sum(map(len, contents[0].values())):,} bytes)"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        print(f"git {' '.join(arguments)}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
