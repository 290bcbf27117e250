"""Measures each part of a training job separately, with the job's own environments, networks and settings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch

from unidle.buffers.rollout import Rollout
from unidle.config import Config, Recipe
from unidle.config.machine import available_cores
from unidle.engine.build import RunParts, build_parts, make_envs, resolve_network
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.engine.collect.rollout_slot import RolloutSlot
from unidle.engine.placement import choose_slices
from unidle.envs.device.device_env import DeviceEnv, traits_of
from unidle.envs.make import EnvMaker
from unidle.envs.protocol import HostEnvs
from unidle.timeline import Timeline
from unidle.tuning.job import endless
from unidle.tuning.probes.device import (
    copy_rates,
    free_memory,
    none_if_out_of_memory,
    simulator_step,
    time_on_device,
    with_more_envs,
)
from unidle.tuning.probes.learning import LearningProbes, quiet_capture, silent, updates_of
from unidle.tuning.probes.probe_results import ProbeResults
from unidle.tuning.probes.profile import Pace, Profile, SimulatorPace, Stepping
from unidle.tuning.probes.stepping import QUICK_STEP, BareStepping, StepStats, step_alone, step_bare
from unidle.tuning.probes.timing import lower_quartile, seconds_of
from unidle.tuning.probes.training import job_maker, replay_is_off_device

_MORE_ENVS = 4  # times as many environments of a simulator are tried


def measure_profile(config: Config, seconds: float = 8.0) -> Profile:
    """Measure each part of the job in about `seconds`, plus the time its environments need."""
    return probe_job(config, seconds).profile


def probe_job(config: Config, seconds: float = 8.0) -> ProbeResults:
    """Like `measure_profile`, with all probe results; `config` must be validated."""
    config = endless(config)
    threads = torch.get_num_threads()
    try:
        return _Probes(config, job_maker(config), seconds / 8).run()
    finally:
        torch.set_num_threads(threads)
        free_memory()


class _Probes:
    """All probes of one job, each about `share` seconds long."""

    def __init__(self, config: Config, maker: EnvMaker, share: float) -> None:
        self._config, self._maker, self._share = config, maker, share
        self._messages: list[str] = []

    def run(self) -> ProbeResults:
        with self._built(self._config, self._messages.append) as parts:
            if not isinstance(parts.collector, DeviceCollector):
                return self._on_host(parts, parts.collector.envs)
            probed = self._on_device(parts, parts.collector)
        simulator = probed.profile.simulator
        if simulator is not None:  # the job's own is closed by now: a process may be able to run only one
            simulator = dataclasses.replace(simulator, larger=self._with_more_envs(parts))
            probed.profile = dataclasses.replace(probed.profile, simulator=simulator)
        return probed

    @contextlib.contextmanager
    def _built(self, config: Config, say: Callable[[str], None]) -> Iterator[RunParts]:
        network = resolve_network(config.recipe.network)[0]
        parts = build_parts(config, self._maker, network, Timeline(), say, lambda *fault: None)
        try:
            yield parts
        finally:
            parts.collector.close()

    # -- environments on the host --------------------------------------------------------------------------------------

    def _on_host(self, parts: RunParts, envs: HostEnvs) -> ProbeResults:
        recipe, engine = self._config.recipe, self._config.engine
        on_gpu = parts.algo.parameters.flat.is_cuda
        fixed = parts.env_spec.vectorised or (self._maker.kind == "async" and not parts.workers)
        slot = self._slot(parts, envs)
        probes = LearningProbes(self._config, self._share, parts, slot)
        envs.start(np.zeros(envs.n_envs, np.int64))
        inference = self._inference(slot, envs)
        bare = step_bare(envs, self._share)
        stepping = [_stepping(parts.workers, envs, bare, recipe)]
        _fill_rollout(slot, envs)
        learning = probes.seconds()
        by_threads = [] if on_gpu else probes.by_threads(learning)
        overhead = probes.update_overhead()
        collecting, rest = self._collecting(self._config, parts, envs)
        requests = bool(envs.block.request_counts())
        step_seconds = parts.env_spec.step_seconds
        steps: StepStats | None = bare.steps
        if not fixed:  # fast steps do not wait for I/O, and their time is known well enough
            alone = step_seconds >= QUICK_STEP
            steps = step_alone(self._maker, parts.env_spec, engine, self._share) if alone else None
        if not fixed:
            stepping += [self._stepping(parts, workers) for workers in self._other_workers(parts)]
        tried = probes.recipe_with()
        profile = Profile(
            n_envs=recipe.n_envs,
            n_steps=recipe.n_steps,
            overlap="strict" if recipe.overlap == "strict" else "off",
            cores=available_cores(),
            on_gpu=on_gpu,
            on_device=False,
            fixed_workers=fixed,
            step_seconds=step_seconds,
            on_core=0.0 if self._maker.kind == "async" else steps.on_core if steps else 1.0,
            stepping=tuple(stepping),
            pace=Pace(inference, learning),
            collecting=collecting,
            rest=rest,
            threads=engine.threads,
            learning_by_threads=tuple(by_threads),
            graphs=engine.graphs,
            graphed=self._graphed(parts, tried) if on_gpu and not engine.graphs else None,
            other_device=self._pace_with(tried, device="cpu" if on_gpu else "cuda")
            if torch.cuda.is_available()
            else None,
            updates=updates_of(recipe),
            update_overhead=overhead,
        )
        probed = self._probed(profile, parts, steps, requests)
        if on_gpu:
            self._time_learning_variants(probed, probes)
        return probed

    def _slot(self, parts: RunParts, envs: HostEnvs) -> RolloutSlot:
        """A rollout slot of the job's size, for inference and learning."""
        recipe, policy = self._config.recipe, parts.algo.policy
        rollout = _rollout(parts, recipe.n_steps, recipe.n_envs)
        state = torch.zeros(recipe.n_envs, policy.state_size, device=rollout.obs.device)
        slot = RolloutSlot(policy, rollout, envs.block, state, parts.capture, own_weights=recipe.overlap == "strict")
        slot.open(len(envs.bounds), self._config.run.seed, 0)
        return slot

    def _inference(self, slot: RolloutSlot, envs: HostEnvs) -> float:
        """Seconds of one inference call."""
        everywhere = 0, slice(0, envs.n_envs)
        starts = np.zeros(envs.n_envs, np.bool_)
        return seconds_of(lambda: slot.inference.act(everywhere, starts), self._share)

    def _collecting(self, config: Config, parts: RunParts, envs: HostEnvs) -> tuple[float, float]:
        """Seconds of a rollout by the real collector, and of handing it over and opening the next."""
        recipe, env_spec = config.recipe, parts.env_spec
        likely = max(1e-6, env_spec.step_seconds * recipe.n_envs / max(1, parts.workers))
        steps = max(4, min(recipe.n_steps, int(self._share / likely)))  # shorten slow rollouts
        n_slots = 2 if recipe.overlap == "strict" else 1
        rollouts = [_rollout(parts, steps, recipe.n_envs) for _ in range(n_slots)]
        capture = quiet_capture(config, parts)
        collector = HostCollector(envs, parts.algo.policy, rollouts, config.run.seed, Timeline(), capture)
        collector.start()
        collector.finish()
        collected: list[float] = []
        opened: list[float] = []
        until = perf_counter() + 2 * self._share
        while not collected or perf_counter() < until:
            began = perf_counter()
            collector.read_episode_stats()
            collector.open_rollout()
            middle = perf_counter()
            collector.finish()
            collected.append(perf_counter() - middle)
            opened.append(middle - began)
        return lower_quartile(collected) * recipe.n_steps / steps, lower_quartile(opened)

    def _other_workers(self, parts: RunParts) -> list[int]:
        """Return the worker counts to try: one per core, and none if steps are quick."""
        n_envs, cores = self._config.recipe.n_envs, available_cores()
        found = {min(n_envs, cores)}
        if parts.env_spec.step_seconds * n_envs < 0.01 * self._share:
            found.add(0)
        return sorted(found - {parts.workers})

    def _stepping(self, parts: RunParts, workers: int) -> Stepping:
        """Measure bare stepping with another number of workers."""
        recipe, engine, env_spec = self._config.recipe, self._config.engine, parts.env_spec
        device = parts.algo.parameters.flat.device
        slices = choose_slices(engine, recipe.n_envs, workers, env_spec.step_seconds, device)
        engine = dataclasses.replace(engine, workers=workers or None, subproc=bool(workers))
        envs = make_envs(
            self._maker.on_host(), env_spec, recipe.n_envs, self._config.run.seed, workers, engine, slices=slices
        )
        try:
            envs.start(np.zeros(envs.n_envs, np.int64))
            return _stepping(workers, envs, step_bare(envs, self._share), recipe)
        finally:
            envs.close()

    def _graphed(self, parts: RunParts, recipe: Recipe) -> Pace | None:
        """Return the pace with CUDA graphs; None with a replay buffer on the host, which the probe would not have."""
        return None if replay_is_off_device(parts.algo) else self._pace_with(recipe, graphs=True)

    def _time_learning_variants(self, probed: ProbeResults, probes: LearningProbes) -> None:
        """Measure learning with the replay buffer on the GPU and in TF32, if the job uses neither."""
        if probed.replay_on_host:
            probed.learning_with_replay_on_gpu = probes.seconds_with()
            if probed.learning_with_replay_on_gpu is None:  # nothing to compare TF32 with
                return
        if self._config.recipe.precision == "fp32":
            probed.learning_in_tf32 = probes.seconds_with(precision="tf32")

    @none_if_out_of_memory
    def _pace_with(self, recipe: Recipe, **settings: Any) -> Pace | None:
        """Measure inference and learning under other engine settings, with a recipe that fits next to the job.

        None if the replay buffer does not fit on that device: the probe would measure copies from the host.
        """
        engine = dataclasses.replace(self._config.engine, **settings)
        config = dataclasses.replace(self._config, recipe=recipe, engine=engine)
        with self._built(config, silent) as parts:
            assert not isinstance(parts.collector, DeviceCollector)
            if replay_is_off_device(parts.algo):
                return None
            envs = parts.collector.envs
            envs.start(np.zeros(envs.n_envs, np.int64))
            slot = self._slot(parts, envs)
            inference = self._inference(slot, envs)
            _fill_rollout(slot, envs)
            learning = LearningProbes(config, self._share, parts, slot).seconds_or_estimate()
            # On the other device environments may be divided differently, which the model accounts for.
            is_here = engine.device == self._config.engine.device
            return Pace(inference, learning, self._collecting(config, parts, envs)[0] if is_here else None)

    # -- environments on the device ------------------------------------------------------------------------------------

    def _on_device(self, parts: RunParts, collector: DeviceCollector) -> ProbeResults:
        """Measure rollout and learning, separately if they are not a single graph."""
        recipe, engine = self._config.recipe, self._config.engine
        collecting, learning = time_on_device(parts, collector, recipe.total_batch, self._config.run.seed, self._share)
        simulator = None
        if not traits_of(collector.env).capture_safe:
            step = self._simulator_step(parts, collector.env, recipe.n_envs)
            simulator = SimulatorPace(step, takes_n_envs=self._maker.kind == "device")
        profile = Profile(
            n_envs=recipe.n_envs,
            n_steps=recipe.n_steps,
            overlap="strict" if recipe.overlap == "strict" else "off",
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
            simulator=simulator,
        )
        return self._probed(profile, parts, None, False)

    def _simulator_step(self, parts: RunParts, env: DeviceEnv, n_envs: int) -> float:
        """Seconds of one step of a simulator."""
        device = parts.algo.parameters.flat.device
        return simulator_step(env, n_envs, parts.env_spec.action_layout.width, device, self._share)

    @none_if_out_of_memory
    def _with_more_envs(self, parts: RunParts) -> tuple[int, float] | None:
        """Return a larger number of environments and the seconds of a step of all of them; None if that fails."""
        n_envs, device = _MORE_ENVS * self._config.recipe.n_envs, parts.algo.parameters.flat.device
        maker = with_more_envs(self._maker, n_envs)
        if maker is None:
            return None
        with contextlib.suppress(Exception):  # a user's factory or simulator may not support it
            env = maker.device_env(n_envs, self._config.run.seed, device)
            try:
                return (n_envs, self._simulator_step(parts, env, n_envs)) if env.n_envs == n_envs else None
            finally:
                if hasattr(env, "close"):
                    env.close()
        return None

    def _probed(self, profile: Profile, parts: RunParts, steps: StepStats | None, requests: bool) -> ProbeResults:
        to_device, from_device = copy_rates(self._share) if profile.on_gpu else (None, None)
        sent = 0 if profile.on_device else profile.n_envs * parts.env_spec.obs_layout.obs_bytes
        return ProbeResults(
            profile,
            steps,
            requests,
            to_device,
            from_device,
            replay_is_off_device(parts.algo),
            sent,
            messages=list(dict.fromkeys(self._messages)),
        )


def _stepping(workers: int, envs: HostEnvs, bare: BareStepping, recipe: Recipe) -> Stepping:
    steps = recipe.n_steps
    return Stepping(workers, len(envs.bounds), steps * bare.round_seconds, steps * bare.lockstep_seconds)


def _rollout(parts: RunParts, n_steps: int, n_envs: int) -> Rollout:
    sizes = parts.env_spec.obs_layout.obs_bytes, parts.env_spec.action_layout.width, parts.algo.policy.state_size
    return Rollout(n_steps, n_envs, *sizes, parts.algo.parameters.flat.device)


def _fill_rollout(slot: RolloutSlot, envs: HostEnvs) -> None:
    """Fill every step of a rollout with the observations in the block and valid actions."""
    rollout = slot.rollout
    slot.inference.act((0, slice(0, envs.n_envs)), np.zeros(envs.n_envs, np.bool_))
    rollout.obs.copy_(torch.from_numpy(envs.block.obs).to(rollout.obs.device).expand_as(rollout.obs))
    rollout.actions_and_trash.copy_(rollout.actions[:1].expand_as(rollout.actions_and_trash))
    torch.nn.init.normal_(rollout.rewards)
