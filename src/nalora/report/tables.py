"""Tables of results as Markdown and LaTeX: mean ± standard deviation over seeds, and marks for significant results.

As in the paper the best is bold and the second best underlined. Unlike there, the best is marked only if it is
significantly better than every other row (`evaluation.significance`), the second only if it is so against every row
behind it. Two equal methods get a wrong mark in 5 % of the tables, more of them less often.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from nalora.errors import NALoRAError
from nalora.evaluation.significance import FEWEST_SEEDS, compare_methods
from nalora.report.naming import brief, tidy

_SCHEME = re.compile(r"\b(https?|ftp|mailto|xmpp):", re.IGNORECASE)
_WWW = re.compile(r"\b(www)\.", re.IGNORECASE)
_LOWER_IS_BETTER = ("loss", "nll", "perplexity", "seconds", "memory", "gib", "error")
TEST = "(Student's t-test, paired by seed, Holm-corrected, p ≤ 0.05)"
Mark = Literal["best", "second", ""]


def lower_is_better(measure: str) -> bool:
    """Whether lower values are better, judged by the measure's name."""
    return any(word in measure.lower() for word in _LOWER_IS_BETTER)


class Record(NamedTuple):
    """The result of one run: the label of its row, its seed, and its measures by name."""

    label: str
    seed: int
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """One measure."""

    measure: str  # its name in the records
    title: str = ""  # of the column; the name where empty
    lower: bool | None = None  # whether lower is better; None judges by the name (loss, seconds, memory, …)
    scale: float = 1.0  # a factor of the values, 100 for a share in percent
    group: str = ""  # a heading above neighbouring columns, such as their model
    ranked: bool = True  # False for a measure that is neither good nor bad: no arrow, no marks

    @property
    def lower_is_better(self) -> bool:
        """As configured, or by the name."""
        return lower_is_better(self.measure) if self.lower is None else self.lower

    @property
    def head(self) -> str:
        """The title with an arrow in the direction that is better."""
        arrow = ("↓" if self.lower_is_better else "↑") if self.ranked else ""
        return f"{self.title or self.measure} {arrow}".strip()


@dataclass
class Cell:
    """The values of one row and measure, by seed."""

    values: dict[int, float] = field(default_factory=dict)
    mark: Mark = ""

    @property
    def mean(self) -> float:
        """NaN where a seed has no finite value: a mean over the other runs would be biased."""
        return fmean(self.values.values()) if self.values else math.nan

    def text(self, decimals: int, seeds: int | None) -> str:
        """Return mean ± standard deviation; with the number of seeds where it is not the table's."""
        if not self.values:
            return "–"
        if failed := sum(not math.isfinite(value) for value in self.values.values()):
            return f"not finite ({failed} of {len(self.values)})"
        deviation = f" ± {stdev(self.values.values()):.{decimals}f}" if len(self.values) > 1 else ""
        number = "" if len(self.values) == seeds else f" (n = {len(self.values)})"
        return f"{self.mean:.{decimals}f}{deviation}{number}"


@dataclass(frozen=True)
class Table:
    """Rows of cells, one per column, and a caption that explains them."""

    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Cell]]
    caption: str
    seeds: int | None  # of every cell in the compared rows; None where it differs
    unranked: Collection[str]  # the rows that are not compared

    def texts(self) -> list[tuple[str, list[tuple[str, Mark]]]]:
        """Return every row's label, and the text and mark of its cells."""
        decimals = [_decimals([row[i] for row in self.rows.values()]) for i in range(len(self.columns))]
        result = []
        for label, cells in self.rows.items():
            # A row that is shown for reference, such as the base model, has no seeds.
            seeds = [len(cell.values) if label in self.unranked else self.seeds for cell in cells]
            texts = map(Cell.text, cells, decimals, seeds)
            result.append((label, list(zip(texts, (cell.mark for cell in cells), strict=True))))
        return result


