"""Whole iterations on the device: rollout and learning are one function, captured together.

The host says when, and looks at the figures after a burst of iterations: reading them after each would take longer than
an iteration does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.algos.registry import ALGORITHMS, Algorithm
from unidle.algos.run_to_end import run_to_end
from unidle.config import Recipe
from unidle.engine.collect.device import NODES_PER_STEP, DeviceCollector
from unidle.engine.learn.learner import all_finite
from unidle.envs.device.device_env import DeviceEnv, traits_of
from unidle.rng import NOISE, SHUFFLE, rekeyed
from unidle.timeline import LEARN, DeviceClock, Timeline

_MOST_NODES = 20_000  # of a whole iteration's graph, which is captured once, in seconds, and always has work to do
_BURST_SECONDS = 0.1
_MOST_ITERATIONS = 1000  # in a burst


@dataclass(frozen=True)
class Flaw:
    """The first thing that was not finite: what came out of step `step` of environment `env`."""

    iteration: int
    step: int
    env: int
    is_reward: bool


def fits(env: DeviceEnv, recipe: Recipe) -> bool:
    """Whether a whole iteration can be one graph."""
    updates = ALGORITHMS[recipe.algo].iteration_nodes(recipe)
    if updates is None or not traits_of(env).capture_safe:
        return False
    return recipe.n_steps * NODES_PER_STEP + updates <= _MOST_NODES


class DeviceLoop:
    """Runs iterations of `algo` on what `collector` collects, in bursts."""

    def __init__(
        self, collector: DeviceCollector, algo: Algorithm, seed: int, timeline: Timeline, capture: Capturer
    ) -> None:
        """Nothing in `collector` and `algo` may be captured on its own."""
        self._collector, self._algo, self._seed = collector, algo, seed
        device = algo.parameters.flat.device
        self._noise, self._shuffle = torch.Generator(device), torch.Generator(device)
        self._names: list[str] = []
        self._values = torch.empty(0)  # the latest iteration's metrics
        self._done = torch.zeros((), dtype=torch.long, device=device)  # iterations of this burst
        # Flag, iteration of the burst, t × N + environment, and whether it was the reward.
        self._flaw = torch.zeros(4, dtype=torch.long, device=device)
        changes = [*_tensors(algo.state_dict()), *collector.moving(), self._done, self._flaw]
        self._iterate = capture("the iteration", self._whole, changes, generators=(self._noise, self._shuffle))
        self._clock = DeviceClock(timeline) if device.type == "cuda" else None
        self._at_once = 1  # iterations in the next burst

    def _whole(self) -> None:
        algo = self._algo
        rollout = self._collector.collect(self._noise)
        finite = all_finite(algo.policy.encoder, rollout)
        self._look_for_flaws(finite, rollout.rewards)
        metrics = run_to_end(algo.learning(rollout, self._shuffle))
        metrics["experience_finite"] = finite.all()
        values = torch.stack([value.detach().float() for value in metrics.values()])
        if not self._values.numel():  # the first time, which no graph records
            self._names, self._values = list(metrics), torch.zeros_like(values)
        # Once not finite, so for the burst: no iteration in the middle is overlooked.
        self._values.copy_(torch.where(torch.isfinite(self._values), values, self._values))
        self._done.add_(1)

    def _look_for_flaws(self, finite: Tensor, rewards: Tensor) -> None:
        flawed = ~finite.view(-1)
        first = flawed.to(torch.uint8).argmax()
        of_reward = ~torch.isfinite(rewards.view(-1).index_select(0, first.view(1)))
        found = torch.cat((flawed.any().view(1), self._done.view(1), first.view(1), of_reward.view(1)))
        self._flaw.copy_(torch.where(self._flaw[0] > 0, self._flaw, found))

    def _burst(self, first: int, count: int, batch: int, timesteps: int) -> None:
        """Do `count` iterations, or have them done."""
        self._collector.forget_episodes()
        self._done.zero_()
        self._values.zero_()
        for iteration in range(first, first + count):
            self._algo.set_progress(min(1.0, iteration * batch / timesteps))
            rekeyed(self._noise, self._seed, NOISE, iteration)
            rekeyed(self._shuffle, self._seed, SHUFFLE, iteration)
            self._iterate()
        self._collector.tell_episodes(count)

    def run(self, first: int, most: int, batch: int, timesteps: int) -> tuple[int, dict[str, float], Flaw | None]:
        """Do up to `most` iterations from number `first` on; returns how many, and what the last one logged."""
        count, began = max(1, min(self._at_once, most)), perf_counter()
        burst = partial(self._burst, first, count, batch, timesteps)
        self._clock.launch(LEARN, burst) if self._clock else burst()
        told = torch.cat((self._values.double(), self._flaw.double())).tolist()  # waits for all of it
        if self._clock is not None:
            self._clock.read()
            seconds = (perf_counter() - began) / count
            self._at_once = max(1, min(_MOST_ITERATIONS, int(_BURST_SECONDS / seconds)))
        numbers = dict(zip(self._names, told))
        flag, iteration, at, of_reward = (int(value) for value in told[len(self._names) :])
        if not flag:
            return count, numbers, None
        step, env = divmod(at, self._collector.n_envs)
        return count, numbers, Flaw(first + iteration, step, env, bool(of_reward))


def _tensors(state: object) -> list[Tensor]:
    """All tensors of a state_dict, however deep."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state.values() for tensor in _tensors(part)] if isinstance(state, dict) else []
