"""The page of a group in a real browser: it fits a phone, has a dark mode, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_runs import make_run

from unidle.groups.page import write_group_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    group = tmp_path_factory.mktemp("group")
    runs = [make_run(group, f"seed-{i}", seed=i, learning_rate=1e-3 * (i + 1)) for i in range(3)]
    failure = "The loss is NaN at step 3,000; lower --learning-rate, or raise --max-grad-norm."
    return write_group_page(group, [*runs, group / "seed-3"], {"seed-3": failure}).as_uri()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_and_is_drawn(browser: Any, address: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: None if request.url == address else problems.append(request.url))
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("svg.chart").count() == 2
    assert page.locator("svg.chart .thin").count() == 6
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part > 127)")
    assert light == (scheme == "light")
    # A value that is cut off would be wider than its cell.
    assert page.evaluate("[...document.querySelectorAll('.value')].every((e) => e.scrollWidth <= e.clientWidth)")
    page.close()
    assert problems == []
