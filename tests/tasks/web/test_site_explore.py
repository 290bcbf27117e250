"""An episode on a site goes as its rules say, repeats, and ends, whatever the site does; many share one crawler."""

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
from web_servers import answering, run

from unidle.envs.make import env_maker
from unidle.envs.spec import probe
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
from unidle.tasks.web.site.serve import Serving, SiteServer, in_background
from unidle.tasks.web.site.topics import TOPICS
from unidle.tasks.web.site_explore import LINK_FACTS, PAGE_WORDS, SiteExplore
from unidle.tasks.web.text_features import Topic

TOPIC = "comet orbit"
# Six words of a hundred on the topic are enough for all of it, three for half.
RELEVANT, OTHER = "comet " * 6 + "x " * 94, "y " * 100


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(Serving(sites=3, pages=200, links=20, page_bytes=4000)) as running:
        yield running


def site(pages: dict[str, Any], robots: str | None = None) -> Any:
    """A server of a few pages, each (text, [(href, link text), ..]), a status, or a whole answer."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        page = pages.get(request.path, 404)
        if isinstance(page, int):
            return web.Response(status=page)
        if callable(page):
            return page()
        text, links = page
        body = text + "".join(f'<a href="{href}">{words}</a>' for href, words in links)
        return web.Response(text=body, content_type="text/html")

    return answering(answer, robots)


def shown(env: SiteExplore) -> list[str]:
    """Paths of the links on offer."""
    return ["/" + env.graph.urls[number].split("/", 3)[3] for number in env.offered]


async def explorer(url: str, **task: Any) -> tuple[SiteExplore, dict[str, Any]]:
    env = SiteExplore(url, TOPIC, **{"links": 4, "seconds": 1.0, "backoff": 0.01, **task})
    _, info = await env.reset(0)
    return env, info


# -- the rules ---------------------------------------------------------------------------------------------------------


def test_a_page_that_counts_is_rewarded_once_and_every_request_costs() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("a", "comet orbit"), ("b", "comet"), ("c", "x")]),
            "/a": (RELEVANT, [("/", "top"), ("c", "x"), ("d", "x")]),
            "/b": (OTHER + "z", []),
            "/c": (RELEVANT, [("/", "top"), ("c", "x"), ("d", "x")]),  # the very bytes of /a
        }
        async with site(pages) as server:
            env, info = await explorer(server.url, budget=10, cost=0.05, novelty=0.1)
            assert shown(env) == ["/a", "/b", "/c"]
            assert info["action_mask"].tolist() == [1, 1, 1, 0, 1]
            _, reward, terminated, truncated, info = await env.step(0)
            assert reward == pytest.approx(1 - 0.05 + 0.1 / 3)  # of comet, x and top, one word is new
            assert (info["found"], info["requests"], info["relevance"]) == (1, 1, pytest.approx(1.0, abs=0.1))
            assert not terminated
            assert not truncated
            assert sorted(shown(env)) == ["/b", "/c", "/d"]
            _, reward, *_, info = await env.step(shown(env).index("/b"))
            assert reward == pytest.approx(-0.05 + 0.1 / 2)  # of y and z
            _, reward, *_, info = await env.step(shown(env).index("/c"))
            assert reward == pytest.approx(-0.05)  # relevant, but not a new page
            assert info["found"] == 1
            _, reward, terminated, _, info = await env.step(0)
            assert (reward, info["failed"]) == (pytest.approx(-0.05), True)  # /d is not there
            assert terminated  # and nothing is left
            assert info["action_mask"].tolist() == [0, 0, 0, 0, 1]
            states = [env.graph.nodes["state"][env.graph._numbers[f"{server.url}{name}"]] for name in ("", *"abcd")]
            assert states == [FETCHED, FETCHED, FETCHED, DUPLICATE, FAILED]
            await env.close()

    run(check())


def test_it_ends_when_told_to_stop_or_out_of_budget() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [(str(n), "x") for n in range(9)])}) as server:
            env, _ = await explorer(server.url, budget=3)
            outcome = await env.step(4)
            assert outcome[1:4] == (0.0, True, False)
            assert len(server.times) == 1
            await env.reset(0)
            ends = [(await env.step(0))[2] for _ in range(3)]
            assert ends == [False, False, True]
            await env.close()

    run(check())


def test_what_is_not_on_offer_wastes_a_request() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x")])}) as server:
            env, _ = await explorer(server.url, budget=3)
            _, reward, terminated, _, info = await env.step(2)
            assert (reward, terminated, info["requests"]) == (-env.cost, False, 1)
            assert len(server.times) == 1
            await env.close()

    run(check())


def test_loops_duplicates_and_other_spellings_are_one_page() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("/a", "x"), ("/a#part", "x"), ("./b/../a", "x"), ("/", "self"), ("/go", "x")]),
            "/a": (OTHER + "a", [("/", "back"), ("/a", "self")]),
            "/go": lambda: web.Response(status=302, headers={"Location": "/a"}),
        }
        async with site(pages) as server:
            env, _ = await explorer(server.url)
            assert shown(env) == ["/a", "/go"]
            await env.step(1)  # redirected to /a, which need not be followed any more
            assert shown(env) == []
            await env.reset(0)
            await env.step(0)
            _, reward, *_ = await env.step(shown(env).index("/go"))
            assert reward == pytest.approx(-env.cost)  # it was seen already
            await env.close()

    run(check())


def test_only_links_that_may_be_followed_are_on_offer() -> None:
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
            env, _ = await explorer(server.url, links=8)
            assert shown(env) == ["/a", "/b"]
            await env.close()

    run(check())


def mentions(urls: list[str], match: list[float], nofollow: list[bool] | None = None) -> LinkFeatures:
    count = len(urls)
    words = np.zeros((count, LINK_WORDS), np.uint8)
    return LinkFeatures(urls, np.array(match, np.float32), np.array(nofollow or [False] * count), words)


def test_the_best_links_come_first_and_of_equal_ones_the_oldest() -> None:
    graph = PageGraph("/")
    urls = [f"/{n}" for n in range(8)]
    graph.add_links(0, mentions(urls, [0.5 * (n in (3, 5)) for n in range(8)], [n == 3 for n in range(8)]), 0.0, 0)
    assert [graph.urls[n] for n in graph.frontier(4)] == ["/5", "/3", "/0", "/1"]
    graph.add_links(graph._numbers["/5"], mentions(["/7"], [0.0]), 1.0, 1)
    assert graph.urls[graph.frontier(1)[0]] == "/7"  # a page that is relevant links to it
    for n in range(1, 9):
        graph.mark(n, FETCHED)
    assert len(graph.frontier(4)) == 1  # the start, which this test did not fetch


def test_a_site_that_invents_addresses_does_not_fill_the_memory() -> None:
    graph = PageGraph("/")
    for page in range(50):
        graph.add_links(0, mentions([f"/{page}/{n}" for n in range(1000)], [0.0] * 1000), 0.0, 0)
    assert len(graph) == MAX_PAGES
    assert len(graph.nodes["state"]) == MAX_PAGES


def test_the_graph_can_be_had_for_networkx() -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": (RELEVANT, [("/", "x"), ("b", "y")])}) as server:
            env, _ = await explorer(server.url)
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


def test_the_graph_is_in_info_when_an_episode_ends_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": (RELEVANT, [("b", "y")])}) as server:
            for asked in (False, True):
                env, first = await explorer(server.url, budget=2, export_graph=asked)
                infos = [first, *[(await env.step(0))[4] for _ in range(2)]]
                assert ["graph" in info for info in infos] == [False, False, asked]
                if asked:
                    assert len(infos[2]["graph"]) == 3
                    assert infos[2]["graph"].nodes[f"{server.url}b"]["state"] == "failed"
                await env.reset(0)
                assert ("graph" in (await env.step(env.links))[4]) == asked  # it stops
                await env.close()
            monkeypatch.setitem(sys.modules, "networkx", None)
            SiteExplore(server.url, TOPIC)
            with pytest.raises(UsageError, match=r"pip install 'unidle\[web\]'"):
                SiteExplore(server.url, TOPIC, export_graph=True)

    run(check())


def test_an_episode_is_told_of_once_it_was_asked_to_be() -> None:
    async def check() -> None:
        pages = {
            "/": (OTHER, [("a", "comet"), ("b", "x"), ("c", "x"), ("d", "x")]),
            "/a": (RELEVANT, [("/", "x"), ("b", "x"), ("e", "x")]),
            "/b": 500,
        }
        async with site(pages) as server:
            env, _ = await explorer(server.url, budget=2)

            async def play() -> None:
                await env.reset(0)
                await env.step(0)
                await env.step(shown(env).index("/b"))

            await play()
            assert env.episode_record is None
            env.records_next_episode = True
            await play()
            record = env.episode_record
            assert record is not None
            await play()
            assert env.episode_record is record  # the first that ended
            assert (record["known"], record["visited"], record["found"], record["requests"]) == (6, 3, 1, 2)
            told = [[page[name] for name in ("state", "relevant", "parent", "others")] for page in record["pages"]]
            assert told == [["fetched", False, -1, 2], ["fetched", True, 0, 1], ["failed", False, 0, 0]]
            assert [page["url"] for page in record["pages"]] == [server.url, f"{server.url}a", f"{server.url}b"]
            assert sorted(record["links"]) == [(0, 1), (0, 2), (1, 0), (1, 2)]
            json.dumps(record)
            await env.close()

    run(check())


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_observations_lie_in_their_space_and_tell_what_they_should(server: SiteServer) -> None:
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
        assert isinstance(to_columns(list(enumerate(infos[:20])), 20), dict)  # so they travel quickly
        assert observation["page"][:PAGE_WORDS].any()
        assert observation["links"][:, LINK_FACTS:].any()
        await env.close()

    run(check())


def test_an_episode_repeats_and_seeds_choose_the_site(server: SiteServer) -> None:
    async def play(seed: int) -> list[Any]:
        env = SiteExplore(server.urls, TOPICS["music"], budget=12)
        observation, info = await env.reset(seed)
        told: list[Any] = [env.graph.urls[0]]
        rng = np.random.default_rng(0)
        for _ in range(12):
            told += [part.tobytes() for part in observation.values()]
            choice = rng.choice(np.flatnonzero(info["action_mask"][:-1]))
            observation, reward, _, _, info = await env.step(choice)
            told.append(reward)
        await env.close()
        return told

    assert run(play(4)) == run(play(4))
    assert [run(play(seed))[0] for seed in (0, 1, 2, 3)] == [*server.urls, server.urls[0]]


# -- pages that were read before ---------------------------------------------------------------------------------------


@pytest.fixture
def pages_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of what was read because it was not kept."""
    addresses = []
    read = page_features.read

    async def noted(page: Page, topic: Topic) -> PageFeatures | None:
        addresses.append(page.url)
        return await read(page, topic)

    monkeypatch.setattr(page_features, "read", noted)
    return addresses


