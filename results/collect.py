"""Add the finished runs of a store to the tables in results/STUDY/, without weights and generated texts.

python results/collect.py STORE

restore.py writes them back into a store. A run that was trained again replaces the earlier training, whose losses
become a line of repeats.jsonl: settings and seed are the same, so the difference between the two is noise.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tables.run_tables import Run, read_run, read_tables, write_tables

RESULTS = Path(__file__).parent
REPEATS = "repeats.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", default=RESULTS / "store", help="default: results/store")
    store = parser.parse_args().store
    changed = collect(store, RESULTS)
    print(f"{len(list(store.glob('*/result.json')))} finished runs in {store}; changed tables: {len(changed)}")
    for file in changed:
        print(file)


def collect(store: Path, results: Path) -> list[Path]:
    """Add the finished runs of a store to the tables below `results`; the files that changed."""
    runs = read_tables(results)
    for folder in sorted(file.parent for file in store.glob("*/result.json")):
        run = _without_places(folder.name, read_run(folder))
        _remember(results, folder.name, runs.get(folder.name), run)
        # The whole run: the evaluations of an earlier training do not belong to this one.
        runs[folder.name] = run
    return write_tables(runs, results)


def _without_places(key: str, run: Run) -> Run:
    """The run without the paths of the machine that trained it, where nobody can repeat it."""
    environment = {name: value for name, value in run.environment.items() if name != "working_directory"}
    if "command" in environment:
        environment["command"] = re.sub(r"--store[ =]\S+", "--store results/store", environment["command"])
    return run._replace(settings=run.settings | {"output": f"runs/{key}"}, environment=environment)


def _remember(results: Path, key: str, earlier: Run | None, run: Run) -> None:
    """Keep the losses of a training that another one of the same run replaces."""
    if earlier and earlier.metrics != run.metrics and earlier.losses():
        with (results / REPEATS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": key, "losses": earlier.losses()}) + "\n")


if __name__ == "__main__":
    main()
