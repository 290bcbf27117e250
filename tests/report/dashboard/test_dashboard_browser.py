"""The dashboard in a real browser: content, plots, interaction and live updates."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dashboard_browser import chromium, needs_chromium, opened, points, wait
from dashboard_runs import iteration, make_run, segment, serving, write_lines

from unidle.cli.main import run as command_line
from unidle.timeline import PHASES

pytestmark = needs_chromium

MARKUP = "<img src=x onerror=alert(1)>"
SECONDS = 5


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as context:
        yield context


def figure(page: Any, name: str) -> str:
    wait(page, "document.querySelectorAll('#figures div').length > 0")
    return str(page.locator("#figures div", has=page.get_by_text(name, exact=True)).locator(".value").inner_text())


def check_finished(page: Any) -> None:
    """Check the page of a metered run of SECONDS seconds, served or from a file."""
    table = ["busy", "environment", "learn (launch)", "unattributed"]
    assert points(page, "timeline") == dict.fromkeys(table, SECONDS + 1)  # one more for the end of the last second
    assert page.locator("#timeline .scatterlayer .trace").count() == len(table)
    assert page.locator("#table th").all_inner_texts() == table
    assert points(page, "lanes") == {"environment": 1, "inference": 1}
    assert page.locator("#lanes .bars path").count() == 2
    assert points(page, "returns")["training, last 100 episodes"] == SECONDS
    assert points(page, "returns")["evaluation"] == 1
    assert points(page, "speed") == {"each iteration": SECONDS}
    assert points(page, "power") == {"power (W)": SECONDS, "GPU energy (J)": SECONDS}
    assert "GPU busy 40 %" in page.locator("#verdict").inner_text()
    assert "125 W in rollouts, 100 % at 208 W in learning" in page.locator("#parts-sentence").inner_text()
    assert page.locator("#parts tr").count() == 3
    assert page.locator("#changes li").all_inner_texts() == [MARKUP]
    assert figure(page, "GPU busy") == "40 %"
    assert page.locator("#state").inner_text() == "done"


def metered(folder: Path) -> Path:
    run = make_run(folder, "x", meter=True, seconds=SECONDS)
    (run / "changes.jsonl").write_text(f'{{"step": 2000, "seconds": 2.0, "change": "{MARKUP}"}}\n')
    return run


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with three runs: a metered one, one without meter, and one whose names contain markup."""
    folder = tmp_path_factory.mktemp("runs")
    metered(folder)
    make_run(folder, "cpu")
    spans = [[MARKUP, MARKUP, 0.0, 0.001], ["host", "constructor", 0.0, 0.001]]
    run = make_run(folder, MARKUP, env=MARKUP, run_name=MARKUP)
    write_lines(run / "meter.jsonl", [segment(1, host={MARKUP: 1.0}, spans=spans)])
    with serving(folder) as port:
        yield f"http://127.0.0.1:{port}"


