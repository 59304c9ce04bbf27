"""Jobs on a Ray cluster: spread over its nodes by what they need, started again where a worker was lost."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, NamedTuple

from nalora.errors import NALoRAError, counted, missing_package
from nalora.studies.ended import TOLD_TO_END, Ended, NotRepeated, told
from nalora.studies.engines import SECONDS_TO_END, Do, attempt
from nalora.studies.job import Job, log_of, work

# Of the study's environment, what a run must see as well; everything else is the node's own.
_CARRIED = ("PYTHONPATH", "PYTHONHASHSEED", "NALORA_CACHE", "HF_HUB_OFFLINE")
_KNOCK_SECONDS = 5.0
# All that passes through it are jobs and lines of text; Ray would take a third of the memory. It asks for 75 MiB.
_OBJECT_STORE_BYTES = 80 * 2**20


class _Underway(NamedTuple):
    job: Job
    lost: int  # workers, so far
    share: float  # of a GPU, that it has


class RayEngine:
    """A cluster that is there, or one of this machine's own.

    The store must be a folder that every node sees under the same path. A lost worker's job is started again, on
    whichever node has room, and goes on from its last checkpoint.

    Args:
        address: of a running cluster, ``host:port``, or ``auto`` for this machine's; by default that in RAY_ADDRESS,
            and without one a cluster of this machine is started, which ends with the study.
        cpus: that one run takes; also its threads, where OMP_NUM_THREADS does not say.
        gpus: that one run takes, at most one; None: a place of `per_gpu` where the cluster has any GPU.
        per_gpu: how many runs fit on one GPU beside each other.
        memory: GiB that one run takes; None: not counted.
        retries: how often a job is started again after its worker was lost.
        do: what a job is done by.

    Raises:
        NALoRAError: Ray is not installed, or there is no such cluster, or no node of it is large enough for a run.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1.0,
        gpus: float | None = None,
        per_gpu: int = 1,
        memory: float | None = None,
        retries: int = 3,
        do: Do = work,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise missing_package("--engine ray", "ray", "to run on a cluster", "'nalora[ray]'") from error
        self._ray: Any = ray
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            _connect(ray, address or os.environ.get("RAY_ADDRESS") or "local")
        if gpus is None:
            # The driver's machine need not have the GPUs that the cluster has.
            gpus = 1 / per_gpu if ray.cluster_resources().get("GPU") else 0.0
        self._needs = {"CPU": cpus, "GPU": gpus, "memory": (memory or 0) * 2**30}
        if not self._places():
            self.close_connection()
            raise _too_small(cpus, gpus, memory)
        self._do, self._retries = do, retries
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cpus)))
        # Ray's own retries know no end where a node ran out of memory; here every loss counts.
        self._remote = self._task = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=int(self._needs["memory"]) or None,
            max_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": _carried()},
        )(attempt_there)
        self._underway: dict[Any, _Underway] = {}
        self._shares: dict[str, float] = {}  # of what has just ended

    def has_room(self) -> bool:
        """Whether the cluster, as large as it is now, has a place; with no node left, one job waits for the next."""
        return len(self._underway) < max(1, self._places())

    def submit(self, job: Job) -> None:
        """Hand the job to the cluster."""
        self._start(job, lost=0)

    def wait(self, seconds: float) -> list[Ended]:
        """What has ended, on whichever node; what was lost is started again."""
        if not self._underway:
            return []
        ready, _ = self._ray.wait(list(self._underway), num_returns=1, timeout=seconds)
        over = {reference: self._underway.pop(reference) for reference in ready}
        self._shares = {underway.job.key: underway.share for underway in over.values()}
        outcomes = [self._outcome(reference, underway) for reference, underway in over.items()]
        return [ended for ended in outcomes if ended is not None]

    def give_way(self, key: str) -> bool:
        """Ask for twice the share of a GPU that the run had, for every later run and on every GPU."""
        share = self._shares[key]
        if not 0 < share <= 0.5:
            return False  # nobody was beside it
        if self._needs["GPU"] == share:
            self._needs["GPU"] = 2 * share
            self._remote = self._task.options(num_gpus=2 * share)
        return True

    def close(self) -> None:
        """Tell every run to end, which a training run does with a checkpoint; those that take long are killed.

        Then leave the cluster; one that was started here ends.
        """
        left = list(self._underway)
        try:
            for reference in left:
                # Arrives as Ctrl-C does: a training run ends after its step, anything else at once.
                self._ray.cancel(reference)
            if left:
                _, left = self._ray.wait(left, num_returns=len(left), timeout=SECONDS_TO_END)
        finally:
            for reference in left:
                self._ray.cancel(reference, force=True)
            self._underway = {}
            self.close_connection()

    def close_connection(self) -> None:
        """Leave a connection alone that was there before."""
        if self._connected_here:
            self._ray.shutdown()

    def _start(self, job: Job, lost: int) -> None:
        reference = self._remote.remote(job, self._do, os.getcwd(), self._threads)
        self._underway[reference] = _Underway(job, lost, self._needs["GPU"])

    def _outcome(self, reference: Any, underway: _Underway) -> Ended | None:
        job = underway.job
        errors = self._ray.exceptions
        losses = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            ended = Ended(job.key, self._ray.get(reference))
        except losses as error:
            why = type(error).__name__
            ended = Ended(
                job.key, NotRepeated(f"its worker was lost ({why}), retried {counted(self._retries, 'time')}")
            )
        except errors.RayError as error:  # the job could not even begin, say where nalora is not installed
            return Ended(job.key, told(getattr(error, "cause", None) or error, line=-1))
        else:
            if not ended.told_to_end:
                return ended
            why = "told to end"
        lost = underway.lost + 1
        if lost > self._retries:
            return ended
        with contextlib.suppress(OSError), log_of(job).open("a", encoding="utf-8") as log:
            log.write(f"the worker was lost ({why}); the run is started again, {lost} of {self._retries}\n")
        self._start(job, lost)
        return None

    def _places(self) -> int:
        """How many runs fit on the nodes that are alive."""
        needs = {kind: need for kind, need in self._needs.items() if need > 0}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        # Ray counts in ten-thousandths: three thirds are a whole.
        return sum(min(int(node.get(kind, 0) / need + 1e-3) for kind, need in needs.items()) for node in nodes)


