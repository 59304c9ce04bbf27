"""Write all that is published of the kept runs: answers, docs/findings.md with its picture, and the studies' reports.

python results/publish.py

Nothing is trained or asked; runs that are missing are said to be missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import findings
import picture

from nalora.studies.answer import answer, write
from nalora.studies.conduct import so_far
from nalora.studies.page import write_page_of
from nalora.studies.study import read

ROOT = Path(__file__).resolve().parents[1]
# From the root, since a report names its runs by these paths in the commands that repeat them.
RESULTS = Path("results")
STORE = RESULTS / "store"


def main() -> None:
    os.chdir(ROOT)
    # The search for a gap has an answer, which the page of findings points to, and nothing else to show.
    print(keep_answer("gap"))
    for name, _ in findings.STUDIES:
        print(keep_answer(name))
        print(write_page_of(_file(name), STORE, RESULTS / f"{name}.html"))
    print(findings.write())
    print(picture.draw())


def keep_answer(name: str) -> Path:
    """Write what a study has come to beside its runs: NAME.md and NAME.json."""
    study = read(_file(name))
    progress = so_far(study, STORE)
    return write(study, answer(progress.schedule, progress.results, progress.failed), STORE)


def _file(name: str) -> Path:
    return Path("studies") / f"{name}.yaml"


if __name__ == "__main__":
    main()
