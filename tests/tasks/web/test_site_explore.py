"""The SiteExplore task: rewards, link frontier, observations, page cache, failing sites, shared fetcher, Gymnasium."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from aiohttp import web
from gymnasium.utils.env_checker import check_env
from web_servers import http_server, run

from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.vector.infos import to_columns
from unidle.errors import UsageError
from unidle.tasks.web import page_features
from unidle.tasks.web.fetch import Fetcher
from unidle.tasks.web.fetch_policy import Page
from unidle.tasks.web.gym_env import SiteExploreEnv
from unidle.tasks.web.page import Link
from unidle.tasks.web.page_features import PageFeatureCache, PageFeatures, link_features
from unidle.tasks.web.page_graph import (
    DUPLICATE,
    FAILED,
    FETCHED,
    FRONTIER,
    LINK_WORDS,
    MAX_PAGES,
    LinkFeatures,
    PageGraph,
)
from unidle.tasks.web.site.serve import SiteServer, SiteServerConfig, in_background
from unidle.tasks.web.site.topics import TOPICS
from unidle.tasks.web.site_explore import LINK_FACTS, PAGE_WORDS, SiteExplore
from unidle.tasks.web.text_features import Topic

TOPIC = "comet orbit"
# Six topic words in a hundred give a relevance of 1, three give 0.5.
RELEVANT, OTHER = "comet " * 6 + "x " * 94, "y " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(SiteServerConfig(sites=3, pages=200, links=20, page_bytes=4000)) as running:
        yield running


def site(pages: dict[str, Any], robots: str | None = None) -> Any:
    """Serves a few pages; each is (text, [(href, link text), …]), a status, or a function that makes the response."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        page = pages.get(request.path, 404)
        if isinstance(page, int):
            return web.Response(status=page)
        if callable(page):
            return page()
        text, links = page
        body = text + "".join(f'<a href="{href}">{words}</a>' for href, words in links)
        return web.Response(text=body, content_type="text/html")

    return http_server(answer, robots)


def offered_paths(env: SiteExplore) -> list[str]:
    """Paths of the links that the agent can choose."""
    return ["/" + env.graph.urls[number].split("/", 3)[3] for number in env.candidates]


async def make_and_reset(url: str, **task: Any) -> tuple[SiteExplore, dict[str, Any]]:
    env = SiteExplore(url, TOPIC, **{"links": 4, "seconds": 1.0, "backoff": 0.01, **task})
    _, info = await env.reset(0)
    return env, info


# -- rewards and rules -------------------------------------------------------------------------------------------------


def test_relevant_page_is_rewarded_once_and_every_request_costs() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("a", "comet orbit"), ("b", "comet"), ("c", "x")]),
            "/a": (RELEVANT, [("/", "top"), ("c", "x"), ("d", "x")]),
            "/b": (OTHER + "z", []),
            "/c": (RELEVANT, [("/", "top"), ("c", "x"), ("d", "x")]),  # the same bytes as /a
        }
        async with site(pages) as server:
            env, info = await make_and_reset(server.url, budget=10, cost=0.05, novelty=0.1)
            assert offered_paths(env) == ["/a", "/b", "/c"]
            assert info["action_mask"].tolist() == [1, 1, 1, 0, 1]
            _, reward, terminated, truncated, info = await env.step(0)
            assert reward == pytest.approx(1 - 0.05 + 0.1 / 3)  # one of its words comet, x and top is new
            assert (info["found"], info["requests"], info["relevance"]) == (1, 1, pytest.approx(1.0, abs=0.1))
            assert not terminated
            assert not truncated
            assert sorted(offered_paths(env)) == ["/b", "/c", "/d"]
            _, reward, *_, info = await env.step(offered_paths(env).index("/b"))
            assert reward == pytest.approx(-0.05 + 0.1 / 2)  # one of its words y and z is new
            _, reward, *_, info = await env.step(offered_paths(env).index("/c"))
            assert reward == pytest.approx(-0.05)  # relevant, but not a new page
            assert info["found"] == 1
            _, reward, terminated, _, info = await env.step(0)
            assert (reward, info["failed"]) == (pytest.approx(-0.05), True)  # /d is missing
            assert terminated  # no links are left
            assert info["action_mask"].tolist() == [0, 0, 0, 0, 1]
            states = [env.graph.nodes["state"][env.graph._numbers[f"{server.url}{name}"]] for name in ("", *"abcd")]
            assert states == [FETCHED, FETCHED, FETCHED, DUPLICATE, FAILED]
            await env.close()

    run(check())


