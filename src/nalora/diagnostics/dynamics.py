"""The dynamics of a run's gates: its states compared pair by pair on one probe, and what that says of every block.

N states cost at most 2N forward passes over the probe: two for each of the N − 1 adjacent pairs, two for the first and
the last. Either model of a pair gets half a batch, so that both together need the memory of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora import tasks
from nalora.control import checkpoint
from nalora.diagnostics.compare import Comparison, compare
from nalora.diagnostics.file import Interval, State, contents, write_channels
from nalora.diagnostics.masks import masks_by_site
from nalora.diagnostics.probe import Probe, make_probe, on_device
from nalora.diagnostics.saved import Saved, states_of
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.diagnostics.twins import Residents
from nalora.errors import NALoRAError
from nalora.models import loading
from nalora.runs.folder import RunFolder, write_json
from nalora.runs.inputs import kind_of
from nalora.runs.progress import Report
from nalora.runs.saved_run import read_run, refuse_unless_own
from nalora.runs.settings import Run
from nalora.runs.writable import refuse_unwritable

CHANNELS_FILE = "diagnosis_channels.safetensors"


@dataclass(frozen=True)
class Request:
    """How a run is looked at.

    Args:
        every: only snapshots of steps that are multiples of this, and the first and the last.
        probe_size: examples.
        task: whose training set; the run's own by default.
        data_dir: the task's files.
        batch_size: examples of which plain inference would take the memory that this may take; 16 on a CPU and 128 on a
            GPU by default, where smaller ones wait for Python.
        device: where; the run's by default.
        per_channel: also write every channel's values.
        trust: whether code that the run's own settings name may run.
    """

    every: int = 1
    probe_size: int = 512
    task: str | None = None
    data_dir: str | None = None
    batch_size: int | None = None
    device: str | None = None
    per_channel: bool = False
    trust: bool = False

    def rows(self, device: torch.device) -> int:
        """Examples of one pass: two models go over each, so half of a batch."""
        return max(1, (self.batch_size or (128 if device.type == "cuda" else 16)) // 2)


def diagnose(
    target: str | Path, request: Request | None = None, *, report: Report = lambda what, done, total: None
) -> dict[str, Any]:
    """Compare a run's states and write what came out into its folder, as diagnosis.json; that file's contents.

    Raises:
        NALoRAError: no run, fewer than two states of it, or a state of another model.
    """
    request = request or Request()
    folder = RunFolder(target)
    run = read_run(folder, trust=request.trust)
    refuse_unless_own(folder, folder.diagnosis.name, CHANNELS_FILE)
    refuse_unwritable(folder.path)
    states, notices = states_of(folder, run, request.every)
    began = time.perf_counter()
    probe, sites, residents = _ready(run, request)
    peak = _Peak(residents, states, probe)
    walk = _Walk(residents, sites, probe, report, total=len(states))
    intervals = [walk.interval(one, other, first=one is states[0]) for one, other in itertools.pairwise(states)]
    ends = intervals[0] if len(states) == 2 else walk.ends(states[0], states[-1])
    notices += walk.notices
    measured = [State(state.step, walk.standing[state.step]) for state in states]
    diagnosis = {
        "run": str(folder.path),
        "method": run.method.name,
        "model": run.settings.model,
        "probe": {
            "task": probe.task, "examples": probe.examples, "tokens": walk.tokens, "seed": run.settings.seed
        },
        **contents(sites, intervals, ends, measured),
        "channels": CHANNELS_FILE if request.per_channel else None,
        "notices": notices,
        "cost": {
            "seconds": round(time.perf_counter() - began, 2),
            "forward_passes_per_checkpoint": walk.passes / len(probe.batches) / len(states),
            "peak_memory_ratio": peak.ratio(),
        },
    }  # fmt: skip
    if request.per_channel:
        write_channels(folder.path / CHANNELS_FILE, sites, intervals, ends, measured)
    write_json(folder.diagnosis, diagnosis)
    return diagnosis


def _ready(run: Run, request: Request) -> tuple[Probe, tuple[GateSite, ...], Residents]:
    """The probe, where the gates are, and the models; here alone the base model is held."""
    settings = run.settings if request.device is None else replace(run.settings, device=request.device)
    own = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
    spec = settings.model_spec(kind_of(own, settings))
    loaded = loading.load(spec)
    processor = loaded.processor
    probe, model = make_probe(
        run,
        loaded,
        size=request.probe_size,
        batch_size=request.rows(loaded.device),
        task=request.task,
        data_dir=request.data_dir,
    )

    def load(state: Path | None) -> nn.Module:
        wanted = spec if state is None else replace(spec, name=str(state))
        return own.prepare_model(loading.load(wanted, processor=processor)).model

    return probe, find_sites(model), Residents(model, load)


class _Walk:
    """From state to state, remembering what each pair of passes told."""

    def __init__(
        self, residents: Residents, sites: Sequence[GateSite], probe: Probe, report: Report, total: int
    ) -> None:
        self.residents, self.sites, self.probe, self.report = residents, sites, probe, report
        self.pairs = total if total > 2 else 1
        self.done = self.passes = self.tokens = 0
        self.standing: dict[int, dict[int, Any]] = {}
        self.notices: list[str] = []

    def interval(self, before: Saved, after: Saved, *, first: bool) -> Interval:
        """How the gates moved between neighbours, and where the states stand that no pass has measured yet."""
        last = self.done == max(1, self.pairs - 1) - 1
        histogram = [state for state, wanted in enumerate((first, last)) if wanted]
        found = self._compare(before, after, (0, 1) if first else (1,), histogram)
        for state, saved in enumerate((before, after)):
            if state in found.standings:
                self.standing[saved.step] = found.standings[state]
        return self._interval(before, after, found)

    def ends(self, before: Saved, after: Saved) -> Interval:
        """How they moved from the first state to the last."""
        return self._interval(before, after, self._compare(before, after, (), ()))

    def _interval(self, before: Saved, after: Saved, found: Comparison) -> Interval:
        return Interval(before.step, after.step, found.movements, self._masks(after))

    def _compare(self, before: Saved, after: Saved, stand: Sequence[int], histogram: Sequence[int]) -> Comparison:
        models = self.residents.pair(before.folder, after.folder)
        batches = self.probe.batches
        total, already = self.pairs * len(batches), self.done * len(batches)

        def progress(done: int) -> None:
            self.report("comparing states", already + done, total)

        found = compare(*models, batches, self.sites, stand=stand, histogram=histogram, progress=progress)
        self.done += 1
        self.passes += found.forward_passes
        self.tokens = max([self.tokens, *(each.tokens for each in found.movements.values())])
        return found

    def _masks(self, state: Saved) -> dict[int, Tensor]:
        """The controller's masks in a state, by site; none where there was no controller."""
        if state.folder is None or not (state.folder / checkpoint.FILE_NAME).is_file():
            return {}
        try:
            controller = checkpoint.load(state.folder)
        except NALoRAError as error:
            self.notices.append(f"D_EH up to step {state.step} is not weighted by the mask: {error}")
            return {}
        return masks_by_site(controller, self.sites)


class _Peak:
    """Memory on a GPU, beside that of plain inference with the whole batch; nothing is measured elsewhere."""

    def __init__(self, residents: Residents, states: Sequence[Saved], probe: Probe) -> None:
        model, _ = residents.pair(states[0].folder, states[1].folder)
        self.device = next(model.parameters()).device
        if self.device.type == "cuda":
            two = [on_device(batch, model) for batch in probe.batches[:2]]
            torch.cuda.reset_peak_memory_stats(self.device)
            _inference(model, two)
            self.inference = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def ratio(self) -> float | None:
        """The peak since, over plain inference's."""
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / self.inference, 3)


@torch.no_grad()
def _inference(model: nn.Module, batches: Sequence[dict[str, Any]]) -> None:
    """One pass over all of the batches at once: they are halves of what inference would take together."""
    names = batches[0].keys()
    whole: dict[str, Any] = {}
    for name in names:
        values = [batch[name] for batch in batches]
        if isinstance(values[0], Tensor) and values[0].ndim > 1:
            length = max(value.shape[-1] for value in values)
            values = [nn.functional.pad(value, (0, length - value.shape[-1])) for value in values]
            whole[name] = torch.cat(values)
        else:
            whole[name] = values[0]
    model.eval()(**whole)
