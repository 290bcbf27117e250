"""Runs on websites: limits that worker processes share, what became of requests, and nothing that is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web
from paths import BENCHMARKS
from web_servers import Seen, answering, run

import unidle
from unidle.cli.main import run as command
from unidle.config import Engine
from unidle.config.presets import default_preset
from unidle.engine import trainer
from unidle.engine.build import make_envs
from unidle.envs.aio import rate_limit as turns
from unidle.envs.aio.rate_limit import RateLimiter, share_limits
from unidle.envs.make import env_maker
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import probe
from unidle.errors import UsageError
from unidle.tasks.web.site.serve import Serving, SiteServer, in_background
from unidle.timeline import LEARN, Timeline

SMALL: dict[str, Any] = {"n_envs": 8, "n_steps": 16}
QUIET: dict[str, Any] = {"device": "cpu", "tensorboard": False, "eval_every": 0, "quiet": True}


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(Serving(sites=2, pages=100, links=20, page_bytes=4000, error_rate=0.05)) as running:
        yield running


def random_links(envs: HostEnvs, slices: list[int], rng: np.random.Generator) -> None:
    masks = envs.env_spec.obs_layout.mask_view(envs.block.obs)[slices]
    chances = rng.random(masks.shape) * masks
    chances[:, -1] *= 1e-9
    envs.block.actions[slices, 0] = chances.argmax(1)
    envs.send(slices)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_worker_processes_share_the_rate_of_a_host() -> None:
    async def page(request: web.BaseRequest) -> web.Response:
        links = "".join(f'<a href="/{request.path[1:]}{n}">x</a>' for n in range(10))
        return web.Response(text=links, content_type="text/html")

    def play(url: str) -> None:
        maker = env_maker("unidle/SiteExplore-v0", {"site": url, "rate": 40.0, "budget": 5})
        envs = make_envs(maker, probe(maker), 8, 0, 2, Engine(workers=2))
        try:
            assert envs.workers == 2
            envs.start(np.zeros(8, np.int64))
            rng, until = np.random.default_rng(0), time.monotonic() + 1.5
            random_links(envs, list(range(8)), rng)
            while time.monotonic() < until:
                random_links(envs, envs.recv(1, 0.05), rng)
        finally:
            envs.close()

    async def check() -> Seen:
        async with answering(page, host="127.0.1.31") as server:
            await asyncio.to_thread(play, server.url)
            return server

    times = run(check()).times
    times = [at for at in times if at > times[0] + 0.5]  # the pool was made, with a few requests of its own
    rate = (len(times) - 2) / (times[-1] - times[0])
    assert 5 < rate < 44


def test_so_they_do_its_connections_and_the_delay_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_n_processes", 1)
    share_limits(4)

    async def places() -> int:
        own = RateLimiter("host.test", 10.0, 9)
        assert own.interval == pytest.approx(0.4)
        own.set_min_interval(0.2)
        assert own.interval == pytest.approx(0.8)
        return own._connections._value

    assert run(places()) == 2
    with pytest.raises(UsageError, match=r"4 worker processes cannot share 3 connections .* --workers 3"):
        RateLimiter("host.test", None, 3)


# -- training ----------------------------------------------------------------------------------------------------------


def records(run_folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "iteration"]


@pytest.mark.parametrize("workers", [None, 2])
def test_what_became_of_requests_is_counted_in_the_metrics(
    server: SiteServer, tmp_path: Path, workers: int | None
) -> None:
    before = sum(server.answers.values())
    unidle.train(
        "unidle/SiteExplore-v0",
        env_kwargs={"site": server.urls, "budget": 6, "backoff": 0.001},
        preset="site-explore",
        **SMALL,
        **QUIET,
        batch_size=64,
        timesteps=256,
        workers=workers,
        runs_dir=str(tmp_path),
        run_name="crawl",
    )
    told = records(tmp_path / "crawl")
    counts = {name.removeprefix("requests/"): value for name, value in told[-1].items() if name.startswith("requests/")}
    assert counts["ok"] > told[0]["requests/ok"] > 0
    assert counts["retry"] > 0
    assert set(counts) <= {"ok", "retry", "status", "robots"}
    asked = counts["ok"] + counts["retry"] + counts.get("status", 0)
    assert asked <= sum(server.answers.values()) - before <= 3 * asked  # a redirect is two, and trials are not counted


def answered(body: bytes, more: str = "", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


BOMB = gzip.compress(bytes(50_000_000))
HOSTILE: dict[str, tuple[str, bytes]] = {  # path → what becomes of the request, and what is sent
    "endless": ("too_large", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"),
    "drip": ("timeout", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "reset": ("broken", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nhalf of it"),
    "declared": ("too_large", b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\nbegins"),
    "bomb": ("too_large", answered(BOMB, "Content-Encoding: gzip\r\n")),
    "loop": ("redirects", answered(b"", "Location: /loop\r\n", "302 Found")),
    "host": ("refused", answered(b"", "Location: http://example.org/\r\n", "302 Found")),
    "address": ("refused", answered(b"", "Location: http://10.0.0.1/\r\n", "302 Found")),
    "500": ("status", answered(b"", status="500 Sorry")),
    "charset": ("ok", answered(b"<meta charset=utf-99>\xff\xfe\x80 comet")),
    "links": ("ok", answered(b"".join(b"<a href=/l/%d>x</a>" % n for n in range(100_000)))),
}


def test_whatever_servers_do_training_goes_on_and_each_is_counted_in_the_metrics(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            name = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()[1:]
            start = answered(b"".join(b"<a href=/%s>x</a>" % path.encode() for path in HOSTILE))
            _, sent = HOSTILE.get(name, ("", start if not name else answered(b"", status="404 Not Found")))
            asked[name] += 1
            writer.write(sent)
            while name in ("endless", "drip"):
                writer.write(b"x" * (65536 if name == "endless" else 1))
                await writer.drain()
                await asyncio.sleep(0 if name == "endless" else 0.05)
            if name == "declared":
                await reader.read()
            await writer.drain()
            if name == "reset":
                writer.transport.abort()
        writer.close()

    def train(url: str) -> None:
        unidle.train(
            "unidle/SiteExplore-v0",
            env_kwargs={"site": url, "budget": 12, "seconds": 0.5, "backoff": 0.001, "max_bytes": 3_000_000},
            preset="site-explore",
            n_envs=8,
            n_steps=24,
            batch_size=96,
            timesteps=192,
            **QUIET,
            runs_dir=str(tmp_path),
            run_name="crawl",
        )

    async def check() -> float:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        began = time.monotonic()
        await asyncio.to_thread(train, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        server.close()
        return time.monotonic() - began

    seconds = asyncio.run(check())
    record = records(tmp_path / "crawl")[-1]
    counts = {name.removeprefix("requests/"): value for name, value in record.items() if name.startswith("requests/")}
    assert set(HOSTILE) <= set(asked)
    assert {kind for kind, _ in HOSTILE.values()} <= set(counts)
    for kind in ("timeout", "too_large", "refused", "redirects"):  # those that are not asked for again
        sent = sum(asked[path] for path, (expected, _) in HOSTILE.items() if expected == kind)
        assert 0 < counts[kind] <= sent
    assert not any(name.startswith("faults/") for name in record)
    assert seconds < 40  # 24 steps of no more than half a second each, and the start


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_command_line_names_a_site(server: SiteServer, tmp_path: Path, algo: str) -> None:
    flags = ["--preset", "site-explore"]
    if algo == "dqn":
        flags = ["--algo", "dqn", "--per", "--learning-starts", "32", "--buffer-size", "512"]
        flags += ["--network", "unidle.nn.link_network:LinkNetwork"]
    sizes = ["--n-envs", "8", "--n-steps", "8", "--batch-size", "32", "--timesteps", "128", "--eval-every", "0"]
    words = ["train", "--env", "unidle/SiteExplore-v0", "--site", server.urls[0], "--env-kwargs", "{budget: 6}"]
    words += ["--runs-dir", str(tmp_path), "--run-name", "crawl", "--quiet", "--device", "cpu"]
    assert command([*words, *flags, *sizes]) == 0
    config = unidle.load(tmp_path / "crawl").config
    assert config.run.env_kwargs == {"budget": 6, "site": server.urls[0]}
    assert command(["train", "--resume", str(tmp_path / "crawl"), "--site", server.urls[1]]) == 2


def test_without_a_preset_the_explorer_has_its_own() -> None:
    for has_gpu in (False, True):
        assert default_preset(has_gpu, "unidle/SiteExplore-v0") == "site-explore"


@pytest.mark.parametrize("workers", [None, 2])
def test_an_evaluation_leaves_the_graph_of_an_episode_for_the_report(
    server: SiteServer, tmp_path: Path, workers: int | None
) -> None:
    folder = tmp_path / "crawl"
    trained = unidle.train(
        "unidle/SiteExplore-v0",
        env_kwargs={"site": server.urls, "budget": 6, "backoff": 0.001},
        preset="site-explore",
        **SMALL,
        **{**QUIET, "eval_every": 128},
        eval_episodes=4,
        batch_size=64,
        timesteps=256,
        workers=workers,
        runs_dir=str(tmp_path),
        run_name="crawl",
    )
    story = json.loads((folder / "page_graph.json").read_text())
    assert story["step"] == 256  # of the last evaluation
    assert 1 <= len(story["pages"]) == story["visited"] <= 7
    assert story["pages"][0]["url"] in server.urls
    assert story["pages"][-1]["url"] in (folder / "report.html").read_text()
    assert trained.evaluate(2).trace is not None


# -- learning while requests are in flight -----------------------------------------------------------------------------

Spans = list[tuple[int, int]]  # (begin, end) in nanoseconds


def union(spans: Spans) -> Spans:
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def share_covered(spans: Spans, by: Spans) -> float:
    covered = sum(max(0, min(end, until) - max(begin, since)) for begin, end in spans for since, until in union(by))
    return covered / sum(end - begin for begin, end in spans)


def test_the_learner_is_busy_while_requests_are_in_flight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_flight: Spans = []
    learning: Spans = []
    answer = SiteServer._answer

    async def noted(server: SiteServer, request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter_ns()
        try:
            return await answer(server, request)
        finally:
            in_flight.append((began, time.perf_counter_ns()))

    class Noted(Timeline):
        def enter(self, phase: int) -> int:
            since, ended = self._since, super().enter(phase)
            if ended == LEARN:
                learning.append((since, self._since))
            return ended

    monkeypatch.setattr(SiteServer, "_answer", noted)
    monkeypatch.setattr(trainer, "Timeline", Noted)
    seconds: dict[str, list[float]] = {"off": [], "strict": []}

    def is_faster() -> bool:  # by the least of each: others may be at work on these cores
        return all(seconds.values()) and min(seconds["strict"]) < 0.95 * min(seconds["off"])

    with in_background(Serving(pages=100, links=20, page_bytes=4000, latency=0.05)) as server:
        for overlap in ("off", "strict") * 3:
            if is_faster():
                break
            in_flight.clear()
            learning.clear()
            unidle.train(
                "unidle/SiteExplore-v0",
                env_kwargs={"site": server.urls},
                preset="site-explore",
                **{**SMALL, "n_steps": 8},
                **QUIET,
                batch_size=32,
                n_epochs=12,  # so that to learn takes no longer than to wait for pages
                timesteps=5 * 64,
                overlap=overlap,
                runs_dir=str(tmp_path),
                run_name=f"{overlap} {len(seconds[overlap])}",
            )
            share = share_covered(learning, in_flight)
            assert share > 0.4 if overlap == "strict" else share < 0.01
            seconds[overlap].append((learning[-1][1] - learning[0][0]) / 1e9)  # from the end of the first rollout on
    assert is_faster()


# -- nothing is left behind --------------------------------------------------------------------------------------------


def test_many_episodes_leave_no_sockets_tasks_or_memory_behind(tmp_path: Path) -> None:
    script = BENCHMARKS / "site_soak.py"
    words = ["--episodes", "600", "--at-a-time", "16", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (early, late) = json.loads((tmp_path / "site_soak.json").read_text())["seen"]
    assert late["episodes"] >= 600 > early["episodes"] >= 150


class Slowing:
    """Answers at once at first; then after half a second, and every third answer has no end."""

    def __init__(self) -> None:
        self.is_slow, self.asked = False, 0
        self.under_way = 0  # pages without an end

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        links = "".join(f'<a href="/{request.path[1:]}{n}">x</a>' for n in range(10))
        if not self.is_slow:
            return web.Response(text=links, content_type="text/html")
        await asyncio.sleep(0.5)
        self.asked += 1
        if self.asked % 3:
            return web.Response(text=links, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        self.under_way += 1
        try:
            while True:
                await response.write(b"<p>")
                await asyncio.sleep(0.05)
        finally:
            self.under_way -= 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--eval-every", "0"],
        ["--eval-every", "0", "--workers", "2", "--overlap", "strict"],
        ["--eval-every", "1024", "--eval-episodes", "5000", "--workers", "2"],
    ],
    ids=["one loop", "several loops, overlapped", "in an evaluation in several loops"],
)
def test_ctrl_c_ends_a_run_on_a_slow_site_in_two_seconds(tmp_path: Path, flags: list[str]) -> None:
    site, folder = Slowing(), tmp_path / "crawl"
    words = ["train", "--env", "unidle/SiteExplore-v0", "--env-kwargs", "{budget: 8}", "--preset", "site-explore"]
    words += ["--n-envs", "16", "--n-steps", "16", "--batch-size", "64", "--timesteps", "1000000", "--device", "cpu"]
    words += ["--runs-dir", str(tmp_path), "--run-name", "crawl", "--no-tensorboard", *flags]

    def stop_it(url: str) -> tuple[str, float]:
        command = [sys.executable, "-m", "unidle", *words, "--site", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                wait_for(
                    lambda: bool(process.poll()) or ((folder / "metrics.jsonl").exists() and bool(records(folder)))
                )
                site.is_slow = True
                wait_for(lambda: bool(process.poll()) or site.under_way > 2)
                assert process.poll() is None, process.communicate()
                workers = psutil.Process(process.pid).children(recursive=True)
                assert len(workers) in ((2, 4) if "--workers" in flags else (0,))
                process.send_signal(signal.SIGINT)
                began = time.monotonic()
                said, _ = process.communicate(timeout=60)
                seconds = time.monotonic() - began
                assert process.returncode == 0, said
                assert not any(worker.is_running() for worker in workers)
                return said, seconds
            finally:
                process.kill()

    async def check() -> tuple[str, float]:
        async with answering(site.page) as server:
            told = await asyncio.to_thread(stop_it, server.url)
            wait_for_end = time.monotonic() + 5
            while site.under_way and time.monotonic() < wait_for_end:
                await asyncio.sleep(0.05)
            assert not site.under_way  # no connection was left open
            return told

    said, seconds = asyncio.run(check())
    assert "without the unfinished rollout" in said
    busy = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # others may be at work here
    assert seconds < 2 * busy
    saved = max(int(path.stem.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*.pt"))
    assert saved >= records(folder)[-1]["step"] > 0  # all that was learned is kept
    assert (folder / "report.html").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