def attempt_there(job: Job, do: Do, folder: str, threads: int) -> str | None:
    """On a worker: in the study's folder, where the node has it, so that relative paths of settings mean the same."""
    import torch

    if os.path.isdir(folder):
        os.chdir(folder)
    torch.set_num_threads(threads)
    try:
        return attempt(job, do)
    except SystemExit:  # said in words: Ray would only know that the worker is gone
        return TOLD_TO_END


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        _knock(address)
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise NALoRAError(
            f"--address {address}",
            found=str(error).strip().splitlines()[0],
            expected="a running Ray cluster",
            fix="start one with `ray start --head`, or leave --address and RAY_ADDRESS out",
        ) from error


def _knock(address: str) -> None:
    """Whether anybody is at home; Ray itself waits for minutes, and may end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"nobody there ({error.strerror or error})") from error


def _carried() -> dict[str, str]:
    found = {name: os.environ[name] for name in _CARRIED if os.environ.get(name)}
    if paths := found.get("PYTHONPATH"):
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
    return found


def _too_small(cpus: float, gpus: float, memory: float | None) -> NALoRAError:
    wanted = f"{cpus:g} CPUs, {gpus:g} GPUs" + (f" and {memory:g} GiB" if memory else "")
    return NALoRAError(
        "--engine ray",
        found="no node of the cluster that is large enough for one run",
        expected=f"a node with {wanted}",
        fix="ask for less with --cpus, --gpus and --memory, or add such a node",
    )