def tabulate(
    records: Sequence[Record],
    columns: Sequence[Column] | None = None,
    *,
    unranked: Collection[str] = (),
    title: str = "",
) -> Table:
    """Return the table of these records of runs, rows and (by default) columns in order of first appearance.

    Rows in `unranked` are shown but not compared, such as the base model or another rank. The title starts the caption.
    Raises NALoRAError if two records have the same label, seed and measure.
    """
    columns = columns_of(records) if columns is None else columns
    rows: dict[str, list[Cell]] = {}
    for label, seed, measures in records:
        for column, cell in zip(columns, rows.setdefault(label, [Cell() for _ in columns]), strict=True):
            if column.measure in measures and seed in cell.values:
                raise NALoRAError(
                    f"{label}, {column.measure}",
                    found=f"two values for seed {seed}",
                    expected="one run per label and seed",
                    fix="give runs that differ in more than their seed different labels",
                )
            if column.measure in measures:
                cell.values[seed] = measures[column.measure] * column.scale
    compared_rows = {label: cells for label, cells in rows.items() if label not in unranked}
    undecided = []
    for i, column in enumerate(columns):
        if column.ranked:
            compared = {label: cells[i] for label, cells in compared_rows.items() if math.isfinite(cells[i].mean)}
            _mark(compared, lower=column.lower_is_better)
            if len(compared) > 1 and not any(cell.mark for cell in compared.values()):
                undecided.append(column.title or column.measure)
    counts = {len(cell.values) for cells in compared_rows.values() for cell in cells if cell.values}
    seeds = counts.pop() if len(counts) == 1 else None
    sentences = [title, _count(rows, seeds)]
    if any(column.ranked for column in columns):
        sentences.append(_legend(compared_rows, columns, undecided))
        if len(compared_rows) < len(rows):
            sentences.append("Not compared: " + ", ".join(label for label in rows if label in unranked) + ".")
    return Table(columns, rows, " ".join(filter(None, sentences)), seeds, unranked)


def columns_of(records: Sequence[Record], *, ranked: bool = True) -> list[Column]:
    """Return a column for each measure, in order of first appearance."""
    names = dict.fromkeys(name for record in records for name in record.measures)
    return [Column(name, ranked=ranked) for name in names]


