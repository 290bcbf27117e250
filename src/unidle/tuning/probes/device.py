"""Probes of the device: environments that run on it, copy rates, and free memory."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from gymnasium import spaces

from unidle.engine.build import RunParts
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.learn.device_loop import DeviceLoop
from unidle.engine.learn.learner import Learner
from unidle.envs.device.device_env import DeviceEnv
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import Timeline
from unidle.tuning.job import ENDLESS
from unidle.tuning.probes.timing import lower_quartile, seconds_of

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_COPIED_BYTES = 64 * 2**20
_WARM_UP = 64  # steps of a simulator that are not timed
_STEPS = 8  # of a simulator between two synchronisations: training has none in a rollout


def time_on_device(
    parts: RunParts, collector: DeviceCollector, batch: int, seed: int, share: float
) -> tuple[float, float]:
    """Return the seconds of a rollout and of learning from it; in a single graph, the rollout counts as learning."""
    collector.start()
    if parts.loop is not None:
        return 0.0, _whole_iteration(parts.loop, batch, share)
    device = parts.algo.parameters.flat.device
    learner = Learner(parts.algo, Timeline())
    collecting, learning = list[float](), list[float]()
    until = perf_counter() + 2 * share
    while len(learning) < 4 or perf_counter() < until:
        began = perf_counter()
        slot = collector.finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        middle = perf_counter()
        learner.begin(slot, 0.5, keyed_generator(device, seed, SHUFFLE, len(learning)))
        while learner.advance():
            pass
        learner.metrics()
        collecting.append(middle - began)
        learning.append(perf_counter() - middle)
        collector.read_episode_stats()
        collector.open_rollout()
    return lower_quartile(collecting[1:]), lower_quartile(learning[1:])


def _whole_iteration(loop: DeviceLoop, batch: int, share: float) -> float:
    """Return the seconds of an iteration in bursts as long as the trainer's."""
    most = 1000
    number = loop.run(0, 1, batch, ENDLESS)[0]
    number += loop.run(number, most, batch, ENDLESS)[0]  # its duration sets the length of the next burst
    spent = list[float]()
    until = perf_counter() + 2 * share
    while len(spent) < 3 or perf_counter() < until:
        began = perf_counter()
        count = loop.run(number, most, batch, ENDLESS)[0]
        spent.append((perf_counter() - began) / count)
        number += count
    return lower_quartile(spent)


def simulator_step(env: DeviceEnv, n_envs: int, width: int, device: torch.device, share: float) -> float:
    """Return the seconds of one step of all environments of a simulator, with random actions.

    It is timed once episodes have begun to end as in training: resets may cost as much as steps.
    """
    state, _ = env.begin()
    actions = _random_actions(env.action_space, n_envs, width, device)

    def steps() -> None:
        nonlocal state
        for action in actions:
            state, _step = env.step(state, action)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        until = perf_counter() + share
        for _ in range(_WARM_UP // _STEPS):
            steps()
            if perf_counter() > until:
                break
        return seconds_of(steps, share) / _STEPS


def _random_actions(space: spaces.Space, n_envs: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Actions of `_STEPS` steps as an untrained Gaussian policy draws them; other than continuous ones are 0."""
    actions = torch.zeros(_STEPS, n_envs, width)
    if isinstance(space, spaces.Box):
        actions.normal_(generator=torch.Generator().manual_seed(0))
        low, high = (torch.from_numpy(np.ravel(bound)).float() for bound in (space.low, space.high))
        actions = actions.clamp(low, high)
    return list(actions.to(device))


def with_more_envs(maker: EnvMaker, n_envs: int) -> EnvMaker | None:
    """Return a maker whose simulator has `n_envs` environments; None if it is unknown how to tell the factory."""
    if maker.kind == "device":
        return maker
    known = {*maker.kwargs, *inspect.signature(maker.factory).parameters}
    name = next((name for name in ("num_envs", "n_envs") if name in known), None)
    return None if name is None else replace(maker, kwargs={**maker.kwargs, name: n_envs}, spare=[])


def copy_rates(share: float) -> tuple[float, float]:
    """Return bytes/s from pinned memory to the GPU and back."""
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.zeros_like(here, device="cuda")

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return _COPIED_BYTES / seconds_of(copy, share / 4)

    return rate(there, here), rate(here, there)


def buffer_size_that_fits(bytes_per_transition: int, device: torch.device) -> int:
    """Return the replay buffer size that fits into a quarter of the free GPU memory."""
    return int(torch.cuda.mem_get_info(device)[0]) // 4 // bytes_per_transition


def none_if_out_of_memory(probe: Callable[_Params, _Result | None]) -> Callable[_Params, _Result | None]:
    """Decorate a probe: it returns None if memory runs out next to the job, and its memory is freed in any case.

    A replay buffer raises UsageError if it does not fit, so that counts as out of memory too.
    """

    @wraps(probe)
    def wrapped(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result | None:
        try:
            with suppress(torch.OutOfMemoryError, UsageError):
                return probe(*args, **kwargs)
            return None
        finally:
            free_memory()  # here, because the exception keeps the probe's tensors alive

    return wrapped


def free_memory() -> None:
    """Free unused memory on the host and the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
