"""One HTML file for any number of runs, which contains its script, its style and its numbers and fetches nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib import resources, util
from pathlib import Path

from nalora import __version__
from nalora.errors import NALoRAError, missing_package, unusable
from nalora.files import atomic, outputs
from nalora.files.atomic import json_text
from nalora.report import sections
from nalora.report.data import RunData, with_comparable_evaluations
from nalora.report.examples import examples
from nalora.report.naming import brief
from nalora.report.payload import payload
from nalora.report.sentences import findings
from nalora.report.study_answer import StudyAnswer

_SCRIPTS = (
    "page_numbers.js", "page_charts.js", "page_answer.js", "page_sections.js", "page_examples.js", "page_capacity.js",
    "page.js",
)  # fmt: skip
_ONE_OF_EACH = "One run of each arm; the results over all seeds are above."


def write_report(runs: Sequence[RunData], output: str | Path, answer: StudyAnswer | None = None) -> Path:
    """Write the report of runs, or of a study with its answer, and return its path.

    Raises NALoRAError if no run is given, plotly is not installed, or the file cannot be written or is not nalora's.
    """
    output = Path(output)
    outputs.refuse_foreign_files([output], outputs.is_page, option="--output", kind="a report")
    text = page(runs, answer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(output, text)
    except OSError as error:
        raise unusable(output, "written", error, "a file to write", "give another --output") from None
    return output


def page(runs: Sequence[RunData], answer: StudyAnswer | None = None) -> str:
    """Return the page; raise NALoRAError if no run is given, or plotly is not installed."""
    if not runs:
        raise NALoRAError("report", found="no runs", expected="one or more", fix="give a run's folder")
    runs = with_comparable_evaluations(runs)
    data = payload(runs)  # first: it adds to the notices
    data["examples"] = examples(runs)
    data["answer"] = answer.charts() if answer else None
    labels = data["labels"] = brief([*(run.name for run in runs), *(answer.arms() if answer else ())])
    not_evaluated = [f"{run.name}: {run.missing['evaluations']}" for run in runs if "evaluations" in run.missing]
    listed = ", ".join(labels[run.name] for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    parts = {
        "title": escape(f"nalora report: {answer.name if answer else listed}"),
        "css": _own("page.css"),
        "summary": sections.summary(runs),
        "answer": answer.tables() if answer else "",
        "answer_sentences": answer.sentences() if answer else "",
        "findings": sections.items([_ONE_OF_EACH] if answer else findings(runs)),
        "scores": sections.scores(runs) + sections.notes([] if answer else not_evaluated),
        "costs": sections.costs(runs),
        "reproduce": sections.reproduce(runs),
        "notices": sections.notices(runs),
        "version": escape(__version__),
        # Escaped for a script element: no text of a run can end the element.
        "data": json_text(data, compact=True).translate({ord(c): f"\\u{ord(c):04x}" for c in "<\u2028\u2029"}),
        "plotly": _plotly().replace("</script", "<\\/script").replace("<!--", "<\\!--"),
        "js": "\n".join(map(_own, _SCRIPTS)),
    }
    # In one pass, so that nothing in the data is replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _own("page.html"))


def _own(name: str) -> str:
    return resources.files("nalora.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    # Not imported: plotly's Python side is not needed and takes a second to load.
    spec = util.find_spec("plotly")
    for place in (spec.submodule_search_locations or []) if spec else []:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script.read_text(encoding="utf-8")
    raise missing_package("report", "plotly", "whose script draws the charts", "'nalora[report]'")
