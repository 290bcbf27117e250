"""Soak test: do thousands of episodes on a slow, flaky website leak resources?

    python benchmarks/site_soak.py [--episodes 10000] [--n-envs 64]

Sockets, descriptors, threads, tasks and memory are counted after a quarter of the episodes, when pages are cached, and
again at the end, with no request in flight. Exits with 1 if any of them has grown.
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
from unidle.envs.probe import probe
from unidle.tasks.web.site.serve import SiteServerConfig, in_background

SITES = SiteServerConfig(
    sites=2, pages=60, links=10, page_bytes=2000, error_rate=0.02, slow_rate=0.02, slow_seconds=0.01
)
GROWTH_MIB = 10.0  # tolerated growth: caches of the server and the interpreter


def soak(urls: list[str], episodes: int, n_envs: int) -> list[dict[str, float]]:
    """Return the counts after a quarter of the episodes and after all."""
    maker = env_maker("unidle/SiteExplore-v0", {"site": urls, "budget": 3, "backoff": 0.001})
    envs = AsyncEnvs(maker, probe(maker), n_envs, 0)
    masks, rng, slices = (
        envs.env_spec.obs_layout.mask_view(envs.block.obs),
        np.random.default_rng(0),
        list(range(n_envs)),
    )
    counts: list[dict[str, float]] = []
    try:
        envs.start(np.zeros(n_envs, np.int64))
        ended, marks, began = 0, [episodes // 4, episodes], time.monotonic()
        while marks:
            envs.block.actions[:, 0] = random_links(masks, rng)
            envs.send(slices)
            envs.recv(n_envs)
            ended += int((envs.block.terminated | envs.block.truncated).sum())
            if ended >= marks[0]:
                marks.pop(0)
                counts.append({"episodes": ended, "seconds": time.monotonic() - began, **_resources(envs)})
        counts[-1]["faults"] = len(envs.faults)
    finally:
        envs.close()
    return counts


def _resources(envs: AsyncEnvs) -> dict[str, float]:
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
    parser.add_argument("--n-envs", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with in_background(SITES) as server:
        counts = soak(server.urls, arguments.episodes, arguments.n_envs)
    gc.collect()
    left = {
        "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
        "threads": threading.active_count() - threads,
    }
    result: dict[str, Any] = {
        "machine": provenance("aiohttp"),
        "at_a_time": arguments.n_envs,
        "seen": counts,
        "left": left,
    }
    save("site_soak", result, arguments.out)
    for name in counts[0]:
        print(f"{name:>12}" + "".join(f"{row[name]:>12,.1f}" for row in counts))
    print(f"left at the end: {left['descriptors']} descriptors, {left['threads']} threads")
    early, late = counts
    # Connections are opened on demand, at most one per episode; this process holds both ends.
    limit = 2 * arguments.n_envs + 8
    leaks = [name for name in ("threads", "tasks") if late[name] > early[name]]
    leaks += [name for name in ("sockets", "descriptors") if late[name] > max(early[name], limit + descriptors)]
    leaks += ["memory"] * (late["MiB"] - early["MiB"] > GROWTH_MIB) + [
        name for name, count in left.items() if count > 0
    ]
    if leaks or late["faults"]:
        sys.exit(f"Leaks: {', '.join(leaks) or 'none'}; faults: {late['faults']:.0f}")


if __name__ == "__main__":
    main()
