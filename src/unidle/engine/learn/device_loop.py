"""Whole iterations on the device: rollout and update are one function, captured as one CUDA graph.

The host launches iterations in bursts and reads the metrics after each burst: reading them after every iteration could
take longer than the iteration.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer, no_capture
from unidle.algos.metrics import stacked
from unidle.algos.registry import ALGORITHMS, Algorithm
from unidle.algos.run_to_end import run_to_end
from unidle.config import Recipe
from unidle.engine.collect.device import NODES_PER_STEP, DeviceCollector
from unidle.engine.learn.finite import NonFinite, all_finite
from unidle.engine.turns import Slots, Turns
from unidle.envs.device.device_env import DeviceEnv, traits_of
from unidle.rng import NOISE, SHUFFLE, reseed
from unidle.timeline import LEARN, DeviceClock, Timeline

_MAX_NODES = 20_000  # of an iteration's graph; capturing it takes seconds, once
_BURST_SECONDS = 0.1
_MAX_ITERATIONS = 1000  # in a burst
Burst = tuple[int, dict[str, float], NonFinite | None]


def can_capture_iteration(env: DeviceEnv, recipe: Recipe) -> bool:
    """Whether a whole iteration can be captured as one graph."""
    updates = ALGORITHMS[recipe.algo].iteration_nodes(recipe)
    if updates is None or not traits_of(env).capture_safe:
        return False
    return recipe.n_steps * NODES_PER_STEP + updates <= _MAX_NODES


class DeviceLoop:
    """Runs iterations of `algo` on rollouts of `collector`, in bursts."""

    def __init__(
        self,
        collector: DeviceCollector,
        algo: Algorithm,
        seed: int,
        timeline: Timeline,
        capture: Capturer,
        slots: Slots | None = None,
    ) -> None:
        """No part of `collector` and `algo` may be captured separately. With an `after_gradient` hook, nothing is.

        `slots`: as many bursts of several runs may be on the device at the same time.
        """
        capture = capture if algo.after_gradient is None else no_capture
        self._collector, self._algo, self._seed = collector, algo, seed
        device = algo.parameters.flat.device
        self._noise, self._shuffle = torch.Generator(device), torch.Generator(device)
        self._names: list[str] = []
        self._values = torch.empty(0)  # the latest iteration's metrics
        self._done = torch.zeros((), dtype=torch.long, device=device)  # iterations of this burst
        # The first NaN or infinite value: flag, iteration of the burst, t × N + env, whether it is a reward.
        self._non_finite = torch.zeros(4, dtype=torch.long, device=device)
        changes = [*_tensors(algo.state_dict()), *collector.carried_state(), self._done, self._non_finite]
        self._iterate = capture("the iteration", self._iteration, changes, generators=(self._noise, self._shuffle))
        self._clock = DeviceClock(timeline) if device.type == "cuda" else None
        self._launched = torch.cuda.Event() if device.type == "cuda" else None  # a burst
        self._burst_length = 1  # iterations in the next one
        self._slots = slots or Slots(1)

    def _iteration(self) -> None:
        algo = self._algo
        rollout = self._collector.collect(self._noise)
        finite = all_finite(algo.policy.encoder, rollout)
        self._find_non_finite(finite, rollout.rewards)
        metrics = run_to_end(algo.update_in_parts(rollout, self._shuffle))
        metrics["experience_finite"] = finite.all()
        values = stacked(metrics)
        if not self._values.numel():  # the first call, which is not captured
            self._names, self._values = list(metrics), torch.zeros_like(values)
        # A NaN stays until the end of the burst, so that it is noticed.
        self._values.copy_(torch.where(torch.isfinite(self._values), values, self._values))
        self._done.add_(1)

    def _find_non_finite(self, finite: Tensor, rewards: Tensor) -> None:
        is_bad = ~finite.view(-1)
        first = is_bad.to(torch.uint8).argmax()
        of_reward = ~torch.isfinite(rewards.view(-1).index_select(0, first.view(1)))
        found = torch.cat((is_bad.any().view(1), self._done.view(1), first.view(1), of_reward.view(1)))
        self._non_finite.copy_(torch.where(self._non_finite[0] > 0, self._non_finite, found))

    def _burst(self, first: int, count: int, batch: int, timesteps: int) -> None:
        """Launch (on a CPU: run) `count` iterations."""
        self._collector.reset_episode_stats()
        self._done.zero_()
        self._values.zero_()
        for iteration in range(first, first + count):
            self._algo.set_progress(min(1.0, iteration * batch / timesteps))
            reseed(self._noise, self._seed, NOISE, iteration)
            reseed(self._shuffle, self._seed, SHUFFLE, iteration)
            self._iterate()
        self._collector.copy_episode_stats(count)

    def run(self, first: int, limit: int, batch: int, timesteps: int) -> Burst:
        """`run_in_turns`, without giving others a turn."""
        return run_to_end(self.run_in_turns(first, limit, batch, timesteps))

    def run_in_turns(self, first: int, limit: int, batch: int, timesteps: int) -> Turns[Burst]:
        """Run up to `limit` iterations, the first with index `first`.

        Returns how many, the metrics of the last one, and the first NaN or infinite value of an environment, if any.
        """
        yield from self._slots.take()
        try:
            count, began = max(1, min(self._burst_length, limit)), perf_counter()
            burst = partial(self._burst, first, count, batch, timesteps)
            self._clock.launch(LEARN, burst) if self._clock else burst()
            outcome = torch.cat((self._values.double(), self._non_finite.double()))
            if self._launched is None:
                yield None
            else:
                self._launched.record()
                yield self._launched.query
            values = outcome.tolist()  # waits for the device
        finally:
            self._slots.give_back()
        if self._clock is not None:
            self._clock.read()
            seconds = (perf_counter() - began) / count
            self._burst_length = max(1, min(_MAX_ITERATIONS, int(_BURST_SECONDS / seconds)))
        metrics = dict(zip(self._names, values))
        flag, iteration, at, of_reward = (int(value) for value in values[len(self._names) :])
        if not flag:
            return count, metrics, None
        step, env = divmod(at, self._collector.n_envs)
        return count, metrics, NonFinite(first + iteration, step, env, bool(of_reward))


def _tensors(state: object) -> list[Tensor]:
    """All tensors of a nested state_dict."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state.values() for tensor in _tensors(part)] if isinstance(state, dict) else []
