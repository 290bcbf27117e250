"""Probes of bare stepping: environments without inference and learning."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from unidle.config import Engine
from unidle.engine.build import make_envs
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import EnvSpec, random_flat_action
from unidle.tuning.probes.timing import lower_quartile

_DRAWN = 32  # sets of random actions, used in turn
_SEGMENTS = 20  # separately timed parts of the measurement
_ROUNDS = 8  # per segment at least, since up to one of them may have started before it
_TICKS_S = 0.1  # CPU time is counted in hundredths of a second; shorter times are too coarse to split
_ALONE_S = 0.4  # shortest measurement of a single environment
QUICK_STEP = 2e-4  # seconds; a round trip to a worker takes as long, so such steps are not measured alone
_WORTH_WAITING = 1e-3  # seconds; quicker steps do not wait for I/O


@dataclass(frozen=True)
class StepStats:
    """Durations and CPU use of environment steps."""

    median: float
    """Seconds."""
    p95: float
    on_core: float
    """Share of a step's time on a core, without time spent waiting for a core."""
    native: float
    """Share of CPU time outside the main thread, such as OpenMP threads."""
    threads: int
    """Threads of its process."""


@dataclass(frozen=True)
class BareStepping:
    """All environments of a job, stepped as fast as possible."""

    round_seconds: float
    """Seconds for one step of each environment, without lockstep."""
    lockstep_seconds: float
    """Seconds for one step of each environment, in lockstep."""
    steps: StepStats
    """Steps of one slice."""


def step_bare(envs: HostEnvs, seconds: float) -> BareStepping:
    """Step started `envs` with random actions for about `seconds`.

    First all of them in lockstep. Then slices get pre-drawn actions as soon as they return, except with action masks,
    which depend on the observation.
    """
    rng = np.random.default_rng(0)
    one_round(envs, _draw(envs, rng))  # the first is slower
    before, began = _CpuTime.now(), perf_counter()
    lockstep_seconds, latencies = _lockstep(envs, rng, seconds / 2)
    round_seconds = lockstep_seconds
    if len(envs.bounds) > 1 and not envs.env_spec.obs_layout.mask_width:
        round_seconds, latencies = _without_lockstep(envs, rng, seconds / 2)
    use = _CpuTime.now().since(before)
    wall = perf_counter() - began
    envs.faults.clear()
    envs.restarted.clear()
    return BareStepping(
        round_seconds,
        lockstep_seconds,
        StepStats(
            float(np.median(latencies)),
            float(np.quantile(latencies, 0.95)),
            min(1.0, use.on_core / max(1e-9, wall * max(1, envs.workers) - use.queued)),
            use.native,
            use.threads,
        ),
    )


def step_alone(maker: EnvMaker, env_spec: EnvSpec, engine: Engine, seconds: float) -> StepStats:
    """Step one environment in its own process, so that its CPU time can be measured separately."""
    others = _CpuTime.children()
    envs = make_envs(maker.on_host(), env_spec, 1, 0, 1, engine)
    rng = np.random.default_rng(0)
    try:
        envs.start(np.zeros(1, np.int64))
        latencies, own = list[float](), list[float]()  # the second without waiting for a core
        worker = [process for process in _CpuTime.children() if process not in others]
        before, began, queued = _CpuTime.of(worker), perf_counter(), _queued(worker)
        while len(latencies) < 5 or perf_counter() - began < max(seconds / 2, _ALONE_S):
            latencies += one_round(envs, _draw(envs, rng))
            until_now, queued = queued, _queued(worker)
            own.append(latencies[-1] - (queued - until_now))
        use = _CpuTime.of(worker).since(before)
    finally:
        envs.close()
    # Per step, so that one long wait for a core does not affect the others.
    on_core = max(use.main, use.on_core) / len(own) / max(1e-9, float(np.median(own)))
    return StepStats(
        float(np.median(latencies)),
        float(np.quantile(latencies, 0.95)),
        1.0 if env_spec.step_seconds < _WORTH_WAITING else min(1.0, on_core),
        use.native,
        use.threads,
    )


def _draw(envs: HostEnvs, rng: np.random.Generator) -> np.ndarray:
    """Draw random actions [N, width] that the current masks allow."""
    obs, actions = envs.env_spec.obs_layout, envs.env_spec.action_layout
    masks = obs.mask_view(envs.block.obs) if obs.mask_width else [None] * envs.n_envs
    return np.stack([random_flat_action(actions, rng, mask) for mask in masks])


