"""The ceilings of a training job: each part by itself, with the job's own environments, networks and settings."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch

from unidle.algos.algorithm import Algorithm, new_policy
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.engine.build import choose_slices, make_envs, new_algorithm, resolve_network, set_numerics
from unidle.engine.capture import Capture
from unidle.engine.collector import Collector
from unidle.engine.device_collector import DeviceCollector
from unidle.engine.lane import Lane
from unidle.engine.learner import Learner
from unidle.engine.parts import Parts, build_parts
from unidle.envs.host import HostEnvs
from unidle.envs.make import EnvMaker
from unidle.errors import UsageError
from unidle.memory.rollout import Rollout
from unidle.streams import SHUFFLE, keyed_generator
from unidle.timeline import Timeline
from unidle.tuning.job import endless
from unidle.tuning.probed import Probed
from unidle.tuning.probes_device import copy_rates, steps_with_room, time_on_device
from unidle.tuning.profile import Pace, Profile, Stepping
from unidle.tuning.stepping import QUICK_STEP, Bare, Steps, step_alone, step_bare
from unidle.tuning.timing import seconds_of, typical, usual
from unidle.tuning.training import job_maker, memory_is_apart

_MOST_OF_A_PROBE = 3  # times its share of the time: what has to be waited for, waits no longer
_WORTH_SHARING = 2e-3  # seconds of an update
_FEWEST_TURNS = 5
_PREPARING = 4  # pieces, at most, before the first update
_SMALL_MEMORY = 100_000  # steps


def measure_profile(config: Config, seconds: float = 8.0) -> Profile:
    """Measure each part of the job by itself, in about so many seconds and the time that its environments need."""
    return probe_job(config, seconds).profile


def probe_job(config: Config, seconds: float = 8.0) -> Probed:
    """`measure_profile`, and what it saw besides; `config` must be validated."""
    config = endless(config)
    threads = torch.get_num_threads()
    try:
        return _Probes(config, job_maker(config), seconds / 8).all()
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Probes:
    """All probes of one job; each has about `share` seconds."""

    def __init__(self, config: Config, maker: EnvMaker, share: float) -> None:
        self._config, self._maker, self._share = config, maker, share
        self._messages: list[str] = []
        self._few = min(config.recipe.buffer_size, _SMALL_MEMORY)  # steps that are remembered in what is only tried

    def all(self) -> Probed:
        with self._built(self._config, self._messages.append) as parts:
            if isinstance(parts.collector, DeviceCollector):
                return self._on_device(parts, parts.collector)
            return self._on_host(parts, parts.collector.envs)

    @contextlib.contextmanager
    def _built(self, config: Config, say: Callable[[str], None]) -> Iterator[Parts]:
        network = resolve_network(config.recipe.network)[0]
        parts = build_parts(config, self._maker, network, Timeline(), say, lambda *fault: None)
        try:
            yield parts
        finally:
            parts.collector.close()

    # -- environments on the host --------------------------------------------------------------------------------------

    def _on_host(self, parts: Parts, envs: HostEnvs) -> Probed:
        recipe, engine = self._config.recipe, self._config.engine
        on_gpu = parts.algo.parameters.flat.is_cuda
        fixed = parts.contract.vectorised or (self._maker.makes == "async" and not parts.workers)
        lane = self._lane(parts, envs)
        if on_gpu:
            self._few = min(self._few, steps_with_room(parts.contract.rows.row_bytes, lane.rollout.rows.device))
        envs.start(np.zeros(envs.n_envs, np.int64))
        inference = self._inference(lane, envs)
        bare = step_bare(envs, self._share)
        stepping = [_stepping(parts.workers, envs, bare, recipe)]
        _spread(lane, envs)
        learning = self._learning(parts.algo, recipe, lane)
        by_threads = [] if on_gpu else self._learning_by_threads(parts, lane, learning)
        overhead = self._update_overhead(parts, lane)
        collecting, rest = self._collecting(parts, envs)
        requests = bool(envs.block.request_counts())
        step_seconds = parts.contract.step_seconds
        steps: Steps | None = bare.steps
        if not fixed:  # what is quick waits for nobody, and what it takes is known well enough
            alone = step_seconds >= QUICK_STEP
            steps = step_alone(self._maker, parts.contract, engine, self._share) if alone else None
        if not fixed:
            stepping += [self._stepping(parts, workers) for workers in self._other_workers(parts)]
        profile = Profile(
            n_envs=recipe.n_envs,
            n_steps=recipe.n_steps,
            overlap=recipe.overlap,
            cores=available_cores(),
            on_gpu=on_gpu,
            on_device=False,
            fixed_workers=fixed,
            step_seconds=step_seconds,
            on_core=0.0 if self._maker.makes == "async" else steps.on_core if steps else 1.0,
            stepping=tuple(stepping),
            pace=Pace(inference, learning),
            collecting=collecting,
            rest=rest,
            threads=engine.threads,
            learning_by_threads=tuple(by_threads),
            graphs=engine.graphs,
            graphed=self._pace_with(graphs=True) if on_gpu and not engine.graphs else None,
            elsewhere=self._pace_with(device="cpu" if on_gpu else "cuda") if torch.cuda.is_available() else None,
            updates=updates_of(recipe),
            update_overhead=overhead,
        )
        probed = self._probed(profile, parts, steps, requests)
        if probed.replay_on_host:
            probed.learning_beside = self._learning_as(parts, lane)
        if on_gpu and recipe.precision == "fp32":
            probed.learning_in_tf32 = self._learning_as(parts, lane, precision="tf32")
        return probed

    def _capture(self, parts: Parts) -> Capture:
        """For what is tried: what the job itself cannot capture was said when that was set up."""
        return Capture(parts.algo.parameters.flat.device, _silent, self._config.engine.graphs)

    def _lane(self, parts: Parts, envs: HostEnvs) -> Lane:
        """A rollout of the job's size, to act into and to learn from."""
        recipe, policy = self._config.recipe, parts.algo.policy
        rollout = _rollout(parts, recipe.n_steps, recipe.n_envs)
        state = torch.zeros(recipe.n_envs, policy.state_size, device=rollout.rows.device)
        lane = Lane(policy, rollout, envs.block, state, parts.capture, own_weights=recipe.overlap == "strict")
        lane.open(len(envs.bounds), self._config.run.seed, 0)
        return lane

    def _inference(self, lane: Lane, envs: HostEnvs) -> float:
        """Seconds of one service."""
        everywhere = 0, slice(0, envs.n_envs)
        starts = np.zeros(envs.n_envs, np.bool_)
        return seconds_of(lambda: lane.service.serve(everywhere, starts), self._share)

    def _learning(self, algo: Algorithm, recipe: Recipe, lane: Lane, longest: float | None = None) -> float:
        """Seconds of learning from one rollout.

        The first time does not count, unless it takes long; on a GPU, where graphs are captured in it, it never does.
        """
        longest = longest or _MOST_OF_A_PROBE * self._share
        latest = self._first_learn(algo, recipe, lane, longest)
        if latest > self._share:
            return latest
        return typical(lambda: self._learn(algo, recipe, lane, longest), self._share)

    def _first_learn(self, algo: Algorithm, recipe: Recipe, lane: Lane, longest: float) -> float:
        """Learn until there is nothing left to set up, and return the seconds of the last time."""
        if algo.parameters.flat.device.type == "cuda":
            # The first captures graphs; the second, where the first only fills a memory to learn from.
            for _ in range(1 if recipe.algo == "ppo" else 2):
                self._learn(algo, recipe, lane, longest)
        return self._learn(algo, recipe, lane, longest)

    def _learn(self, algo: Algorithm, recipe: Recipe, lane: Lane, longest: float, fewest: int = _PREPARING) -> float:
        """Learn once; on a CPU, what takes longer is stopped, and reckoned up from the pieces that were done."""
        device = algo.parameters.flat.device
        learner = Learner(algo, Timeline())
        learner.begin(lane, 0.5, keyed_generator(device, self._config.run.seed, SHUFFLE, 0))
        began, pieces = perf_counter(), [0.0]
        while learner.advance():
            pieces.append(perf_counter() - began)
            if device.type == "cpu" and pieces[-1] > longest and len(pieces) > fewest:
                half = max(fewest, len(pieces) // 2) - 1
                return updates_of(recipe) * (pieces[-1] - pieces[half]) / (len(pieces) - 1 - half)
        learner.numbers()
        return perf_counter() - began

    def _learning_by_threads(self, parts: Parts, lane: Lane, learning: float) -> list[tuple[int, float]]:
        """The same with one thread, and with one for each core, on a CPU; small updates are not worth sharing out."""
        recipe, cores, threads = self._config.recipe, available_cores(), self._config.engine.threads
        others = {1} if learning / updates_of(recipe) < _WORTH_SHARING else {1, cores}
        found: list[tuple[int, float]] = []
        try:
            for other in sorted(others - {threads}):
                torch.set_num_threads(other)
                found.append((other, self._learning(parts.algo, recipe, lane, min(learning, self._share))))
        finally:
            torch.set_num_threads(threads)
        return found

    def _update_overhead(self, parts: Parts, lane: Lane) -> float | None:
        """The share of an update that a larger batch leaves as it is: by two sizes of it, on a straight line.

        The two take turns: another program that comes or goes between them would look like a share of its own.
        """
        recipe = self._config.recipe
        size = recipe.batch_size
        assert isinstance(size, int)
        times = 8
        while recipe.algo == "ppo" and times > 1 and recipe.total_batch % (size * times):
            times //= 2
        if times == 1 or memory_is_apart(parts.algo):  # the host draws such batches, and the GPU waits for them
            return None
        larger = self._recipe_with(batch_size=size * times)
        algo = self._algorithm(larger, parts)
        self._first_learn(algo, larger, lane, self._share)
        sizes = (parts.algo, recipe), (algo, larger)
        turns: list[list[float]] = []
        until = perf_counter() + 2 * self._share
        while len(turns) < _FEWEST_TURNS or perf_counter() < until:
            turns.append([self._learn(*size, lane, self._share) / updates_of(size[1]) for size in sizes])
        small, large = (min(seconds) for seconds in zip(*turns, strict=True))
        per_size = (large - small) / (times - 1)
        return min(1.0, max(0.0, 1 - per_size / small))

    def _recipe_with(self, **changes: Any) -> Recipe:
        """The job's with changes, to be tried beside it: another memory would take as much room once more."""
        return dataclasses.replace(self._config.recipe, **{"buffer_size": self._few, **changes})

    def _algorithm(self, recipe: Recipe, parts: Parts) -> Algorithm:
        """Of another recipe, on the same device."""
        network, capture = resolve_network(recipe.network)[0], self._capture(parts)
        policy = new_policy(parts.contract.rows, parts.contract.actions, recipe, network)
        return new_algorithm(policy.to(parts.algo.parameters.flat.device), recipe, capture, capture.fall_back)

    def _learning_as(self, parts: Parts, lane: Lane, **changes: Any) -> float | None:
        """Seconds of learning from one rollout by another recipe; None where that is none for this job."""
        recipe, device = self._recipe_with(**changes), parts.algo.parameters.flat.device
        set_numerics(device, recipe)
        try:
            return self._learning(self._algorithm(recipe, parts), recipe, lane)
        except UsageError:  # a memory that is too small for its environments
            return None
        finally:
            set_numerics(device, self._config.recipe)

    def _collecting(self, parts: Parts, envs: HostEnvs) -> tuple[float, float]:
        """Seconds of a rollout by the real collector, and of handing it over and opening the next."""
        recipe, contract = self._config.recipe, parts.contract
        likely = max(1e-6, contract.step_seconds * recipe.n_envs / max(1, parts.workers))
        steps = max(4, min(recipe.n_steps, int(self._share / likely)))  # what takes long is not waited for to its end
        lanes = 2 if recipe.overlap == "strict" else 1
        rollouts = [_rollout(parts, steps, recipe.n_envs) for _ in range(lanes)]
        capture = self._capture(parts)
        collector = Collector(envs, parts.algo.policy, rollouts, self._config.run.seed, Timeline(), capture)
        collector.start()
        collector.finish()
        collected: list[float] = []
        opened: list[float] = []
        until = perf_counter() + 2 * self._share
        while not collected or perf_counter() < until:
            began = perf_counter()
            collector.settle()
            collector.open()
            middle = perf_counter()
            collector.finish()
            collected.append(perf_counter() - middle)
            opened.append(middle - began)
        return usual(collected) * recipe.n_steps / steps, usual(opened)

    def _other_workers(self, parts: Parts) -> list[int]:
        """Numbers of workers to try: all cores, and none where steps are quick."""
        n_envs, cores = self._config.recipe.n_envs, available_cores()
        found = {min(n_envs, cores)}
        if parts.contract.step_seconds * n_envs < 0.01 * self._share:
            found.add(0)
        return sorted(found - {parts.workers})

    def _stepping(self, parts: Parts, workers: int) -> Stepping:
        """Bare stepping by another number of workers."""
        recipe, engine, contract = self._config.recipe, self._config.engine, parts.contract
        device = parts.algo.parameters.flat.device
        slices = choose_slices(engine, recipe.n_envs, workers, contract.step_seconds, device)
        engine = dataclasses.replace(engine, workers=workers or None, subproc=bool(workers))
        envs = make_envs(
            self._maker.on_host(), contract, recipe.n_envs, self._config.run.seed, workers, engine, slices=slices
        )
        try:
            envs.start(np.zeros(envs.n_envs, np.int64))
            return _stepping(workers, envs, step_bare(envs, self._share), recipe)
        finally:
            envs.close()

    def _pace_with(self, **settings: Any) -> Pace:
        """Inference and learning under other engine settings."""
        recipe = self._recipe_with()
        engine = dataclasses.replace(self._config.engine, **settings)
        with self._built(dataclasses.replace(self._config, recipe=recipe, engine=engine), _silent) as parts:
            assert not isinstance(parts.collector, DeviceCollector)
            envs, on_cpu = parts.collector.envs, parts.algo.parameters.flat.device.type == "cpu"
            envs.start(np.zeros(envs.n_envs, np.int64))
            lane = self._lane(parts, envs)
            inference = self._inference(lane, envs)
            _spread(lane, envs)
            if on_cpu:  # it may be a hundred times slower there, and its first piece tells that already
                longest = _MOST_OF_A_PROBE * self._share
                roughly = self._learn(parts.algo, recipe, lane, longest, fewest=1)
                if roughly > longest:
                    return Pace(inference, roughly)
            return Pace(inference, self._learning(parts.algo, recipe, lane))

    # -- environments on the device ------------------------------------------------------------------------------------

    def _on_device(self, parts: Parts, collector: DeviceCollector) -> Probed:
        """Rollout and learning are of one piece, or nearly: what can be told apart is told."""
        recipe, engine = self._config.recipe, self._config.engine
        collecting, learning = time_on_device(parts, collector, recipe.total_batch, self._config.run.seed, self._share)
        profile = Profile(
            n_envs=recipe.n_envs,
            n_steps=recipe.n_steps,
            overlap=recipe.overlap,
            cores=available_cores(),
            on_gpu=parts.algo.parameters.flat.is_cuda,
            on_device=True,
            fixed_workers=True,
            step_seconds=0.0,
            on_core=1.0,
            stepping=(),
            pace=Pace(0.0, learning),
            collecting=collecting,
            rest=0.0,
            threads=engine.threads,
            updates=updates_of(recipe),
        )
        return self._probed(profile, parts, None, False)

    def _probed(self, profile: Profile, parts: Parts, steps: Steps | None, requests: bool) -> Probed:
        to_device, from_device = copy_rates(self._share) if profile.on_gpu else (None, None)
        sent = 0 if profile.on_device else profile.n_envs * parts.contract.rows.row_bytes
        return Probed(
            profile,
            steps,
            requests,
            to_device,
            from_device,
            memory_is_apart(parts.algo),
            sent,
            messages=list(dict.fromkeys(self._messages)),
        )


def updates_of(recipe: Recipe) -> float:
    """Minibatches that an iteration learns from."""
    if recipe.algo != "ppo":
        return max(1e-9, recipe.total_batch * recipe.updates_per_step)
    assert isinstance(recipe.batch_size, int)
    return recipe.n_epochs * recipe.total_batch / recipe.batch_size


def _silent(text: str) -> None:
    """For what is tried beside the job itself."""


def _stepping(workers: int, envs: HostEnvs, bare: Bare, recipe: Recipe) -> Stepping:
    steps = recipe.n_steps
    return Stepping(workers, len(envs.bounds), steps * bare.round_seconds, steps * bare.in_step)


def _rollout(parts: Parts, n_steps: int, n_envs: int) -> Rollout:
    sizes = parts.contract.rows.row_bytes, parts.contract.actions.width, parts.algo.policy.state_size
    return Rollout(n_steps, n_envs, *sizes, parts.algo.parameters.flat.device)


def _spread(lane: Lane, envs: HostEnvs) -> None:
    """Fill a rollout with the observations in the block, at every step, and actions that suit them."""
    rollout = lane.rollout
    lane.service.serve((0, slice(0, envs.n_envs)), np.zeros(envs.n_envs, np.bool_))
    rollout.rows.copy_(torch.from_numpy(envs.block.rows).to(rollout.rows.device).expand_as(rollout.rows))
    rollout.actions_and_trash.copy_(rollout.actions[:1].expand_as(rollout.actions_and_trash))
    torch.nn.init.normal_(rollout.rewards)