def test_pages_that_are_kept_change_nothing_but_the_time_it_takes(server: SiteServer, pages_read: list[str]) -> None:
    async def play(**task: Any) -> list[Any]:
        env = SiteExplore(server.urls, TOPICS["sailing"], budget=12, **task)
        told: list[Any] = []
        for seed in (0, 1, 0, 0):
            rng = np.random.default_rng(seed)
            observation, info = await env.reset(seed)
            for _ in range(12):
                choice = rng.choice(np.flatnonzero(info["action_mask"][:-1]))
                observation, reward, _, _, info = await env.step(choice)
                told += [reward, *(part.tobytes() for part in observation.values())]
        await env.close()
        return told

    assert run(play()) == run(play(keep_pages=False))
    assert 0 < len(pages_read) <= 26  # of 52 that were visited: two of four episodes are as one before
    assert len(pages_read) == len(set(pages_read))


def test_a_page_that_changes_is_read_anew_and_so_are_its_rules() -> None:
    async def check() -> None:
        pages: dict[str, Any] = {"/": (OTHER, [("a", "x"), ("private/b", "x")])}
        async with site(pages, "User-agent: *\nDisallow: /private/") as server:
            for _ in range(2):
                env, _ = await explorer(server.url)
                assert shown(env) == ["/a"]
                await env.close()
            env, _ = await explorer(server.url, obey_robots=False)
            assert shown(env) == ["/a", "/private/b"]
            pages["/"] = (OTHER, [("c", "x")])
            await env.reset(0)
            assert shown(env) == ["/c"]
            await env.close()

    run(check())


