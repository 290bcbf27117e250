"""The dashboard's pages in a real browser: opening them, and waiting for what they draw."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with a desktop's window."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser.new_context(viewport={"width": 1280, "height": 800})
        browser.close()


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A page that must not log errors, open a dialog, or send requests to other origins."""
    page = browser.new_page()
    problems: list[str] = []
    home = "/".join(address.split("/")[:3])
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda r: None if r.url.startswith((home, "data:", "blob:")) else problems.append(r.url))
    page.goto(address)
    try:
        yield page
    finally:
        page.close()
    assert problems == []


def wait(page: Any, expression: str) -> None:
    """Wait until an expression is true; Playwright's own wait uses eval, which the page's CSP forbids."""
    deadline = time.monotonic() + 15
    while True:
        try:
            if page.evaluate(expression):
                return
        except playwright.Error:  # the page is navigating
            pass
        assert time.monotonic() < deadline, expression
        time.sleep(0.05)


def points(page: Any, plot: str) -> dict[str, int]:
    """Name → number of points of each trace that Plotly holds."""
    wait(page, f"document.getElementById('{plot}').data?.length > 0")
    traces = page.evaluate(f"document.getElementById('{plot}').data.map((t) => [t.name, t.y.length])")
    return dict(traces)
