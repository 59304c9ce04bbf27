"""Take the pictures of reports that the documentation shows: python docs/screenshots.py RUN...

Each is of a part of a real report in Chromium, as a reader sees it; runs with gates, a diagnosis and evaluations fill
all of them. The pictures go to docs/figures/report-*.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from nalora.report.data import read_runs
from nalora.report.html import write_report

FIGURES = Path(__file__).parent / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A picture is of a window of this size, scrolled to a section or a chart: (name, where, width, height, theme).
PICTURES = (
    ("learn", "body", 1200, 900, "light"),
    ("gates", "#gates", 1200, 900, "light"),
    ("kappa", "#chart-kappa", 1200, 620, "light"),
    ("moved", "#moved", 1200, 560, "light"),
    ("mismatch", "#mismatch", 1200, 860, "light"),
    ("capacity", "#capacity", 1200, 900, "light"),
    ("dark", "#gates", 1200, 900, "dark"),
    ("phone", "body", 400, 860, "light"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    runs = read_runs(parser.parse_args().runs)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = write_report(runs, Path(folder) / "report.html")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, place, width, height, theme in PICTURES:
            context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
            page = context.new_page()
            page.goto(report.as_uri())
            if take(page, place, FIGURES / f"report-{name}.png"):
                print(FIGURES / f"report-{name}.png")
            context.close()
        chromium.close()


def take(page: Any, place: str, target: Path) -> bool:
    """Scroll there, wait until every chart in sight is drawn, and take the picture; False where nothing is there."""
    page.wait_for_function("window.Plotly")
    if not page.locator(place).is_visible():
        return False
    # Charts above take their height only once they were in sight, so the way there is gone twice.
    for _ in range(2):
        page.locator(place).evaluate("each => each.scrollIntoView({block: 'start', behavior: 'instant'})")
        page.wait_for_timeout(1500)
    FIGURES.mkdir(exist_ok=True)
    page.screenshot(path=target)
    return True


if __name__ == "__main__":
    main()
