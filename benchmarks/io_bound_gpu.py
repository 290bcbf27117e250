"""Training on a website with the `max-gpu` recipe on a GPU: unidle's event loops against SB3's processes.

    python benchmarks/io_bound_gpu.py                # one GPU and about 16 cores: five minutes
    python benchmarks/io_bound_gpu.py --seconds 2 --servers 1 --loops 1 --episodes 32 --peers 4 --selectolax-peers 8 \\
        --samples 512 --peer-samples 256 --epochs 2 --arch 64 64   # smoke test: no GPU, two cores

The site is that of io_bound.py (50 ms latency, 30 KB pages), served by `--servers` processes on the same machine, one
core each; unidle has `--loops` worker processes with an event loop each (default: all other cores but two). Network,
minibatch and epochs are those of the preset `max-gpu`. Its rollouts of 32 × 8,192 steps would take SB3 minutes each, so
they are shorter here: `--samples` per iteration, `--peer-samples` for SB3. Every sample is used in the same number of
epochs, so the ratio of collecting to learning stays the same. SB3 has no action masks: the action is taken modulo the
number of candidate links, so that every step makes a request there too.

SB3 runs as a script would (`--peers` processes with `requests` and BeautifulSoup), and with more processes and
unidle's parser (`--selectolax-peers`, at least 16 steps of each per iteration); the best of them counts. SB3's
processes do not cache what they parsed. The largest number of unidle's episodes is measured once more without its
cache, with `keep_pages: false`.

Memory is the PSS of the processes that step environments. Core usage shows the bottleneck: CPU seconds per second of
the trainer, its environments and the servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from cpu_bound import Meter
from io_bound import LATENCY, PAGE_BYTES, TOPIC, BaselineEnv, serve_site
from machine import provenance, save

PRESET = "max-gpu"
SELECTOLAX, NO_CACHE = "selectolax", "no cache"  # variants of the sides
MIN_STEPS = 16  # of each of SB3's processes per iteration
_PHASE_METRICS = ("profiled_gpu_rollout", "profiled_gpu_learning")  # dropped: phases are not marked in this benchmark
PACKAGES = ("stable-baselines3", "aiohttp", "selectolax", "requests", "beautifulsoup4", "lxml")


class ResourceMeter:
    """`Meter`, plus the cores and memory used during the measurement."""

    def __init__(self, seconds: float, servers: list[int]) -> None:
        import psutil

        self._psutil, self._servers = psutil, [psutil.Process(server) for server in servers]
        self._own = psutil.Process()
        self.meter = Meter(seconds)
        self._before: tuple[float, dict[str, float]] | None = None
        self.result: dict[str, float] = {}

    def mark(self, step: int) -> bool:
        """Record the end of an iteration; True when the measurement is complete."""
        was_measured = bool(self.meter.result)
        enough = self.meter.mark(step)
        if self.meter.has_begun and self._before is None:
            self._before = time.perf_counter(), self._cpu()
        if self.meter.result and self._before and not was_measured:
            began, before = self._before
            seconds = time.perf_counter() - began
            self.result = {name: (now - before[name]) / seconds for name, now in self._cpu().items()}
            self.result["pool_mib"] = sum(child.memory_full_info().pss for child in self._children()) / 2**20
        self.result |= {name: value for name, value in self.meter.result.items() if name not in _PHASE_METRICS}
        return enough

    def _children(self) -> list[Any]:
        return self._own.children(recursive=True)

    def _cpu(self) -> dict[str, float]:
        def spent(processes: list[Any]) -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        return {
            "trainer_cores": spent([self._own]),
            "pool_cores": spent(self._children()),
            "server_cores": spent(self._servers),
        }


def measure_unidle(arguments: argparse.Namespace, sites: list[str], watch: ResourceMeter) -> None:
    """Run one training, stopped when the measurement is complete."""
    import unidle

    def after_iteration(context: unidle.CallbackContext) -> None:
        if watch.mark(context.record["step"]):
            context.stop()

    episodes = arguments.side_episodes
    with tempfile.TemporaryDirectory() as folder:
        watch.meter.runs = Path(folder)
        unidle.train(
            "unidle/SiteExplore-v0",
            env_kwargs={
                "site": sites,
                "topic": TOPIC,
                "connections": max(512, episodes),
                "keep_pages": arguments.side_option != NO_CACHE,
            },
            **recipe(arguments),
            n_envs=episodes,
            n_steps=arguments.samples // episodes,
            overlap="strict",
            workers=arguments.loops,
            timesteps=10**9,
            runs_dir=folder,
            eval_every=0,
            checkpoint_every=10**9,
            tensorboard=False,
            quiet=True,
            after_iteration=[after_iteration],
        )


def recipe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of both sides: those of the preset, overridden by flags."""
    from unidle.config.presets import load_preset

    preset = load_preset(PRESET).values
    return {
        "preset": PRESET,
        "net_arch": tuple(arguments.arch or preset["net_arch"]),
        "n_epochs": arguments.epochs or preset["n_epochs"],
        "batch_size": min(preset["batch_size"], arguments.peer_samples),
    }


class ModuloActionEnv(BaselineEnv):
    """The baseline environment, with actions modulo the number of candidate links: all except stop make a request."""

    def step(self, action: Any) -> Any:
        explorer = self._explorer
        n_candidates = len(explorer.candidates)
        return super().step(action if action == explorer.links or not n_candidates else int(action) % n_candidates)


