"""LoRA at a run's mean factors takes those that acted, from runs of any version."""

from __future__ import annotations

import json

import pytest
import yaml

import nalora
from nalora import methods
from nalora.methods.lora_scaled import mean_applied_factors

SCALES = ("scale_gate", "scale_up", "scale_down")
FOLLOWED = {"scale_gate": 1.3, "scale_up": 1.2, "scale_down": 1.1, "mask_mean": 0.4}
SILU, GELU = [-1.2785, 1.2785], [-0.7518, 0.8399]


def run_of_0_1(folder, activations=("silu", "silu"), thresholds=(SILU, SILU), gates=True, **settings):
    """A run's folder as 0.1 wrote it: the followed values under the names of what is applied."""
    folder.mkdir(exist_ok=True)
    told = {"model": "m", "task": "t", "method": "na-lora", "mask": True, "scaling": True, "preserve_mean": False,
            "regimes": "paper", "target_modules": "all-linear"} | settings  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(told))
    rows = [
        {"step": step, "learning_rate": 1e-3} | {f"nalora/{name}": value for name, value in FOLLOWED.items()}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if gates:
        blocks = [f"model.layers.{i}.mlp" for i in range(len(activations))]
        lines = [{"blocks": blocks, "activations": list(activations), "thresholds": list(thresholds)}]
        lines += [{"step": step} | {n: [v] * len(blocks) for n, v in FOLLOWED.items()} for step in (1, 2, 3)]
        (folder / "gates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, FOLLOWED),
        ({"scaling": False}, dict.fromkeys(SCALES, 1.0)),
        ({"mask": False}, {"mask_mean": 1.0}),
        ({"preserve_mean": True, "method": "na-lora-mean"}, {"mask_mean": 1.0}),
        ({"activations": ("gelu", "gelu"), "thresholds": (GELU, GELU)}, dict.fromkeys(SCALES, 1.0)),
        ({"activations": ("gelu", "gelu"), "thresholds": (GELU, GELU), "regimes": "derived"}, FOLLOWED),
        ({"activations": ("relu",), "thresholds": (None,), "regimes": "derived"}, dict.fromkeys(SCALES, 1.0)),
        ({"target_modules": ["gate_proj", "down_proj"]}, {"scale_up": 1.0}),
        # One block of two is scaled: half of the steps are multiplied by 1.
        ({"activations": ("silu", "gelu"), "thresholds": (SILU, GELU)},
         {"scale_gate": 1.15, "scale_up": 1.1, "scale_down": 1.05}),
    ],
)  # fmt: skip
def test_an_older_run_gives_what_acted(tmp_path, changes, expected):
    factors = mean_applied_factors(run_of_0_1(tmp_path, **changes))
    assert factors == pytest.approx(FOLLOWED | expected)


def test_an_older_run_that_has_no_record_is_refused(tmp_path):
    with pytest.raises(nalora.NALoRAError, match="which controls acted"):
        mean_applied_factors(run_of_0_1(tmp_path, gates=False))


def test_a_run_in_which_nothing_acted_is_refused(tmp_path):
    run = run_of_0_1(tmp_path, mask=False, scaling=False, method="na-lora-off")
    with pytest.raises(nalora.NALoRAError, match="use method=lora"):
        methods.get("lora-scaled")(like=str(run)).factors()
