"""Write what follows from the kept runs: answers, docs/findings.md, docs/choosing.md, the evidence of `suggest`.

python results/publish.py

Nothing is trained or evaluated; missing runs are reported as missing. A study's report is not kept:
`nalora report STUDY --store results/store` writes it after restore.py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import rate_evidence
from choosing_page import choosing
from findings_page import findings, picture
from restore import RESULTS, restore
from tables.run_tables import RUNS

from nalora.studies.answer import answer, write
from nalora.studies.conduct import so_far
from nalora.studies.study import read

STUDIES = RESULTS.parent / "studies"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        restore(RESULTS, store)
        for name in sorted(table.parent.name for table in RESULTS.glob(f"*/{RUNS}")):
            if (STUDIES / f"{name}.yaml").is_file():
                print(keep_answer(name, store))
        print(findings.write(store))
        print(choosing.write(store))
        print(rate_evidence.write(store))
    print(picture.draw())


def keep_answer(name: str, store: Path) -> Path:
    """Write the answer of a study, as a page and as numbers; the page."""
    study = read(STUDIES / f"{name}.yaml")
    progress = so_far(study, store)
    page = write(answer(progress.schedule, progress.results, progress.failed), store)
    for file in (page.with_suffix(".json"), page):
        target = RESULTS / name / f"answer{file.suffix}"
        shutil.copyfile(file, target)
    return target


if __name__ == "__main__":
    main()
