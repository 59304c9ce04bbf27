"""All measurements of docs/performance.md that compare with peers, for a GPU that is available for some minutes.

python benchmarks/lease.py OUTPUT --minutes 28 [--list]

The commands run in this order, the most valuable first, each with its own time limit, while the minutes last. OUTPUT
receives rows.csv, log.txt and finished.txt; called again with the same folder and commit, it continues with what is
not finished. Nothing is installed: PYTHONPATH must give `src` and the folder of prepare_peers.py. Afterwards
`cat OUTPUT/rows.csv` without its first line is appended to benchmarks/rows.csv, and page.py writes the page.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import harness

HERE = Path(__file__).parent
# What the goals compare; the other variants are measured once, at 4 x 1,024 with rank 8.
LONG = ["PEFT LoRA + Liger", "NA-LoRA, everything on", "NA-LoRA, everything on, FP8 base"]
GRAPHED = ", cuDNN attention, CUDA graphs"
MAIN = ["Unsloth", *LONG, *(f"{name}{GRAPHED}" for name in LONG[1:])]
# The README's rows of `nalora.fuse`, which must be of the same run.
FUSED = ["nalora.fuse", *(f"nalora.fuse + Liger{more}" for more in ("", GRAPHED, f", FP8 base{GRAPHED}"))]
# Compiled layers take a minute each to compile.
COMPILED = [
    f"NA-LoRA + Liger's loss, compiled layers{base}, cuDNN attention{graphs}"
    for base, graphs in (("", ""), ("", ", CUDA graphs"), (", FP8 base", ", CUDA graphs"))
]
# Enough for the model to be built and for each variant's first round, whose kernels are compiled.
GRACE = 60
SHORTEST = 90


class Command(NamedTuple):
    """A script with its arguments, and the seconds that it may take."""

    name: str
    seconds: int
    arguments: tuple[str, ...]


def step(name: str, seconds: int, *options: str, only: list[str] | None = None) -> Command:
    chosen = ("--only", *only) if only else ()
    return Command(name, seconds, ("training_step.py", "--time-limit", str(seconds - GRACE), *options, *chosen))


COMMANDS = [
    # The variants that the goals are about, on two layers: what does not run or does not agree is known after a minute.
    Command("check", 150, ("training_step.py", "--check", "--layers", "2", "--only", *MAIN, *COMPILED)),
    # Compiled layers cast adapters once in a pass since the last rows.
    step("bf16 and FP8, 4 x 1,024", 480, only=[*MAIN, *FUSED, *COMPILED]),
    Command("loss curves", 180, ("loss_curves.py",)),
    Command("small model in Trainer", 90, ("trainer_graphs.py",)),
    step("four bits", 210, "--four-bit", only=MAIN[:-1]),
    Command("profile", 150, ("profile_step.py", "NA-LoRA, everything on", "Unsloth", "PEFT LoRA", COMPILED[0])),
    Command("profile of FP8", 120, ("profile_step.py", "NA-LoRA, everything on, FP8 base")),
    step("every other variant, 4 x 1,024", 600),
    step("rank 128", 180, "--rank", "128", only=MAIN),
    step("1 x 16,384", 240, "--batch", "1", "--length", "16384", "--checkpointing", "--rounds", "2", "--steps", "4",
         only=LONG),
    Command("tiles by rank", 300, ("rank_tiles.py", "--time-limit", "240")),
    step("rank 64", 180, "--rank", "64", only=MAIN),
    step("rank 32", 180, "--rank", "32", only=MAIN),
    step("2 x 8,192", 240, "--batch", "2", "--length", "8192", "--checkpointing", "--rounds", "2", "--steps", "4",
         only=LONG),
    step("8 x 1,024 with checkpointing", 240, "--batch", "8", "--checkpointing", only=MAIN),
]  # fmt: skip


def finished(folder: Path) -> set[str]:
    """Return the names of the commands that this commit has finished."""
    path = folder / "finished.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {name for mark, _, name in (line.partition(" ") for line in lines) if mark == harness.commit()}


def perform(command: Command, folder: Path, seconds: float, program: str = sys.executable) -> str:
    """Run one command; return "finished", "failed" or "out of time"."""
    script, *options = command.arguments
    # The check writes no rows.
    rows = [] if "--check" in options else ["--rows", str(folder / "rows.csv")]
    if script == "loss_curves.py":
        rows = ["--curves", str(folder / "loss_curves.csv")]
    line = [program, "-u", str(HERE / script), *rows, *options]
    with (folder / "log.txt").open("a") as log:
        log.write(f"\n=== {command.name}: {' '.join(line)}\n")
        log.flush()
        try:
            code = subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            return "out of time"
    if code:
        return "failed"
    with (folder / "finished.txt").open("a") as marks:
        marks.write(f"{harness.commit()} {command.name}\n")
    return "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, default=28)
    parser.add_argument("--only", nargs="*", help="names of commands (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    done = finished(args.output)
    for command in COMMANDS:
        if args.list:
            print(f"{command.seconds:4d} s  {command.name:30s} {'finished' if command.name in done else ''}")
            continue
        left = end - time.monotonic()
        if command.name in done or (args.only and command.name not in args.only):
            continue
        # A command that cannot reach its first round would only heat the GPU; a shorter one may still fit.
        if left < min(SHORTEST, command.seconds):
            print(f"{command.name}: not begun, {left:.0f} s left")
            continue
        start = time.monotonic()
        outcome = perform(command, args.output, min(command.seconds, left))
        print(f"{command.name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    log = args.output / "log.txt"
    if log.exists() and not args.list:
        wanted = (" ms ", "missing:", "not timed:", "failed:", "fastest ", "differs by")
        print(*(line for line in log.read_text().splitlines() if any(word in line for word in wanted)), sep="\n")


if __name__ == "__main__":
    main()
