"""Write docs/methods.md and what `nalora methods` says of costs from rows.csv.

python benchmarks/methods_page.py
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness import ROWS
from page import Row, measured_on, median, settings

from nalora import methods

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "methods.md"
COSTS = ROOT / "src" / "nalora" / "methods" / "costs.json"
BASELINE = "lora"
HEAD = """# Methods

Made by `benchmarks/methods_page.py`; do not edit. All of the paper's tables behind one interface: `method: NAME` in a
run's file, or `nalora train RUN.yaml method=NAME`. Each leaves an adapter that loads on the stock base model in stock
PEFT. [A method of your own](extending.md) is one more file.

| method | what it is | reference |
|---|---|---|"""
NOTES = """
## What is done here, where papers, public code and libraries differ

- **LoRA** and all others keep A and B in float32, whatever the base is held in.
- **rsLoRA** is LoRA at s = α/√r: at r = 8, α = 16 that is 5.66 in place of 2. Tune its learning rate on its own.
- **DoRA** is PEFT's: the norm is detached, μ starts at ‖W₀‖.
- **PiSSA** starts with the leading singular values in the adapter and takes them off the base. The saved adapter is
  relative to the stock base: [B, −B₀]·[A; A₀], of rank 2r. `iterations=16` is the authors' fast decomposition; exact
  by default.
- **LoRA+** gives B 16 times the learning rate. PEFT's own also gives it to DoRA's μ; here μ stays with A.
- **AdaLoRA** is PEFT's, with `update_and_allocate` really called at every step and its averages kept in checkpoints.
  PEFT drops the orthogonality penalty where it was not told the task type, and its checkpoints cannot be loaded while
  ranks are pruned; neither happens here. The loss it logs includes the penalty. Saved as plain LoRA, E inside A.
- **LoRA-GA** is its reference's (singular vectors without singular values), which PEFT's `lora_ga` is not. The base
  moves, as with PiSSA; in bfloat16 it cannot move exactly. Tune its learning rate as for full fine-tuning.
- **LoRA-Pro** solves its Sylvester equation by two symmetric eigendecompositions, with a damping relative to the
  trace: an absolute one spoils the first steps, when B is near zero. `mode: efficient` keeps the run's optimizer;
  `mode: full`, with which its Llama numbers were published, keeps Adam's moments on the m × n gradient and wants a
  learning rate for W.
- **GoRA** shares the budget by mean|W ⊙ Ḡ| without the √(m+n) weighting that the public code can switch on, and trains
  with LoRA+. The start has the minus sign that a public version lost. It says how much of the budget it used.
- **NA-LoRA** controls the steps of any of them but full, AdaLoRA and LoRA-Pro: `method: na-lora, on: pissa`. By default
  in gradient space, as the paper writes it; `apply_to: update` is what its analysis is about.
  Its settings are the fields of `NALoRAConfig`, or the argument names of the paper's code; see [runs](runs.md).
- **Block LoRA** (`block-lora`): GraLoRA's function as one ordinary adapter of rank k·r with zeros. `blocks: 2` is k,
  which must divide the rank and the sizes of the layers; `ratio: 4` trains B at four times A's rate (default 1).
- **PEFT's tuners** (`peft/gralora`, `peft/loha`, …): PEFT's configuration fields are the settings; see
  [extending](extending.md).
- **The controls**: `na-lora-off` (observed, nothing multiplied), `na-lora-random` (the mask's values on channels drawn
  once), `na-lora-frozen` (the first mask), `na-lora-mean` (mask divided by its mean), `na-lora-utility` (ranked by
  E|φ′(z)|·|u|), `lora-scaled` (LoRA at NA-LoRA's mean factors, read from a run by `like:`). `like:` takes the
  factors that were applied: 1 for a control that was switched off, for step scaling of GELU under `regimes: paper`, and
  for the mask where its mean was preserved."""


def main() -> None:
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["question"] == "methods"]
    lines = [HEAD]
    for name in methods.names():
        method = methods.get(name)
        title = method.title.replace("|", "\\|")
        lines.append(f"| `{name}` | {title} | {method.reference} |")
    lines += costs(rows)
    PAGE.write_text("\n".join([*lines, NOTES]) + "\n")
    COSTS.write_text(json.dumps(listed(rows), indent=2) + "\n")


class Cost(NamedTuple):
    """One method in one run, and LoRA in the same run."""

    step: Row
    start: Row
    passes: int
    lora: Row

    @property
    def fits(self) -> bool:
        return self.step["samples"] != "0"

    @property
    def time(self) -> float:
        return median(self.step) / median(self.lora)

    @property
    def memory(self) -> float:
        return float(self.step["peak_gib"]) / float(self.lora["peak_gib"])


def latest(rows: list[Row], setting: str) -> dict[str, Cost]:
    """The last measurement of every method."""
    found: dict[str, Cost] = {}
    of_setting = [row for row in rows if row["setting"] == setting]
    lora = None
    for i, row in enumerate(of_setting):
        if row["unit"] == "ms":
            lora = row if row["variant"] == BASELINE else lora
            start, passes = of_setting[i + 1 : i + 3] if row["samples"] != "0" else (row, None)
            assert lora is not None
            found[row["variant"]] = Cost(row, start, int(median(passes)) if passes else 0, lora)
    return found


def costs(rows: list[Row]) -> Iterator[str]:
    yield """
## What each costs

`python benchmarks/methods_cost.py`: each method with the run's own Trainer on a model of its own, r = 8 on all linear
layers, bf16 base, one batch for all. A row is of the method's last run, and its ratios are to LoRA's step and peak in
that same run, which may be an earlier one than that of LoRA's row and of the commit named. In the last run LoRA comes
first and last, and what lies between those two is the machine. An eager step of the small model waits for Python,
whose speed varied by a third over the run: there only AdaLoRA and DoRA stand out, and full fine-tuning, which has
fewer launches."""
    for setting in settings(rows, "methods"):
        found = latest(rows, setting)
        yield f"\n### {setting}\n\n{measured_on(found[BASELINE].step)}\n"
        yield "| method | step, ms | × LoRA | peak GiB | × LoRA | start, s | its peak GiB | gradient passes |"
        yield "|---|---|---|---|---|---|---|---|"
        for name, cost in found.items():
            if not cost.fits:
                yield f"| {name} | did not fit | | | | | | |"
                continue
            step = f"{median(cost.step):.1f} | {cost.time:.3f}"
            memory = f"{float(cost.step['peak_gib']):.2f} | {cost.memory:.3f}"
            start = f"{median(cost.start):.1f} | {float(cost.start['peak_gib']):.1f} | {cost.passes}"
            yield f"| {name} | {step} | {memory} | {start} |"


def listed(rows: list[Row]) -> dict[str, dict[str, float]]:
    """For `nalora methods`: at 8B shapes, as ratios to LoRA."""
    setting = next(each for each in settings(rows, "methods") if "8b" in each)
    return {
        name: {"step": round(cost.time, 3), "memory": round(cost.memory, 3), "start_s": round(median(cost.start), 1)}
        for name, cost in latest(rows, setting).items()
        if name in methods.names() and cost.fits
    }


if __name__ == "__main__":
    main()