def one_round(envs: HostEnvs, actions: np.ndarray) -> list[float]:
    """Step each environment once; returns the seconds until each slice was back, in order of return."""
    every = list(range(len(envs.bounds)))
    envs.block.actions[:] = actions
    sent, back = perf_counter(), list[float]()
    envs.send(every)
    while len(back) < len(every):
        stepped = len(envs.recv(1))
        back += [perf_counter() - sent] * stepped
    return back


def _without_lockstep(envs: HostEnvs, rng: np.random.Generator, seconds: float) -> tuple[float, list[float]]:
    """Return the seconds per round and the latency of each slice's step, without lockstep."""
    drawn = [_draw(envs, rng) for _ in range(_DRAWN)]
    slices = len(envs.bounds)
    env_ids = [slice(*bounds) for bounds in envs.bounds]
    envs.block.actions[:] = drawn[0]
    sent = [perf_counter()] * slices
    envs.send(list(range(slices)))
    number, latencies = 0, list[float]()
    began = since = perf_counter()
    stepped, rounds = 0, list[float]()  # slices since then, seconds per round of each segment
    while True:
        back = envs.recv(1)
        now = perf_counter()
        latencies += [now - sent[index] for index in back]
        stepped += len(back)
        if now - since >= seconds / _SEGMENTS and stepped >= _ROUNDS * slices:
            rounds.append((now - since) / stepped * slices)
            since, stepped = now, 0
        if len(latencies) >= slices and now - began > seconds:
            break
        number = (number + 1) % len(drawn)
        for index in back:
            envs.block.actions[env_ids[index]] = drawn[number][env_ids[index]]
            sent[index] = now
        envs.send(back)
    in_flight = slices - len(back)
    while in_flight:
        in_flight -= len(envs.recv(in_flight))
    if len(rounds) < _SEGMENTS // 2:  # slow steps: use the whole measurement
        return (now - began) / len(latencies) * slices, latencies
    return lower_quartile(rounds), latencies


def _lockstep(envs: HostEnvs, rng: np.random.Generator, seconds: float) -> tuple[float, list[float]]:
    """Return the seconds per round and the latencies in lockstep."""
    rounds: list[list[float]] = []
    began = perf_counter()
    while len(rounds) < 2 or perf_counter() - began < seconds:
        rounds.append(one_round(envs, _draw(envs, rng)))
    return lower_quartile(back[-1] for back in rounds), [latency for back in rounds for latency in back]


@dataclass(frozen=True)
class _CpuTime:
    """CPU time of processes so far, in seconds."""

    on_core: float
    main: float  # of their main threads
    queued: float  # main threads waiting for a core
    threads: int  # most threads of one process

    @property
    def native(self) -> float:
        return max(0.0, 1 - self.main / self.on_core) if self.on_core > _TICKS_S else 0.0

    @staticmethod
    def children() -> list[Any]:
        return list(psutil.Process().children(recursive=True))

    @staticmethod
    def now() -> _CpuTime:
        """Return the use of all child processes, or of this process if there are none."""
        return _CpuTime.of(_CpuTime.children() or [psutil.Process()])

    @staticmethod
    def of(processes: Iterable[Any]) -> _CpuTime:
        on_core, main, queued, threads = 0.0, 0.0, 0.0, 0
        for process in processes:
            with suppress(psutil.Error):
                own = sum(process.cpu_times()[:2])
                scheduled = _scheduled(process.pid)
                on_core += own
                main += own if scheduled is None else scheduled[0]
                queued += 0.0 if scheduled is None else scheduled[1]
                threads = max(threads, process.num_threads())
        return _CpuTime(on_core, main, queued, threads)

    def since(self, before: _CpuTime) -> _CpuTime:
        return _CpuTime(
            self.on_core - before.on_core, self.main - before.main, self.queued - before.queued, self.threads
        )


def _queued(processes: Iterable[Any]) -> float:
    """Return the seconds that the main threads waited for a core."""
    return sum(scheduled[1] for process in processes if (scheduled := _scheduled(process.pid)) is not None)


def _scheduled(pid: int) -> tuple[float, float] | None:
    """Return the seconds that a process's main thread was on a core and waited for one; None if unknown."""
    with suppress(OSError, ValueError):
        on_core, queued = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return int(on_core) * 1e-9, int(queued) * 1e-9
    return None
