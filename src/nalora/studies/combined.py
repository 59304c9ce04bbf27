"""Combined tables of a study, or of several: tasks and models side by side as in the paper, with averages over tasks.

A study has a table for every combination of its settings. Here each combination of model and task is a column, and the
other settings, such as the rank, are part of the rows' names. A study that varies neither model nor task has a column
for each value of its last setting.

Marks are those of the study's own test, which compares the rows of one combination. A column that contains several
combinations has no marks. Averages are not tested, so they have none either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from nalora import tasks
from nalora.evaluation.significance import Comparison
from nalora.files import outputs
from nalora.report.run_tables import write_files
from nalora.report.study_answer import AnswerPart, StudyAnswer
from nalora.report.tables import TEST, Cell, Column, Table
from nalora.studies.questions import is_loss
from nalora.studies.study import Study

_COLUMN_SETTINGS = ("model", "task")


class Answered(NamedTuple):
    """A study and its answer."""

    study: Study
    answer: StudyAnswer


class Place(NamedTuple):
    """A column: the model, the task, and for studies that vary neither the value of another setting."""

    model: str
    task: str
    other: str = ""


@dataclass
class IntervalCell(Cell):
    """A difference with its interval, as text."""

    shown: str = "–"

    def text(self, decimals: int, seeds: int | None) -> str:
        """Return the difference."""
        return self.shown


@dataclass
class _Grid:
    """The cells of one kind of measure by row and column."""

    columns: dict[Place, Column] = field(default_factory=dict)
    rows: dict[str, dict[Place, Cell]] = field(default_factory=dict)
    parts: dict[Place, int] = field(default_factory=dict)  # how many combinations a column contains
    incomplete: set[tuple[str, Place]] = field(default_factory=set)
    differences: dict[str, dict[Place, Comparison]] = field(default_factory=dict)


def combined_tables(answered: Sequence[Answered]) -> dict[str, Table]:
    """Return the tables that the results suffice for, by title: test answers, test loss, and differences of each."""
    names = ", ".join(dict.fromkeys(study.name for study, _ in answered))
    baselines = {answer.baseline for _, answer in answered}
    tables: dict[str, Table] = {}
    for title, wanted in (("Test answers", lambda name: not is_loss(name)), ("Test loss", is_loss)):
        grid = _grid(answered, wanted)
        if not grid.columns:
            continue
        tables[title] = _results(grid, f"{title} of {names}.")
        if grid.differences and len(baselines) == 1:
            tables[f"{title}: differences from {min(baselines)}"] = _differences(grid, min(baselines), names)
    return tables


def _grid(answered: Sequence[Answered], wanted: Callable[[str], bool]) -> _Grid:
    """Collect the first measure of every combination that is wanted: a task's main measure comes first."""
    grid = _Grid()
    for study, answer in answered:
        for part in answer.parts:
            index = next((i for i, column in enumerate(part.table.columns) if wanted(column.measure)), None)
            if index is None:
                continue
            place, row_settings = _place(study, part)
            column = part.table.columns[index]
            grid.columns.setdefault(place, column)
            grid.parts[place] = grid.parts.get(place, 0) + 1
            labels = {}
            for arm, cells in part.table.rows.items():
                label = labels[arm] = _label(grid, ", ".join([arm, *row_settings]), place, cells[index], study.name)
                grid.rows.setdefault(label, {})[place] = replace(cells[index], values=dict(cells[index].values))
                if arm in part.missing:
                    grid.incomplete.add((label, place))
            for comparison in part.comparisons.get(column.measure, ()):
                grid.differences.setdefault(labels[comparison.method], {})[place] = comparison
    return grid


def _place(study: Study, part: AnswerPart) -> tuple[Place, list[str]]:
    """Return the column of a combination, and the settings that its rows are named by."""
    settings: Mapping[str, Any] = {**study.settings, **study.settings_of(part.settings)}
    in_columns = [name for name in part.settings if name in _COLUMN_SETTINGS] or [*part.settings][-1:]
    other = ", ".join(f"{name} {part.settings[name]}" for name in in_columns if name not in _COLUMN_SETTINGS)
    rows = [f"{name} {value}" for name, value in part.settings.items() if name not in in_columns]
    return Place(str(settings["model"]), tasks.name_of(settings["task"]), other), rows


def _label(grid: _Grid, label: str, place: Place, cell: Cell, study: str) -> str:
    """Return the row's label; with the study's name if another study has other values there."""
    known = grid.rows.get(label, {}).get(place)
    return label if known is None or known.values == cell.values else f"{label} ({study})"


def _ordered(grid: _Grid) -> dict[str, list[Place]]:
    """Return the columns of every model, in order of first appearance."""
    models: dict[str, list[Place]] = {}
    for place in grid.columns:
        models.setdefault(place.model, []).append(place)
    return models


