"""Runs on websites: limits that worker processes share, what became of requests, and nothing that is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from web_servers import Seen, answering, run

import unidle
from unidle.cli.main import run as command
from unidle.config import Engine
from unidle.config.presets import default_preset
from unidle.engine.build import make_envs
from unidle.envs import turns
from unidle.envs.contract import probe
from unidle.envs.host import HostEnvs
from unidle.envs.make import env_maker
from unidle.envs.turns import Turns, share_among
from unidle.errors import UsageError
from unidle.sites.serve import Serving, SiteServer, in_background

SMALL: dict[str, Any] = {"n_envs": 8, "n_steps": 16}
QUIET: dict[str, Any] = {"device": "cpu", "tensorboard": False, "eval_every": 0, "quiet": True}


@pytest.fixture(scope="module")
def server() -> Iterator[SiteServer]:
    with in_background(Serving(sites=2, pages=100, links=20, page_bytes=4000, error_rate=0.05)) as running:
        yield running


def random_links(envs: HostEnvs, slices: list[int], rng: np.random.Generator) -> None:
    masks = envs.contract.rows.mask_view(envs.block.rows)[slices]
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
    monkeypatch.setattr(turns, "_sharing", 1)
    share_among(4)

    async def places() -> int:
        own = Turns("host.test", 10.0, 9)
        assert own.interval == pytest.approx(0.4)
        own.keep_apart(0.2)
        assert own.interval == pytest.approx(0.8)
        return own._places._value

    assert run(places()) == 2
    with pytest.raises(UsageError, match=r"4 worker processes cannot share 3 connections .* --workers 3"):
        Turns("host.test", None, 3)


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


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_command_line_names_a_site(server: SiteServer, tmp_path: Path, algo: str) -> None:
    flags = ["--preset", "site-explore"]
    if algo == "dqn":
        flags = ["--algo", "dqn", "--prioritised", "--learning-starts", "32", "--buffer-size", "512"]
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


# -- nothing is left behind --------------------------------------------------------------------------------------------


def test_many_episodes_leave_no_sockets_tasks_or_memory_behind(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "site_soak.py"
    words = ["--episodes", "600", "--at-a-time", "16", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (early, late) = json.loads((tmp_path / "site_soak.json").read_text())["seen"]
    assert late["episodes"] >= 600 > early["episodes"] >= 150


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_ends_a_run_that_waits_for_pages(tmp_path: Path, workers: int) -> None:
    with in_background(Serving(pages=50, links=10, page_bytes=2000)) as server:
        words = ["train", "--env", "unidle/SiteExplore-v0", "--site", server.urls[0], "--preset", "site-explore"]
        words += ["--n-envs", "8", "--n-steps", "8", "--batch-size", "64", "--timesteps", "1000000", "--device", "cpu"]
        words += ["--runs-dir", str(tmp_path), "--run-name", "crawl", *(["--workers", str(workers)] * bool(workers))]
        with subprocess.Popen(
            [sys.executable, "-m", "unidle.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            until = time.monotonic() + 60
            while not (tmp_path / "crawl" / "metrics.jsonl").exists() and time.monotonic() < until:
                time.sleep(0.05)
            server.serving = replace(server.serving, latency=30)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)  # at once, and not after this iteration
            began = time.monotonic()
            said, _ = process.communicate(timeout=30)
            seconds = time.monotonic() - began
    assert "Stopped at once" in said
    busy = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # others may be at work here
    assert seconds < 2 * busy
