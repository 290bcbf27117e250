"""Training runs on websites: shared limits, request metrics, overlap with learning, clean shutdown."""

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
from web_servers import ServerLog, http_server, run

import unidle
from unidle.cli.main import run as command_line
from unidle.config import Engine
from unidle.config.presets import default_preset
from unidle.engine import trainer
from unidle.engine.build import make_envs
from unidle.envs.aio import rate_limit
from unidle.envs.aio.rate_limit import RateLimiter, share_limits
from unidle.envs.make import env_maker
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.errors import UsageError
from unidle.tasks.web.site.serve import SiteServer, SiteServerConfig, in_background
from unidle.timeline import LEARN, Timeline

SMALL: dict[str, Any] = {"n_envs": 8, "n_steps": 16}
QUIET: dict[str, Any] = {"device": "cpu", "tensorboard": False, "eval_every": 0, "quiet": True}


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(SiteServerConfig(sites=2, pages=100, links=20, page_bytes=4000, error_rate=0.05)) as running:
        yield running


def random_links(envs: HostEnvs, slices: list[int], rng: np.random.Generator) -> None:
    masks = envs.env_spec.obs_layout.mask_view(envs.block.obs)[slices]
    scores = rng.random(masks.shape) * masks
    scores[:, -1] *= 1e-9
    envs.block.actions[slices, 0] = scores.argmax(1)
    envs.send(slices)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_worker_processes_share_the_rate_limit_of_a_host() -> None:
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

    async def check() -> ServerLog:
        async with http_server(page, host="127.0.1.31") as server:
            await asyncio.to_thread(play, server.url)
            return server

    times = run(check()).times
    times = [at for at in times if at > times[0] + 0.5]  # without the requests made while the pool starts
    rate = (len(times) - 2) / (times[-1] - times[0])
    assert 5 < rate < 44


def test_worker_processes_share_connections_and_crawl_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_n_processes", 1)
    share_limits(4)

    async def free_connections() -> int:
        own = RateLimiter("host.test", 10.0, 9)
        assert own.interval == pytest.approx(0.4)
        own.set_min_interval(0.2)
        assert own.interval == pytest.approx(0.8)
        return own._connections._value

    assert run(free_connections()) == 2
    with pytest.raises(UsageError, match=r"4 worker processes cannot share 3 connections .* --workers 3"):
        RateLimiter("host.test", None, 3)


# -- training ----------------------------------------------------------------------------------------------------------


def records(run_folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "iteration"]


@pytest.mark.parametrize("workers", [None, 2])
def test_metrics_count_request_outcomes(server: SiteServer, tmp_path: Path, workers: int | None) -> None:
    before = sum(server.responses.values())
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
    logged = records(tmp_path / "crawl")
    counts = {
        name.removeprefix("requests/"): value for name, value in logged[-1].items() if name.startswith("requests/")
    }
    assert counts["ok"] > logged[0]["requests/ok"] > 0
    assert counts["retry"] > 0
    assert set(counts) <= {"ok", "retry", "status", "robots"}
    sent = counts["ok"] + counts["retry"] + counts.get("status", 0)
    # A redirect takes two requests; the metrics leave out those of the environment's probe.
    assert sent <= sum(server.responses.values()) - before <= 3 * sent


