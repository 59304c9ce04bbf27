"""Selection mismatch: how a run's FFN utilities differ from a target's, in the terms of eq:exact_selection_decomp.

Both models process the same tokens in lockstep, one block at a time. The paper is about the second term, the difference
because the gates select differently, as opposed to differences of z or u themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nalora.diagnostics.decomposition import MismatchSums, States
from nalora.diagnostics.file import described
from nalora.diagnostics.inputs import DiagnosisOptions, load_run_and_target
from nalora.diagnostics.lockstep import Gates, Lockstep
from nalora.diagnostics.mismatch_measures import STATISTICS, measures
from nalora.diagnostics.sites import GateSite, find_sites
from nalora.diagnostics.states import final_state, masks_by_site
from nalora.diagnostics.subjects import subject_of
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.runs.folder import write_json
from nalora.runs.progress import Report

FILE_NAME = "mismatch.json"
CHANNELS_FILE = "mismatch_channels.safetensors"
VERSION = 1


def diagnose_against(
    run: str | Path,
    target: str,
    options: DiagnosisOptions | None = None,
    *,
    report: Report = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure the mismatch of a run or an adapter against a target, write it as mismatch.json, and return it.

    Args:
        run: folder of a finished run, or of an adapter.
        target: folder of another finished run, of an adapter of the same base or of a model, or a hub id.
        options: probe (default: the run's training set) and device.
        report: called with (description, done, total).

    Raises NALoRAError if run or target do not exist or are not finished, or for models of different architectures.
    """
    options = options or DiagnosisOptions()
    subject = subject_of(run, options, FILE_NAME, CHANNELS_FILE, finished=True)
    assert subject.trained is not None
    models = load_run_and_target(subject.run, subject.trained, target, options)
    batches = models.probe.batches
    all_sites, all_sums = compare(
        models.run, models.target, batches, progress=lambda done: report("comparing", done, len(batches))
    )
    # Blocks that no token reached, such as those of another tower, are left out.
    sites = [site for site, block in zip(all_sites, all_sums, strict=True) if block.tokens]
    sums = [block for block in all_sums if block.tokens]
    state = final_state(subject.folder)
    by_site = masks_by_site(state.controller, sites) if state else {}
    masks = [by_site.get(index) for index in range(len(sites))] if by_site else None
    result = {
        "version": VERSION,
        "run": str(run),
        "target": target,
        "probe": {
            "task": models.probe.task,
            "examples": models.probe.examples,
            "tokens": max((block.tokens for block in sums), default=0),
            "seed": subject.run.settings.seed,
        },
        "blocks": [{**described(site), "gated": site.up is not None} for site in sites],
        "mask_step": state and state.step,
        "channels": CHANNELS_FILE if options.per_channel else None,
        **measures(sums, masks),
    }
    subject.output.mkdir(parents=True, exist_ok=True)
    if options.per_channel:
        _write_channels(subject.output / CHANNELS_FILE, sites, sums, by_site)
    write_json(subject.output / FILE_NAME, result)
    return result


def compare(
    run: nn.Module,
    target: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[tuple[GateSite, ...], list[MismatchSums]]:
    """Return the FFN blocks of both models and the sums of each over the batches.

    `progress` is called with the number of finished batches. Raises NALoRAError for different architectures.
    """
    sites, others = find_sites(run), find_sites(target)
    if _layout(sites) != _layout(others):
        raise NALoRAError(
            f"{_description(run, sites)} against {_description(target, others)}",
            found="models of different architectures",
            expected="the same FFN blocks, of the same names, widths and activations",
            fix="give a target that was made from the run's base model",
        )
    device = next(run.parameters()).device
    sums = [MismatchSums(site.width, site.activation, device) for site in sites]

    def visit(site: int, gates: Sequence[Gates], mask: Tensor | None) -> None:
        (z_target, u_target), (z_lora, u_lora) = gates
        sums[site].add(States(z_target, u_target, z_lora, u_lora), mask)

    with Lockstep([target, run], sites, with_up=True) as lockstep:
        lockstep.run_all(batches, visit, progress)
    return sites, sums


def _layout(sites: Sequence[GateSite]) -> list[tuple[Any, ...]]:
    return [(site.name, site.width, site.gate, site.up, site.activation.name) for site in sites]


def _description(model: nn.Module, sites: Sequence[GateSite]) -> str:
    base: Any = base_of(model)
    widths = "/".join(str(width) for width in sorted({site.width for site in sites}))
    name = getattr(base, "name_or_path", "") or "a model"
    return f"{name} ({type(base).__name__}, {len(sites)} FFN blocks of width {widths})"


def _write_channels(
    path: Path, sites: Sequence[GateSite], sums: Sequence[MismatchSums], masks: Mapping[int, Tensor]
) -> None:
    """Write the means over tokens of every channel, [channels]: ``block/energy``, the statistics, ``block/mask``."""
    tensors: dict[str, Tensor] = {}
    for index, (site, block) in enumerate(zip(sites, sums, strict=True)):
        tensors[f"{site.name}/energy"] = block.channel_energy / block.tokens
        tensors |= {f"{site.name}/{name}": getattr(block, name) / block.tokens for name in STATISTICS}
        if index in masks:
            tensors[f"{site.name}/mask"] = masks[index]
    atomic.save_tensors(path, {name: tensor.float() for name, tensor in tensors.items()})
