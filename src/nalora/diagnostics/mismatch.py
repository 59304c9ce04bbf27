"""Selection mismatch: where a run's FFN utilities part from a target's, in the terms of eq:exact_selection_decomp.

Both models see the same tokens in lockstep, a block at a time. The term that the paper is about is the second: what
differs because the gates *decide* otherwise, beside what differs because z or u came out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nalora.diagnostics.decomposition import MismatchSums, States
from nalora.diagnostics.dynamics import Request
from nalora.diagnostics.file import described
from nalora.diagnostics.lockstep import Gates, Lockstep
from nalora.diagnostics.masks import final_state, masks_by_site
from nalora.diagnostics.mismatch_measures import STATISTICS, measures
from nalora.diagnostics.pairs import open_pair
from nalora.diagnostics.probe import on_device
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.runs.folder import write_json
from nalora.runs.progress import Report
from nalora.runs.saved_run import finished_run, refuse_unless_own
from nalora.runs.writable import refuse_unwritable

FILE_NAME = "mismatch.json"
CHANNELS_FILE = "mismatch_channels.safetensors"
VERSION = 1


def diagnose_against(
    run: str | Path,
    target: str,
    request: Request | None = None,
    *,
    report: Report = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure a run's mismatch against a target and write it into the run's folder as mismatch.json.

    Args:
        run: the folder of a finished run.
        target: the folder of another finished run, of an adapter of the same base, of a model, or a hub id.
        request: the probe, the run's own training set by default, and where to run.
        report: hears (what, done, total).

    Raises:
        NALoRAError: no such run or target, an unfinished one, or models of different architectures.
    """
    request = request or Request()
    finished = finished_run(run, trust=request.trust)
    refuse_unless_own(finished.folder, FILE_NAME, CHANNELS_FILE)
    refuse_unwritable(finished.folder.path)
    pair = open_pair(finished, target, request)
    batches = pair.probe.batches
    every_site, every_sum = compare(
        pair.run, pair.target, batches, progress=lambda done: report("comparing", done, len(batches))
    )
    # A block that no token reached, such as one of another tower, has nothing to say.
    reached = [(site, each) for site, each in zip(every_site, every_sum, strict=True) if each.tokens]
    sites, sums = [site for site, _ in reached], [each for _, each in reached]
    state = final_state(finished.folder)
    by_site = masks_by_site(state.controller, sites) if state else {}
    masks = [by_site.get(index) for index in range(len(sites))] if by_site else None
    result = {
        "version": VERSION,
        "run": str(run),
        "target": target,
        "probe": {
            "task": pair.probe.task,
            "examples": pair.probe.examples,
            "tokens": max((each.tokens for each in sums), default=0),
            "seed": finished.run.settings.seed,
        },
        "blocks": [{**described(site), "gated": site.up is not None} for site in sites],
        "mask_step": state and state.step,
        "channels": CHANNELS_FILE if request.per_channel else None,
        **measures(sums, masks),
    }
    if request.per_channel:
        _write_channels(finished.folder.path / CHANNELS_FILE, sites, sums, masks)
    write_json(finished.folder.path / FILE_NAME, result)
    return result


def compare(
    run: nn.Module,
    target: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[tuple[GateSite, ...], list[MismatchSums]]:
    """The FFN blocks of both models and the sums of each over the batches; `progress` hears how many are done.

    Raises:
        NALoRAError: the two are not of one architecture.
    """
    sites = same_sites(run, target)
    device = next(run.parameters()).device
    sums = [MismatchSums(site.width, site.activation, device) for site in sites]

    def visit(site: int, gates: Sequence[Gates], mask: Tensor | None) -> None:
        (z_target, u_target), (z_lora, u_lora) = gates
        sums[site].add(States(z_target, u_target, z_lora, u_lora), mask)

    with Lockstep([target, run], sites, with_up=True) as models:
        for done, batch in enumerate(batches, 1):
            models.run(on_device(dict(batch), run), visit)
            progress(done)
    return sites, sums


def same_sites(run: nn.Module, target: nn.Module) -> tuple[GateSite, ...]:
    """Where the gates of both models are.

    Raises:
        NALoRAError: they differ.
    """
    here, there = find_sites(run), find_sites(target)
    if _layout(here) != _layout(there):
        raise NALoRAError(
            f"{_described(run, here)} against {_described(target, there)}",
            found="models of different architectures",
            expected="the same FFN blocks, of the same names, widths and activations",
            fix="give a target that was made from the run's base model",
        )
    return here


def _layout(sites: Sequence[GateSite]) -> list[tuple[Any, ...]]:
    return [(site.name, site.width, site.gate, site.up, site.activation.name) for site in sites]


def _described(model: nn.Module, sites: Sequence[GateSite]) -> str:
    base: Any = base_of(model)
    widths = "/".join(str(width) for width in sorted({site.width for site in sites}))
    name = getattr(base, "name_or_path", "") or "a model"
    return f"{name} ({type(base).__name__}, {len(sites)} FFN blocks of width {widths})"


def _write_channels(
    path: Path, sites: Sequence[GateSite], sums: Sequence[MismatchSums], masks: Sequence[Tensor | None] | None
) -> None:
    """Means over tokens for every channel, [channels] each: ``block/energy``, the statistics, ``block/mask``."""
    tensors: dict[str, Tensor] = {}
    for index, (site, each) in enumerate(zip(sites, sums, strict=True)):
        tensors[f"{site.name}/energy"] = each.channel_energy / each.tokens
        tensors |= {f"{site.name}/{name}": getattr(each, name) / each.tokens for name in STATISTICS}
        if masks is not None and (mask := masks[index]) is not None:
            tensors[f"{site.name}/mask"] = mask
    atomic.save_tensors(path, {name: tensor.float() for name, tensor in tensors.items()})