def http_response(body: bytes, headers: str = "", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


BOMB = gzip.compress(bytes(50_000_000))
HOSTILE: dict[str, tuple[str, bytes]] = {  # path → expected outcome, raw response
    "endless": ("too_large", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"),
    "drip": ("timeout", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "reset": ("broken", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nhalf of it"),
    "declared": ("too_large", b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\nbegins"),
    "bomb": ("too_large", http_response(BOMB, "Content-Encoding: gzip\r\n")),
    "loop": ("redirects", http_response(b"", "Location: /loop\r\n", "302 Found")),
    "host": ("refused", http_response(b"", "Location: http://example.org/\r\n", "302 Found")),
    "address": ("refused", http_response(b"", "Location: http://10.0.0.1/\r\n", "302 Found")),
    "500": ("status", http_response(b"", status="500 Sorry")),
    "charset": ("ok", http_response(b"<meta charset=utf-99>\xff\xfe\x80 comet")),
    "links": ("ok", http_response(b"".join(b"<a href=/l/%d>x</a>" % n for n in range(100_000)))),
}


def test_training_survives_hostile_servers_and_counts_each_outcome(tmp_path: Path) -> None:
    requests: Counter[str] = Counter()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            name = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()[1:]
            start = http_response(b"".join(b"<a href=/%s>x</a>" % path.encode() for path in HOSTILE))
            _, sent = HOSTILE.get(name, ("", start if not name else http_response(b"", status="404 Not Found")))
            requests[name] += 1
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
    assert set(HOSTILE) <= set(requests)
    assert {kind for kind, _ in HOSTILE.values()} <= set(counts)
    for kind in ("timeout", "too_large", "refused", "redirects"):  # outcomes that are not retried
        sent = sum(requests[path] for path, (expected, _) in HOSTILE.items() if expected == kind)
        assert 0 < counts[kind] <= sent
    assert not any(name.startswith("faults/") for name in record)
    assert seconds < 40  # 24 steps of at most half a second each, plus startup


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_site_flag_sets_the_site(server: SiteServer, tmp_path: Path, algo: str) -> None:
    flags = ["--preset", "site-explore"]
    if algo == "dqn":
        flags = ["--algo", "dqn", "--per", "--learning-starts", "32", "--buffer-size", "512"]
        flags += ["--network", "unidle.nn.link_network:LinkNetwork"]
    sizes = ["--n-envs", "8", "--n-steps", "8", "--batch-size", "32", "--timesteps", "128", "--eval-every", "0"]
    argv = ["train", "--env", "unidle/SiteExplore-v0", "--site", server.urls[0], "--env-kwargs", "{budget: 6}"]
    argv += ["--runs-dir", str(tmp_path), "--run-name", "crawl", "--quiet", "--device", "cpu"]
    assert command_line([*argv, *flags, *sizes]) == 0
    config = unidle.load(tmp_path / "crawl").config
    assert config.run.env_kwargs == {"budget": 6, "site": server.urls[0]}
    assert command_line(["train", "--resume", str(tmp_path / "crawl"), "--site", server.urls[1]]) == 2


def test_site_explore_defaults_to_its_own_preset() -> None:
    assert default_preset("unidle/SiteExplore-v0") == "site-explore"


@pytest.mark.parametrize("workers", [None, 2])
def test_evaluation_writes_a_page_graph_for_the_report(server: SiteServer, tmp_path: Path, workers: int | None) -> None:
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
    graph = json.loads((folder / "page_graph.json").read_text())
    assert graph["step"] == 256  # of the last evaluation
    assert 1 <= len(graph["pages"]) == graph["visited"] <= 7
    assert graph["pages"][0]["url"] in server.urls
    assert graph["pages"][-1]["url"] in (folder / "report.html").read_text()
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


def test_strict_overlap_learns_while_requests_are_in_flight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_flight: Spans = []
    learning: Spans = []
    handle = SiteServer._handle

    async def recording_handle(server: SiteServer, request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter_ns()
        try:
            return await handle(server, request)
        finally:
            in_flight.append((began, time.perf_counter_ns()))

    class RecordingTimeline(Timeline):
        def enter(self, phase: int) -> int:
            since, ended = self._since, super().enter(phase)
            if ended == LEARN:
                learning.append((since, self._since))
            return ended

    monkeypatch.setattr(SiteServer, "_handle", recording_handle)
    monkeypatch.setattr(trainer, "Timeline", RecordingTimeline)
    seconds: dict[str, list[float]] = {"off": [], "strict": []}

    def is_faster() -> bool:  # compares minima: other programs may use these cores
        return all(seconds.values()) and min(seconds["strict"]) < 0.95 * min(seconds["off"])

    with in_background(SiteServerConfig(pages=100, links=20, page_bytes=4000, latency=0.05)) as server:
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
                n_epochs=12,  # learning takes no longer than waiting for pages
                timesteps=5 * 64,
                overlap=overlap,
                runs_dir=str(tmp_path),
                run_name=f"{overlap} {len(seconds[overlap])}",
            )
            share = share_covered(learning, in_flight)
            assert share > 0.4 if overlap == "strict" else share < 0.01
            seconds[overlap].append((learning[-1][1] - learning[0][0]) / 1e9)  # from the end of the first rollout
    assert is_faster()


# -- resources and shutdown --------------------------------------------------------------------------------------------


def test_many_episodes_leak_no_sockets_tasks_or_memory(tmp_path: Path) -> None:
    script = BENCHMARKS / "site_soak.py"
    argv = ["--episodes", "600", "--n-envs", "16", "--out", str(tmp_path)]
    result = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (early, late) = json.loads((tmp_path / "site_soak.json").read_text())["seen"]
    assert late["episodes"] >= 600 > early["episodes"] >= 150


class SlowingSite:
    """Answers at once until `is_slow`; then after half a second, and every third response never ends."""

    def __init__(self) -> None:
        self.is_slow, self.n_requests = False, 0
        self.open_streams = 0  # responses that never end

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        links = "".join(f'<a href="/{request.path[1:]}{n}">x</a>' for n in range(10))
        if not self.is_slow:
            return web.Response(text=links, content_type="text/html")
        await asyncio.sleep(0.5)
        self.n_requests += 1
        if self.n_requests % 3:
            return web.Response(text=links, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        self.open_streams += 1
        try:
            while True:
                await response.write(b"<p>")
                await asyncio.sleep(0.05)
        finally:
            self.open_streams -= 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--eval-every", "0"],
        ["--eval-every", "0", "--workers", "2", "--overlap", "strict"],
        ["--eval-every", "1024", "--eval-episodes", "5000", "--workers", "2"],
    ],
    ids=["one_event_loop", "two_workers_overlapped", "two_workers_in_evaluation"],
)
def test_ctrl_c_stops_a_run_on_a_slow_site_within_two_seconds(tmp_path: Path, flags: list[str]) -> None:
    site, folder = SlowingSite(), tmp_path / "crawl"
    argv = ["train", "--env", "unidle/SiteExplore-v0", "--env-kwargs", "{budget: 8}", "--preset", "site-explore"]
    argv += ["--n-envs", "16", "--n-steps", "16", "--batch-size", "64", "--timesteps", "1000000", "--device", "cpu"]
    argv += ["--runs-dir", str(tmp_path), "--run-name", "crawl", "--no-tensorboard", *flags]

    def interrupt_run(url: str) -> tuple[str, float]:
        command = [sys.executable, "-m", "unidle", *argv, "--site", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                wait_for(
                    lambda: bool(process.poll()) or ((folder / "metrics.jsonl").exists() and bool(records(folder)))
                )
                site.is_slow = True
                wait_for(lambda: bool(process.poll()) or site.open_streams > 2)
                assert process.poll() is None, process.communicate()
                workers = psutil.Process(process.pid).children(recursive=True)
                assert len(workers) in ((2, 4) if "--workers" in flags else (0,))
                process.send_signal(signal.SIGINT)
                began = time.monotonic()
                output, _ = process.communicate(timeout=60)
                seconds = time.monotonic() - began
                assert process.returncode == 128 + signal.SIGINT, output
                assert not any(worker.is_running() for worker in workers)
                return output, seconds
            finally:
                process.kill()

    async def check() -> tuple[str, float]:
        async with http_server(site.page) as server:
            result = await asyncio.to_thread(interrupt_run, server.url)
            wait_for_end = time.monotonic() + 5
            while site.open_streams and time.monotonic() < wait_for_end:
                await asyncio.sleep(0.05)
            assert not site.open_streams  # no connection was left open
            return result

    output, seconds = asyncio.run(check())
    assert "without the unfinished rollout" in output
    load = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # other programs may use the machine
    assert seconds < 2 * load
    saved = max(int(path.stem.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*.pt"))
    assert saved >= records(folder)[-1]["step"] > 0  # the checkpoint holds all that was learned
    assert (folder / "report.html").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.02)
