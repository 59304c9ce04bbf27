"""Tables of results as Markdown and LaTeX: mean ± standard deviation over seeds, marks only where they are earned.

As in the paper the best is bold and the second best underlined. Unlike there, the best is marked only if it is
significantly better than every other row (`evaluation.significance`), the second only if it is so against every row
behind it. Two equal methods get a wrong mark in 5 % of the tables, more of them less often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from nalora.errors import NALoRAError
from nalora.evaluation.significance import FEWEST_SEEDS, compare_methods
from nalora.report.naming import brief, tidy

_SCHEME = re.compile(r"\b(https?|ftp|mailto|xmpp):", re.IGNORECASE)
_WWW = re.compile(r"\b(www)\.", re.IGNORECASE)
_LOWER_IS_BETTER = ("loss", "nll", "perplexity", "seconds", "memory", "gib", "error")
Mark = Literal["best", "second", ""]


def lower_is_better(measure: str) -> bool:
    """Whether less of it is better, by its name."""
    return any(word in measure.lower() for word in _LOWER_IS_BETTER)


class Record(NamedTuple):
    """What one run came to: which row it belongs to, its seed, and its measures by name."""

    label: str
    seed: int
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """One measure.

    Attributes:
        measure: its name in the records.
        title: what the head says; the name where empty.
        lower: whether lower is better; None tells by the name (loss, perplexity, seconds, memory, …).
        scale: what values are multiplied by, 100 for a share in percent.
        ranked: False for what is neither good nor bad: no arrow, no marks.
        decimals: None gives the largest mean four digits, and no value more than four decimals.
    """

    measure: str
    title: str = ""
    lower: bool | None = None
    scale: float = 1.0
    ranked: bool = True
    decimals: int | None = None

    @property
    def lower_is_better(self) -> bool:
        """As said, or by the name."""
        return lower_is_better(self.measure) if self.lower is None else self.lower

    @property
    def head(self) -> str:
        """The title with the direction that is better."""
        arrow = ("↓" if self.lower_is_better else "↑") if self.ranked else ""
        return f"{self.title or self.measure} {arrow}".strip()


@dataclass
class Cell:
    """The values of one row under one measure, by seed."""

    values: dict[int, float] = field(default_factory=dict)
    mark: Mark = ""

    @property
    def mean(self) -> float:
        """NaN where a seed has no finite value: a mean over the runs that went well would flatter."""
        return fmean(self.values.values()) if self.values else math.nan

    def text(self, decimals: int, seeds: int | None) -> str:
        """Mean ± standard deviation; with its own number of seeds where that is not the table's."""
        if not self.values:
            return "–"
        failed = sum(not math.isfinite(value) for value in self.values.values())
        if failed:
            return f"not finite ({failed} of {len(self.values)})"
        shown = f"{self.mean:.{decimals}f}"
        if len(self.values) > 1:
            shown += f" ± {stdev(self.values.values()):.{decimals}f}"
        return shown if len(self.values) == seeds else f"{shown} (n = {len(self.values)})"


@dataclass(frozen=True)
class Table:
    """Rows of cells, one per column, and the sentences that say how to read them.

    Attributes:
        seeds: how many every cell has of the rows that are compared; None where they differ.
        unranked: the rows that are not compared.
    """

    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Cell]]
    caption: str
    seeds: int | None
    unranked: Collection[str]

    def texts(self) -> list[tuple[str, list[tuple[str, Mark]]]]:
        """Every row's label, and the text and mark of its cells."""
        decimals = [_decimals(column, [row[i] for row in self.rows.values()]) for i, column in enumerate(self.columns)]
        found = []
        for label, cells in self.rows.items():
            # A row that is shown for reference, such as the base model, needs no seeds of its own.
            texts = (
                cell.text(d, len(cell.values) if label in self.unranked else self.seeds)
                for cell, d in zip(cells, decimals, strict=True)
            )
            found.append((label, list(zip(texts, (cell.mark for cell in cells), strict=True))))
        return found


def tabulate(
    records: Sequence[Record],
    columns: Sequence[Column] | None = None,
    *,
    unranked: Collection[str] = (),
    title: str = "",
) -> Table:
    """The table of these records, rows in order of first appearance.

    Args:
        records: one for every run.
        columns: which measures; all of them in order of first appearance where None.
        unranked: labels that are shown but not compared, such as the base model or another rank.
        title: what the caption opens with.

    Raises:
        NALoRAError: two records have the same label, seed and measure.
    """
    if columns is None:
        columns = [Column(name) for name in dict.fromkeys(name for record in records for name in record.measures)]
    rows: dict[str, list[Cell]] = {}
    for label, seed, measures in records:
        cells = rows.setdefault(label, [Cell() for _ in columns])
        for column, cell in zip(columns, cells, strict=True):
            if column.measure not in measures:
                continue
            if seed in cell.values:
                raise NALoRAError(
                    f"{label}, {column.measure}",
                    found=f"two values for seed {seed}",
                    expected="one run per label and seed",
                    fix="give runs that differ in more than their seed labels of their own",
                )
            cell.values[seed] = measures[column.measure] * column.scale
    undecided = []
    for i, column in enumerate(columns):
        if not column.ranked:
            continue
        compared = {
            label: cells[i] for label, cells in rows.items() if label not in unranked and math.isfinite(cells[i].mean)
        }
        _mark(compared, lower=column.lower_is_better)
        if len(compared) > 1 and not any(cell.mark for cell in compared.values()):
            undecided.append(column.title or column.measure)
    counts = {
        len(cell.values) for label, cells in rows.items() if label not in unranked for cell in cells if cell.values
    }
    seeds = counts.pop() if len(counts) == 1 else None
    sentences = [title, _count(rows, seeds)]
    if any(column.ranked for column in columns):
        compared_rows = {label: cells for label, cells in rows.items() if label not in unranked}
        sentences.append(_legend(compared_rows, columns, undecided))
        if len(compared_rows) < len(rows):
            sentences.append("Not compared: " + ", ".join(label for label in rows if label in unranked) + ".")
    return Table(columns, rows, " ".join(filter(None, sentences)), seeds, unranked)


