"""Optimizer steps per second of several runs that share one GPU.

python benchmarks/packing.py STUDY.yaml [--beside 1 4 8 12] [--steps 60] [--label TEXT]

The runs are of the study's first arm, trained by the study's own workers; the first run of each worker is a warm-up and
not counted. Steps of small models wait for Python, so concurrent runs cost little until the GPU is full.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from nalora.studies.engines import LocalEngine
from nalora.studies.job import Job
from nalora.studies.store import Store
from nalora.studies.study import Study, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--beside", type=int, nargs="+", default=[1, 4, 8, 12])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--label", help="name of the setting in the rows")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()
    study = read(args.study)
    for count in args.beside:
        per_second, seconds = measure(study, count, args.steps)
        print(f"{count} concurrent runs: {sum(per_second):.1f} steps/s in total, {seconds:.0f} s", flush=True)
        row: dict[str, Any] = {"question": "packing", "setting": args.label or study.name,
                               "variant": f"{count} runs beside each other", "unit": "steps/s"}  # fmt: skip
        low, middle, high = (count * each for each in (min(per_second), statistics.median(per_second), max(per_second)))
        harness.append([{**row, "p20": low, "p50": middle, "p80": high, "samples": count}], args.rows)


def measure(study: Study, count: int, steps: int) -> tuple[list[float], float]:
    """Return the steps per second of each of `count` concurrent runs, and the total time in seconds."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as store:
        engine = LocalEngine(workers=count)
        warm = [_job(study, store, seed, 5) for seed in range(count)]
        counted = [_job(study, store, 1_000 + seed, steps) for seed in range(count)]
        try:
            for jobs in (warm, counted):
                for job in jobs:
                    engine.submit(job)
                left = {job.key for job in jobs}
                while left:
                    for ended in engine.wait(1.0):
                        if ended.error:
                            raise SystemExit(f"{ended.key}: {ended.error}")
                        left.discard(ended.key)
        finally:
            engine.close()
        seconds = [Store(store).result(job.key).seconds for job in counted]
    return [steps / each for each in seconds], time.perf_counter() - began


def _job(study: Study, store: str, seed: int, steps: int) -> Job:
    run = study.run(study.combinations()[0], study.arms[0], study.arms[0].learning_rates[0], seed)
    return Job(f"{seed}-{steps}", {**run.to_dict(), "steps": steps}, (), store, f"seed {seed}")


if __name__ == "__main__":
    main()
