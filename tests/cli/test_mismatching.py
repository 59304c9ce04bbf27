"""The table of `nalora diagnose RUN --against TARGET`."""

from __future__ import annotations

import io

import tiny
from rich.console import Console

from nalora.cli.mismatching import print_mismatch
from nalora.diagnostics.mismatch import compare
from nalora.diagnostics.mismatch_measures import measures


def printed(run, target, masks=None) -> str:
    sites, sums = compare(run, target, [{"input_ids": tiny.tokens()}])
    if masks == "energy":
        masks = [each.channel_energy for each in sums]
    elif masks == "away":
        masks = [-each.channel_energy for each in sums]
    screen = Console(record=True, width=160, file=io.StringIO())
    blocks = [{"name": site.name, "gated": site.up is not None} for site in sites]
    about = {"run": "runs/a", "target": "runs/b", "probe": {"tokens": 48}, "blocks": blocks}
    print_mismatch(screen, {**about, **measures(sums, masks)})
    return screen.export_text()


def test_a_row_for_each_block_and_a_verdict():
    text = printed(tiny.llama(), tiny.llama(lora_b=0.1), "energy")
    assert "runs/a against runs/b: 48 tokens" in text
    assert "model.layers.0.mlp" in text
    assert "model.layers.1.mlp" in text
    assert "ρ mask" in text
    assert "+1.00" in text
    assert "The mask puts its weight where the mismatch is: rank correlation +1.00 over 2 blocks" in text
    assert "weight away from the mismatch" in printed(tiny.llama(), tiny.llama(lora_b=0.1), "away")


def test_without_a_mask_the_sensitivity_is_asked():
    text = printed(tiny.llama(), tiny.llama(lora_b=0.1))
    assert "ρ mask" not in text
    assert "The sensitivity E|φ′(z)|, which would be the mask," in text


def test_nothing_differs():
    text = printed(tiny.llama(), tiny.llama())
    assert "there is no mismatch to point at" in text
    assert "nan" not in text
