"""How the gates of a run changed: its states compared in pairs on one probe.

N states need at most 2N forward passes over the probe: two for each of the N − 1 adjacent pairs, and two for the first
and the last state. Each model of a pair gets half a batch, so that both together need the memory of one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control import checkpoint
from nalora.diagnostics.file import Interval, contents, write_channels
from nalora.diagnostics.inputs import Batch, DiagnosisInputs, DiagnosisOptions
from nalora.diagnostics.lockstep import Gates, Lockstep, on_device
from nalora.diagnostics.measures import Distribution, Movement, Sums, distribution, movement, token_slices
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.diagnostics.states import SavedState, masks_by_site
from nalora.diagnostics.subjects import subject_of
from nalora.errors import NALoRAError
from nalora.runs.folder import write_json
from nalora.runs.progress import Report

FILE_NAME = "diagnosis.json"
CHANNELS_FILE = "diagnosis_channels.safetensors"
# Elements of z that are processed together: what fits a CPU's cache, and what fills a GPU.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 18, 1 << 22


@dataclass
class Comparison:
    """Sums over the tokens of all batches, by site; a site that no token reached is missing.

    Attributes:
        movements: from the first state to the second.
        distributions: of the requested states (0, 1).
        forward_passes: number of passes of a model over a batch.
    """

    movements: dict[int, Movement] = field(default_factory=dict)
    distributions: dict[int, dict[int, Distribution]] = field(default_factory=dict)
    forward_passes: int = 0


def diagnose(
    target: str | Path, options: DiagnosisOptions | None = None, *, report: Report = lambda what, done, total: None
) -> dict[str, Any]:
    """Compare the states of a run or an adapter, write the result as diagnosis.json, and return it.

    Raises NALoRAError if there is no run or adapter, fewer than two states of it, or a state of another model.
    """
    options = options or DiagnosisOptions()
    subject = subject_of(target, options, FILE_NAME, CHANNELS_FILE)
    folder, run = subject.folder, subject.run
    states, notices = subject.states(options.every)
    began = time.perf_counter()
    inputs = DiagnosisInputs(run, options, subject.trained)
    sites, batches = find_sites(inputs.base), inputs.probe.batches
    device = next(inputs.base.parameters()).device
    inference_peak = _inference_peak(inputs.pair(states[0].folder, states[1].folder)[0], batches)
    pairs = list(itertools.pairwise(states))
    last = len(pairs) - 1
    if len(states) > 2:
        pairs.append((states[0], states[-1]))
    intervals: list[Interval] = []
    distributions: dict[int, dict[int, Distribution]] = {}
    passes = 0
    for number, (before, after) in enumerate(pairs):

        def progress(done: int, finished: int = number * len(batches)) -> None:
            report("comparing states", finished + done, len(pairs) * len(batches))

        # The distribution of every state is measured once, with a histogram for the first and the last.
        comparison = compare(
            *inputs.pair(before.folder, after.folder),
            batches,
            sites,
            distributions=() if number > last else (1,) if number else (0, 1),
            histograms=[state for state, place in enumerate((0, last)) if number == place],
            progress=progress,
        )
        for state, measured in comparison.distributions.items():
            distributions[(before, after)[state].step] = measured
        passes += comparison.forward_passes
        masks = intervals[last].masks if number > last else _masks(after, sites, notices)
        intervals.append(Interval(before.step, after.step, comparison.movements, masks))
    intervals, first_to_last = intervals[: last + 1], intervals[-1]
    tokens = [block.tokens for interval in (*intervals, first_to_last) for block in interval.movements.values()]
    diagnosis = {
        "run": str(folder.path),
        "method": run.method.name if subject.is_run else "adapter",
        "model": run.settings.model,
        "probe": {
            "task": inputs.probe.task,
            "examples": inputs.probe.examples,
            "tokens": max([0, *tokens]),
            "seed": run.settings.seed,
        },
        **contents(sites, intervals, first_to_last, distributions),
        "channels": CHANNELS_FILE if options.per_channel else None,
        "notices": notices,
        "cost": {
            "seconds": round(time.perf_counter() - began, 2),
            "forward_passes_per_checkpoint": passes / len(batches) / len(states),
            "peak_memory_ratio": inference_peak and round(torch.cuda.max_memory_allocated(device) / inference_peak, 3),
        },
    }
    subject.output.mkdir(parents=True, exist_ok=True)
    if options.per_channel:
        write_channels(subject.output / CHANNELS_FILE, sites, intervals, first_to_last, distributions)
    write_json(subject.output / FILE_NAME, diagnosis)
    return diagnosis


def compare(
    before: nn.Module,
    after: nn.Module,
    batches: Sequence[Batch],
    sites: Sequence[GateSite],
    *,
    distributions: Collection[int] = (),
    histograms: Collection[int] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Run two states of a model, different objects of one architecture, in lockstep and return the sums.

    Args:
        before: the earlier state.
        after: the later state.
        batches: the probe.
        sites: where the gates are.
        distributions: the states (0: before, 1: after) whose regimes are counted.
        histograms: those of them whose z are also binned.
        progress: called with the number of finished batches.
    """
    result = Comparison(distributions={state: {} for state in distributions})

    @torch.no_grad()
    def visit(index: int, gates: Sequence[Gates], mask: Tensor | None) -> None:
        site, z = sites[index], [model.z for model in gates]
        elements = _CPU_ELEMENTS if z[0].device.type == "cpu" else _GPU_ELEMENTS
        for tokens in token_slices(z, mask, elements):
            _add(result.movements, index, movement(tokens[0], tokens[1], site.activation, site.thresholds))
            for state, sums in result.distributions.items():
                _add(sums, index, distribution(tokens[state], site.thresholds, histogram=state in histograms))

    with Lockstep([before, after], sites) as lockstep:
        lockstep.run_all(batches, visit, progress)
        result.forward_passes = lockstep.forward_passes
    return result


def _add(sums: dict[int, Sums], site: int, new: Sums) -> None:
    sums[site] = sums[site] + new if site in sums else new


def _masks(state: SavedState, sites: Sequence[GateSite], notices: list[str]) -> dict[int, Tensor]:
    """Return the controller's masks in a state by site; none without a controller."""
    if state.folder is None or not (state.folder / checkpoint.FILE_NAME).is_file():
        return {}
    try:
        return masks_by_site(checkpoint.load(state.folder), sites)
    except NALoRAError as error:
        notices.append(f"D_EH up to step {state.step} is not weighted by the mask: {error}")
        return {}


@torch.no_grad()
def _inference_peak(model: nn.Module, batches: Sequence[Batch]) -> int | None:
    """Return the peak GPU memory of plain inference on a whole batch, two of the probe's; None on other devices."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    halves = [on_device(batch, model) for batch in batches[:2]]
    whole = dict(halves[0])
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.ndim > 1:
            tensors = [half[name] for half in halves]
            length = max(tensor.shape[-1] for tensor in tensors)
            whole[name] = torch.cat([nn.functional.pad(each, (0, length - each.shape[-1])) for each in tensors])
    torch.cuda.reset_peak_memory_stats(device)
    model.eval()(**whole)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
