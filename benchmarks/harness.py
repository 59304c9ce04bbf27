"""Measurement: variants interleaved in one process after a warm-up, medians with percentiles, rows stored in git."""

from __future__ import annotations

import csv
import itertools
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROWS = Path(__file__).parent / "rows.csv"
COLUMNS = [
    "question", "setting", "variant", "unit", "p20", "p50", "p80", "samples",
    "peak_gib", "device", "torch", "triton", "transformers", "peft", "liger", "commit", "date",
]  # fmt: skip


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def commit() -> str:
    """Return the measured commit, with a + if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(rows: list[dict[str, Any]], path: Path = ROWS) -> None:
    """Append rows to the CSV, with the device, the versions and the commit."""
    new = not path.exists()
    common = {
        "device": device_name(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("triton", "transformers", "peft")},
        "liger": version("liger_kernel"),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**common, **row})


def quantiles(samples: list[float]) -> dict[str, float]:
    values = torch.tensor(samples, dtype=torch.float64)
    p20, p50, p80 = torch.quantile(values, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {"p20": round(p20, 5), "p50": round(p50, 5), "p80": round(p80, 5), "samples": len(samples)}


def time_steps(step: Callable[[], None], count: int) -> list[float]:
    """Return the milliseconds of each of `count` consecutive steps, without synchronising in between."""
    if not torch.cuda.is_available():
        moments = [time.perf_counter()]
        for _ in range(count):
            step()
            moments.append(time.perf_counter())
        return [1000 * (after - before) for before, after in itertools.pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


Variant = Callable[[], AbstractContextManager[Callable[[], None]]]


def interleave(variants: dict[str, Variant], rounds: int, steps: int, warmup: int) -> dict[str, dict[str, float]]:
    """Run every variant for a few steps, `rounds` times in turn; return quantiles of the steps and peak memory."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float] = {}
    for turn in range(rounds):
        for name, variant in variants.items():
            with variant() as step:
                for _ in range(warmup if turn else 2 * warmup):
                    step()
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                samples[name] += time_steps(step, steps)
                if torch.cuda.is_available():
                    peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    return {name: quantiles(times) | {"peak_gib": round(peaks.get(name, 0.0), 3)} for name, times in samples.items()}