def test_episode_ends_on_stop_action_or_exhausted_budget() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [(str(n), "x") for n in range(9)])}) as server:
            env, _ = await make_and_reset(server.url, budget=3)
            outcome = await env.step(4)
            assert outcome[1:4] == (0.0, True, False)
            assert len(server.times) == 1
            await env.reset(0)
            ends = [(await env.step(0))[2] for _ in range(3)]
            assert ends == [False, False, True]
            await env.close()

    run(check())


def test_choosing_a_missing_link_wastes_a_request() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x")])}) as server:
            env, _ = await make_and_reset(server.url, budget=3)
            _, reward, terminated, _, info = await env.step(2)
            assert (reward, terminated, info["requests"]) == (-env.cost, False, 1)
            assert len(server.times) == 1
            await env.close()

    run(check())


def test_equivalent_urls_count_as_one_page() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("/a", "x"), ("/a#part", "x"), ("./b/../a", "x"), ("/", "self"), ("/go", "x")]),
            "/a": (OTHER + "a", [("/", "back"), ("/a", "self")]),
            "/go": lambda: web.Response(status=302, headers={"Location": "/a"}),
        }
        async with site(pages) as server:
            env, _ = await make_and_reset(server.url)
            assert offered_paths(env) == ["/a", "/go"]
            await env.step(1)  # redirects to /a, which is then no longer offered
            assert offered_paths(env) == []
            await env.reset(0)
            await env.step(0)
            _, reward, *_ = await env.step(offered_paths(env).index("/go"))
            assert reward == pytest.approx(-env.cost)  # a page that was already visited
            await env.close()

    run(check())


def test_only_permitted_links_are_offered() -> None:
    async def check() -> None:
        hrefs = [
            "/a",
            "/private/x",
            "http://example.org/",
            "http://10.0.0.1/",
            "http://127.0.0.1:9/",
            "mailto:a@b",
            "/b",
        ]
        async with site(
            {"/": (OTHER, [(href, "comet") for href in hrefs])}, "User-agent: *\nDisallow: /private/"
        ) as server:
            env, _ = await make_and_reset(server.url, links=8)
            assert offered_paths(env) == ["/a", "/b"]
            await env.close()

    run(check())


def links_to(urls: list[str], match: list[float], nofollow: list[bool] | None = None) -> LinkFeatures:
    count = len(urls)
    words = np.zeros((count, LINK_WORDS), np.uint8)
    return LinkFeatures(urls, np.array(match, np.float32), np.array(nofollow or [False] * count), words)


def test_frontier_orders_by_score_then_age() -> None:
    graph = PageGraph("/")
    urls = [f"/{n}" for n in range(8)]
    graph.add_links(0, links_to(urls, [0.5 * (n in (3, 5)) for n in range(8)], [n == 3 for n in range(8)]), 0.0, 0)
    assert [graph.urls[n] for n in graph.frontier(4)] == ["/5", "/3", "/0", "/1"]
    graph.add_links(graph._numbers["/5"], links_to(["/7"], [0.0]), 1.0, 1)
    assert graph.urls[graph.frontier(1)[0]] == "/7"  # a relevant page links to it
    for n in range(1, 9):
        graph.record_visit(n, FETCHED)
    assert len(graph.frontier(4)) == 1  # the start page, which this test did not fetch


