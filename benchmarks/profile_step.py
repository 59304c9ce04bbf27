"""Where the time of a training step goes: its GPU kernels grouped into products, attention, loss, norms and so on.

python benchmarks/profile_step.py "NA-LoRA, everything on" [--steps 3] [options of training_step.py]

"launches and gaps" is the time of a step in which no kernel ran. The names of kernels that belong to no group are
printed, so that kernel_groups.py can be completed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import harness
import kernel_groups
import torch
import training_step
import variants
from peers_page import PROFILE as QUESTION
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GAPS = "launches and gaps"


class Kernel(NamedTuple):
    """One run of a kernel: its name, when it ran in microseconds, and the operators around its launch."""

    name: str
    start: float
    end: float
    operators: tuple[str, ...] = ()
    smallest_dimension: int | None = None


def kernels_of(events: Any) -> list[Kernel]:
    """Return the kernels of a profile, each with the operator that launched it and those around that one.

    The profiler lists kernels by operator without their times, and by time without their operators: both lists are
    joined by name and duration. A kernel that no operator launched, as many of Triton's, has no operators here.
    """
    launched: dict[tuple[str, float], list[tuple[tuple[str, ...], int | None]]] = defaultdict(list)
    for event in events:
        if event.device_type != DeviceType.CPU or not event.kernels:
            continue
        names, parent = [], event
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        sizes = [size for shape in event.input_shapes or () if len(shape) == 2 for size in shape]
        for kernel in event.kernels:
            launched[kernel.name, round(kernel.duration, 3)].append((tuple(names), min(sizes, default=None)))
    kernels = []
    for event in events:
        if event.device_type == DeviceType.CPU or event.is_user_annotation:
            continue
        start, end = event.time_range.start, event.time_range.end
        known = launched.get((event.name, round(end - start, 3)))
        kernels.append(Kernel(event.name, start, end, *(known.pop() if known else ())))
    return kernels


def union(spans: list[tuple[float, float]]) -> float:
    """Return the total length of intervals sorted by their starts, overlaps counted once."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def by_group(kernels: list[Kernel], rank: int) -> tuple[dict[str, float], Counter[str], Counter[str]]:
    """Return microseconds and number of kernels by group, and microseconds of kernels without a group by name."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for kernel in kernels:
        group = kernel_groups.group_of(kernel.name, kernel.operators, kernel.smallest_dimension, rank)
        times[group] += kernel.end - kernel.start
        counts[group] += 1
        if group == kernel_groups.OTHER:
            unknown[kernel.name] += kernel.end - kernel.start
    return dict(times.most_common()), counts, unknown


@contextlib.contextmanager
def annotated_optimizer(training: Any) -> Iterator[None]:
    """Mark clipping and the optimizer's step, whose kernels have no telling names."""
    marked: list[tuple[Any, str, Callable]] = [(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)]
    if training.controller is not None:
        marked.append((training.controller, "clip_grad_norm_", training.controller.clip_grad_norm_))
    for owner, name, function in marked:

        def recorded(*args, function=function, name=name, **options):
            with torch.profiler.record_function(name):
                return function(*args, **options)

        setattr(owner, name, recorded)
    try:
        yield
    finally:
        for owner, name, function in reversed(marked):
            if isinstance(owner, type(torch)):
                setattr(owner, name, function)
            else:
                delattr(owner, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help='for example "NA-LoRA, everything on"')
    parser.add_argument("--steps", type=int, default=3)
    training_step.arguments(parser)
    args = parser.parse_args()
    del sys.argv[1:]  # Inductor writes them into its code, where an apostrophe is a syntax error
    comparison = training_step.Comparison(args)
    if any("FP8" in name for name in args.variants):
        comparison.add_fp8()
    if unknown := [name for name in args.variants if name not in comparison.variants]:
        parser.error(f"no variant {unknown[0]!r}; there are: {', '.join(comparison.variants)}")
    for name in args.variants:
        variant = comparison.variants[name]
        if note := comparison.reason_missing(variant):
            print(f"{name}: {note}")
        else:
            report(name, variant, comparison, args)


def profiled_steps(step: Callable[[], None], args: argparse.Namespace, activities: list[ProfilerActivity]) -> Any:
    """Return the profiler's events of some steps."""
    with profile(activities=activities, record_shapes=True) as profiled:
        for _ in range(args.steps):
            step()
        if args.device == "cuda":
            torch.cuda.synchronize()
    return profiled.events()


def report(
    name: str, variant: variants.Described, comparison: training_step.Comparison, args: argparse.Namespace
) -> None:
    """Profile some steps of a variant, print its table and append its rows."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if args.device == "cuda" else [])]
    with variant.enter() as step, annotated_optimizer(comparison.training(variant)):
        for _ in range(4):
            step()
        unprofiled = harness.quantiles(harness.time_steps(step, max(args.steps, 3)))
        kernels = kernels_of(profiled_steps(step, args, activities))
        # Operators are recorded at the cost of gaps, in which the GPU cools and runs faster afterwards: how long it is
        # busy is measured without them.
        alone = profiled_steps(step, args, activities[1:]) if args.device == "cuda" else []
    times, counts, unknown = by_group(kernels, args.rank)
    busy = [event for event in alone if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    spans = sorted((event.time_range.start, event.time_range.end) for event in busy)
    gaps = max(0.0, 1000 * unprofiled["p50"] - union(spans) / args.steps)
    table = {group: total / args.steps / 1000 for group, total in times.items()} | {GAPS: gaps / 1000}
    print(f"\n{name}, {training_step.setting(args)}: {unprofiled['p50']:.1f} ms a step")
    for group, ms in table.items():
        launches = f"{counts[group] // args.steps:6d} kernels" if group in counts else ""
        print(f"  {group:28s} {ms:8.2f} ms  {ms / unprofiled['p50']:6.1%}  {launches}")
    for kernel, total in unknown.most_common(8):
        print(f"    no group: {total / args.steps / 1000:7.3f} ms  {kernel[:120]}")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{harness.commit()}"
    keys = {"question": QUESTION, "setting": f"{training_step.setting(args)}: {name}", "unit": "ms", "run": run_id}
    rows = [
        keys
        | {"variant": group, "p50": round(ms, 4), "samples": args.steps}
        | {"note": f"{counts[group] // args.steps} kernels"}
        for group, ms in table.items()
    ]
    harness.append([*rows, keys | {"variant": "step", **unprofiled}], args.rows)


if __name__ == "__main__":
    main()