def test_finished_run_is_drawn(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/run/x") as page:
        check_finished(page)


def test_losses_and_settings_of_a_run_are_shown(tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path, "x", learning_rate=0.25)
    records = [iteration(i, **{"train/value_loss": 1.0 / i, "train/grad_norm": i, "train/same": 1}) for i in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", records)
    losses = "[...document.querySelectorAll('#losses .plot')].map((box) => [box.ariaLabel, box.data?.[0].y])"
    with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/run/x") as page:
        wait(page, f'JSON.stringify({losses}) === \'[["Value loss",[1,0.5,{1 / 3}]],["Grad norm",[1,2,3]]]\'')
        assert "learning_rate\t0.25" in page.locator("#config").inner_text()
        page.get_by_role("button", name="seconds").click()
        wait(page, "document.querySelector('#losses .plot').data[0].x.join() === '1,2,3'")


def test_html_file_of_run_is_drawn_without_server(tmp_path: Path, browser: Any) -> None:
    run = metered(tmp_path)
    assert command_line(["report", str(run), "--html"]) == 0
    with opened(browser, (run / "dashboard.html").as_uri()) as page:
        check_finished(page)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_phases_have_the_same_colour_in_report_and_dashboard(mode: str, tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path, "x")
    times = {f"time/{name}": (i + 1) / 10 for i, name in enumerate(PHASES)}
    write_lines(run / "metrics.jsonl", [iteration(6, **times)])  # 1.5 seconds are unattributed
    write_lines(run / "meter.jsonl", [segment(1, host=dict.fromkeys((*PHASES, "unattributed"), 0.1))])
    assert command_line(["report", str(run)]) == 0
    assert command_line(["report", str(run), "--html"]) == 0
    with opened(browser, (run / "report.html").as_uri()) as page:
        page.emulate_media(color_scheme=mode)
        names = """'svg[aria-label="Where the time went"] .chart-name'"""
        found = page.evaluate(
            f"[...document.querySelectorAll({names})]"
            + """.map(
            (name) => {
              const all = [...name.parentElement.querySelectorAll('rect[width="10.0"]')];
              const near = (box) => Math.abs(box.getAttribute('y') - name.getAttribute('y') + 9) < 1;
              const [swatch, hatch] = all.filter(near);
              return [name.textContent, getComputedStyle(swatch).fill, hatch?.getAttribute('class') ?? null];
            })"""
        )
    hatches = {None: None, "hatch-up": "-45deg", "hatch-down": "45deg"}
    in_report = {name: (colour, hatches[hatch]) for name, colour, hatch in found}
    with opened(browser, (run / "dashboard.html").as_uri()) as page:
        page.emulate_media(color_scheme=mode)
        page.get_by_role("button", name="trainer thread").click()
        found = page.evaluate("""[...document.querySelectorAll('#table th')].map((cell) => {
            const swatch = cell.querySelector('.swatch'), probe = swatch.style.getPropertyValue('--c');
            swatch.style.color = probe;
            const isHatched = swatch.classList.contains('hatched');
            return [cell.textContent, getComputedStyle(swatch).color,
                    isHatched ? swatch.style.getPropertyValue('--angle') : null];
        })""")
        drawn = page.evaluate("document.getElementById('timeline').data.map((t) => [t.name, t.fillcolor])")
    on_dashboard = {name: (colour, hatch) for name, colour, hatch in found}
    assert set(on_dashboard) == {*PHASES, "unattributed"}
    assert in_report == on_dashboard
    assert {name: _rgb(colour) for name, colour in drawn} == {name: colour for name, (colour, _) in in_report.items()}


def test_single_chart_is_no_larger_than_others(tmp_path: Path, browser: Any) -> None:
    run = make_run(tmp_path, "x")
    write_lines(run / "metrics.jsonl", [iteration(i, **{"train/entropy": 0.1 * i}) for i in (1, 2, 3)])
    assert command_line(["report", str(run)]) == 0
    with opened(browser, (run / "report.html").as_uri()) as page:
        cards = page.locator(".three .card").all()
        assert len(cards) == 4  # three of speed, one of learning
        widths = [card.bounding_box()["width"] for card in cards]
        assert widths == pytest.approx([widths[0]] * 4, abs=1)


def test_pages_fit_on_a_phone(address: str, browser: Any) -> None:
    context = browser.browser.new_context(viewport={"width": 390, "height": 800})
    with opened(context, f"{address}/") as page:
        wait(page, "document.querySelectorAll('#rows tr').length === 3")
        name = page.locator("#rows a", has_text="cpu")
        assert name.bounding_box()["height"] < 30  # on one line
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.goto(f"{address}/run/x")
        assert points(page, "lanes")
        assert page.locator("#lanes .legend").count() == 0  # it would cover the bars
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    context.close()


def _rgb(colour: str) -> str:
    """#0072b2 in a browser's notation."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_x_axis_can_be_steps_seconds_or_joules(address: str, browser: Any) -> None:
    xs = "document.getElementById('returns').data[0].x"
    with opened(browser, f"{address}/run/x") as page:
        points(page, "returns")
        assert page.evaluate(xs) == [1000.0 * (i + 1) for i in range(SECONDS)]
        page.get_by_role("button", name="seconds").click()
        assert page.evaluate(xs) == [i + 1.0 for i in range(SECONDS)]
        page.get_by_role("button", name="joules").click()
        assert page.evaluate(xs) == [150.0 * (i + 1) for i in range(SECONDS)]
        page.goto(f"{address}/run/cpu")
        points(page, "returns")
        assert page.get_by_role("button", name="joules").is_hidden()


def test_run_without_gpu_has_no_empty_gpu_figures(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/run/cpu") as page:
        points(page, "returns")
        assert "GPU" not in page.locator("#figures").inner_text()
        assert page.get_by_role("button", name="GPU").is_hidden()
        assert page.get_by_text("GPU power and energy").is_hidden()


def test_click_selects_another_segment(address: str, browser: Any) -> None:
    length = "document.getElementById('lanes').data[1].x[0]"
    durations = [1e3 * (span[3] - span[2]) for i in range(SECONDS) for span in [segment(i + 1)["spans"][1]]]
    with opened(browser, f"{address}/run/x") as page:
        points(page, "lanes")
        assert page.evaluate(length) == pytest.approx(durations[-1])
        box = page.locator("#timeline .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.22, box["y"] + box["height"] / 2)
        wait(page, "document.querySelectorAll('#timeline .hoverlayer text').length > 0")
        page.mouse.down()
        page.mouse.up()
        wait(page, f"Math.abs({length} - {durations[1]}) < 1e-9")
        assert "from 1.0 s:" in page.locator("#lanes-title").inner_text()
        page.get_by_label("Next segment").click()
        wait(page, f"Math.abs({length} - {durations[2]}) < 1e-9")
        page.get_by_role("button", name="latest").click()
        wait(page, f"Math.abs({length} - {durations[-1]}) < 1e-9")


def test_unmetered_time_is_a_gap(tmp_path: Path, browser: Any) -> None:
    """Seconds 0 to 10 and 30 to 40 have a bar each; clicking the second bar selects it."""
    lines = [segment(10, covered=10.0), segment(40, covered=10.0)]
    write_lines(make_run(tmp_path, "x") / "meter.jsonl", lines)
    with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/run/x") as page:
        points(page, "timeline")
        busy = page.evaluate("(({x, y}) => [x, y])(document.getElementById('timeline').data[0])")
        assert busy == [[0, 10, 30, 40], [0.4, 0, 0.4, 0.4]]
        page.get_by_label("Previous segment").click()
        wait(page, "document.getElementById('lanes-title').textContent.includes('from 9.0 s:')")
        box = page.locator("#timeline .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.77, box["y"] + box["height"] / 2)
        wait(page, "document.querySelectorAll('#timeline .hoverlayer text').length > 0")
        page.mouse.down()
        page.mouse.up()
        wait(page, "document.getElementById('lanes-title').textContent.includes('from 39.0 s:')")


def test_names_and_settings_are_escaped(address: str, browser: Any) -> None:
    with opened(browser, f"{address}/") as page:
        wait(page, "document.querySelectorAll('#rows tr').length === 3")
        row = page.locator("#rows tr", has_text="onerror")
        assert row.locator("td").nth(1).inner_text() == MARKUP
        row.locator("a").click()
        points(page, "lanes")
        assert page.locator("h1 #name").inner_text() == MARKUP
        assert MARKUP in page.locator("#facts").inner_text()
        page.get_by_role("button", name="trainer thread").click()
        assert page.locator("#table th").all_inner_texts() == [MARKUP]
        assert page.locator("img").count() == 0


def test_token_is_removed_from_url_and_page_still_works(tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path, token="word") as port, opened(browser, f"http://127.0.0.1:{port}/?token=word") as page:
        page.locator("#rows a").click()
        assert figure(page, "Steps") == "4,000"
        assert "word" not in page.url


def test_token_is_in_no_referrer_and_not_in_the_history(tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path, "x")
    with serving(tmp_path, token="word") as port, opened(browser, f"http://127.0.0.1:{port}/?token=word") as page:
        sent: list[dict[str, str]] = []
        page.on("request", lambda request: sent.append(request.all_headers()))
        page.locator("#rows a").click()
        assert figure(page, "Steps") == "4,000"
        assert sent
        assert not any(headers.get("referer") for headers in sent)
        page.go_back()
        page.wait_for_selector("#rows a")
        assert "word" not in page.url


def test_other_sites_can_neither_read_nor_embed_runs(tmp_path: Path, browser: Any) -> None:
    """Another server on this machine is another origin, but the browser sends it the same cookies."""
    make_run(tmp_path, "x")
    with (
        serving(tmp_path, token="word") as port,
        ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as foreign,
    ):
        threading.Thread(target=foreign.serve_forever).start()
        address = f"http://127.0.0.1:{port}"
        with opened(browser, f"{address}/?token=word"):
            pass
        page = browser.new_page()
        try:
            for site in ("127.0.0.1", "localhost"):
                page.goto(f"http://{site}:{foreign.server_port}/missing")
                for path, mode in (("run/x", "cors"), ("static/run.js", "no-cors")):
                    given = f"fetch('{address}/{path}', {{mode: '{mode}', credentials: 'include'}})"
                    assert page.evaluate(f"{given}.then(() => 'answered', () => 'refused')") == "refused"
                page.evaluate(f"document.body.innerHTML = '<iframe src=\"{address}/run/x\"></iframe>'")
                page.wait_for_timeout(300)
                assert [frame.url for frame in page.frames[1:]] == ["chrome-error://chromewebdata/"]
        finally:
            page.close()
            foreign.shutdown()


def test_only_the_browser_that_opened_the_printed_address_sees_the_runs(tmp_path: Path, browser: Any) -> None:
    make_run(tmp_path, "x")
    command = [sys.executable, "-m", "unidle", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            printed = server.stdout.readline().split()[-1]
            address, token = printed.split("?token=")
            with opened(browser, printed) as page:
                page.locator("#rows a").click()
                assert figure(page, "Steps") == "4,000"
                assert token not in page.url
                assert token not in page.evaluate("document.cookie")  # scripts cannot read it
                page.goto(address)  # a second visit, without the token
                page.wait_for_selector("#rows a")
            (cookie,) = (cookie for cookie in browser.cookies() if cookie["value"] == token)
            assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
            stranger = browser.browser.new_context()
            page = stranger.new_page()
            for path in ("", "run/x", "run/x/events", "?token=", f"?token={token[:-1]}", f"run/x?token={token}x"):
                response = page.goto(address + path)
                assert response.status == 401
                assert page.inner_text("body") == "This dashboard needs a token; open the address that it printed."
            stranger.close()
        finally:
            server.kill()


def test_figures_of_live_run_update(tmp_path: Path, browser: Any) -> None:
    command = [sys.executable, "-m", "unidle", "train", "--env", "CartPole-v1", "--preset", "classic", "--quiet"]
    command += ["--timesteps", "10000000", "--n-steps", "256", "--runs-dir", str(tmp_path), "--run-name", "live"]
    trainer = subprocess.Popen([*command, "--eval-every", "0"], stdout=subprocess.DEVNULL)
    try:
        with serving(tmp_path) as port, opened(browser, f"http://127.0.0.1:{port}/") as page:
            page.wait_for_selector("#rows a", timeout=30_000)
            page.wait_for_selector("#rows .state.training")
            cell = "document.querySelector('#rows tr').cells[7].textContent"
            before = page.evaluate(cell)
            wait(page, f"{cell} !== '{before}'")
            page.locator("#rows a").click()
            steps = "document.querySelector('#figures .value').textContent"
            wait(page, "(document.querySelector('#figures .value')?.textContent ?? '0') !== '0'")
            before, drawn = page.evaluate(steps), points(page, "speed")["each iteration"]
            wait(page, f"{steps} !== '{before}'")
            wait(page, f"document.getElementById('speed').data[0].x.length > {drawn}")
            assert page.locator("#state").inner_text() == "training"
            trainer.send_signal(signal.SIGINT)
            assert trainer.wait(30) == 128 + signal.SIGINT
            wait(page, "document.getElementById('state').textContent === 'stopped'")
    finally:
        trainer.kill()
        trainer.wait()