def test_page_graph_size_is_bounded() -> None:
    graph = PageGraph("/")
    for page in range(50):
        graph.add_links(0, links_to([f"/{page}/{n}" for n in range(1000)], [0.0] * 1000), 0.0, 0)
    assert len(graph) == MAX_PAGES
    assert len(graph.nodes["state"]) == MAX_PAGES


def test_page_graph_converts_to_networkx() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": (RELEVANT, [("/", "x"), ("b", "y")])}) as server:
            env, _ = await make_and_reset(server.url)
            await env.step(0)
            graph = env.graph.to_networkx()
            url = server.url
            assert set(graph.edges) == {(url, f"{url}a"), (url, f"{url}b"), (f"{url}a", url), (f"{url}a", f"{url}b")}
            assert graph.nodes[f"{url}a"]["relevant"]
            assert graph.nodes[f"{url}b"] == {
                "state": "frontier",
                "depth": 1,
                "relevance": 0.0,
                "relevant": False,
                "visit": None,
            }
            assert [graph.nodes[address]["visit"] for address in (url, f"{url}a")] == [0, 1]
            assert env.graph.nodes["state"].tolist() == [FETCHED, FETCHED, FRONTIER]
            await env.close()

    run(check())


def test_export_graph_adds_the_graph_to_the_final_info(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": (RELEVANT, [("b", "y")])}) as server:
            for export in (False, True):
                env, first = await make_and_reset(server.url, budget=2, export_graph=export)
                infos = [first, *[(await env.step(0))[4] for _ in range(2)]]
                assert ["graph" in info for info in infos] == [False, False, export]
                if export:
                    assert len(infos[2]["graph"]) == 3
                    assert infos[2]["graph"].nodes[f"{server.url}b"]["state"] == "failed"
                await env.reset(0)
                assert ("graph" in (await env.step(env.links))[4]) == export  # the stop action
                await env.close()
            monkeypatch.setitem(sys.modules, "networkx", None)
            SiteExplore(server.url, TOPIC)
            with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
                SiteExplore(server.url, TOPIC, export_graph=True)

    run(check())


def test_episode_record_is_written_only_on_request() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("a", "comet"), ("b", "x"), ("c", "x"), ("d", "x")]),
            "/a": (RELEVANT, [("/", "x"), ("b", "x"), ("e", "x")]),
            "/b": 500,
        }
        async with site(pages) as server:
            env, _ = await make_and_reset(server.url, budget=2)

            async def play() -> None:
                await env.reset(0)
                await env.step(0)
                await env.step(offered_paths(env).index("/b"))

            await play()
            assert env.episode_record is None
            env.records_next_episode = True
            await play()
            record = env.episode_record
            assert record is not None
            await play()
            assert env.episode_record is record  # of the first episode that ended
            assert (record["known"], record["visited"], record["found"], record["requests"]) == (6, 3, 1, 2)
            summaries = [[page[name] for name in ("state", "relevant", "parent", "others")] for page in record["pages"]]
            assert summaries == [["fetched", False, -1, 2], ["fetched", True, 0, 1], ["failed", False, 0, 0]]
            assert [page["url"] for page in record["pages"]] == [server.url, f"{server.url}a", f"{server.url}b"]
            assert sorted(record["links"]) == [(0, 1), (0, 2), (1, 0), (1, 2)]
            json.dumps(record)
            await env.close()

    run(check())


# -- observations ------------------------------------------------------------------------------------------------------


