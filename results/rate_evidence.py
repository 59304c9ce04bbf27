"""What the stored runs say about the rule of `nalora suggest`: the file that comes with nalora.

python results/rate_evidence.py [STORE]

The grids are those of early_losses.py, on the two tasks that the rule was looked at on. Nothing is trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from findings_page.early_losses import TASKS, grids
from tables.stored_answers import FULL, compared_runs, study

from nalora.files import atomic
from nalora.studies.rate_evidence import FILE, RULE, Evidence, counts, to_json
from nalora.studies.rate_rules import Case
from nalora.studies.store import Store

RESULTS = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", default=RESULTS / "store", help="default: results/store")
    print(write(parser.parse_args().store))


def write(store: Path) -> Path:
    """Write the file from the runs of a store."""
    atomic.write(FILE, atomic.json_text(to_json(evidence(store)), indent=1) + "\n")
    return FILE


def evidence(store: Path) -> Evidence:
    """Return the counts of the rule by task, and the model and the steps of the runs."""
    by_task: dict[str, list[Case]] = {}
    for (task, _), cases in grids(store).items():
        by_task.setdefault(task, []).extend(cases)
    tasks = {task: counts(RULE, cases) for task, cases in by_task.items()}
    names = [name for studies in TASKS.values() for name in studies]
    (model,) = {study(name).settings["model"] for name in names}
    steps = {case.steps for cases in by_task.values() for case in cases}
    return Evidence(RULE, tasks, str(model), parameters(names, store), tuple(sorted(steps)))


def parameters(names: list[str], store: Path) -> int:
    """Return the number of the model's parameters, all of which full fine-tuning trains."""
    keys = {key for name in names for key in compared_runs(name, store).get(FULL, {}).values()}
    (number,) = {atomic.read_json(Store(store).folder(key).result)["trainable_parameters"] for key in keys}
    return int(number)


if __name__ == "__main__":
    main()
