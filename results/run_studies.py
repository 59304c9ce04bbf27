"""Run studies on a GPU that is available for some minutes, and add what was finished to the tables.

python results/run_studies.py STUDY [STUDY …] --minutes 25 [--per-gpu 9] [--store results/store]

The store gets all runs of the tables first, so that none is trained again. The studies run in the order of the command,
as many runs at a time as --per-gpu says; they share the GPU by CUDA's multi-process service, if it is installed. At the
end of the time the current study is stopped by SIGTERM, and continues in the next call. The last lines say how long
training and evaluation of a run took: a GPU whose runs are evaluated longer than they are trained is wasted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from collect import collect
from restore import restore

RESULTS = Path(__file__).parent
MPS = "nvidia-cuda-mps-control"
# A study that is stopped waits for checkpoints of its runs.
SECONDS_TO_STOP = 45
PHASE = re.compile(r"^(training|evaluation)\b[^:]*: ([\d.]+) s$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", help="names listed by `nalora recipes`, or files")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--per-gpu", type=int, default=9)
    parser.add_argument("--store", type=Path, default=RESULTS / "store")
    args = parser.parse_args()
    end, began = time.monotonic() + 60 * args.minutes, time.time()
    print(f"{restore(RESULTS, args.store)} runs written to {args.store}", flush=True)
    share_gpu(args.store)
    for study in args.studies:
        if (left := end - time.monotonic()) > SECONDS_TO_STOP:
            before = time.monotonic()
            outcome = run(study, args.store, args.per_gpu, left - SECONDS_TO_STOP)
            print(f"{study}: {outcome} after {time.monotonic() - before:.0f} s", flush=True)
    for file in collect(args.store, RESULTS):
        print(file)
    for line in phases(args.store, began):
        print(line)


def share_gpu(store: Path) -> None:
    """Start CUDA's multi-process service if it is installed; a service that runs already is used."""
    if shutil.which(MPS) and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        for kind in ("PIPE", "LOG"):
            folder = (store / f"mps-{kind.lower()}").absolute()
            folder.mkdir(exist_ok=True)
            os.environ[f"CUDA_MPS_{kind}_DIRECTORY"] = str(folder)
        subprocess.run([MPS, "-d"], check=False)


def run(study: str, store: Path, per_gpu: int, seconds: float) -> str:
    """Run one study until it is finished or the time is over; return which. None of its processes is left."""
    command = [sys.executable, "-m", "nalora", "study", study, "--per-gpu", str(per_gpu), "--store", str(store)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return "finished" if process.wait(seconds) == 0 else "ended with missing runs"
    except subprocess.TimeoutExpired:
        process.terminate()  # SIGINT is ignored in processes of a script's background jobs
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        return "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def phases(store: Path, began: float) -> list[str]:
    """Return the median seconds of training and of evaluation in the logs written since a time."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for log in store.glob("*.log"):
        if log.stat().st_mtime >= began:
            for phase, value in PHASE.findall(log.read_text(encoding="utf-8", errors="replace")):
                seconds[phase].append(float(value))
    return [
        f"{phase}: {statistics.median(values):.1f} s (median of {len(values)} runs)"
        for phase, values in seconds.items()
    ]


if __name__ == "__main__":
    main()