def test_observations_match_their_space_and_the_action_mask(server: SiteServer) -> None:
    async def check() -> None:
        env = SiteExplore(server.urls, TOPICS["music"], budget=25)
        rng = np.random.default_rng(0)
        infos = []
        for seed in range(3):
            observation, info = await env.reset(seed)
            terminated = False
            while not terminated:
                assert env.observation_space.contains(observation)
                links, mask = observation["links"], info["action_mask"]
                assert links[:, 0].tolist() == mask[:-1].tolist()
                assert (np.diff(links[: mask[:-1].sum(), 1]) <= 1).all()
                assert (links[mask[:-1] == 0] == 0).all()
                assert observation["graph"][0] == pytest.approx(1 - env.requests / 25)
                observation, _, terminated, _, info = await env.step(rng.choice(np.flatnonzero(mask[:-1])))
                infos.append(info)
        assert isinstance(to_columns(list(enumerate(infos[:20])), 20), dict)  # columns are quick to transfer
        assert observation["page"][:PAGE_WORDS].any()
        assert observation["links"][:, LINK_FACTS:].any()
        await env.close()

    run(check())


def test_episode_is_reproducible_and_seed_selects_the_site(server: SiteServer) -> None:
    async def play(seed: int) -> list[Any]:
        env = SiteExplore(server.urls, TOPICS["music"], budget=12)
        observation, info = await env.reset(seed)
        trace: list[Any] = [env.graph.urls[0]]
        rng = np.random.default_rng(0)
        for _ in range(12):
            trace += [part.tobytes() for part in observation.values()]
            choice = rng.choice(np.flatnonzero(info["action_mask"][:-1]))
            observation, reward, _, _, info = await env.step(choice)
            trace.append(reward)
        await env.close()
        return trace

    assert run(play(4)) == run(play(4))
    assert [run(play(seed))[0] for seed in (0, 1, 2, 3)] == [*server.urls, server.urls[0]]


# -- page cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pages_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URLs of the pages that were parsed because the cache did not have them."""
    urls = []
    read = page_features.read

    async def recording_read(page: Page, topic: Topic) -> PageFeatures | None:
        urls.append(page.url)
        return await read(page, topic)

    monkeypatch.setattr(page_features, "read", recording_read)
    return urls


def test_page_cache_does_not_change_episodes(server: SiteServer, pages_read: list[str]) -> None:
    async def play(**task: Any) -> list[Any]:
        env = SiteExplore(server.urls, TOPICS["sailing"], budget=12, **task)
        trace: list[Any] = []
        for seed in (0, 1, 0, 0):
            rng = np.random.default_rng(seed)
            observation, info = await env.reset(seed)
            for _ in range(12):
                choice = rng.choice(np.flatnonzero(info["action_mask"][:-1]))
                observation, reward, _, _, info = await env.step(choice)
                trace += [reward, *(part.tobytes() for part in observation.values())]
        await env.close()
        return trace

    assert run(play()) == run(play(keep_pages=False))
    assert 0 < len(pages_read) <= 26  # of 52 visited pages: two of the four episodes repeat an earlier one
    assert len(pages_read) == len(set(pages_read))


def test_changed_page_or_policy_invalidates_the_page_cache() -> None:
    async def check() -> None:
        pages: dict[str, Any] = {"/": (OTHER, [("a", "x"), ("private/b", "x")])}
        async with site(pages, "User-agent: *\nDisallow: /private/") as server:
            for _ in range(2):
                env, _ = await make_and_reset(server.url)
                assert offered_paths(env) == ["/a"]
                await env.close()
            env, _ = await make_and_reset(server.url, obey_robots=False)
            assert offered_paths(env) == ["/a", "/private/b"]
            pages["/"] = (OTHER, [("c", "x")])
            await env.reset(0)
            assert offered_paths(env) == ["/c"]
            await env.close()

    run(check())


def test_page_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, pages_read: list[str]) -> None:
    monkeypatch.setattr(page_features, "_CACHE_BYTES", 50_000)
    cache = PageFeatureCache(Topic(TOPIC))

    async def check() -> None:
        for number in range(100):
            page = Page(f"http://127.0.0.1/{number}", 200, body=f'<a href="{number}">x</a>'.encode())
            first = await cache.of(page)
            assert await cache.of(page) is first
        assert await cache.of(Page("http://127.0.0.1/99", 200, body=b"other")) is not first

    run(check())
    assert len(pages_read) == 101
    assert 10 < len(cache._kept) < 25


