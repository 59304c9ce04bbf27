"""Take the pictures of reports that the documentation shows.

python docs/screenshots.py RUN...
python docs/screenshots.py --study studies/gsm8k.yaml --store results/store   (after python results/restore.py)

Each is of a part of a real report in Chromium, as a reader sees it; runs with gates, a diagnosis and evaluations fill
all of them. The pictures go to docs/figures/report-*.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalora.report.data import read_runs
from nalora.report.html import write_report
from nalora.studies.page import write_page_of

FIGURES = Path(__file__).parent / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A picture is of a window of this size, scrolled to a section or a chart: (name, where, width, height, theme).
PICTURES = (
    ("results", "body", 1200, 900, "light"),
    ("examples", "#examples", 1200, 700, "light"),
    ("gates", "#gates", 1200, 900, "light"),
    ("kappa", "#chart-kappa", 1200, 620, "light"),
    ("moved", "#moved", 1200, 560, "light"),
    ("mismatch", "#mismatch", 1200, 860, "light"),
    ("capacity", "#capacity", 1200, 900, "light"),
    ("dark", "#gates", 1200, 900, "dark"),
    ("phone", "body", 400, 860, "light"),
)
OF_A_STUDY = (("study", "#answer", 1200, 1500, "light"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--study", type=Path)
    parser.add_argument("--store", type=Path, default=Path("runs/store"))
    args = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        if args.runs:
            report = write_report(read_runs(args.runs), Path(folder) / "report.html")
            take_all(chromium, report, PICTURES)
        if args.study:
            take_all(chromium, write_page_of(args.study, args.store, Path(folder) / "study.html"), OF_A_STUDY)
        chromium.close()


def take_all(chromium: Any, report: Path, pictures: Sequence[tuple[str, str, int, int, str]]) -> None:
    for name, place, width, height, theme in pictures:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        page = context.new_page()
        page.goto(report.as_uri())
        if take(page, place, FIGURES / f"report-{name}.png"):
            print(FIGURES / f"report-{name}.png")
        context.close()


def take(page: Any, place: str, target: Path) -> bool:
    """Scroll to the place, wait until its charts are drawn, and take the picture; return False if it is not visible."""
    page.wait_for_function("window.Plotly")
    if not page.locator(place).is_visible():
        return False
    # Charts above get their height when they are first visible, so scroll twice.
    for _ in range(2):
        page.locator(place).evaluate("element => element.scrollIntoView({block: 'start', behavior: 'instant'})")
        page.wait_for_timeout(1500)
    FIGURES.mkdir(exist_ok=True)
    page.screenshot(path=target)
    return True


if __name__ == "__main__":
    main()
