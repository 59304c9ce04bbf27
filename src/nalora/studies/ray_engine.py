"""Jobs on a Ray cluster: spread over its nodes by what they need, started again where a worker was lost."""

from __future__ import annotations

from typing import Any

from nalora.errors import NALoRAError
from nalora.studies.engines import Do, Ended, attempt
from nalora.studies.job import Job, work


class RayEngine:
    """A cluster that is there, or one of this machine's own.

    The store must be a folder that every node sees under the same path. A lost worker's job is started again by Ray,
    and goes on from its last checkpoint.

    Args:
        address: of a running cluster (``auto`` finds this machine's); None starts one here.
        cpus: that one run takes.
        gpus: that one run takes; a fraction packs several on one.
        retries: how often a job is started again after its worker was lost.
        do: what a job is done by.

    Raises:
        NALoRAError: Ray is not installed, or there is no such cluster.
    """

    def __init__(
        self, address: str | None = None, *, cpus: float = 1.0, gpus: float = 0.0, retries: int = 3, do: Do = work
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise NALoRAError(
                "--engine ray", found="no Ray", expected="the package ray", fix="pip install 'nalora[ray]'"
            ) from error
        self._ray: Any = ray
        self._started_here = not ray.is_initialized()
        if self._started_here:
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except ConnectionError as error:
                raise NALoRAError(
                    f"--address {address}",
                    found=str(error).splitlines()[0],
                    expected="a running Ray cluster",
                    fix="start one with `ray start --head`, or leave --address out",
                ) from error
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": retries, "scheduling_strategy": "SPREAD"}
        self._do, self._remote = do, ray.remote(attempt).options(**options)
        resources = ray.cluster_resources()
        places = [resources.get(kind, 0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each > 0]
        self._room = max(1, int(min(places, default=1)))
        self._jobs: dict[Any, Job] = {}

    def has_room(self) -> bool:
        """Whether the cluster has a place; a few jobs may wait there, so that none stands idle."""
        return len(self._jobs) < self._room + 2

    def submit(self, job: Job) -> None:
        """Hand the job to the cluster."""
        self._jobs[self._remote.remote(job, self._do)] = job

    def wait(self, seconds: float) -> list[Ended]:
        """What has ended, on whichever node."""
        if not self._jobs:
            return []
        ready, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        ended = []
        for reference in ready:
            job = self._jobs.pop(reference)
            try:
                ended.append(Ended(job.key, self._ray.get(reference)))
            except self._ray.exceptions.RayError as error:
                ended.append(Ended(job.key, f"{type(error).__name__}: its worker was lost too often"))
        return ended

    def close(self) -> None:
        """Cancel what runs, and stop the cluster if it was started here."""
        for reference in self._jobs:
            self._ray.cancel(reference, force=True)
        if self._started_here:
            self._ray.shutdown()
