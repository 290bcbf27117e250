"""Episodes on a website: unidle's event loop against SB3's 32 processes with requests and BeautifulSoup.

Both play the same episodes of `SiteExplore` on a generated site (30 KB pages, about 50 links each) that another process
serves on this machine. Links are chosen at random, without learning. The baseline's environment is the same class
except for fetching (`requests`, one session per environment) and parsing (BeautifulSoup on lxml). Each side is a
separate process. Memory is what the pool adds: PSS of the process and its children while it runs, minus that of the
process before the pool was created, with torch imported. SB3's processes are forked, so earlier imports do not count as
theirs. CPU time is that of all processes of a side; that of the server, which shares the cores, is listed separately.

unidle caches the features of a page for all episodes and parses the same bytes only once (`keep_pages`); here all pages
are soon cached. "no cache" parses every page at every visit, as the baseline does.

    python benchmarks/io_bound.py              # ratio, memory, scaling curve and CPU shares: some minutes
    python benchmarks/io_bound.py --brief      # the ratio only
    python benchmarks/io_bound.py --seconds 1  # everything, but too short for reliable results
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import resource
import subprocess
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gymnasium
import numpy as np
from machine import provenance, save

TOPIC = "comet orbit telescope galaxy nebula planet"
LATENCY, SB3_PROCESSES, EPISODES = 0.05, 32, 256
CURVE_EPISODES, CURVE_LATENCIES = (32, 128, 512, 2048), (0.0, 0.05, 0.5)
PAGES, LINKS, PAGE_BYTES = 1000, 50, 30_000


# -- the site ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve_site(latency: float) -> Iterator[tuple[str, int]]:
    """Serve a site from another process; yield its URL and the process ID once all pages are generated."""
    command = [sys.executable, "-m", "unidle.tasks.web.site", "--latency", str(latency), "--pages", str(PAGES)]
    command += ["--links", str(LINKS), "--page-bytes", str(PAGE_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            asyncio.run(_fetch_all_pages(url))
            yield url, server.pid
        finally:
            server.terminate()


async def _fetch_all_pages(url: str) -> None:
    import aiohttp

    from unidle.tasks.web.site.generate import Layout, Site

    limit = asyncio.Semaphore(64)
    async with aiohttp.ClientSession() as session:

        async def fetch(path: str) -> None:
            async with limit, session.get(url + path) as response:
                await response.read()

        await asyncio.gather(*map(fetch, Site.of(0, Layout(PAGES, LINKS, PAGE_BYTES)).paths))


# -- memory and CPU time of a process and its children -----------------------------------------------------------------


def process_tree() -> list[Any]:
    """This process and its children."""
    import psutil

    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def pss() -> float:
    """Return the memory of all these processes (PSS), in MiB."""
    return sum(process.memory_full_info().pss for process in process_tree()) / 2**20


def cpu_seconds() -> float:
    """Return the CPU time of all these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in process_tree())


