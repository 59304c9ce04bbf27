"""Where a study's jobs run: in processes of this machine, or on a Ray cluster; one small interface."""

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
from typing import IO, NamedTuple, Protocol

from nalora.errors import NALoRAError, wrong_kind
from nalora.studies.ended import TOLD_TO_END, Ended, told
from nalora.studies.job import Job, let_go_of_memory, log_of, work

Do = Callable[[Job], None]
_TERMINATED = 128 + 15  # as a shell would say of SIGTERM
SECONDS_TO_END = 30.0


class Engine(Protocol):
    """Takes jobs and says which have ended."""

    def has_room(self) -> bool:
        """Whether one more job would start at once."""
        ...

    def submit(self, job: Job) -> None:
        """Start a job."""
        ...

    def wait(self, seconds: float) -> list[Ended]:
        """The jobs that have ended, waiting so long for the first."""
        ...

    def give_way(self, key: str) -> bool:
        """Let fewer runs share a GPU than when this one began, which has just ended; whether that is possible."""
        ...

    def close(self) -> None:
        """Stop everything that still runs."""
        ...


class _Worker:
    """A process that does one job after another; torch is imported once for all of them."""

    def __init__(self, gpu: str | None, do: Do) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, gpu, os.getpid(), do), daemon=False)
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Began(NamedTuple):
    gpu: str | None
    places: int  # of that GPU, when the run began


class LocalEngine:
    """Processes of this machine; several share a GPU where `per_gpu` says so.

    Args:
        workers: how many at once; on a machine with GPUs one for each place by default, else one.
        per_gpu: how many runs share one GPU at most; fewer where they turn out not to fit.
        do: what a job is done by.
    """

    def __init__(self, workers: int | None = None, per_gpu: int = 1, do: Do = work) -> None:
        self._do = do
        gpus = _visible_gpus()
        count = workers or max(1, len(gpus) * per_gpu)
        self._gpus = [gpus[i % len(gpus)] if gpus else None for i in range(count)]
        self._workers: list[_Worker | None] = [None] * count
        self._began: dict[str, _Began] = {}

    def has_room(self) -> bool:
        """Whether a place is free."""
        return any(worker is None or worker.job is None for worker in self._workers)

    def submit(self, job: Job) -> None:
        """Hand the job to a free worker, which is started if it is not there."""
        for place, worker in enumerate(self._workers):
            if worker is None or worker.job is None:
                if worker is None or not worker.process.is_alive():
                    worker = self._workers[place] = _Worker(self._gpus[place], self._do)
                worker.job = job
                gpu = self._gpus[place]
                self._began[job.key] = _Began(gpu, self._gpus.count(gpu))
                worker.pipe.send(job)
                return
        raise RuntimeError("no room")

    def wait(self, seconds: float) -> list[Ended]:
        """Answers of workers, and workers that died without one."""
        busy = {worker.pipe: place for place, worker in enumerate(self._workers) if worker and worker.job}
        self._began = {job.key: self._began[job.key] for worker in self._workers if worker and (job := worker.job)}
        ended = []
        for pipe in wait(list(busy), timeout=seconds):
            place = busy[pipe]  # type: ignore[index]
            worker = self._workers[place]
            assert worker is not None
            job, worker.job = worker.job, None
            assert job is not None
            try:
                ended.append(Ended(job.key, worker.pipe.recv()))
                dead = ended[-1].lost_the_gpu
            except (EOFError, OSError):
                worker.process.join(5)
                code = worker.process.exitcode
                asked = code in (_TERMINATED, -signal.SIGTERM)
                ended.append(Ended(job.key, TOLD_TO_END if asked else f"its process died (exit code {code})"))
                dead = True
            if dead:
                worker.stop()
                self._workers[place] = None
        return ended

    def give_way(self, key: str) -> bool:
        """Give up a free place of the GPU that the run was on, unless that has only one or has lost one since."""
        gpu, places = self._began[key]
        if places == 1:
            return False  # nobody was beside it
        if self._gpus.count(gpu) == places:
            free = (place for place, worker in enumerate(self._workers) if worker is None or worker.job is None)
            place = next(place for place in free if self._gpus[place] == gpu)
            if (worker := self._workers.pop(place)) is not None:
                worker.stop()
            self._gpus.pop(place)
        return True

    def close(self) -> None:
        """Tell every worker to end, which a training run does with a checkpoint; those that take long are killed.

        Raises:
            KeyboardInterrupt: asked again while waiting; all are killed at once then.
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


def _serve(pipe: Connection, gpu: str | None, parent: int, do: Do) -> None:
    """A worker's life: jobs in, None or an error's text out, until nobody asks any more."""
    import threading

    from tqdm import tqdm

    # Both reach every process of a terminal; the study answers them, and tells its workers to end by SIGTERM.
    for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
        signal.signal(number, signal.SIG_IGN)
    # Its lock between processes would be left behind by a worker that is killed, and Python would complain of that.
    tqdm.set_lock(threading.RLock())
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent or os.name == "nt":
            if pipe.poll(1.0):
                pipe.send(attempt(pipe.recv(), do))


def _visible_gpus() -> list[str]:
    """What CUDA calls the GPUs that this process sees; a number counts among the machine's, not among these."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(number) for number in range(count)]


def attempt(job: Job, do: Do = work) -> str | None:
    """Do a job, its output kept in its log; None, or what went wrong in one line.

    Raises:
        SystemExit: the process was told to end, which says nothing against the run.
    """
    try:
        with _into(log_of(job)), _alone(log_of(job)):
            return _attempt(job, do)
    except (OSError, NALoRAError) as error:  # its log cannot be written, or not be locked
        return told(error)


def _attempt(job: Job, do: Do) -> str | None:
    try:
        do(job)
    except NALoRAError as error:
        print(error, file=sys.stderr)
        return told(error)
    except Exception as error:
        from nalora.training.run import Interrupted

        traceback.print_exc()
        if isinstance(error, Interrupted):
            raise SystemExit(_TERMINATED) from error
        return told(error)
    finally:
        let_go_of_memory()
    return None


@contextlib.contextmanager
def _into(path: Path) -> Iterator[None]:
    """Everything that this process prints, by whatever library, goes into a file for the moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with _log(path) as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, before in zip((1, 2), kept, strict=True):
                os.dup2(before, number)
                os.close(before)


def _log(path: Path) -> IO[bytes]:
    """The log of a run, to be appended to; not through a link to a file, which is somebody else's."""
    if path.is_symlink() and (path.is_file() or not path.exists()):
        raise wrong_kind(path, "file", "a log inside the store", "move it away, or give another --store")
    return path.open("ab")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else does this job meanwhile: a worker whose study was killed may still be at it.

    Its log is locked, which ends with the holder's life, however that ends; NFS passes such locks on to other machines.

    Raises:
        NALoRAError: the file system has no locks.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with _log(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is at this run; waiting for its end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise _no_locks(path.parent, error) from error
        yield


def refuse_without_locks(store: Path) -> None:
    """Find out before any run whether files of the store can be locked.

    Raises:
        NALoRAError: they cannot: two studies could train the same run into the same files.
    """
    if sys.platform == "win32":
        return
    import fcntl

    with tempfile.TemporaryFile(dir=store) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _no_locks(store, error) from error


def _no_locks(store: Path, error: OSError) -> NALoRAError:
    return NALoRAError(
        str(store),
        found=f"a file system without file locks ({error.strerror})",
        expected="locks, so that no run is trained by two processes at a time",
        fix="use a store on a local disk, or mount this one with locks (NFS without nolock, Lustre with flock)",
    )
