"""Keep the finished runs of a store here, without weights and outputs: what a study needs to go on and to be repeated.

python results/collect.py STORE

`nalora study FILE --store results/store` then takes these runs as done. A run whose weights are not kept is trained
again only if something new is asked of it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

HERE = Path(__file__).parent / "store"
KEPT = ("run.yaml", "environment.json", "result.json", "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    store = parser.parse_args().store
    runs = sorted(file.parent for file in store.glob("*/result.json"))
    for run in runs:
        # Whole or not at all: what an earlier training of the same run came to is not this one's.
        shutil.rmtree(HERE / run.name, ignore_errors=True)
        summaries = [file for file in run.glob("evaluations/**/*.json") if file.is_file()]
        for file in [*(run / name for name in KEPT), *summaries]:
            place = HERE / run.name / file.relative_to(run)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        settings = HERE / run.name / "run.yaml"
        # Where it was made is nobody's business, and no run should be repeated there.
        lines = settings.read_text(encoding="utf-8").splitlines()
        lines = [f"output: runs/{run.name}" if line.startswith("output:") else line for line in lines]
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(runs)} finished runs of {store}; {len(list(HERE.iterdir()))} are kept")


if __name__ == "__main__":
    main()