def measure_sb3(arguments: argparse.Namespace, sites: list[str], watch: ResourceMeter) -> None:
    """Train SB3 with the same recipe."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecMonitor

    torch.set_float32_matmul_precision("high")  # as in unidle
    makers: list[Callable[[], gymnasium.Env]] = [
        partial(ModuloActionEnv, sites[peer % len(sites)], soup=arguments.side_option != SELECTOLAX)
        for peer in range(arguments.side_episodes)
    ]
    envs = VecMonitor(SubprocVecEnv(makers, start_method="fork"))  # forked before CUDA is initialised
    chosen = recipe(arguments)

    class Marks(BaseCallback):
        enough = False

        def _on_rollout_start(self) -> None:  # the last iteration's update is complete
            self.enough = self.num_timesteps > 0 and watch.mark(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.enough

    model = PPO(
        "MultiInputPolicy",
        envs,
        n_steps=max(MIN_STEPS, arguments.peer_samples // arguments.side_episodes),
        batch_size=chosen["batch_size"],
        n_epochs=chosen["n_epochs"],
        policy_kwargs={"net_arch": list(chosen["net_arch"])},
        device="auto",
    )
    model.learn(10**9, callback=Marks())
    envs.close()


@contextlib.contextmanager
def serve_sites(count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Start the servers; return their sites and processes."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        servers = [serve_site(LATENCY) for _ in range(count)]
        entered = list(threads.map(lambda server: server.__enter__(), servers))
        for server in servers:
            stack.push(server.__exit__)
        yield [url for url, _ in entered], [process for _, process in entered]


def run_side(kind: str, episodes: int, option: str, sites: list[str], servers: list[int]) -> dict[str, float]:
    """Run one measurement in a separate process."""
    own = ["--side", kind, "--side-episodes", str(episodes), "--side-option", option]
    own += ["--sites", *sites, "--processes", *map(str, servers)]
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *own], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} with {episodes} {option} failed:\n{done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind} {episodes} {option}: {row}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure everything and print the table."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, at least")
    parser.add_argument("--servers", type=int, default=max(1, cores // 4), help="processes that serve the site")
    parser.add_argument("--loops", type=int, default=None, help="worker processes of unidle")
    parser.add_argument("--episodes", type=int, nargs="+", default=[512, 2048], help="concurrent episodes")
    parser.add_argument("--peers", type=int, nargs="*", default=[32], help="processes of SB3, with BeautifulSoup")
    parser.add_argument("--selectolax-peers", type=int, nargs="*", default=[128, 512], help="the same with selectolax")
    parser.add_argument("--samples", type=int, default=16_384, help="per iteration of unidle")
    parser.add_argument("--peer-samples", type=int, default=2048, help="per iteration of SB3, at least")
    parser.add_argument("--epochs", type=int, default=None, help="instead of the preset's")
    parser.add_argument("--arch", type=int, nargs="+", default=None, help="instead of the preset's")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default: benchmarks/results)")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=["unidle", "sb3"], help=argparse.SUPPRESS)
    parser.add_argument("--side-episodes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side-option", default="", help=argparse.SUPPRESS)
    parser.add_argument("--sites", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.loops = arguments.loops or max(1, cores - arguments.servers - 2)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # up to 2,048 concurrent connections
    if arguments.side:
        watch = ResourceMeter(arguments.seconds, arguments.processes)
        {"unidle": measure_unidle, "sb3": measure_sb3}[arguments.side](arguments, arguments.sites, watch)
        print(json.dumps(watch.result))
        return
    internal = ("out", "side", "side_episodes", "side_option", "sites", "processes")
    settings = {name: value for name, value in vars(arguments).items() if name not in internal}
    settings |= {**recipe(arguments), "latency": LATENCY, "page_bytes": PAGE_BYTES}
    result: dict[str, Any] = {"machine": provenance(*PACKAGES), "settings": settings, "sides": {}}
    with serve_sites(arguments.servers) as (sites, servers):
        plan = [
            *(("sb3", peers, "") for peers in arguments.peers),
            *(("unidle", episodes, "") for episodes in arguments.episodes),
            *(("sb3", peers, SELECTOLAX) for peers in arguments.selectolax_peers),
            ("unidle", max(arguments.episodes), NO_CACHE),
        ]
        for kind, episodes, option in plan:
            name = f"{kind} {episodes} {option}".rstrip()
            result["sides"][name] = run_side(kind, episodes, option, sites, servers)
            save("io_bound_gpu", result, arguments.out)
    print_table(result)


def print_table(result: dict[str, Any]) -> None:
    """Print every side relative to the best one of SB3; – without a GPU."""
    best = max(row["steps_per_second"] for name, row in result["sides"].items() if name.startswith("sb3"))
    keys = {
        "steps/s": ("steps_per_second", "{:,.0f}"),
        "NVML %": ("gpu_percent", "{:.0f}"),
        "busy": ("profiled_gpu_overall", "{:.0%}"),
        "W": ("watts", "{:.0f}"),
        "GPU MiB": ("gpu_memory_mib", "{:,.0f}"),
        "pool MiB": ("pool_mib", "{:,.0f}"),
        "trainer": ("trainer_cores", "{:.1f}"),
        "envs": ("pool_cores", "{:.1f}"),
        "servers": ("server_cores", "{:.1f}"),
    }
    print(f"{'':>22}{'× SB3':>10}" + "".join(f"{head:>10}" for head in keys))
    for name, row in result["sides"].items():
        ratio = row["steps_per_second"] / best
        cells = [form.format(row[key]) if np.isfinite(row.get(key, np.nan)) else "–" for key, form in keys.values()]
        print(f"{name:>22}{ratio:>10.1f}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    main()
