"""Selection mismatch: where a run's FFN utilities part from a target's, in the terms of eq:exact_selection_decomp.

Both models see the same tokens in lockstep, a block at a time. The term that the paper is about is the second: what
differs because the gates *decide* otherwise, beside what differs because z or u came out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.diagnostics.decomposition import MismatchSums, States
from nalora.diagnostics.lockstep import Gates, Lockstep
from nalora.diagnostics.masks import final_masks
from nalora.diagnostics.mismatch_measures import measures
from nalora.diagnostics.pairs import finished_run, open_pair
from nalora.diagnostics.sites import GateSite, base_of, find_sites
from nalora.errors import NALoRAError
from nalora.training.folder import write_json
from nalora.training.run import Material

FILE_NAME = "mismatch.json"
VERSION = 1


def diagnose_against(
    run: str | Path,
    target: str,
    *,
    examples: int = 512,
    batch_size: int = 8,
    device: str | None = None,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure a run's mismatch against a target on the run's own training set; `mismatch.json` in its folder.

    Args:
        run: the folder of a finished run.
        target: the folder of another finished run, of an adapter of the same base, of a model, or a hub id.
        examples: how many training rows are the probe, from the first on.
        batch_size: rows in one forward pass; changes time and memory alone.
        device: where, in place of the run's.
        report: hears (what, done, total).

    Raises:
        NALoRAError: no such run or target, an unfinished one, or models of different architectures.
    """
    finished = finished_run(run)
    pair = open_pair(finished, target, device)
    where = next(pair.run.parameters()).device
    count = min(examples, len(pair.material.dataset))

    def batches() -> Iterator[Mapping[str, Any]]:
        for start in range(0, count, batch_size):
            yield _batch(pair.material, range(start, min(start + batch_size, count)), where)
            report("comparing", min(start + batch_size, count), count)

    sites, sums = compare(pair.run, pair.target, batches())
    known = final_masks(finished.folder)
    result = {
        "version": VERSION,
        "run": str(run),
        "target": target,
        "probe": {"task": finished.run.settings.task, "examples": count, "tokens": sums[0].tokens, "seed": 0},
        "blocks": [_block(site) for site in sites],
        "mask_step": known and known.step,
        **measures(sums, known and [known.masks.get(site.name) for site in sites]),
    }
    write_json(finished.folder.path / FILE_NAME, result)
    return result


def compare(
    run: nn.Module, target: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> tuple[tuple[GateSite, ...], list[MismatchSums]]:
    """The FFN blocks of both models and the sums of each over the batches.

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
        for batch in batches:
            models.run(batch, visit)
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


def _block(site: GateSite) -> dict[str, Any]:
    lower, upper = site.thresholds or (None, None)
    known = {"name": site.name, "activation": site.activation.name, "width": site.width}
    return {**known, "lower": lower, "upper": upper, "gated": site.up is not None}


def _batch(material: Material, rows: Iterable[int], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in material.collator([material.dataset[i] for i in rows]).items()}