def markdown(table: Table) -> str:
    """Return a GitHub-flavoured table with its caption below."""
    head, rows, caption = _escaped(table, escape_markdown, {"best": "**{}**", "second": "<u>{}</u>", "": "{}"})
    groups = ["", *(f"{escape_markdown(column.group)}: " if column.group else "" for column in table.columns)]
    head = [group + title for group, title in zip(groups, head, strict=True)]
    lines = [head, ["---", *("---:" for _ in table.columns)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{caption}\n"


def latex(table: Table, label: str = "tab:results") -> str:
    """Return a table for booktabs, escaped for every LaTeX engine."""
    marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    head, rows, caption = _escaped(table, escape_latex, marks)
    return "\n".join([
        "% needs \\usepackage{booktabs}",
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \label{{{label}}}",
        rf"  \begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        r"    \toprule",
        *_latex_groups(table.columns),
        rf"   {' & '.join(head)} \\",
        r"    \midrule",
        *(rf"    {' & '.join(row)} \\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ])  # fmt: skip


def _latex_groups(columns: Sequence[Column]) -> list[str]:
    """Return the line of headings above the columns' own, with a rule below each; none without groups."""
    if not any(column.group for column in columns):
        return []
    heads, rules, first = [], [], 2  # the first column has the rows' labels
    for group, members in itertools.groupby(columns, key=lambda column: column.group):
        last = first + len(list(members)) - 1
        heads.append(rf"\multicolumn{{{last - first + 1}}}{{c}}{{{escape_latex(group)}}}")
        rules.append(rf"\cmidrule(lr){{{first}-{last}}}" if group else "")
        first = last + 1
    return [rf"    & {' & '.join(heads)} \\", f"    {' '.join(filter(None, rules))}"]


def _escaped(
    table: Table, escape: Callable[[str], str], marks: Mapping[str, str]
) -> tuple[list[str], list[list[str]], str]:
    """Return the head, the rows and the caption; long labels are short in their row and complete in the caption."""
    short = brief(table.rows)
    full = [f"{form}: {label}" for label, form in short.items() if form != label]
    caption = " ".join([table.caption, *([f"Shortened: {'; '.join(full)}."] if full else [])])
    rows = [
        [escape(short[label]), *(marks[mark].format(escape(text)) for text, mark in cells)]
        for label, cells in table.texts()
    ]
    return ["", *(escape(column.head) for column in table.columns)], rows, escape(caption)


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows literally: no markup, and no address that becomes a link."""
    escaped = "".join(f"\\{c}" if c in r"\`*_{}[]<>#|~&" else c for c in tidy(text))
    # GitHub links what looks like an address: the scheme's colon and the dot after www are escaped, and a word joiner,
    # which has no width, ends what would be a mail address after its @.
    escaped = _SCHEME.sub(r"\1\:", escaped)
    return _WWW.sub(r"\1\.", escaped).replace("@", "@\N{WORD JOINER}")


def escape_latex(text: str) -> str:
    """Return text that LaTeX shows literally; nalora's symbols become commands that pdflatex knows too."""
    return " ".join("".join(_LATEX.get(c, c) for c in tidy(text)).split())


def _mark(cells: Mapping[str, Cell], *, lower: bool) -> None:
    """Mark the best, and after a marked best the second, if each is better than every row behind it."""
    values = {label: cell.values for label, cell in cells.items()}
    ranked = sorted(cells, key=lambda label: cells[label].mean, reverse=not lower)
    marks: tuple[Mark, ...] = ("best", "second")
    for i, (label, mark) in enumerate(zip(ranked, marks, strict=False)):
        pairs = [(label, other) for other in ranked[i + 1 :]]
        compared = compare_methods(values, pairs, higher_is_better=not lower)
        if not compared or any(comparison.verdict != "better" for comparison in compared):
            return
        cells[label].mark = mark


def _count(rows: Mapping[str, Sequence[Cell]], seeds: int | None) -> str:
    if not rows:
        return "No results."
    count = "n as stated" if seeds is None else f"n = {seeds}"
    return "One seed (n = 1)." if seeds == 1 else f"Mean ± standard deviation over seeds ({count})."


def _legend(rows: Mapping[str, Sequence[Cell]], columns: Sequence[Column], undecided: list[str]) -> str:
    """Explain the marks, or why a column has none."""
    cells = [cell for row in rows.values() for cell in row]
    if len(rows) < 2:
        return ""
    if all(len(cell.values) < FEWEST_SEEDS for cell in cells):
        return f"Nothing is marked: fewer than {FEWEST_SEEDS} seeds cannot show a significant difference."
    if not any(cell.mark for cell in cells):
        return f"Nothing is marked: no row is significantly better than every other {TEST}."
    second = ", underlined: than every row behind it" if any(cell.mark == "second" for cell in cells) else ""
    unmarked = f" No mark for {', '.join(undecided)}." if undecided else ""
    columnwise = " Each column on its own." if len(columns) > 1 else ""
    return f"Bold: significantly better than every other row{second} {TEST}.{columnwise}{unmarked}"


def _decimals(cells: Sequence[Cell]) -> int:
    """Return the number that gives the largest mean four digits, and at most four."""
    largest = max((abs(cell.mean) for cell in cells if math.isfinite(cell.mean)), default=0.0)
    return min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest else 1


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    # After a row's end LaTeX parses a bracket or a star as an option.
    "[": "{[}", "]": "{]}", "*": "{*}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "≤": r"$\leq$", "≥": r"$\geq$",
    "φ": r"$\phi$", "κ": r"$\kappa$", "χ": r"$\chi$", "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$",
    "η": r"$\eta$", "−": "$-$", "–": "--", "…": r"\ldots{}", "·": r"$\cdot$", "′": r"$'$",
}  # fmt: skip
