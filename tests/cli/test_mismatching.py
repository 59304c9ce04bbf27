"""The table of `nalora diagnose RUN --against TARGET`."""

from __future__ import annotations

import io

import tiny
from rich.console import Console

from nalora.cli.diagnosing import print_mismatch
from nalora.diagnostics.mismatch import compare
from nalora.diagnostics.mismatch_measures import measures
from nalora.runs.settings import check
from nalora.training.run import train


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


def test_without_a_mask_the_sensitivity_is_evaluated():
    text = printed(tiny.llama(), tiny.llama(lora_b=0.1))
    assert "ρ mask" not in text
    assert "The sensitivity E|φ′(z)|, which would be the mask," in text


def test_nothing_differs():
    text = printed(tiny.llama(), tiny.llama())
    assert "there is no mismatch" in text
    assert "nan" not in text


def test_as_a_user_types_it(run, tmp_path):
    train(check({
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 12, "test_size": 4,
        "output": str(tmp_path / "run"), "steps": 2, "batch_size": 4, "device": "cpu", "learning_rate": 1e-2,
    }))  # fmt: skip

    def type_in(target):
        return run("diagnose", tmp_path / "run", "--against", target, "--probe-size", 8)

    code, out, err = type_in(tmp_path / "base")
    assert code == 0, err
    assert "model.layers.1.mlp" in out
    assert "mismatch.json" in out
    assert "rank correlation" in out
    code, _, err = type_in(tmp_path / "nothing")
    assert code == 2
    assert err.startswith("nalora: ")
    assert "nothing: found no such folder" in err
    assert err.count("\n") == 1
