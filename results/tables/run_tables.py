"""Finished runs as three tables per study, in results/STUDY/; restore.py and collect.py convert from and to a store.

runs.csv         one row per run: its settings, `environment.*` (versions, hardware) and `result.*`
evaluations.csv  one row per evaluation: `losses.*` and, where answers were generated, `summary.*`
curves.csv.xz    one row per logged training step

The column `run` is the run's key in all three. A cell holds JSON, or a text that is not JSON; an empty cell means that
the run has no such entry (`null` is an entry). Rows are sorted by run, so that a new run adds lines and moves none.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nalora.files.atomic import json_text
from nalora.runs.folder import read_jsonl
from nalora.runs.marker import MARKER

RUNS, EVALUATIONS, CURVES = "runs.csv", "evaluations.csv", "curves.csv.xz"
# The files of a run's folder that become columns `environment.*` and `result.*`. The result is written last: a run
# without one is not finished.
DOCUMENTS = ("environment", "result")
# A mapping is split into columns only where its keys can be parts of a column's name.
_NAME = re.compile(r"[\w+-]+")
# Seven times as fast, where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Row = dict[str, str]


class Run(NamedTuple):
    """The content of a run's folder, without weights and generated texts."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    evaluations: dict[str, dict[str, Any]]  # by folder below `evaluations`: the content of its files by name
    metrics: list[dict[str, Any]]

    @property
    def study(self) -> str:
        """The study that trained it, by the recorded command."""
        command = re.search(r"\bstudy ([^-\s]\S*)", self.environment.get("command", ""))
        return Path(command[1]).stem if command else "other"

    def losses(self) -> dict[str, float]:
        """Validation and test loss by the name of the evaluation."""
        values = {
            folder.rpartition("/")[0]: files["losses"]["target_loss"]["value"]
            for folder, files in self.evaluations.items()
            if "losses" in files
        }
        return dict(sorted(values.items()))


def read_run(folder: Path) -> Run:
    """A run from its folder in a store."""
    place = folder / "evaluations"
    evaluations: dict[str, dict[str, Any]] = {}
    for file in sorted(place.rglob("*.json")):
        files = evaluations.setdefault(file.parent.relative_to(place).as_posix(), {})
        files["marker" if file.name == MARKER else file.stem] = json.loads(file.read_text(encoding="utf-8"))
    settings = yaml.load((folder / "run.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
    documents = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in DOCUMENTS}
    return Run(settings, **documents, evaluations=evaluations, metrics=read_jsonl(folder / "metrics.jsonl"))


def write_run(run: Run, folder: Path) -> None:
    """Write a run's folder into a store."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(
        yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    (folder / "metrics.jsonl").write_text("".join(json_text(row) + "\n" for row in run.metrics), encoding="utf-8")
    for place, files in run.evaluations.items():
        (folder / "evaluations" / place).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            file = MARKER if name == "marker" else f"{name}.json"
            _write_json(folder / "evaluations" / place / file, content, indent=None if name == "marker" else 2)
    for name in DOCUMENTS:
        _write_json(folder / f"{name}.json", getattr(run, name))


def _write_json(file: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    file.write_text(json_text(content, indent=indent) + "\n", encoding="utf-8")


def read_tables(results: Path) -> dict[str, Run]:
    """All runs of all studies, by key."""
    return {key: run for file in sorted(results.glob(f"*/{RUNS}")) for key, run in _read_study(file.parent)}


def _read_study(folder: Path) -> Iterator[tuple[str, Run]]:
    evaluations, curves = (_by_run(_read_rows(folder / name)) for name in (EVALUATIONS, CURVES))
    for row in _read_rows(folder / RUNS):
        key = row.pop("run")
        documents = _nested({column: cell for column, cell in row.items() if column.partition(".")[0] in DOCUMENTS})
        settings = {column: _value(cell) for column, cell in row.items() if column.partition(".")[0] not in DOCUMENTS}
        yield (
            key,
            Run(
                settings,
                **documents,
                evaluations=dict(_evaluation(files) for files in evaluations.get(key, [])),
                metrics=[{name: _value(cell) for name, cell in step.items()} for step in curves.get(key, [])],
            ),
        )


def _evaluation(row: Row) -> tuple[str, dict[str, Any]]:
    folder = Path(row.pop("evaluation", ""), row.pop("folder")).as_posix()
    return folder, _nested(row)


def write_tables(runs: Mapping[str, Run], results: Path) -> list[Path]:
    """Write the tables of all studies; the files that changed."""
    studies: dict[str, dict[str, Run]] = {file.parent.name: {} for file in results.glob(f"*/{RUNS}")}
    for key, run in sorted(runs.items()):
        studies.setdefault(run.study, {})[key] = run
    tables = {
        results / study / name: rows(members)
        for study, members in sorted(studies.items())
        for name, rows in ((RUNS, _run_rows), (EVALUATIONS, _evaluation_rows), (CURVES, _curve_rows))
    }
    return [file for file, rows in tables.items() if _write_rows(file, list(rows))]


def _run_rows(runs: Mapping[str, Run]) -> Iterator[Row]:
    for key, run in runs.items():
        settings = {name: _cell(value) for name, value in run.settings.items()}
        yield {"run": key, **settings, **dict(_flat({name: getattr(run, name) for name in DOCUMENTS}))}


def _evaluation_rows(runs: Mapping[str, Run]) -> Iterator[Row]:
    for key, run in runs.items():
        for place, files in sorted(run.evaluations.items()):
            evaluation, _, folder = place.rpartition("/")
            yield {"run": key, "evaluation": evaluation, "folder": folder, **dict(_flat(dict(sorted(files.items()))))}


def _curve_rows(runs: Mapping[str, Run]) -> Iterator[Row]:
    for key, run in runs.items():
        for step in run.metrics:
            yield {"run": key, **{name: _cell(value) for name, value in step.items()}}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The cells of nested mappings, by column: the keys joined by points."""
    for name, value in content.items():
        if isinstance(value, dict) and value and all(_NAME.fullmatch(key) for key in value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _cell(value)


def _nested(row: Mapping[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for column, cell in row.items():
        *path, name = column.split(".")
        place = content
        for key in path:
            place = place.setdefault(key, {})
        place[name] = _value(cell)
    return content


def _cell(value: Any) -> str:
    if isinstance(value, str) and value and _value(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _by_run(rows: Iterable[Row]) -> dict[str, list[Row]]:
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.pop("run"), []).append(row)
    return runs


def _read_rows(file: Path) -> list[Row]:
    rows = csv.DictReader(io.StringIO(_read_text(file), newline=""))
    return [{column: cell for column, cell in row.items() if cell} for row in rows]


def _read_text(file: Path) -> str:
    content = file.read_bytes()
    return (lzma.decompress(content) if file.suffix == ".xz" else content).decode()


def _write_rows(file: Path, rows: list[Row]) -> bool:
    """Write a table; False where it has this content already, whichever version of xz compressed it."""
    columns = dict.fromkeys(["run", *(column for row in rows for column in row)])
    groups = list(dict.fromkeys(_group(column) for column in columns))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, sorted(columns, key=lambda name: groups.index(_group(name))), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    if file.is_file() and _read_text(file) == text.getvalue():
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    content = text.getvalue().encode()
    file.write_bytes(lzma.compress(content, preset=9) if file.suffix == ".xz" else content)
    return True


def _group(column: str) -> str:
    """The file that a column is from; columns of the same file are next to each other."""
    file, dot, _ = column.partition(".")
    return file if dot else ""
