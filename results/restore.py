"""Write the runs in the tables of results/STUDY/ into a store, from which `nalora study FILE --store STORE` continues.

python results/restore.py [STORE]

Runs that are in the store already are left as they are. Weights are not kept: a run is trained again only if a study
needs an evaluation that it does not have.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tables.run_tables import read_tables, write_run

from nalora.studies.store import Store

RESULTS = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?", default=RESULTS / "store", help="default: results/store")
    store = parser.parse_args().store
    print(f"{restore(RESULTS, store)} runs written to {store}")


def restore(results: Path, store: Path) -> int:
    """Write all runs below `results` that a store lacks, and the studies' answers; the number of runs written.

    Raises:
        NALoRAError: the folder holds files that nalora did not write.
    """
    Store(store).claim()
    missing = {key: run for key, run in read_tables(results).items() if not (store / key / "result.json").is_file()}
    for key, run in missing.items():
        write_run(run, store / key)
    for answer in results.glob("*/answer.*"):
        if not (target := store / f"{answer.parent.name}{answer.suffix}").is_file():
            shutil.copyfile(answer, target)
    return len(missing)


if __name__ == "__main__":
    main()
