"""Keep the finished runs of a store here, without weights and outputs: what a study needs to go on and to be repeated.

python results/collect.py STORE

`nalora study FILE --store results/store` then takes these runs as done. A run whose weights are not kept is trained
again only if something new is asked of it; the later training is kept, and what the earlier one came to is a line of
repeats.jsonl: the same settings and the same seed, so that its distance is noise.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent / "store"
REPEATS = "repeats.jsonl"
KEPT = ("run.yaml", "environment.json", "result.json", "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    store = parser.parse_args().store
    runs = sorted(file.parent for file in store.glob("*/result.json"))
    for run in runs:
        _remember(HERE / run.name, run)
        _keep(run)
    kept = len(list(HERE.glob("*/result.json")))
    print(f"{len(runs)} finished runs of {store}; {kept} are kept")


def losses(run: Path) -> dict[str, float]:
    """What a training came to, by what it was asked: validation and test."""
    place = run / "evaluations"
    found = {
        str(file.parents[1].relative_to(place)): json.loads(file.read_text()) for file in place.rglob("losses.json")
    }
    return {asked: each["target_loss"]["value"] for asked, each in sorted(found.items())}


def _remember(kept: Path, run: Path) -> None:
    """Write down the losses of a training that another one of the same run replaces."""
    earlier, later = (folder / "metrics.jsonl" for folder in (kept, run))
    if earlier.is_file() and earlier.read_bytes() != later.read_bytes() and losses(kept):
        with (HERE.parent / REPEATS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run.name, "losses": losses(kept)}) + "\n")


def _keep(run: Path) -> None:
    """Whole or not at all: what an earlier training of the same run came to is not this one's."""
    shutil.rmtree(HERE / run.name, ignore_errors=True)
    summaries = [file for file in run.glob("evaluations/**/*.json") if file.is_file()]
    for file in [*(run / name for name in KEPT), *summaries]:
        place = HERE / run.name / file.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    # Where it was made is nobody's business, and no run should be repeated there.
    _say_instead(HERE / run.name / "run.yaml", r"^output:.*$", f"output: runs/{run.name}")
    _say_instead(HERE / run.name / "environment.json", r",?\s*\"working_directory\": \"[^\"]*\"", "")
    _say_instead(HERE / run.name / "environment.json", r"--store[ =][^ \"]+", "--store results/store")


def _say_instead(file: Path, place: str, words: str) -> None:
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(place, words, text, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main()