def test_what_is_kept_of_pages_is_bounded(monkeypatch: pytest.MonkeyPatch, pages_read: list[str]) -> None:
    monkeypatch.setattr(page_features, "_KEPT_BYTES", 50_000)
    kept = PageFeatureCache(Topic(TOPIC))

    async def check() -> None:
        for number in range(100):
            page = Page(f"http://127.0.0.1/{number}", 200, body=f'<a href="{number}">x</a>'.encode())
            first = await kept.of(page)
            assert await kept.of(page) is first
        assert await kept.of(Page("http://127.0.0.1/99", 200, body=b"other")) is not first

    run(check())
    assert len(pages_read) == 101
    assert 10 < len(kept._kept) < 25


@pytest.mark.parametrize("links", [5, 60, 400])
def test_what_is_kept_of_pages_takes_the_memory_that_it_may(monkeypatch: pytest.MonkeyPatch, links: int) -> None:
    monkeypatch.setattr(page_features, "_KEPT_BYTES", 300_000)

    async def filled() -> PageFeatureCache:
        kept, rules = PageFeatureCache(Topic(TOPIC)), object()
        for number in range(9_000 // (links + 20)):  # several times what may be kept
            body = OTHER + "".join(f'<a href="/section/{number}/page-{n}.html">{n}</a>' for n in range(links))
            found = await kept.of(Page(f"http://127.0.0.1:8000/{number}", 200, body=body.encode()))
            assert found is not None
            found.followable(rules, lambda urls: [n > 0 for n, _ in enumerate(urls)])
        return kept

    tracemalloc.start()
    try:
        kept = run(filled())
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        del kept
        gc.collect()
        taken -= tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 150_000 < taken < 360_000


def test_addresses_are_let_go_with_the_pages_that_they_stand_on() -> None:
    # Some releases of Python 3.12 never let go of a string that was interned.
    (url,) = link_features([Link("http://site.test/a page of its own", "", False)], Topic(TOPIC)).urls
    assert sys.intern("".join(list(url))) is not url


def test_what_another_event_loop_may_follow_is_not_handed_over() -> None:
    mine, theirs = mentions(["/a"], [0.0]), mentions(["/b"], [0.0])

    class Contested(PageFeatures):
        """Another thread's event loop has other rules, and writes right after this one."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, (object(), theirs) if name == "_followed" and value is not None else value)

    page = Contested(0.0, 0, np.zeros(0, np.uint16), np.zeros(PAGE_WORDS, np.float32), mine, True)
    assert page.followable(object(), lambda urls: [True for _ in urls]) is mine


def test_what_links_say_is_told_one_by_one() -> None:
    links = [
        Link("http://site.test/guide/index.html", "Comet and ORBIT", False),
        Link("http://site.test/", "", True),
        Link("http://site.test/12", "orbit orbit the", False),
        Link("http://site.test/x", " ".join(f"word{n}" for n in range(20)), False),
    ]
    told = link_features(links, Topic("comet orbit moon"))
    assert told.match.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert told.nofollow.tolist() == [False, True, False, False]
    assert (told.words > 0).sum(1).tolist() == [3, 0, 2, LINK_WORDS]
    assert told.words[0, 2] == told.words[2, 0] == told.words[2, 1]  # orbit
    assert link_features([], Topic("comet")).urls == []


# -- sites that fail ---------------------------------------------------------------------------------------------------


def test_a_site_that_does_not_answer_at_all_is_the_users_mistake() -> None:
    env = SiteExplore("http://127.0.0.1:9/", TOPIC, seconds=1.0, backoff=0.01)
    with pytest.raises(UsageError, match=r"could not be fetched \(connect: .*python -m unidle\.tasks\.web\.site"):
        run(env.reset(0))


def test_a_site_that_fails_later_is_something_to_be_seen() -> None:
    async def check() -> None:
        pages: dict[str, Any] = {"/": (OTHER, [("a", "x"), ("b", "x")]), "/a": 500, "/b": (OTHER, [])}
        async with site(pages) as server:
            env, _ = await explorer(server.url)
            observation, reward, terminated, _, info = await env.step(0)
            assert (info["failed"], reward, terminated) == (True, -env.cost, False)
            assert observation["page"][PAGE_WORDS + 5] == 1
            # Of several sites one may fail at its first visit, once another has answered.
            several = SiteExplore([server.url, f"{server.url}a"], TOPIC, fetcher=env._fetcher)
            assert [(await several.reset(number))[1]["failed"] for number in (0, 1)] == [False, True]
            pages["/"] = 500
            observation, info = await env.reset(1)
            assert info["action_mask"].tolist() == [0, 0, 0, 0, 1]
            assert env.observation_space.contains(observation)
            assert (await env.step(4))[2]
            # One that is made anew, as after a step that took too long, knows the address as well.
            anew = SiteExplore(server.url, TOPIC, fetcher=env._fetcher)
            assert (await anew.reset(0))[1]["failed"]
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
def test_strange_pages_are_seen_and_passed_by(page: Any) -> None:
    async def check() -> None:
        async with site({"/": (OTHER, [("strange", "comet"), ("b", "x")]), "/strange": page}) as server:
            env, _ = await explorer(server.url)
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
def test_a_task_that_cannot_be_is_said_before_anything_starts(task: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SiteExplore(**{"site": "http://127.0.0.1:8000/", "topic": TOPIC, **task})


def test_a_site_that_is_listed_may_be_anywhere() -> None:
    env = SiteExplore("https://example.org/", TOPIC, hosts=["example.org"])
    assert env.policy.hosts == ("example.org",)
    assert SiteExplore("http://[::1]:80/", TOPIC).policy.hosts == ("[::1]:80",)


# -- many at a time ----------------------------------------------------------------------------------------------------


def test_many_episodes_share_one_crawler_and_leave_nothing_behind(server: SiteServer) -> None:
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
        assert await play(envs[0], 3) > 0  # after that, it can begin again
        for env in envs:
            await env.close()
            await env.close()
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) <= 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        run(check())
        gc.collect()


def test_a_crawler_of_ones_own_is_not_closed(server: SiteServer) -> None:
    async def check() -> None:
        fetcher = Fetcher()
        env = SiteExplore(server.urls, TOPIC, fetcher=fetcher)
        await env.reset(0)
        await env.close()
        assert (await fetcher.fetch(server.urls[0])).failure is None
        await fetcher.close()

    run(check())


# -- for Gymnasium -----------------------------------------------------------------------------------------------------


def test_the_twin_is_a_gymnasium_environment(server: SiteServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not having a spec.*|.*No render.*|.*render modes.*")
        env = SiteExploreEnv(site=server.urls, topic=TOPICS["music"], budget=10)
        check_env(env, skip_render_check=True)
        env.close()
        env.close()


def test_the_twin_plays_what_the_coroutine_plays(server: SiteServer) -> None:
    async def play() -> list[float]:
        env = SiteExplore(server.urls, TOPICS["music"])
        await env.reset(7)
        rewards = [(await env.step(1))[1] for _ in range(6)]
        await env.close()
        return rewards

    twin = SiteExploreEnv(site=server.urls, topic=TOPICS["music"])
    twin.reset(seed=7)
    assert [twin.step(1)[1] for _ in range(6)] == run(play())
    twin.close()


def test_the_twin_runs_where_another_loop_is_running(server: SiteServer) -> None:
    async def notebook() -> int:
        twin = SiteExploreEnv(site=server.urls, topic=TOPICS["music"])
        twin.reset(seed=0)
        info = twin.step(0)[4]
        twin.close()
        return int(info["requests"])

    assert run(notebook()) == 1


def test_the_trainer_sees_its_masks(server: SiteServer) -> None:
    maker = env_maker("unidle.tasks.web.gym_env:SiteExploreEnv", {"site": server.urls, "topic": TOPICS["music"]})
    env_spec = probe(maker)
    assert env_spec.obs_layout.mask_width == 17
    with pytest.raises(UsageError, match="does not accept these env_kwargs"):
        env_maker("unidle.tasks.web.gym_env:SiteExploreEnv", {"site": "http://127.0.0.1/", "topic": "x", "no": 1})()


def test_it_trains(server: SiteServer, tmp_path: Path) -> None:
    import unidle

    run_ = unidle.train(
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
    assert info["action_mask"][run_.predict(observation, action_mask=info["action_mask"])]
    env.close()
