"""One HTML file for any number of runs: its script, its style and its numbers inside, nothing fetched."""

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
from nalora.report import words
from nalora.report.data import RunData, with_comparable_evaluations
from nalora.report.naming import brief
from nalora.report.payload import payload
from nalora.report.study_answer import StudyAnswer

_SCRIPTS = ("page_numbers.js", "page_charts.js", "page_answer.js", "page_sections.js", "page_capacity.js", "page.js")
_ONE_OF_EACH = "One run of each arm; what may be said of the arms, over all their seeds, stands above."


def write_report(runs: Sequence[RunData], output: str | Path, answer: StudyAnswer | None = None) -> Path:
    """Write the report, that of a study with its answer, and give its path.

    Raises:
        NALoRAError: no run is given, plotly is not installed, or the file cannot be written or is somebody else's.
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
    """The whole page.

    Raises:
        NALoRAError: no run is given, or plotly is not installed.
    """
    if not runs:
        raise NALoRAError("report", found="no runs", expected="one or more", fix="give a run's folder")
    runs = with_comparable_evaluations(runs)
    data = payload(runs)  # first: it adds to the notices
    data["answer"] = answer.charts() if answer else None
    arms = answer.arms() if answer else []
    data["labels"] = brief([*(run.name for run in runs), *arms])
    listed = ", ".join(data["labels"][run.name] for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    names = answer.name if answer else listed
    parts = {
        "title": escape(f"nalora report: {names}"),
        "css": _own("page.css"),
        "summary": words.summary(runs),
        "answer": answer.tables() if answer else "",
        "answer_in_words": answer.sentences() if answer else "",
        "said": words.items([_ONE_OF_EACH]) if answer else words.said(runs),
        "answers": words.answers(runs) + ("" if answer else words.not_asked(runs)),
        "costs": words.costs(runs),
        "repeat": words.repeat(runs),
        "notices": words.notices(runs),
        "version": escape(__version__),
        "data": embedded(data),
        "plotly": _within_script(_plotly()),
        "js": "\n".join(map(_own, _SCRIPTS)),
    }
    # One pass, so that nothing in the data is taken for a place to fill in.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _own("page.html"))


def embedded(data: object) -> str:
    """JSON that can stand in a script element: no text of a run can end it."""
    text = json_text(data, compact=True)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _within_script(code: str) -> str:
    """Code whose strings hold nothing that would end a script element, or change how it is read."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _own(name: str) -> str:
    return resources.files("nalora.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    # Found, not imported: plotly's Python side is not needed and takes a second to load.
    found = util.find_spec("plotly")
    places = (found.submodule_search_locations or []) if found else []
    for place in places:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script.read_text(encoding="utf-8")
    raise missing_package("report", "plotly", "whose script draws the charts", "'nalora[report]'")
