"""Jobs on a Ray cluster: distributed over its nodes by the resources they need, restarted if a worker is lost."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, NamedTuple

from nalora.errors import NALoRAError, counted, missing_package
from nalora.studies.engines import SECONDS_TO_END, Do, attempt
from nalora.studies.job import Job, log_of, work
from nalora.studies.outcome import TERMINATED, Outcome, PermanentError, describe_error

# Variables of the study's environment that are passed on to the runs; all others are those of the node.
_PASSED_ON = ("PYTHONPATH", "PYTHONHASHSEED", "NALORA_CACHE", "HF_HUB_OFFLINE")
_CONNECT_SECONDS = 5.0
# Only jobs and lines of text pass through it; Ray would reserve a third of the memory. Its minimum is 75 MiB.
_OBJECT_STORE_BYTES = 80 * 2**20


class _Started(NamedTuple):
    job: Job
    lost: int  # the number of workers that were lost so far
    share: float  # of a GPU


class RayEngine:
    """A running Ray cluster, or one that is started on this machine.

    The store must be a folder that every node sees under the same path. The job of a lost worker is started again on
    any node with room, and continues from its last checkpoint.

    Args:
        address: of a running cluster, ``host:port``, or ``auto`` for that of this machine; by default $RAY_ADDRESS,
            and without it a cluster is started on this machine and shut down with the study.
        cpus: CPUs of one run, and its number of threads unless OMP_NUM_THREADS is set.
        gpus: share of a GPU of one run, at most 1; None: 1 / `per_gpu` if the cluster has a GPU.
        per_gpu: the number of runs that share one GPU.
        memory: GiB of memory of one run; None: not limited.
        retries: how often a job is started again after its worker was lost.
        do: carries out a job.

    Raises:
        NALoRAError: Ray is not installed, there is no such cluster, or no node of it is large enough for a run.
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
        self._started: dict[Any, _Started] = {}
        self._shares: dict[str, float] = {}  # of the jobs that have just ended
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            _connect(ray, address or os.environ.get("RAY_ADDRESS") or "local")
        if gpus is None:
            # The machine of the study need not have the GPUs that the cluster has.
            gpus = 1 / per_gpu if ray.cluster_resources().get("GPU") else 0.0
        self._needs = {"CPU": cpus, "GPU": gpus, "memory": (memory or 0) * 2**30}
        if not self._slots():
            self.close()
            wanted = f"{cpus:g} CPUs, {gpus:g} GPUs" + (f" and {memory:g} GiB" if memory else "")
            raise NALoRAError(
                "--engine ray",
                found="no node of the cluster that is large enough for one run",
                expected=f"a node with {wanted}",
                fix="reduce --cpus, --gpus and --memory, or add such a node",
            )
        self._do, self._retries = do, retries
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cpus)))
        # Ray's own retries are unlimited when a node runs out of memory; here every loss counts.
        self._remote = self._task = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            memory=int(self._needs["memory"]) or None,
            max_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": _passed_on()},
        )(attempt_on_node)

    def has_room(self) -> bool:
        """Whether the cluster, at its present size, has a free slot; with no node left, one job waits for the next."""
        return len(self._started) < max(1, self._slots())

    def submit(self, job: Job) -> None:
        """Send the job to the cluster."""
        self._start(job, lost=0)

    def wait(self, seconds: float) -> list[Outcome]:
        """Return the jobs that have ended, on any node; jobs of lost workers are started again."""
        if not self._started:
            return []
        ready, _ = self._ray.wait(list(self._started), num_returns=1, timeout=seconds)
        ended = {reference: self._started.pop(reference) for reference in ready}
        self._shares = {started.job.key: started.share for started in ended.values()}
        outcomes = [self._outcome(reference, started) for reference, started in ended.items()]
        return [outcome for outcome in outcomes if outcome is not None]

    def reduce_sharing(self, key: str) -> bool:
        """Give every later run, on every GPU, twice the share of a GPU that this run had."""
        share = self._shares[key]
        if not 0 < share <= 0.5:
            return False
        if self._needs["GPU"] == share:
            self._needs["GPU"] = 2 * share
            self._remote = self._task.options(num_gpus=2 * share)
        return True

    def close(self) -> None:
        """Cancel every run, which lets training write a checkpoint, and kill those that take too long.

        Then disconnect, unless the connection existed before; a cluster that was started here is shut down.
        """
        left = list(self._started)
        try:
            for reference in left:
                # Arrives like Ctrl-C: a training run ends after its step, anything else at once.
                self._ray.cancel(reference)
            if left:
                _, left = self._ray.wait(left, num_returns=len(left), timeout=SECONDS_TO_END)
        finally:
            for reference in left:
                self._ray.cancel(reference, force=True)
            self._started = {}
            if self._connected_here:
                self._ray.shutdown()

    def _start(self, job: Job, lost: int) -> None:
        reference = self._remote.remote(job, self._do, os.getcwd(), self._threads)
        self._started[reference] = _Started(job, lost, self._needs["GPU"])

    def _outcome(self, reference: Any, started: _Started) -> Outcome | None:
        """Return how the job ended, or None if it was started again."""
        job = started.job
        errors = self._ray.exceptions
        losses = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            outcome = Outcome(job.key, self._ray.get(reference))
        except losses as error:
            reason = type(error).__name__
            retried = f"its worker was lost ({reason}), retried {counted(self._retries, 'time')}"
            outcome = Outcome(job.key, PermanentError(retried))
        except errors.RayError as error:  # the job could not start, for example because the node has no nalora
            return Outcome(job.key, describe_error(getattr(error, "cause", None) or error, line=-1))
        else:
            if not outcome.terminated:
                return outcome
            reason = "terminated"
        lost = started.lost + 1
        if lost > self._retries:
            return outcome
        with contextlib.suppress(OSError), log_of(job).open("a", encoding="utf-8") as log:
            log.write(f"the worker was lost ({reason}); the run is started again, {lost} of {self._retries}\n")
        self._start(job, lost)
        return None

    def _slots(self) -> int:
        """Return the number of runs that fit on the nodes that are alive."""
        needs = {kind: need for kind, need in self._needs.items() if need > 0}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        # Ray counts in units of 0.0001, so that three thirds are less than a whole.
        return sum(min(int(node.get(kind, 0) / need + 1e-3) for kind, need in needs.items()) for node in nodes)


def attempt_on_node(job: Job, do: Do, folder: str, threads: int) -> str | None:
    """Run on a worker: carry out the job in the study's working folder if the node has it, for relative paths."""
    import torch

    if os.path.isdir(folder):
        os.chdir(folder)
    torch.set_num_threads(threads)
    try:
        return attempt(job, do)
    except SystemExit:  # Ray would only report that the worker is gone
        return TERMINATED


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        _check_reachable(address)
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise NALoRAError(
            f"--address {address}",
            found=str(error).strip().splitlines()[0],
            expected="a running Ray cluster",
            fix="start one with `ray start --head`, or leave --address and RAY_ADDRESS out",
        ) from error


def _check_reachable(address: str) -> None:
    """Raise `ConnectionError` if nothing listens at the address; Ray would wait for minutes, or end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"no connection ({error.strerror or error})") from error


def _passed_on() -> dict[str, str]:
    variables = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    if paths := variables.get("PYTHONPATH"):
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
    return variables