def measure(step: Callable[[], int], seconds: float, before: float, server: int) -> dict[str, float]:
    """Call `step`, which returns the number of steps it took, for `seconds` after warm-up; return the measurements."""
    import psutil

    def served_seconds() -> float:
        return sum(psutil.Process(server).cpu_times()[:2])

    until = time.perf_counter() + seconds / 3
    while time.perf_counter() < until:
        step()
    steps, cpu, serving, began = 0, cpu_seconds(), served_seconds(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += step()
    wall = time.perf_counter() - began
    return {
        "steps_per_second": steps / wall,
        "cpu_ms_per_step": 1000 * (cpu_seconds() - cpu) / max(1, steps),
        "server_ms_per_step": 1000 * (served_seconds() - serving) / max(1, steps),
        "added_mib": pss() - before,
        "load": os.getloadavg()[0],
    }


def random_links(masks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random candidate link for each environment [N]; stop if there are none."""
    chances = rng.random(masks.shape) * masks
    chances[:, -1] *= 1e-9
    return chances.argmax(1)


# -- the two sides -----------------------------------------------------------------------------------------------------


def measure_unidle(
    url: str, server: int, seconds: float, episodes: int, loops: int, keep_pages: bool
) -> dict[str, float]:
    """Measure unidle: one event loop in this process (`loops` 0), or one in each of `loops` worker processes."""
    import torch  # noqa: F401

    before = pss()
    envs = _pool(url, episodes, loops, keep_pages)
    masks, rng = envs.env_spec.obs_layout.mask_view(envs.block.obs), np.random.default_rng(0)
    at_least = max(1, episodes // 32)

    def act(slices: list[int]) -> None:
        envs.block.actions[slices, 0] = random_links(masks[slices], rng)
        envs.send(slices)

    def step() -> int:
        done: list[int] = envs.recv(at_least, 0.01)
        if done:
            act(done)
        return len(done)

    try:
        envs.start(np.zeros(episodes, np.int64))
        act(list(range(episodes)))
        return {**measure(step, seconds, before, server), "faults": len(envs.faults)}
    finally:
        envs.close()


def _pool(url: str, episodes: int, loops: int, keep_pages: bool) -> Any:
    from unidle.config import Engine
    from unidle.engine.build import make_envs
    from unidle.envs.make import env_maker
    from unidle.envs.probe import probe

    task = {"site": url, "topic": TOPIC, "keep_pages": keep_pages, "connections": max(512, episodes)}
    maker = env_maker("unidle/SiteExplore-v0", task)
    return make_envs(maker, probe(maker), episodes, 0, loops, Engine(workers=loops or None))


class RequestsFetcher:
    """The Fetcher interface that `SiteExplore` needs, with blocking `requests` calls."""

    def __init__(self) -> None:
        import requests

        from unidle.tasks.web.fetch_policy import FetchPolicy

        self.policy = FetchPolicy()
        self._session = requests.Session()
        self._session.headers["User-Agent"] = self.policy.user_agent
        self._robots: dict[str, Any] = {}
        self.rules_version = object()

    async def fetch(self, url: str) -> Any:
        from unidle.tasks.web.fetch_policy import Page

        answer = self._session.get(url, timeout=10)
        kind, _, rest = answer.headers.get("Content-Type", "").partition(";")
        failure = None if answer.ok else "status"
        charset = rest.partition("charset=")[2]
        return Page(answer.url, answer.status_code, failure, "", answer.content if answer.ok else b"", kind, charset)  # type: ignore[arg-type]

    def may_follow(self, urls: Iterator[str]) -> list[bool]:
        return [self._may(urlsplit(url)) for url in urls]

    def _may(self, url: Any) -> bool:
        from unidle.tasks.web.robots import Robots

        if url.hostname != "127.0.0.1":
            return False
        if url.netloc not in self._robots:
            text = self._session.get(f"http://{url.netloc}/robots.txt", timeout=10).text
            self._robots[url.netloc] = Robots.parse(text, "unidle")
        return bool(self._robots[url.netloc].allows(url.path))


async def read_with_soup(body: bytes, url: str, content_type: str = "text/html", charset: str = "") -> Any:
    """Replacement of `unidle.tasks.web.page.read` that uses BeautifulSoup."""
    from bs4 import BeautifulSoup

    from unidle.tasks.web.links import LinkBase
    from unidle.tasks.web.page import Content, Link

    if content_type != "text/html":
        return Content()
    soup = BeautifulSoup(body, "lxml", from_encoding=charset or None)
    for invisible in soup(["script", "style", "noscript", "template"]):
        invisible.decompose()
    base, links = LinkBase(url), {}
    for anchor in soup.find_all(["a", "area"], href=True):
        target = base.absolute(str(anchor["href"]))
        if target is not None and target not in links:
            text = " ".join(anchor.get_text(" ").split())
            links[target] = Link(target, text, "nofollow" in (anchor.get("rel") or ()))
    text = soup.body.get_text(" ") if soup.body else ""
    return Content(text, list(links.values()), is_html=True)


class BaselineEnv(gymnasium.Env):
    """`SiteExplore` as a blocking environment for worker processes, with BeautifulSoup or with unidle's parser."""

    def __init__(self, url: str, soup: bool = True) -> None:
        from unidle.tasks.web import page
        from unidle.tasks.web.site_explore import SiteExplore

        if soup:
            page.read = read_with_soup  # in this process only
        self._explorer = SiteExplore(url, TOPIC, keep_pages=False, fetcher=RequestsFetcher())  # type: ignore[arg-type]
        self.observation_space, self.action_space = self._explorer.observation_space, self._explorer.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return _run_coroutine(self._explorer.reset(seed or 0))

    def step(self, action: Any) -> Any:
        return _run_coroutine(self._explorer.step(action))


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise AssertionError("the coroutine suspended")


def measure_sb3(url: str, server: int, seconds: float, processes: int) -> dict[str, float]:
    """Measure SB3's SubprocVecEnv: one process per environment, in lockstep."""
    import torch  # noqa: F401
    from stable_baselines3.common.vec_env import SubprocVecEnv

    before = pss()
    envs = SubprocVecEnv([lambda: BaselineEnv(url)] * processes, start_method="fork")
    rng = np.random.default_rng(0)
    try:
        envs.reset()
        masks = np.stack([info["action_mask"] for info in envs.reset_infos])

        def step() -> int:
            _, _, done, infos = envs.step(random_links(masks, rng))
            for index, info in enumerate(infos):
                masks[index] = (envs.reset_infos[index] if done[index] else info)["action_mask"]
            return processes

        return measure(step, seconds, before, server)
    finally:
        envs.close()


# -- where the time of a step goes -------------------------------------------------------------------------------------


def measure_shares(url: str, seconds: float, episodes: int, keep_pages: bool) -> dict[str, float]:
    """Return the CPU milliseconds per step by activity; the rest (`network`) is the HTTP client and the event loop."""
    from unidle.envs.pool.slots import Slots
    from unidle.tasks.web import page, site_explore
    from unidle.tasks.web import page_features as features
    from unidle.tasks.web.page_graph import PageGraph
    from unidle.tasks.web.site_explore import SiteExplore

    spent: dict[str, float] = defaultdict(float)
    for owner, method, name in (
        (page, "parse", "parse"),
        (features, "link_features", "links"),
        (features.PageFeatureCache, "of", "words"),  # includes the two above
        (site_explore, "read", "words"),  # the same without the cache
        (features.PageFeatures, "followable", "robots"),
        (SiteExplore, "_observe", "observe"),
        (SiteExplore, "_set_page_features", "observe"),
        (PageGraph, "add_links", "graph"),
        (Slots, "step", "block"),
    ):
        setattr(owner, method, _timed(getattr(owner, method), name, spent))
    envs = _pool(url, episodes, 0, keep_pages)
    masks, rng, steps = envs.env_spec.obs_layout.mask_view(envs.block.obs), np.random.default_rng(0), 0
    try:
        envs.start(np.zeros(episodes, np.int64))
        slices = list(range(episodes))
        spent.clear()
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            envs.block.actions[slices, 0] = random_links(masks[slices], rng)
            envs.send(slices)
            slices = envs.recv(max(1, episodes // 32), 0.01)
            steps += len(slices)
        total, parts = time.process_time() - cpu, spent.copy()  # the loop is still running
    finally:
        envs.close()
    parts["words"] -= parts["parse"] + parts["links"]
    parts["network"] = total - sum(parts.values())
    return {**{f"{name}_ms": 1000 * value / steps for name, value in parts.items()}, "whole_ms": 1000 * total / steps}


def _timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """Add the CPU time of each call to `spent`; for a coroutine, without the time while it is suspended."""

    def timed(*arguments: Any, **settings: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*arguments, **settings)
        finally:
            spent[name] += time.thread_time() - began

    @types.coroutine
    def timed_turns(*arguments: Any, **settings: Any) -> Generator[Any, Any, Any]:
        turn = _timed(call(*arguments, **settings).__await__().__next__, name, spent)
        while True:
            try:
                waits_for = turn()
            except StopIteration as over:
                return over.value
            yield waits_for

    return timed_turns if inspect.iscoroutinefunction(call) else timed


# ----------------------------------------------------------------------------------------------------------------------


def run_side(
    kind: str, site: tuple[str, int], seconds: float, episodes: int, loops: int = 0, no_cache: bool = False
) -> dict[str, float]:
    """Run one measurement in a separate process."""
    command = [sys.executable, __file__, "--side", kind, "--url", site[0], "--server", str(site[1])]
    command += ["--seconds", str(seconds), "--episodes", str(episodes), "--loops", str(loops)]
    command += ["--no-cache"] * no_cache
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    words = ", ".join(f"{name} {value:,.2f}" for name, value in row.items())
    print(f"{kind} episodes={episodes} loops={loops} no_cache={no_cache}: {words}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure everything and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="the ratio only")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=["unidle", "sb3", "shares"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, default=os.getpid(), help=argparse.SUPPRESS)  # process ID of the server
    parser.add_argument("--episodes", type=int, default=EPISODES, help=argparse.SUPPRESS)
    parser.add_argument("--loops", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--no-cache", action="store_true", help=argparse.SUPPRESS)  # without the page cache
    arguments = parser.parse_args()
    keep = not arguments.no_cache
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # up to 2,048 concurrent connections
    url, server, seconds, episodes = arguments.url, arguments.server, arguments.seconds, arguments.episodes
    if arguments.side == "unidle":
        print(json.dumps(measure_unidle(url, server, seconds, episodes, arguments.loops, keep)))
    elif arguments.side == "sb3":
        print(json.dumps(measure_sb3(url, server, seconds, episodes)))
    elif arguments.side == "shares":
        print(json.dumps(measure_shares(url, seconds, episodes, keep)))
    else:
        result = measure_all(seconds, arguments.brief)
        save("io_bound", result, arguments.out)
        print_table(result)


def measure_all(seconds: float, brief: bool) -> dict[str, Any]:
    """Measure all sides, then again in reverse order; then the CPU breakdown and the scaling curve."""
    packages = ("stable-baselines3", "aiohttp", "selectolax", "requests", "beautifulsoup4", "lxml")
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {"machine": provenance(*packages), "latency": LATENCY, "page_bytes": PAGE_BYTES}
    sides: dict[str, dict[str, Any]] = {
        "sb3": {"kind": "sb3", "episodes": SB3_PROCESSES},
        "one loop": {"kind": "unidle", "episodes": EPISODES},
        "a loop per core": {"kind": "unidle", "episodes": EPISODES, "loops": cores},
        "one loop, no cache": {"kind": "unidle", "episodes": EPISODES, "no_cache": True},
        "a loop per core, no cache": {"kind": "unidle", "episodes": EPISODES, "loops": cores, "no_cache": True},
    }
    with serve_site(LATENCY) as site:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for name in (*sides, *reversed(sides)):
            runs[name].append(run_side(site=site, seconds=seconds, **sides[name]))
        result["sides"] = {
            name: {"runs": row, **{key: float(np.mean([run[key] for run in row])) for key in row[0]}}
            for name, row in runs.items()
        }
        if not brief:
            result["shares"] = {
                name: run_side("shares", site, seconds, EPISODES, no_cache=no_cache)
                for name, no_cache in (("kept pages", False), ("no cache", True))
            }
    if not brief:
        result["curve"] = [
            {"latency": latency, "episodes": episodes, **row}
            for latency in CURVE_LATENCIES
            for episodes, row in curve(latency, seconds / 2, cores)
        ]
    return result


def curve(latency: float, seconds: float, cores: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield numbers of concurrent episodes and their measurements, with one loop per core."""
    with serve_site(latency) as site:
        for episodes in CURVE_EPISODES:
            yield episodes, run_side("unidle", site, seconds, episodes, cores)


def print_table(result: dict[str, Any]) -> None:
    """Print every side relative to the baseline."""
    baseline = result["sides"]["sb3"]
    head = ("steps/s", "× SB3", "CPU ms", "server ms", "added MiB", "of SB3", "load")
    print(f"{'':>30}" + "".join(f"{name:>11}" for name in head))
    for name, row in result["sides"].items():
        ratio, memory = row["steps_per_second"] / baseline["steps_per_second"], row["added_mib"] / baseline["added_mib"]
        print(
            f"{name:>30}{row['steps_per_second']:>11,.0f}{ratio:>11.1f}{row['cpu_ms_per_step']:>11.2f}"
            f"{row['server_ms_per_step']:>11.2f}{row['added_mib']:>11,.0f}{memory:>11.2f}{row['load']:>11.1f}"
        )
    for name, shares in result.get("shares", {}).items():
        print(f"CPU ms per step, {name}: " + ", ".join(f"{part[:-3]} {ms:.2f}" for part, ms in shares.items()))
    if "curve" in result:
        print(f"{'latency':>12}{'episodes':>12}{'steps/s':>12}{'CPU ms':>12}{'added MiB':>12}")
        for row in result["curve"]:
            print(
                f"{1000 * row['latency']:>9.0f} ms{row['episodes']:>12,}{row['steps_per_second']:>12,.0f}"
                f"{row['cpu_ms_per_step']:>12.2f}{row['added_mib']:>12,.0f}"
            )


if __name__ == "__main__":
    main()
