"""Where a study's jobs run: the interface of all engines, and the one that uses processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from nalora.errors import NALoRAError, wrong_kind
from nalora.studies.job import Job, log_of, release_memory, work
from nalora.studies.outcome import TERMINATED, Outcome, describe_error

Do = Callable[[Job], None]  # carries out a job
_SIGTERM_EXIT = 128 + 15  # as shells report SIGTERM
SECONDS_TO_END = 30.0


class Engine(Protocol):
    """Starts jobs and reports which have ended."""

    def has_room(self) -> bool:
        """Whether one more job would start at once."""
        ...

    def submit(self, job: Job) -> None:
        """Start a job."""
        ...

    def wait(self, seconds: float) -> list[Outcome]:
        """Return the jobs that have ended; wait at most `seconds` for the first one."""
        ...

    def reduce_sharing(self, key: str) -> bool:
        """Let fewer runs share a GPU than when this run, which has just ended, was started; False if it had its own."""
        ...

    def close(self) -> None:
        """Stop everything that still runs."""
        ...


class _Worker:
    """A process that does one job after another, so that torch is imported once for all of them."""

    def __init__(self, gpu: str | None, threads: int | None, do: Do) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, gpu, threads, os.getpid(), do), daemon=False)
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Placement(NamedTuple):
    gpu: str | None
    slots: int  # of that GPU, when the run was started


class LocalEngine:
    """Processes of this machine; without GPUs, several of them share its cores unless OMP_NUM_THREADS is set.

    Args:
        workers: the number of processes; by default one for each slot of a GPU, or one on a machine without GPUs.
        per_gpu: the number of runs that share one GPU; it is reduced if their memory does not suffice.
        do: carries out a job.
    """

    def __init__(self, workers: int | None = None, per_gpu: int = 1, do: Do = work) -> None:
        self._do = do
        gpus = _visible_gpus()
        count = workers or max(1, len(gpus) * per_gpu)
        self._gpus = [gpus[slot % len(gpus)] if gpus else None for slot in range(count)]
        # Of each process; None leaves the number to torch.
        self._threads = None if gpus or count == 1 or os.environ.get("OMP_NUM_THREADS") else max(1, _cores() // count)
        self._workers: list[_Worker | None] = [None] * count
        self._placements: dict[str, _Placement] = {}

    def _free_slots(self) -> list[int]:
        return [slot for slot, worker in enumerate(self._workers) if worker is None or worker.job is None]

    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots())

    def submit(self, job: Job) -> None:
        """Send the job to a free worker, which is started if necessary."""
        slot = self._free_slots()[0]
        gpu, worker = self._gpus[slot], self._workers[slot]
        if worker is None or not worker.process.is_alive():
            worker = self._workers[slot] = _Worker(gpu, self._threads, self._do)
        worker.job = job
        self._placements[job.key] = _Placement(gpu, self._gpus.count(gpu))
        worker.pipe.send(job)

    def wait(self, seconds: float) -> list[Outcome]:
        """Return the outcomes that workers have sent, and those of workers that died."""
        busy: dict[Any, tuple[int, _Worker, Job]] = {
            worker.pipe: (slot, worker, worker.job)
            for slot, worker in enumerate(self._workers)
            if worker is not None and worker.job is not None
        }
        self._placements = {job.key: self._placements[job.key] for _, _, job in busy.values()}
        outcomes = []
        for pipe in wait(list(busy), timeout=seconds):
            slot, worker, job = busy[pipe]
            worker.job = None
            try:
                outcome = Outcome(job.key, worker.pipe.recv())
                dead = outcome.lost_the_gpu
            except (EOFError, OSError):
                worker.process.join(5)
                code = worker.process.exitcode
                terminated = code in (_SIGTERM_EXIT, -signal.SIGTERM)
                outcome = Outcome(job.key, TERMINATED if terminated else f"its process died (exit code {code})")
                dead = True
            outcomes.append(outcome)
            if dead:
                worker.stop()
                self._workers[slot] = None
        return outcomes

    def reduce_sharing(self, key: str) -> bool:
        """Remove a slot of the GPU that the run was on, unless one has been removed since it was started."""
        gpu, slots = self._placements[key]
        if slots == 1:
            return False
        if self._gpus.count(gpu) == slots:
            slot = next(slot for slot in self._free_slots() if self._gpus[slot] == gpu)
            if (worker := self._workers.pop(slot)) is not None:
                worker.stop()
            self._gpus.pop(slot)
        return True

    def close(self) -> None:
        """Terminate every worker, which lets a training run write a checkpoint; kill those that take too long.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again; all workers have been killed.
        """
        workers = [worker for worker in self._workers if worker is not None]
        latest = time.monotonic() + SECONDS_TO_END
        try:
            for worker in workers:
                worker.process.terminate()
            for worker in workers:
                worker.process.join(max(0.0, latest - time.monotonic()))
        finally:
            for worker in workers:
                worker.stop()


def _serve(pipe: Connection, gpu: str | None, threads: int | None, parent: int, do: Do) -> None:
    """Run in a worker: receive jobs and send None or an error message for each, until the study's process ends."""
    import threading

    from tqdm import tqdm

    # A terminal sends both to all of its processes; the study handles them and terminates its workers by SIGTERM.
    for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
        signal.signal(number, signal.SIG_IGN)
    # A worker that is killed would leave tqdm's lock between processes behind, about which Python would warn.
    tqdm.set_lock(threading.RLock())
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that a run starts
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent or os.name == "nt":
            if pipe.poll(1.0):
                pipe.send(attempt(pipe.recv(), do))


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    """Return CUDA's names of the GPUs that this process sees; their numbers are those of the machine."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(number) for number in range(count)]


def attempt(job: Job, do: Do = work) -> str | None:
    """Carry out a job, with its output in its log; return None, or the error in one line.

    Raises:
        SystemExit: the process was terminated, which is not an error of the run.
    """
    log = log_of(job)
    try:
        with _output_to(log), _locked(log):
            try:
                do(job)
            except NALoRAError as error:
                print(error, file=sys.stderr)
                return describe_error(error)
            except Exception as error:
                from nalora.training.run import Interrupted

                traceback.print_exc()
                if isinstance(error, Interrupted):
                    raise SystemExit(_SIGTERM_EXIT) from error
                return describe_error(error)
            finally:
                release_memory()
    except (OSError, NALoRAError) as error:  # the log cannot be written or locked
        return describe_error(error)
    return None


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect everything that this process prints, also from C code, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    originals = [os.dup(number) for number in (1, 2)]
    try:
        with _open_log(path) as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, original in zip((1, 2), originals, strict=True):
                os.dup2(original, number)
                os.close(original)


def _open_log(path: Path) -> IO[bytes]:
    """Open the log of a run to append to it, but not through a link, which may lead to a file of the user."""
    if path.is_symlink() and (path.is_file() or not path.exists()):
        raise wrong_kind(path, "file", "a log inside the store", "move it away, or give another --store")
    return path.open("ab")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the log of a run, so that no other process does the same job: a worker of a killed study may still run.

    The lock ends with the process that holds it, however that ends; NFS passes such locks on to other machines.
    """
    with _open_log(path) as file:
        _lock(file, path.parent)
        yield


def _lock(file: IO[bytes], store: Path) -> None:
    """Lock an open file of the store; wait if another process has locked it."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another process works on this run; waiting until it ends", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise NALoRAError(
            str(store),
            found=f"a file system without file locks ({error.strerror})",
            expected="locks, so that no run is trained by two processes at a time",
            fix="use a store on a local disk, or mount this one with locks (NFS without nolock, Lustre with flock)",
        ) from error


def refuse_without_locks(store: Path) -> None:
    """Raise `NALoRAError` if files of the store cannot be locked: two studies could train the same run."""
    with tempfile.TemporaryFile(dir=store) as file:
        _lock(file, store)
