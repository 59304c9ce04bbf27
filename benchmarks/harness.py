"""Measurement: variants interleaved in one process after a warm-up, medians with percentiles, rows stored in git."""

from __future__ import annotations

import csv
import gc
import itertools
import os
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
    # Of variants that are compared with a baseline; empty in rows of earlier versions.
    "run", "loss_difference", "gradient_error", "worst_cosine", "worst_layer", "note",
]  # fmt: skip


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def commit() -> str:
    """Return the measured commit, with a + if files differ from it.

    Where the files were copied without their history, the environment variable MEASURED_COMMIT names it.
    """
    if "MEASURED_COMMIT" in os.environ:
        return os.environ["MEASURED_COMMIT"]

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
    if not new:
        _add_columns(path)
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


def _add_columns(path: Path) -> None:
    """Give a file with fewer columns the missing ones, empty in its rows."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns, rows = reader.fieldnames, list(reader)
    if columns == COLUMNS:
        return
    whole = path.with_suffix(".new")
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({name: value for name, value in row.items() if value is not None} for row in rows)
    whole.replace(path)


def read(path: Path = ROWS) -> list[dict[str, str]]:
    """Return all rows; columns that a row does not have are empty."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]


def measured(question: str, setting: str, path: Path = ROWS) -> set[str]:
    """Return the variants that have a time for this setting, on this device and with this commit."""
    here = {"question": question, "setting": setting, "device": device_name(), "commit": commit()}
    return {row["variant"] for row in read(path) if row["p50"] and here.items() <= row.items()}


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


class TimeLimit:
    """A time after which no further round begins."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    def reached(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end


def interleave(
    variants: dict[str, Variant], rounds: int, steps: int, warmup: int, limit: TimeLimit | None = None
) -> dict[str, dict[str, Any]]:
    """Run every variant for a few steps, `rounds` times in turn; return quantiles of the steps and peak memory.

    After the round in which the limit is reached no other begins. A variant that fails, for example for lack of
    memory, is left out of the remaining rounds, and its result is a note instead of a time.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float] = {}
    failures: dict[str, str] = {}
    for turn in range(rounds):
        if turn and limit is not None and limit.reached():
            break
        for name, variant in variants.items():
            if name in failures:
                continue
            try:
                with variant() as step:
                    for _ in range(warmup if turn else 2 * warmup):
                        step()
                    if torch.cuda.is_available():
                        torch.cuda.reset_peak_memory_stats()
                    samples[name] += time_steps(step, steps)
                    if torch.cuda.is_available():
                        peaks[name] = (torch.cuda.max_memory_allocated() + unlisted_in_graphs()) / 2**30
            except Exception as error:
                failures[name] = failure(error)
    return {
        name: {"note": failures[name], "samples": 0}
        if name in failures
        else quantiles(times) | {"peak_gib": round(peaks.get(name, 0.0), 3)}
        for name, times in samples.items()
    }


def unlisted_in_graphs() -> int:
    """Return the bytes that CUDA graphs keep for their kernels and that no tensor holds between replays."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def failure(error: Exception) -> str:
    """Return one line about an error, and free the memory that its frames hold."""
    error.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
