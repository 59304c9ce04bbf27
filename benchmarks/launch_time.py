"""The time Python needs to launch a training step, by part of the step: a lower limit that no kernel can change.

python benchmarks/launch_time.py [--only NAME ...] [--profile NAME] [options of training_step.py]

The batch is so small that the GPU waits for Python: the time of a part is then that of its launches. A step with a
large batch takes at least this long, and longer if the GPU has more to do.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time

import harness
import torch
import training_step
from peers_page import LAUNCHES as QUESTION
from training import Training

PARTS = ("forward", "backward", "clipping", "optimizer")


def parts_of_step(training: Training) -> list[float]:
    """Return the milliseconds of each part of one step; the device is idle at the beginning of each."""
    times = []

    def part(function):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
        return result

    loss = part(lambda: training.loss_of(training.batch))
    part(loss.backward)
    part(training.clip)
    part(training.update)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    training_step.arguments(parser)
    parser.set_defaults(batch=1, length=64)
    parser.add_argument("--only", nargs="*", help="the variants to measure (default: all)")
    parser.add_argument("--profile", nargs="*", default=[], help="variants whose Python functions are printed by time")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    del sys.argv[1:]  # Inductor writes them into its code, where an apostrophe is a syntax error
    comparison = training_step.Comparison(args)
    if not args.only or any("FP8" in name for name in [*args.only, *args.profile]):
        comparison.add_fp8()
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{harness.commit()}"
    for name, variant in comparison.variants.items():
        if (args.only and name not in args.only) or comparison.reason_missing(variant):
            continue
        training = comparison.training(variant)
        with variant.enter() as step:
            for _ in range(4):
                step()
            samples = torch.tensor([parts_of_step(training) for _ in range(args.steps)])
            medians = zip(PARTS, samples.median(0).values, strict=True)
            described = " ".join(f"{part} {ms:6.1f}" for part, ms in medians)
            print(f"{name:56s} {described}   together {samples.sum(1).median():6.1f} ms", flush=True)
            columns = [*zip(PARTS, samples.T, strict=True), ("step", samples.sum(1))]
            keys = {"question": QUESTION, "setting": f"{training_step.setting(args)}: {name}", "unit": "ms"}
            rows = [keys | {"variant": part, "run": run_id} | harness.quantiles(ms.tolist()) for part, ms in columns]
            harness.append(rows, args.rows)
            if name in args.profile:
                print_functions(step)


def print_functions(step) -> None:
    """Print the functions that take the most time in three steps, backward in the same thread."""
    with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as profile:
        for _ in range(3):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
