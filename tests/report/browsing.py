"""A real browser for the tests, with the actions of a user."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def installed_browser() -> str:
    """Return the path of a browser; without one, skip the test and name the package to install."""
    pytest.importorskip("playwright", reason="pip install playwright, to look at reports in a browser")
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser: install one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)")


class Visit:
    """An open page, with its console messages and requests."""

    def __init__(self, browser, path, **options) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1600, "height": 1000}} | options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.context.route("**/*", self._note)
        self.page.goto(path.resolve().as_uri())

    def _note(self, route) -> None:
        self.requests.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    def charts(self) -> list[str]:
        """Return the ids of the charts, in the page's order."""
        self.page.wait_for_function("window.Plotly")
        return self.page.evaluate("[...document.querySelectorAll('figure')].map(f => f.id.replace('chart-', ''))")

    def show(self, chart: str):
        """Scroll to a chart, wait until it is drawn or shows a reason, and return its element."""
        self.page.locator(f"#chart-{chart}").evaluate("f => f.scrollIntoView({block: 'center', behavior: 'instant'})")
        self.page.wait_for_function(
            "id => { const f = document.getElementById('chart-' + id);"
            " return !('stale' in f.dataset) && (f.querySelector('.main-svg') || !f.querySelector('.note').hidden); }",
            arg=chart,
        )
        return self.page.locator(f"#plot-{chart}")

    def traces(self, chart: str) -> list[dict]:
        """Return name, type, x, y and z of every trace."""
        self.show(chart)
        code = """id => { const plot = document.getElementById('plot-' + id);
            const list = (v) => v === undefined ? null : Array.from(v, (e) => e && e.length !== undefined
                && typeof e !== 'string' ? Array.from(e) : e);
            return JSON.stringify((plot._fullData || []).map(t => ({name: t.name, type: t.type, x: list(t.x),
                y: list(t.y), z: list(t.z), color: (t.line || {}).color}))); }"""
        return json.loads(self.page.evaluate(code, chart))

    def hover(self, chart: str, x, y) -> str:
        """Hover over a place given in the chart's coordinates, and return the label's text."""
        self.show(chart)
        place = self.page.evaluate(
            """([id, x, y]) => { const plot = document.getElementById('plot-' + id), box = plot.getBoundingClientRect();
            const {xaxis, yaxis} = plot._fullLayout;
            return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)]; }""",
            [chart, x, y],
        )
        label = f"#plot-{chart} .hoverlayer .hovertext"
        self.page.mouse.move(1, 1)  # away, so that no earlier label is read
        self.page.wait_for_function("label => !document.querySelector(label)", arg=label)
        self.page.mouse.move(place[0] - 2, place[1])
        self.page.mouse.move(*place)
        self.page.locator(label).first.wait_for()
        lines = """label => [...label.querySelectorAll('text')].flatMap(text => {
            const found = [...text.querySelectorAll('tspan.line')];
            return found.length ? found.map(line => line.textContent) : [text.textContent]; }).join('\\n')"""
        return self.page.locator(label).first.evaluate(lines)


@contextmanager
def a_browser():
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = installed_browser()
    with sync_playwright() as playwright:
        # No sandbox: it is not available to root in a container, and the page is trusted.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