def markdown(table: Table) -> str:
    """A GitHub-flavoured table with its caption below."""
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    lines = [["", *(escape_markdown(column.head) for column in table.columns)]]
    lines.append(["---", *("---:" for _ in table.columns)])
    short = brief(table.rows)
    for label, cells in table.texts():
        lines.append([escape_markdown(short[label]), *(marks[mark].format(text) for text, mark in cells)])
    caption = " ".join([table.caption, *_shortened(short)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{escape_markdown(caption)}\n"


def latex(table: Table, label: str = "tab:results") -> str:
    """A table for booktabs, escaped for every LaTeX engine."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    head = " & ".join(["", *(escape_latex(column.head) for column in table.columns)])
    short = brief(table.rows)
    caption = " ".join([table.caption, *_shortened(short)])
    body = [
        " & ".join([escape_latex(short[name]), *(marks[mark].format(escape_latex(text)) for text, mark in cells)])
        for name, cells in table.texts()
    ]
    return "\n".join([
        "% needs \\usepackage{booktabs}",
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \caption{{{escape_latex(caption)}}}",
        rf"  \label{{{label}}}",
        rf"  \begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        r"    \toprule",
        rf"   {head} \\",
        r"    \midrule",
        *(rf"    {line} \\" for line in body),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ])  # fmt: skip


def _shortened(short: Mapping[str, str]) -> list[str]:
    """A sentence with the whole of every label that was too long for its row."""
    whole = [f"{form}: {label}" for label, form in short.items() if form != label]
    return [f"Shortened: {'; '.join(whole)}."] if whole else []


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is: no markup, and no address that becomes a link by itself."""
    escaped = "".join(f"\\{c}" if c in r"\`*_{}[]<>#|~&" else c for c in tidy(text))
    # GitHub links what looks like an address: the scheme's colon and the dot after www are escaped, and a word joiner,
    # which has no width, ends what would be a mail address after its @.
    escaped = _SCHEME.sub(r"\1\:", escaped)
    return _WWW.sub(r"\1\.", escaped).replace("@", "@\N{WORD JOINER}")


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it is; the signs nalora writes become commands, so pdflatex knows them too."""
    return " ".join("".join(_LATEX.get(c, c) for c in tidy(text)).split())


def _mark(cells: Mapping[str, Cell], *, lower: bool) -> None:
    """Mark the best, and behind a marked best the second, where each is better than every row behind it."""
    values = {label: cell.values for label, cell in cells.items()}
    ranked = sorted(cells, key=lambda label: cells[label].mean, reverse=not lower)
    marks: tuple[Mark, ...] = ("best", "second")
    for place, mark in enumerate(marks):
        pairs = [(ranked[place], other) for other in ranked[place + 1 :]] if place < len(ranked) else []
        compared = compare_methods(values, pairs, higher_is_better=not lower)
        if not compared or any(comparison.verdict != "better" for comparison in compared):
            return
        cells[ranked[place]].mark = mark


def _count(rows: Mapping[str, Sequence[Cell]], seeds: int | None) -> str:
    if not rows:
        return "No results."
    if seeds == 1:
        return "One seed (n = 1)."
    count = "n as stated" if seeds is None else f"n = {seeds}"
    return f"Mean ± standard deviation over seeds ({count})."


def _legend(rows: Mapping[str, Sequence[Cell]], columns: Sequence[Column], undecided: list[str]) -> str:
    """What marks mean here, and why a column has none."""
    cells = [cell for row in rows.values() for cell in row]
    if len(rows) < 2:
        return ""
    if all(len(cell.values) < FEWEST_SEEDS for cell in cells):
        return f"Nothing is marked: fewer than {FEWEST_SEEDS} seeds cannot show a significant difference."
    test = "(Student's t-test, paired by seed, Holm-corrected, p ≤ 0.05)"
    if not any(cell.mark for cell in cells):
        return f"Nothing is marked: no row is significantly better than every other {test}."
    marked = {cell.mark for cell in cells}
    second = ", underlined: than every row behind it" if "second" in marked else ""
    unmarked = f" No mark for {', '.join(undecided)}." if undecided else ""
    columnwise = " Each column on its own." if len(columns) > 1 else ""
    return f"Bold: significantly better than every other row{second} {test}.{columnwise}{unmarked}"


def _decimals(column: Column, cells: Sequence[Cell]) -> int:
    if column.decimals is not None:
        return column.decimals
    largest = max((abs(cell.mean) for cell in cells if math.isfinite(cell.mean)), default=0.0)
    return min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest else 1


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    # After a row's end LaTeX takes a bracket or a star for an option of it.
    "[": "{[}", "]": "{]}", "*": "{*}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "≤": r"$\leq$", "≥": r"$\geq$",
    "φ": r"$\phi$", "κ": r"$\kappa$", "χ": r"$\chi$", "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$",
    "η": r"$\eta$", "−": "$-$", "–": "--", "…": r"\ldots{}", "·": r"$\cdot$", "′": r"$'$",
}  # fmt: skip
