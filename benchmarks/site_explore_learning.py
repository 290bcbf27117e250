"""Does PPO learn to explore? Relevant pages per request on unseen generated sites, against crawlers.

    python benchmarks/site_explore_learning.py [--seeds 5] [--timesteps 100000]

Each seed trains on its own 24 sites with `--preset site-explore` and is evaluated on 24 others, one episode of 40
requests each, with the mode action. The crawlers play the same episodes. Breadth-first and random crawlers choose among
all discovered links. The policy chooses among the environment's 16 best candidates, so the last two rows are ablations:
a random one of those 16, and always the first.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import provenance, save

from unidle.tasks.web.site.serve import SiteServerConfig, in_background
from unidle.tasks.web.site.topics import TOPICS
from unidle.tasks.web.site_explore import SiteExplore

TOPIC = TOPICS["astronomy"][:6]  # only some of the words that pages about this topic use
SITES, BUDGET, CANDIDATES = 24, 40, 16
LAYOUT = {"sites": SITES, "pages": 600, "links": 30, "page_bytes": 6000}
TEST_SEED = 1_000_000  # added to the seeds of the sites for evaluation
ALL_LINKS = 2000  # more links than an episode discovers, so all are candidates

Choice = Callable[[SiteExplore, dict[str, np.ndarray], np.ndarray, np.random.Generator], int]


def breadth_first(env: SiteExplore, obs: dict[str, np.ndarray], mask: np.ndarray, rng: np.random.Generator) -> int:
    """Choose the oldest link."""
    return int(np.argmin(env.candidates))


def random_link(env: SiteExplore, obs: dict[str, np.ndarray], mask: np.ndarray, rng: np.random.Generator) -> int:
    """Choose a random candidate link."""
    return int(rng.integers(len(env.candidates)))


def best_first(env: SiteExplore, obs: dict[str, np.ndarray], mask: np.ndarray, rng: np.random.Generator) -> int:
    """Choose the environment's best candidate."""
    return 0


CRAWLERS: dict[str, tuple[Choice, int]] = {
    "breadth-first": (breadth_first, ALL_LINKS),
    "random": (random_link, ALL_LINKS),
    "random candidate": (random_link, CANDIDATES),
    "best candidate": (best_first, CANDIDATES),
}


async def crawl(urls: list[str], choose: Choice, links: int) -> float:
    """Return the relevant pages per request, over one episode on each site."""
    found = requests = 0
    for number in range(len(urls)):
        env = SiteExplore(urls, TOPIC, budget=BUDGET, links=links)
        obs, info = await env.reset(number)
        rng, is_over = np.random.default_rng(number), False
        while not is_over:
            choice = choose(env, obs, info["action_mask"], rng)
            obs, _, is_over, _, info = await env.step(choice)
        found, requests = found + env.found, requests + env.requests
        await env.close()
    return found / max(1, requests)


def trained(seed: int, timesteps: int, run_dir: str) -> tuple[Choice, float]:
    """Train PPO on the sites of this seed; return the policy and the seconds it took."""
    import unidle

    with in_background(SiteServerConfig(seed=seed * SITES, **LAYOUT)) as server:
        began = time.perf_counter()
        run = unidle.train(
            "unidle/SiteExplore-v0",
            preset="site-explore",
            env_kwargs={"site": server.urls, "topic": TOPIC, "budget": BUDGET, "links": CANDIDATES},
            timesteps=timesteps,
            seed=seed,
            runs_dir=run_dir,
            eval_every=0,
            tensorboard=False,
            device="cpu",
            slices=4,  # without latency, inference on full batches is faster than on a few episodes
            quiet=True,
        )
        seconds = time.perf_counter() - began

    def choose(env: SiteExplore, obs: dict[str, np.ndarray], mask: np.ndarray, rng: np.random.Generator) -> int:
        return int(run.predict(obs, action_mask=mask)[0])

    return choose, seconds


def run_seed(seed: int, timesteps: int) -> dict[str, float]:
    """Return the relevant pages per request of each method on unseen sites."""
    with tempfile.TemporaryDirectory() as folder:
        policy, seconds = trained(seed, timesteps, folder)
        with in_background(SiteServerConfig(seed=TEST_SEED + seed * SITES, **LAYOUT)) as server:
            sides: dict[str, tuple[Choice, int]] = {"PPO": (policy, CANDIDATES), **CRAWLERS}
            results = {name: asyncio.run(crawl(server.urls, *method)) for name, method in sides.items()}
    return {**results, "training seconds": seconds}


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--timesteps", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        rows.append(run_seed(seed, arguments.timesteps))
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    names = ["PPO", *CRAWLERS]
    table = {name: [row[name] for row in rows] for name in names}
    ratios = {name: [row["PPO"] / row[name] for row in rows] for name in names[1:]}
    result: dict[str, Any] = {
        "machine": provenance("aiohttp", "selectolax"),
        "settings": {**LAYOUT, "budget": BUDGET, "offered": CANDIDATES, "timesteps": arguments.timesteps},
        "relevant_per_request": table,
        "ppo_times": ratios,
        "training_seconds": [row["training seconds"] for row in rows],
    }
    save("site_explore_learning", result, arguments.out)
    print(f"{'':>26}{'pages/request':>15}{'from':>8}{'to':>8}{'PPO ×':>8}{'least':>8}")
    for name in names:
        values, times = table[name], ratios.get(name, [1.0])
        print(
            f"{name:>26}{np.median(values):>15.3f}{min(values):>8.3f}{max(values):>8.3f}{np.median(times):>8.2f}{min(times):>8.2f}"
        )


if __name__ == "__main__":
    main()
