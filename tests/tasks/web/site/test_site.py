"""The generated test site and its server: reproducible pages, topics, latency and errors."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
import zlib

import aiohttp
import numpy as np
import pytest
from processes import restore_sigint
from web_servers import run

from unidle.errors import UsageError
from unidle.tasks.web.page import parse
from unidle.tasks.web.page_features import first_words
from unidle.tasks.web.site.generate import NAMES, Layout, Site
from unidle.tasks.web.site.serve import SiteServer, SiteServerConfig, in_background, run_server
from unidle.tasks.web.site.topics import ADVERTISING_WORDS, HONEST_WORDS, PLAIN_WORDS, TOPICS
from unidle.tasks.web.text_features import Topic

SMALL = Layout(pages=120, links=12, page_bytes=4000)


async def get(url: str, method: str = "GET") -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.request(method, url, allow_redirects=False) as response:
        return response.status, await response.read()


# -- the site ----------------------------------------------------------------------------------------------------------


def test_site_is_reproducible_from_its_seed_across_processes() -> None:
    code = (
        "import zlib; from unidle.tasks.web.site.generate import *; site = Site.of(5, Layout(120, 12, 4000));"
        "print(zlib.crc32(b''.join(site.html(path) for path in site.paths)))"
    )
    printed = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    site = Site.of(5, SMALL)
    assert printed == {f"{_digest(site)}\n".encode()}
    assert _digest(Site.of(6, SMALL)) != _digest(site)


def _digest(site: Site) -> int:
    return zlib.crc32(b"".join(site.html(path) or b"" for path in site.paths))


@pytest.mark.parametrize("seed", range(5))
def test_every_page_is_reachable_from_the_home_page(seed: int) -> None:
    site = Site.of(seed, SMALL)
    reached, frontier = {0}, [0]
    while frontier:
        new = set(site.targets[frontier.pop()].tolist()) - reached
        reached |= new
        frontier += new
    assert reached == set(range(SMALL.pages))


def test_pages_have_the_configured_size_and_link_count() -> None:
    site = Site.of(0)
    pages = [site.html(path, "/0/") or b"" for path in site.paths[1:60]]
    assert np.mean([len(page) for page in pages]) == pytest.approx(30_000, rel=0.1)
    found = [len(parse(page, "http://127.0.0.1/0/").links) for page in pages]
    assert np.mean(found) == pytest.approx(50 + 8, rel=0.15)  # plus the links that every page has


def test_page_is_relevant_to_its_own_topic_only() -> None:
    site = Site.of(1)
    for path, topic in list(zip(site.paths, site.topic))[1:40]:
        content = parse(site.html(path) or b"", "http://127.0.0.1/")
        topics = {name: Topic(words) for name, words in TOPICS.items()}
        scores = {name: topic.relevance(first_words(content.text)) for name, topic in topics.items()}
        assert scores.pop(NAMES[topic]) > 0.5
        assert max(scores.values()) < 0.5


def test_links_favour_their_topic_and_words_mark_honest_links() -> None:
    site = Site.of(2)
    same = [(site.topic[row] == site.topic[page]).mean() for page, row in enumerate(site.targets) if page]
    assert np.mean(same) > 3 / len(NAMES)
    honest, lying = [], []
    page_of = {f"http://127.0.0.1/{path}": page for page, path in enumerate(site.paths)}
    for path in site.paths[1:40]:
        for link in parse(site.html(path) or b"", f"http://127.0.0.1/{path}").links:
            words = set(link.text.split())
            named = [name for name in NAMES if words & set(TOPICS[name])]
            if link.url in page_of and named:
                is_true = NAMES[site.topic[page_of[link.url]]] == named[0]
                (honest if words & set(HONEST_WORDS) else lying).append(is_true)
    assert min(len(honest), len(lying)) > 300
    assert all(honest)
    assert not any(lying)


def test_word_groups_are_disjoint() -> None:
    words = [word for group in (*TOPICS.values(), PLAIN_WORDS, HONEST_WORDS, ADVERTISING_WORDS) for word in group]
    assert len(words) == len(set(words))


def test_archive_is_endless() -> None:
    site = Site.of(0, SMALL)
    for number in (0, 7, 10**8):
        assert f"archive/{number + 1}.html".encode() in (site.html(f"archive/{number}.html") or b"")
    assert site.html("archive/x.html") is None


@pytest.mark.parametrize("layout", [{"pages": 9}, {"links": 0}, {"page_bytes": 0}])
def test_invalid_layout_is_refused(layout: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="A site needs"):
        Layout(**layout)
    with pytest.raises(UsageError, match="A site needs"):
        SiteServerConfig(**layout)


# -- the server --------------------------------------------------------------------------------------------------------

SMALL_SITE = {"pages": 120, "links": 12, "page_bytes": 4000}


def test_server_serves_pages_robots_redirects_and_errors() -> None:
    async def check() -> None:
        async with run_server(SiteServerConfig(seed=3, sites=2, **SMALL_SITE)) as server:
            assert server.urls == [f"{server.url}0/", f"{server.url}1/"]
            site = Site.of(4, SMALL)
            assert await get(server.urls[1]) == (200, site.html("", "/1/"))
            assert await get(f"{server.urls[1]}{site.paths[7]}") == (200, site.html(site.paths[7], "/1/"))
            assert (await get(f"{server.url}robots.txt"))[1].startswith(b"User-agent: *")
            assert (await get(server.url))[1].count(b"<a href") == 2
            status, _ = await get(f"{server.urls[0]}go/5")
            assert status == 302
            assert (await get(f"{server.urls[0]}files/1.pdf"))[1].startswith(b"%PDF")
            for missing in ("2/", "0/lost/1.html", "0/x-7.html", "x/", "0", "0/go/x", "99999999999999999999/"):
                assert (await get(server.url + missing))[0] == 404, missing
            assert (await get(server.url, "POST"))[0] == 405
            assert server.responses[404] == 7

    run(check())


def test_responses_take_the_configured_latency() -> None:
    async def check() -> None:
        async with run_server(
            SiteServerConfig(latency=0.1, jitter=0.1, slow_rate=1.0, slow_seconds=0.2, **SMALL_SITE)
        ) as server:
            began = time.monotonic()
            await asyncio.gather(*(get(server.urls[0]) for _ in range(10)))
            assert 0.3 <= time.monotonic() - began < 1.5

    run(check())


def test_same_pages_are_slow_on_every_visit() -> None:
    async def check() -> None:
        async with run_server(SiteServerConfig(slow_rate=0.3, slow_seconds=0.15, **SMALL_SITE)) as server:
            slow = []
            for _ in range(2):
                slow.append([])
                for path in server.site(0).paths[1:15]:
                    began = time.monotonic()
                    await get(server.urls[0] + path)
                    slow[-1].append(time.monotonic() - began > 0.15)
            assert slow[0] == slow[1]
            assert 0 < sum(slow[0]) < 14

    run(check())


def test_requests_fail_at_the_configured_error_rate() -> None:
    async def check() -> None:
        async with run_server(SiteServerConfig(error_rate=0.5, **SMALL_SITE)) as server:
            await asyncio.gather(*(get(server.urls[0]) for _ in range(200)))
            assert set(server.responses) == {200, 503}
            assert 60 < server.responses[503] < 140
            assert (await get(f"{server.url}robots.txt"))[0] == 200

    run(check())


def test_server_listens_on_loopback_and_reports_taken_port() -> None:
    async def check() -> None:
        async with run_server(SiteServerConfig(**SMALL_SITE)) as server:
            assert [host for host, _ in server._runner.addresses] == ["127.0.0.1"]
            port = int(re.findall(r"\d+", server.url)[-1])
            with pytest.raises(UsageError, match=f"Cannot listen on port {port}"):
                await SiteServer(SiteServerConfig(port=port)).start()

    run(check())


def test_server_runs_in_the_background() -> None:
    with in_background(SiteServerConfig(**SMALL_SITE)) as server:
        assert run(get(server.urls[0]))[0] == 200
    with pytest.raises(aiohttp.ClientConnectorError):
        run(get(server.urls[0]))


def test_server_runs_from_the_command_line_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "unidle.tasks.web.site", "--port", "0", "--pages", "50", "--page-bytes", "2000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=restore_sigint) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/0/", process.stdout.readline())
        assert url is not None
        assert run(get(url[0]))[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 0
        assert process.stderr.read() == ""
    invalid = subprocess.run([*command[:3], "--error-rate", "2"], capture_output=True, text=True)
    assert invalid.returncode == 1
    assert invalid.stderr == "error: error_rate must be between 0 and 1, not 2.0.\n"


@pytest.mark.parametrize("setting", [{"latency": -1.0}, {"error_rate": 1.5}, {"sites": 0}, {"port": 70000}])
def test_invalid_server_setting_raises_usage_error(setting: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SiteServerConfig(**setting)  # type: ignore[arg-type]


def test_missing_aiohttp_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
        SiteServer(SiteServerConfig())