@pytest.mark.parametrize("links", [5, 60, 400])
def test_page_cache_memory_stays_near_its_limit(monkeypatch: pytest.MonkeyPatch, links: int) -> None:
    monkeypatch.setattr(page_features, "_CACHE_BYTES", 300_000)

    async def filled_cache() -> PageFeatureCache:
        cache, rules = PageFeatureCache(Topic(TOPIC)), object()
        for number in range(9_000 // (links + 20)):  # several times the cache limit
            body = OTHER + "".join(f'<a href="/section/{number}/page-{n}.html">{n}</a>' for n in range(links))
            found = await cache.of(Page(f"http://127.0.0.1:8000/{number}", 200, body=body.encode()))
            assert found is not None
            found.followable(rules, lambda urls: [n > 0 for n, _ in enumerate(urls)])
        return cache

    tracemalloc.start()
    try:
        cache = run(filled_cache())
        gc.collect()
        used_bytes = tracemalloc.get_traced_memory()[0]
        del cache
        gc.collect()
        used_bytes -= tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 150_000 < used_bytes < 360_000


def test_page_urls_are_not_interned() -> None:
    # Some releases of Python 3.12 never free interned strings.
    (url,) = link_features([Link("http://site.test/a page of its own", "", False)], Topic(TOPIC)).urls
    assert sys.intern("".join(list(url))) is not url


def test_followable_links_ignore_another_event_loops_result() -> None:
    mine, theirs = links_to(["/a"], [0.0]), links_to(["/b"], [0.0])

    class Contested(PageFeatures):
        """Another thread's event loop has other rules and overwrites the value right after this one."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, (object(), theirs) if name == "_followed" and value is not None else value)

    page = Contested(0.0, 0, np.zeros(0, np.uint16), np.zeros(PAGE_WORDS, np.float32), mine, True)
    assert page.followable(object(), lambda urls: [True for _ in urls]) is mine


def test_link_features_are_computed_per_link() -> None:
    links = [
        Link("http://site.test/guide/index.html", "Comet and ORBIT", False),
        Link("http://site.test/", "", True),
        Link("http://site.test/12", "orbit orbit the", False),
        Link("http://site.test/x", " ".join(f"word{n}" for n in range(20)), False),
    ]
    features = link_features(links, Topic("comet orbit moon"))
    assert features.match.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert features.nofollow.tolist() == [False, True, False, False]
    assert (features.words > 0).sum(1).tolist() == [3, 0, 2, LINK_WORDS]
    assert features.words[0, 2] == features.words[2, 0] == features.words[2, 1]  # orbit
    assert link_features([], Topic("comet")).urls == []


# -- failing sites -----------------------------------------------------------------------------------------------------


def test_unreachable_site_raises_usage_error() -> None:
    env = SiteExplore("http://127.0.0.1:9/", TOPIC, seconds=1.0, backoff=0.01)
    with pytest.raises(UsageError, match=r"could not be fetched \(connect: .*python -m unidle\.tasks\.web\.site"):
        run(env.reset(0))


def test_site_that_fails_later_shows_in_the_observation() -> None:
    async def check() -> None:
        pages: dict[str, Any] = {"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": 500, "/b": (OTHER, [])}
        async with site(pages) as server:
            env, _ = await make_and_reset(server.url)
            observation, reward, terminated, _, info = await env.step(0)
            assert (info["failed"], reward, terminated) == (True, -env.cost, False)
            assert observation["page"][PAGE_WORDS + 5] == 1
            # With several sites, one may fail on its first visit if another has answered.
            several = SiteExplore([server.url, f"{server.url}a"], TOPIC, fetcher=env._fetcher)
            assert [(await several.reset(number))[1]["failed"] for number in (0, 1)] == [False, True]
            pages["/"] = 500
            observation, info = await env.reset(1)
            assert info["action_mask"].tolist() == [0, 0, 0, 0, 1]
            assert env.observation_space.contains(observation)
            assert (await env.step(4))[2]
            # A new environment, as created after a step timeout, knows that the site has answered before.
            recreated = SiteExplore(server.url, TOPIC, fetcher=env._fetcher)
            assert (await recreated.reset(0))[1]["failed"]
            assert env._fetcher is not None
            assert env._fetcher.outcomes["status"] == 4
            await env.close()

    run(check())


@pytest.mark.parametrize(
    "page",
    [
        lambda: web.Response(body=bytes(range(256)) * 100, content_type="image/png"),
        lambda: web.Response(text=""),
        lambda: web.Response(body=b"\xff\xfe\x00<a href=", content_type="text/html"),
        lambda: web.Response(body=b"x" * 5_000_000, content_type="text/html"),
        lambda: web.Response(text="".join(f'<a href="/{n}">y</a>' for n in range(100_000)), content_type="text/html"),
        lambda: web.Response(text="<ul><li>" * 100_000, content_type="text/html"),
        lambda: web.Response(status=302, headers={"Location": "http://10.0.0.1/"}),
        lambda: web.Response(status=302, headers={"Location": "/strange"}),
    ],
)
def test_malformed_page_does_not_end_the_episode(page: Any) -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("strange", "comet"), ("b", "x")]), "/strange": page}) as server:
            env, _ = await make_and_reset(server.url)
            observation, reward, terminated, _, info = await env.step(0)
            assert env.observation_space.contains(observation)
            assert reward <= env.novelty
            assert not terminated
            assert info["action_mask"][0]
            await env.close()

    run(check())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"site": "example.org"}, "is not the URL of a site"),
        ({"site": "ftp://127.0.0.1/"}, "is not the URL of a site"),
        ({"site": "https://example.org/"}, r"add hosts=\['example.org'\]"),
        ({"site": "http://10.0.0.1/"}, "is not on the list of allowed hosts"),
        ({"site": []}, "at least one site"),
        ({"budget": 0}, "a budget"),
        ({"topic": ""}, "at least one word"),
        ({"rate": 0.0}, "rate must be positive"),
        ({"hosts": ["http://x"]}, "is not a host"),
    ],
)
def test_invalid_task_setting_raises_usage_error(task: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SiteExplore(**{"site": "http://127.0.0.1:8000/", "topic": TOPIC, **task})


def test_listed_site_may_have_any_host() -> None:
    env = SiteExplore("https://example.org/", TOPIC, hosts=["example.org"])
    assert env.policy.hosts == ("example.org",)
    assert SiteExplore("http://[::1]:80/", TOPIC).policy.hosts == ("[::1]:80",)


# -- concurrent episodes -----------------------------------------------------------------------------------------------


def test_concurrent_episodes_share_a_fetcher_and_leak_nothing(server: SiteServer) -> None:
    async def check() -> None:
        envs = [SiteExplore(server.urls, TOPICS["music"], budget=8) for _ in range(48)]

        async def play(env: SiteExplore, seed: int) -> int:
            _, info = await env.reset(seed)
            terminated = False
            while not terminated:
                *_, terminated, _, info = await env.step(0)
            return int(info["found"])

        found = await asyncio.gather(*(play(env, seed) for seed, env in enumerate(envs)))
        assert min(found) > 0
        assert len({id(env._fetcher) for env in envs}) == 1
        fetcher = envs[0]._fetcher
        assert fetcher is not None
        assert fetcher.outcomes["ok"] + fetcher.outcomes["status"] == 48 * 9
        cancelled = [asyncio.create_task(play(env, 0)) for env in envs]
        await asyncio.sleep(0.01)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        assert await play(envs[0], 3) > 0  # playable again after a cancellation
        for env in envs:
            await env.close()
            await env.close()
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) <= 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        run(check())
        gc.collect()


def test_close_leaves_a_passed_in_fetcher_open(server: SiteServer) -> None:
    async def check() -> None:
        fetcher = Fetcher()
        env = SiteExplore(server.urls, TOPIC, fetcher=fetcher)
        await env.reset(0)
        await env.close()
        assert (await fetcher.fetch(server.urls[0])).failure is None
        await fetcher.close()

    run(check())


# -- Gymnasium environment ---------------------------------------------------------------------------------------------


def test_gym_env_passes_gymnasium_check_env(server: SiteServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not having a spec.*|.*render_fps.*")
        env = SiteExploreEnv(site=server.urls, topic=TOPICS["music"], budget=10)
        check_env(env, skip_render_check=True)
        env.close()
        env.close()


def test_gym_env_renders_its_page_and_links_as_text(server: SiteServer) -> None:
    for mode in SiteExploreEnv.metadata["render_modes"]:
        env = SiteExploreEnv(mode, site=server.urls[0], topic=TOPICS["music"], links=3, budget=5)
        env.reset(seed=0)
        env.step(0)
        page, progress, *choices, stop = env.render().splitlines()
        assert page.startswith(server.urls[0].rstrip("/"))
        assert progress.startswith("1 of 5 requests, ")
        assert [line.split()[0] for line in choices] == [str(n) for n in range(len(choices))]
        assert stop == "   3 (stop)"
        env.close()
    assert SiteExploreEnv(site=server.urls, topic=TOPICS["music"]).render() is None


def test_gym_env_matches_the_async_env(server: SiteServer) -> None:
    async def play() -> list[float]:
        env = SiteExplore(server.urls, TOPICS["music"])
        await env.reset(7)
        rewards = [(await env.step(1))[1] for _ in range(6)]
        await env.close()
        return rewards

    gym_env = SiteExploreEnv(site=server.urls, topic=TOPICS["music"])
    gym_env.reset(seed=7)
    assert [gym_env.step(1)[1] for _ in range(6)] == run(play())
    gym_env.close()


def test_gym_env_works_inside_a_running_event_loop(server: SiteServer) -> None:
    async def notebook() -> int:
        gym_env = SiteExploreEnv(site=server.urls, topic=TOPICS["music"])
        gym_env.reset(seed=0)
        info = gym_env.step(0)[4]
        gym_env.close()
        return int(info["requests"])

    assert run(notebook()) == 1


def test_env_spec_contains_the_action_mask(server: SiteServer) -> None:
    maker = env_maker("unidle.tasks.web.gym_env:SiteExploreEnv", {"site": server.urls, "topic": TOPICS["music"]})
    env_spec = probe(maker)
    assert env_spec.obs_layout.mask_width == 17
    with pytest.raises(UsageError, match="does not accept these env_kwargs"):
        env_maker("unidle.tasks.web.gym_env:SiteExploreEnv", {"site": "http://127.0.0.1/", "topic": "x", "no": 1})()


def test_ppo_trains_on_the_gym_env(server: SiteServer, tmp_path: Path) -> None:
    import unidle

    trained = unidle.train(
        "unidle.tasks.web.gym_env:SiteExploreEnv",
        env_kwargs={"site": server.urls, "topic": TOPICS["music"], "budget": 10},
        n_envs=2,
        n_steps=64,
        batch_size=64,
        timesteps=256,
        subproc=False,
        runs_dir=str(tmp_path),
        device="cpu",
    )
    env: gymnasium.Env = SiteExploreEnv(site=server.urls, topic=TOPICS["music"])
    observation, info = env.reset(seed=0)
    assert info["action_mask"][trained.predict(observation, action_mask=info["action_mask"])[0]]
    env.close()
