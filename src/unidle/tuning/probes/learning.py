"""Probes of learning from one rollout, with the job's settings and with changed ones."""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import Any

import torch

from unidle.algos.registry import Algorithm, new_algorithm, new_policy
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.engine.build import RunParts, resolve_network
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.cuda_graphs import Capture
from unidle.engine.learn.learner import Learner
from unidle.engine.placement import set_numerics
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import Timeline
from unidle.tuning.probes.device import buffer_size_that_fits, none_if_out_of_memory
from unidle.tuning.probes.timing import typical_seconds
from unidle.tuning.probes.training import replay_is_off_device

_LONGEST_PROBE = 3  # times its share of the time
_WORTH_THREADS = 2e-3  # seconds per update above which more threads are tried
_FEWEST_TURNS = 5
_PREPARING = 4  # at most this many calls of `advance` come before the first minibatch
_SMALL_BUFFER = 100_000  # steps


class LearningProbes:
    """Learns from one rollout repeatedly; each probe takes about `share` seconds and returns seconds per rollout."""

    def __init__(self, config: Config, share: float, parts: RunParts, slot: RolloutSlot) -> None:
        """`parts` are the job's own, and `slot` must hold a complete rollout before the first probe."""
        self._config, self._share, self._parts, self._slot = config, share, parts, slot
        self._device = parts.algo.parameters.flat.device
        buffer_size = vars(config.recipe).get("buffer_size", _SMALL_BUFFER)
        self._buffer_size = min(buffer_size, _SMALL_BUFFER)  # replay buffer size of probes
        experience = parts.algo.experience
        if self._device.type == "cuda" and experience is not None:
            env_spec = parts.env_spec
            each = experience.buffer.bytes_per_transition(env_spec.obs_layout.obs_bytes, env_spec.action_layout.width)
            self._buffer_size = min(self._buffer_size, buffer_size_that_fits(each, self._device))

    # -- with the job's settings ---------------------------------------------------------------------------------------

    def seconds(self, longest: float | None = None) -> float:
        """Return the seconds of learning; on a CPU, a probe stops soon after `longest`."""
        return self._typical_seconds(self._parts.algo, self._config.recipe, longest)

    def seconds_or_estimate(self) -> float:
        """Like `seconds`, but on a CPU extrapolate from the first updates, since it may be far slower than the GPU."""
        longest = _LONGEST_PROBE * self._share
        if self._device.type == "cpu":
            estimate = self.learn_once(self._parts.algo, self._config.recipe, longest, fewest=1)
            if estimate > longest:
                return estimate
        return self.seconds()

    def by_threads(self, learning: float) -> list[tuple[int, float]]:
        """Return (threads, seconds) with one thread and, unless updates are small, one per core, on a CPU.

        `learning` is the time with the job's own number of threads.
        """
        threads = self._config.engine.threads
        others = {1} if learning / updates_of(self._config.recipe) < _WORTH_THREADS else {1, available_cores()}
        found: list[tuple[int, float]] = []
        try:
            for other in sorted(others - {threads}):
                torch.set_num_threads(other)
                found.append((other, self.seconds(min(learning, self._share))))
        finally:
            torch.set_num_threads(threads)
        return found

    # -- with changed settings -----------------------------------------------------------------------------------------

    def recipe_with(self, **changes: Any) -> Recipe:
        """Return the job's recipe with changes and a small replay buffer, which fits next to the job's."""
        recipe = self._config.recipe
        smaller = {} if recipe.on_policy else {"buffer_size": self._buffer_size}
        return dataclasses.replace(recipe, **{**smaller, **changes})

    @none_if_out_of_memory
    def seconds_with(self, **changes: Any) -> float | None:
        """Return the seconds with a changed recipe and the replay buffer on the job's device; None if not possible."""
        recipe = self.recipe_with(**changes)
        set_numerics(self._device, recipe)
        try:
            algo, capture = self._algorithm(recipe)
            if replay_is_off_device(algo):
                return None
            seconds = self._typical_seconds(algo, recipe)
        finally:
            set_numerics(self._device, self._config.recipe)
        return seconds if self._uses_only_the_jobs_fallbacks(capture) else None

    @none_if_out_of_memory
    def update_overhead(self) -> float | None:
        """Return the share of an update that does not depend on the batch size, by a line through two sizes.

        The two sizes alternate, so that load from other programs affects both.
        """
        recipe = self._config.recipe
        size = recipe.batch_size
        assert isinstance(size, int)
        times = 8
        while recipe.on_policy and times > 1 and recipe.total_batch % (size * times):
            times //= 2
        if times == 1 or replay_is_off_device(
            self._parts.algo
        ):  # the host draws such batches, and the GPU waits for them
            return None
        larger = self.recipe_with(batch_size=size * times)
        algo, capture = self._algorithm(larger)
        self._set_up(algo, larger, self._share)
        # Two different implementations cannot be compared.
        is_other_kind = _in_numpy(algo) != _in_numpy(self._parts.algo)
        if is_other_kind or not self._uses_only_the_jobs_fallbacks(capture):
            return None
        both = (self._parts.algo, recipe), (algo, larger)
        turns: list[list[float]] = []
        until = perf_counter() + 2 * self._share
        while len(turns) < _FEWEST_TURNS or perf_counter() < until:
            turns.append([self.learn_once(*each, self._share) / updates_of(each[1]) for each in both])
        small, large = (min(seconds) for seconds in zip(*turns, strict=True))
        per_size = (large - small) / (times - 1)
        return min(1.0, max(0.0, 1 - per_size / small))

    def _algorithm(self, recipe: Recipe) -> tuple[Algorithm, Capture]:
        """Build the algorithm of another recipe on the same device; its capture records fallbacks."""
        env_spec, capture = self._parts.env_spec, quiet_capture(self._config, self._parts)
        policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe, resolve_network(recipe.network)[0])
        return new_algorithm(policy.to(self._device), recipe, capture, capture.fall_back), capture

    def _uses_only_the_jobs_fallbacks(self, tried: Capture) -> bool:
        """Whether the probe used no fallback that the job does not use, which would distort the measurement."""
        return tried.fallbacks.keys() <= self._parts.capture.fallbacks.keys()

    # -- for any algorithm ---------------------------------------------------------------------------------------------

    def _typical_seconds(self, algo: Algorithm, recipe: Recipe, longest: float | None = None) -> float:
        """Return the typical time of learning.

        The first run does not count unless it is slow; on a GPU, where it captures graphs, it never counts.
        """
        longest = longest or _LONGEST_PROBE * self._share
        latest = self._set_up(algo, recipe, longest)
        if latest > self._share:
            return latest
        return typical_seconds(lambda: self.learn_once(algo, recipe, longest), self._share)

    def _set_up(self, algo: Algorithm, recipe: Recipe, longest: float) -> float:
        """Learn until everything is set up, and return the seconds of the last run."""
        if self._device.type == "cuda":
            # The first captures graphs, or the second if the first only fills a replay buffer.
            for _ in range(1 if recipe.on_policy else 2):
                self.learn_once(algo, recipe, longest)
        return self.learn_once(algo, recipe, longest)

    def learn_once(self, algo: Algorithm, recipe: Recipe, longest: float, fewest: int = _PREPARING) -> float:
        """Learn once; on a CPU, stop after `longest` and extrapolate from the updates done."""
        learner = Learner(algo, Timeline())
        learner.begin(self._slot, 0.5, keyed_generator(self._device, self._config.run.seed, SHUFFLE, 0))
        began, times = perf_counter(), [0.0]
        while learner.advance():
            times.append(perf_counter() - began)
            if self._device.type == "cpu" and times[-1] > longest and len(times) > fewest:
                half = max(fewest, len(times) // 2) - 1
                return updates_of(recipe) * (times[-1] - times[half]) / (len(times) - 1 - half)
        learner.metrics()
        return perf_counter() - began


def _in_numpy(algo: Algorithm) -> bool:
    """Return whether updates are computed in NumPy; only PPO's can be."""
    return bool(getattr(getattr(algo, "ops", None), "in_numpy", False))


def updates_of(recipe: Recipe) -> float:
    """Return the number of minibatch updates per iteration."""
    return max(1e-9, recipe.updates_per_iteration)


def quiet_capture(config: Config, parts: RunParts) -> Capture:
    """Return a capture for probes that reports no fallbacks: the job's own were already reported."""
    return Capture(parts.algo.parameters.flat.device, silent, config.engine.graphs)


def silent(text: str) -> None:
    """Discard a message."""
