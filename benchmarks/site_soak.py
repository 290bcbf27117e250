"""Soak test: do thousands of episodes on a slow, flaky website leak resources?

    python benchmarks/site_soak.py [--episodes 10000] [--at-a-time 64]

Sockets, descriptors, threads, tasks and memory are counted after a quarter of the episodes, when pages are cached, and
again at the end, with nothing in flight. Exits with 1 if any of them has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from io_bound import random_links
from machine import provenance, save

from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.make import env_maker
from unidle.envs.spec import probe
from unidle.tasks.web.site.serve import Serving, in_background

SERVED = Serving(sites=2, pages=60, links=10, page_bytes=2000, error_rate=0.02, slow_rate=0.02, slow_seconds=0.01)
GROWTH_MIB = 10.0  # tolerated growth: caches of the server and the interpreter


def soak(urls: list[str], episodes: int, at_a_time: int) -> list[dict[str, float]]:
    """Return the counts after a quarter of the episodes and after all."""
    maker = env_maker("unidle/SiteExplore-v0", {"site": urls, "budget": 3, "backoff": 0.001})
    envs = AsyncEnvs(maker, probe(maker), at_a_time, 0)
    masks, rng, slices = (
        envs.env_spec.obs_layout.mask_view(envs.block.obs),
        np.random.default_rng(0),
        list(range(at_a_time)),
    )
    seen: list[dict[str, float]] = []
    try:
        envs.start(np.zeros(at_a_time, np.int64))
        ended, marks, began = 0, [episodes // 4, episodes], time.monotonic()
        while marks:
            envs.block.actions[:, 0] = random_links(masks, rng)
            envs.send(slices)
            envs.recv(at_a_time)
            ended += int((envs.block.terminated | envs.block.truncated).sum())
            if ended >= marks[0]:
                marks.pop(0)
                seen.append({"episodes": ended, "seconds": time.monotonic() - began, **_belongings(envs)})
        seen[-1]["faults"] = len(envs.faults)
    finally:
        envs.close()
    return seen


def _belongings(envs: AsyncEnvs) -> dict[str, float]:
    gc.collect()
    own = psutil.Process()
    return {
        "sockets": len(own.net_connections("tcp")),
        "descriptors": own.num_fds(),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks(envs._slots._thread.loop)),
        "MiB": own.memory_info().rss / 2**20,
    }


def main() -> None:
    """Run the soak test and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--at-a-time", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    given = parser.parse_args()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with in_background(SERVED) as server:
        seen = soak(server.urls, given.episodes, given.at_a_time)
    gc.collect()
    left = {
        "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
        "threads": threading.active_count() - threads,
    }
    result: dict[str, Any] = {
        "machine": provenance("aiohttp"),
        "at_a_time": given.at_a_time,
        "seen": seen,
        "left": left,
    }
    save("site_soak", result, given.out)
    for name in seen[0]:
        print(f"{name:>12}" + "".join(f"{row[name]:>12,.1f}" for row in seen))
    print(f"left at the end: {left['descriptors']} descriptors, {left['threads']} threads")
    early, late = seen
    # Connections are made as they are needed, never more than one for each episode; both ends are here.
    most = 2 * given.at_a_time + 8
    leaks = [name for name in ("threads", "tasks") if late[name] > early[name]]
    leaks += [name for name in ("sockets", "descriptors") if late[name] > max(early[name], most + descriptors)]
    leaks += ["memory"] * (late["MiB"] - early["MiB"] > GROWTH_MIB) + [name for name, more in left.items() if more > 0]
    if leaks or late["faults"]:
        sys.exit(f"Leaks: {', '.join(leaks) or 'none'}; faults: {late['faults']:.0f}")


if __name__ == "__main__":
    main()
