"""Groups, sweeps, packs and comparisons in a real browser: the table, the plots, and a phone's width."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_browser import chromium, needs_chromium, opened, points, wait
from dashboard_runs import iteration, make_group, make_pack, make_run, make_sweep, serving, write_lines

from unidle.report.dashboard.folders import Runs

pytestmark = needs_chromium

MARKUP = "<img src=x onerror=alert(1)>"
LONG = "HalfCheetah-v5-ppo-heavy-with-a-long-name-seed1"
ROWS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as context:
        yield context


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a group, a sweep, a pack and three runs, with markup wherever it can be."""
    folder = tmp_path_factory.mktemp("dashboard")
    runs, settings = folder / "runs", {MARKUP: MARKUP}
    make_group(runs, "group")
    make_run(runs, LONG, learning_rate=0.5, meter=True)
    slow = make_run(runs, "slow", learning_rate=0.25, env=MARKUP)
    write_lines(slow / "metrics.jsonl", [iteration(i, **{"rollout/return_mean": float(i)}) for i in (1, 2, 3)])
    make_run(runs, MARKUP)
    finished = {"state": "finished", "settings": settings}
    trials = [
        {"return": 10.0, "time-to-target": 60.0, MARKUP: 1.0, **finished},
        {"return": 20.0, "time-to-target": 90.0, MARKUP: 2.0, **finished},
        {"return": 5.0, "time-to-target": 95.0, MARKUP: 3.0, **finished},
        {"state": "failed", "error": MARKUP, "settings": settings},
    ]
    sweep = make_sweep(runs, "sweep", trials, sampler=MARKUP)
    (sweep / "pareto").mkdir()
    for best in (0, 1):
        (sweep / "pareto" / f"trial-{best}.yaml").touch()
    job = {
        "name": MARKUP,
        "state": "failed",
        "note": MARKUP,
        "command": [MARKUP],
        "exit_code": 3,
        "run": f"runs/{LONG}",
    }
    make_pack(folder / "packs", "pack", [job, {**job, "name": "second", "state": MARKUP}])
    with serving(runs, packs=Runs(folder / "packs")) as port:
        yield f"http://127.0.0.1:{port}"


def names(page: Any) -> list[str]:
    return list(page.locator("#rows tr th a").all_inner_texts())


def open_table(page: Any, count: int) -> None:
    wait(page, f"document.querySelectorAll('#rows tr').length === {count}")


