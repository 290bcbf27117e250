"""Probes of learning: from one rollout, as the job does it, and in other ways that are tried beside it."""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import Any

import torch

from unidle.algos.registry import Algorithm, new_algorithm, new_policy
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.engine.build import resolve_network, set_numerics
from unidle.engine.collect.rollout_slot import Lane
from unidle.engine.cuda_graphs import Capture
from unidle.engine.learn.learner import Learner
from unidle.engine.parts import Parts
from unidle.rng import SHUFFLE, keyed_generator
from unidle.timeline import Timeline
from unidle.tuning.probes.device import if_it_fits, steps_with_room
from unidle.tuning.probes.timing import typical
from unidle.tuning.probes.training import memory_is_apart

_MOST_OF_A_PROBE = 3  # times its share of the time: what has to be waited for, waits no longer
_WORTH_SHARING = 2e-3  # seconds of an update
_FEWEST_TURNS = 5
_PREPARING = 4  # pieces, at most, before the first update
_SMALL_MEMORY = 100_000  # steps


class LearningProbes:
    """Learns from one rollout again and again; each probe has about `share` seconds, and seconds are of one rollout."""

    def __init__(self, config: Config, share: float, parts: Parts, lane: Lane) -> None:
        """`parts` are the job's own, and `lane` holds a whole rollout before anything is probed."""
        self._config, self._share, self._parts, self._lane = config, share, parts, lane
        self._device = parts.algo.parameters.flat.device
        self._few = min(config.recipe.buffer_size, _SMALL_MEMORY)  # steps that are remembered in what is only tried
        experience = parts.algo.experience
        if self._device.type == "cuda" and experience is not None:
            env_spec = parts.env_spec
            each = experience.buffer.bytes_per_place(env_spec.obs_layout.obs_bytes, env_spec.action_layout.width)
            self._few = min(self._few, steps_with_room(each, self._device))

    # -- as the job does it --------------------------------------------------------------------------------------------

    def seconds(self, longest: float | None = None) -> float:
        """Seconds of learning; on a CPU, none is waited for much longer than `longest`."""
        return self._usual(self._parts.algo, self._config.recipe, longest)

    def seconds_or_a_guess(self) -> float:
        """The same on a CPU that may be a hundred times slower than the job's GPU: its first piece tells that."""
        longest = _MOST_OF_A_PROBE * self._share
        if self._device.type == "cpu":
            guess = self.once(self._parts.algo, self._config.recipe, longest, fewest=1)
            if guess > longest:
                return guess
        return self.seconds()

    def by_threads(self, learning: float) -> list[tuple[int, float]]:
        """The same with one thread, and with one for each core, on a CPU; small updates are not worth sharing out.

        `learning` is what it takes with the job's own number.
        """
        threads = self._config.engine.threads
        others = {1} if learning / updates_of(self._config.recipe) < _WORTH_SHARING else {1, available_cores()}
        found: list[tuple[int, float]] = []
        try:
            for other in sorted(others - {threads}):
                torch.set_num_threads(other)
                found.append((other, self.seconds(min(learning, self._share))))
        finally:
            torch.set_num_threads(threads)
        return found

    # -- in other ways -------------------------------------------------------------------------------------------------

    def recipe_with(self, **changes: Any) -> Recipe:
        """The job's with changes, to be tried beside it: another memory would take as much room once more."""
        return dataclasses.replace(self._config.recipe, **{"buffer_size": self._few, **changes})

    @if_it_fits
    def seconds_with(self, **changes: Any) -> float | None:
        """Seconds by a recipe with changes, out of a memory on the job's device; None where that cannot be told."""
        recipe = self.recipe_with(**changes)
        set_numerics(self._device, recipe)
        try:
            algo, capture = self._algorithm(recipe)
            if memory_is_apart(algo):
                return None
            seconds = self._usual(algo, recipe)
        finally:
            set_numerics(self._device, self._config.recipe)
        return seconds if self._goes_the_jobs_ways(capture) else None

    @if_it_fits
    def update_overhead(self) -> float | None:
        """The share of an update that a larger batch leaves as it is: by two sizes of it, on a straight line.

        The two take turns: another program that comes or goes between them would look like a share of its own.
        """
        recipe = self._config.recipe
        size = recipe.batch_size
        assert isinstance(size, int)
        times = 8
        while recipe.on_policy and times > 1 and recipe.total_batch % (size * times):
            times //= 2
        if times == 1 or memory_is_apart(self._parts.algo):  # the host draws such batches, and the GPU waits for them
            return None
        larger = self.recipe_with(batch_size=size * times)
        algo, capture = self._algorithm(larger)
        self._set_up(algo, larger, self._share)
        # A line through two ways of learning would say nothing.
        is_other_way = getattr(algo, "in_numpy", False) != getattr(self._parts.algo, "in_numpy", False)
        if is_other_way or not self._goes_the_jobs_ways(capture):
            return None
        both = (self._parts.algo, recipe), (algo, larger)
        turns: list[list[float]] = []
        until = perf_counter() + 2 * self._share
        while len(turns) < _FEWEST_TURNS or perf_counter() < until:
            turns.append([self.once(*each, self._share) / updates_of(each[1]) for each in both])
        small, large = (min(seconds) for seconds in zip(*turns, strict=True))
        per_size = (large - small) / (times - 1)
        return min(1.0, max(0.0, 1 - per_size / small))

    def _algorithm(self, recipe: Recipe) -> tuple[Algorithm, Capture]:
        """Of another recipe, on the same device; and what notes the slower ways that it takes."""
        env_spec, capture = self._parts.env_spec, quiet_capture(self._config, self._parts)
        policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe, resolve_network(recipe.network)[0])
        return new_algorithm(policy.to(self._device), recipe, capture, capture.fall_back), capture

    def _goes_the_jobs_ways(self, tried: Capture) -> bool:
        """Whether nothing that was tried takes a slower way than in the job: it would be that which was measured."""
        return tried.fallbacks.keys() <= self._parts.capture.fallbacks.keys()

    # -- of whichever algorithm ----------------------------------------------------------------------------------------

    def _usual(self, algo: Algorithm, recipe: Recipe, longest: float | None = None) -> float:
        """What learning usually takes.

        The first time does not count, unless it takes long; on a GPU, where graphs are captured in it, it never does.
        """
        longest = longest or _MOST_OF_A_PROBE * self._share
        latest = self._set_up(algo, recipe, longest)
        if latest > self._share:
            return latest
        return typical(lambda: self.once(algo, recipe, longest), self._share)

    def _set_up(self, algo: Algorithm, recipe: Recipe, longest: float) -> float:
        """Learn until there is nothing left to set up, and return the seconds of the last time."""
        if self._device.type == "cuda":
            # The first captures graphs; the second, where the first only fills a memory to learn from.
            for _ in range(1 if recipe.on_policy else 2):
                self.once(algo, recipe, longest)
        return self.once(algo, recipe, longest)

    def once(self, algo: Algorithm, recipe: Recipe, longest: float, fewest: int = _PREPARING) -> float:
        """Learn once; on a CPU, what takes longer is stopped, and reckoned up from the pieces that were done."""
        learner = Learner(algo, Timeline())
        learner.begin(self._lane, 0.5, keyed_generator(self._device, self._config.run.seed, SHUFFLE, 0))
        began, pieces = perf_counter(), [0.0]
        while learner.advance():
            pieces.append(perf_counter() - began)
            if self._device.type == "cpu" and pieces[-1] > longest and len(pieces) > fewest:
                half = max(fewest, len(pieces) // 2) - 1
                return updates_of(recipe) * (pieces[-1] - pieces[half]) / (len(pieces) - 1 - half)
        learner.numbers()
        return perf_counter() - began


def updates_of(recipe: Recipe) -> float:
    """Minibatches that an iteration learns from."""
    if not recipe.on_policy:
        return max(1e-9, recipe.total_batch * recipe.utd_ratio)
    assert isinstance(recipe.batch_size, int)
    return recipe.n_epochs * recipe.total_batch / recipe.batch_size


def quiet_capture(config: Config, parts: Parts) -> Capture:
    """For what is tried: what the job itself cannot capture was said when that was set up."""
    return Capture(parts.algo.parameters.flat.device, silent, config.engine.graphs)


def silent(text: str) -> None:
    """Say nothing, of what is tried beside the job itself."""