def _column(grid: _Grid, place: Place, several_models: bool) -> Column:
    column, varied = grid.columns[place], {other.task for other in grid.columns}
    name = place.other if place.other and len(varied) == 1 else ", ".join(filter(None, [place.task, place.other]))
    percent = " %" if column.scale == 100 else ""
    return replace(column, title=name + percent, group=_short(place.model) if several_models else "")


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _results(grid: _Grid, title: str) -> Table:
    models = _ordered(grid)
    columns: list[Column] = []
    rows: dict[str, list[Cell]] = {label: [] for label in grid.rows}
    for model, places in models.items():
        columns += [_column(grid, place, len(models) > 1) for place in places]
        for label, cells in grid.rows.items():
            rows[label] += [_unmarked(cells.get(place, Cell()), grid.parts[place] > 1) for place in places]
        if _has_average(grid, places):
            group = _short(model) if len(models) > 1 else ""
            columns.append(replace(grid.columns[places[0]], measure="average", title="Average %", group=group))
            for label in rows:
                rows[label].append(_average(grid, label, places))
    shown = [cell for row in rows.values() for cell in row]
    counts = {len(cell.values) for cell in shown if cell.values}
    seeds = counts.pop() if len(counts) == 1 else None
    return Table(columns, rows, " ".join([title, *_caption(grid, columns, shown, seeds)]), seeds, ())


def _unmarked(cell: Cell, without_mark: bool) -> Cell:
    return replace(cell, mark="") if without_mark else cell


def _has_average(grid: _Grid, places: Sequence[Place]) -> bool:
    """Whether an average makes sense: several tasks, all of them shares in which higher is better."""
    columns = [grid.columns[place] for place in places]
    is_share = all(column.scale == 100 and not column.lower_is_better for column in columns)
    return is_share and len({place.task for place in places}) == len(places) > 1


def _average(grid: _Grid, label: str, places: Sequence[Place]) -> Cell:
    """Return the mean over the tasks for every seed; empty unless all its cells are complete and finite."""
    cells = [grid.rows[label].get(place, Cell()) for place in places]
    seeds = {frozenset(cell.values) for cell in cells}
    incomplete = any((label, place) in grid.incomplete for place in places)
    if incomplete or len(seeds) > 1 or not all(cell.values and math.isfinite(cell.mean) for cell in cells):
        return Cell()
    return Cell({seed: sum(cell.values[seed] for cell in cells) / len(cells) for seed in cells[0].values})


def _caption(grid: _Grid, columns: Sequence[Column], cells: Sequence[Cell], seeds: int | None) -> list[str]:
    measures = {place.task: column.measure for place, column in grid.columns.items()}
    sentences = ["; ".join(f"{task}: {measure}" for task, measure in measures.items()) + "."]
    sentences.append("One seed." if seeds == 1 else f"Mean ± standard deviation over seeds ({_count(seeds)}).")
    if grid.incomplete:
        sentences.append("A row whose runs are not complete is shown with the number of its seeds and is not compared.")
    if any(number > 1 for number in grid.parts.values()):
        sentences.append("Columns that combine several comparisons have no marks: their rows were not tested together.")
    if any(cell.mark for cell in cells):
        second = ", underlined: than every row behind it" if any(cell.mark == "second" for cell in cells) else ""
        sentences.append(f"Bold: significantly better than every other row{second} {TEST}, each column on its own.")
    else:
        sentences.append("Nothing is marked: no row is significantly better than every other row of its comparison.")
    if any(column.measure == "average" for column in columns):
        sentences.append(
            "Average: the mean over the tasks seed by seed, only where all of them are complete; it is not tested."
        )
    return sentences


def _count(seeds: int | None) -> str:
    return "n as stated" if seeds is None else f"n = {seeds}"


def _differences(grid: _Grid, baseline: str, names: str) -> Table:
    models = _ordered(grid)
    places = [place for of_model in models.values() for place in of_model]
    columns = [_column(grid, place, len(models) > 1) for place in places]
    rows = {
        label: [
            _difference(cells[place], column) if place in cells else IntervalCell()
            for place, column in zip(places, columns, strict=True)
        ]
        for label, cells in grid.differences.items()
    }
    caption = (
        f"Differences from {baseline} in {names}: mean over shared seeds and its 95 % interval, which is not corrected"
        f" for the number of comparisons. Bold: better by the study's own test {TEST}; (worse): worse by that test."
    )
    return Table(columns, rows, caption, None, ())


def _difference(comparison: Comparison, column: Column) -> IntervalCell:
    decimals, scale = (2 if column.scale == 100 else 4), column.scale
    text = f"{scale * comparison.difference:+.{decimals}f}"
    if comparison.interval is not None:
        low, high = (f"{scale * end:+.{decimals}f}" for end in comparison.interval)
        text += f" [{low}, {high}]"
    text += f" (n = {comparison.seeds})" + (" (worse)" if comparison.verdict == "worse" else "")
    return IntervalCell(mark="best" if comparison.verdict == "better" else "", shown=text)


def files_of(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the paths of a study's combined tables: Markdown and LaTeX."""
    return folder / f"{name}.tables.md", folder / f"{name}.tables.tex"


def refuse_foreign_files(name: str, folder: Path) -> None:
    """Raise NALoRAError if the files of a study's combined tables exist and were not written by nalora."""
    outputs.refuse_foreign_files(files_of(name, folder), outputs.is_text, option="--store", kind="a table")


def write(answered: Answered, folder: Path) -> tuple[Path, Path] | None:
    """Write the combined tables of a study with several combinations; None if there is nothing to combine."""
    tables = combined_tables([answered]) if len(answered.answer.parts) > 1 else {}
    if not tables:
        return None
    refuse_foreign_files(answered.study.name, folder)
    files = files_of(answered.study.name, folder)
    write_files(tables, *files)
    return files