def test_index_has_one_row_per_run_group_sweep_and_pack(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        assert set(names(page)) == {"group", LONG, "slow", MARKUP, "sweep", "pack"}
        group = page.locator("#rows tr", has_text="3 runs")
        assert group.locator(".spark polyline").count() == 1
        assert group.locator("td", has_text="14.00").count() == 1  # the interquartile mean
        assert group.locator("td.right").first.inner_text().startswith("12,000")
        tickable = page.locator("#rows tr:has(input)").all_inner_texts()
        assert len(tickable) == ROWS - 2  # not the sweep and the pack


def test_column_of_gpus_is_hidden_without_any(address: str, tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path, "x")
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        assert page.get_by_role("button", name="GPU busy").is_visible()
        assert page.locator("#rows tr", has_text=LONG).locator("td").last.inner_text() == "40 %"
    with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/") as page:
        open_table(page, 1)
        assert page.get_by_role("button", name="steps", exact=True).is_visible()
        assert page.get_by_role("button", name="GPU busy").is_hidden()


def test_table_is_sorted_by_column(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        page.get_by_role("button", name="return").click()
        known = [row for row in names(page) if row != "pack"]  # it has no return
        assert known[-1] == "slow"
        assert known.index(LONG) < known.index("sweep") < known.index("group")
        assert (
            page.locator("th", has=page.get_by_role("button", name="return")).get_attribute("aria-sort") == "descending"
        )
        page.get_by_role("button", name="return").click()
        assert names(page)[0] == "slow"
        assert names(page)[-1] == "pack"  # unknown values are last
        page.reload()
        open_table(page, ROWS)
        assert names(page)[0] == "slow"


def test_table_is_filtered_by_text(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        page.get_by_role("searchbox").fill("cartpole 3 runs")
        assert names(page) == ["group"]
        assert f"1 of {ROWS}" in page.locator(".bar").inner_text()
        page.get_by_role("searchbox").fill("no such text")
        assert page.get_by_text("No row has this text.").is_visible()
        page.get_by_role("searchbox").fill("")
        assert len(names(page)) == ROWS


def test_ticked_runs_are_compared_on_one_plot(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        for name in ("slow", LONG):
            page.get_by_label(f"Compare {name}", exact=True).check()
        page.get_by_role("link", name="compare 2 on one plot").click()
        assert set(points(page, "steps")) == {"slow", LONG}
        assert points(page, "seconds") == {"slow": 3, LONG: 4}
        assert page.locator("#keys span").all_inner_texts() == ["slow", LONG]
        settings = page.locator("#settings").inner_text()
        assert "learning_rate" in settings
        assert MARKUP in settings  # its environment
        assert page.locator("img").count() == 0
        page.locator("#rows a", has_text=LONG).click()
        wait(page, f"location.pathname === '/run/{LONG}'")


def test_group_page_has_all_curves_and_their_mean(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        open_table(page, ROWS)
        page.locator("#rows a", has_text="group").click()
        drawn = points(page, "steps")
        assert set(drawn) == {"interquartile mean", "low", "high", "seed-0", "seed-1", "seed-2"}
        assert page.evaluate("document.getElementById('steps').data.at(-1).y") == [11, 12, 13, 14]
        assert page.locator("#keys span").all_inner_texts()[0] == "interquartile mean"
        assert page.locator("#same").inner_text() == "The runs differ only in their seeds."
        page.locator("#rows a", has_text="seed-1").click()
        assert points(page, "returns")["training, last 100 episodes"] == 4
        page.locator(".brand a", has_text="group").click()
        assert points(page, "seconds")


def test_group_of_many_runs_has_a_short_legend(tmp_path: Path, browser: Any) -> None:
    make_group(tmp_path, "g", seeds=12)
    with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/run/g") as page:
        assert len(points(page, "steps")) == 15
        assert page.locator("#keys span").all_inner_texts() == ["interquartile mean"]


def test_group_page_is_updated(tmp_path: Path, browser: Any) -> None:
    group = make_group(tmp_path, "g")
    with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/run/g") as page:
        assert points(page, "steps")["seed-2"] == 4
        with (group / "seed-2" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(iteration(5)) + "\n")
        wait(page, "document.getElementById('steps').data.find((t) => t.name === 'seed-2').y.length === 5")


def test_sweep_page_has_trials_and_their_front(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/run/sweep") as page:
        assert points(page, "front") == {"other trials": 1, "Pareto front": 2}
        assert points(page, "progress") == {"finished": 3, "best so far": 3}
        assert page.evaluate("document.getElementById('progress').data[1].y") == [10, 20, 20]
        assert page.locator("#rows tr").count() == 4
        assert MARKUP in page.locator("#rows tr").nth(3).inner_text()  # the error of the failed trial
        assert MARKUP in page.locator("#facts").inner_text()
        assert page.locator("img").count() == 0
        page.get_by_role("button", name="return").click()
        assert page.locator("#rows th a").first.inner_text() == "trial 1"
        page.locator("#rows th a").first.click()
        wait(page, "location.pathname === '/run/sweep/trial-1'")


def test_pack_page_has_jobs(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/pack/pack") as page:
        open_table(page, 2)
        assert page.locator("#rows th").first.inner_text() == MARKUP
        assert page.locator("img").count() == 0
        page.locator("#rows a").first.click()
        wait(page, f"location.pathname === '/run/{LONG}'")


def test_missing_page_links_to_the_list(address: str, browser: Any) -> None:
    page = browser.new_page()
    try:
        assert page.goto(f"{address}/run/none").status == 404
        assert page.inner_text("h1") == "There is no such run in this folder."
        page.get_by_role("link", name="Go to the list of runs.").click()
        open_table(page, ROWS)
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_on_a_phone(scheme: str, address: str, browser: Any) -> None:
    context = browser.browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    compare = f"/compare?run=group&run={LONG}&run=slow"
    colour = {"light": "rgb(246, 246, 244)", "dark": "rgb(16, 18, 22)"}[scheme]
    for path, charts in {"/": (), "/run/group": ("steps",), compare: ("steps",), "/run/sweep": ("front",)}.items():
        with opened(context, address + path) as page:
            wait(page, "document.querySelectorAll('#rows tr').length > 0")
            for chart in charts:
                assert points(page, chart)
                legend = page.locator(".keys").first.bounding_box()
                plot = page.locator(f"#{chart}").bounding_box()
                assert legend["y"] + legend["height"] <= plot["y"]
                assert page.locator(f"#{chart} .legend").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") == 390, path
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colour
    with opened(context, f"{address}/") as page:
        open_table(page, ROWS)
        assert page.locator("#rows a", has_text=LONG).bounding_box()["height"] < 60  # on two lines, not by letters
    context.close()
