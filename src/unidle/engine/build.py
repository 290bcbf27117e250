"""Builds a run from its settings: policy, algorithm, environments, collector.

placement.py decides what runs where, and in how many processes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unidle.algos.capturing import Capturer, no_capture
from unidle.algos.registry import Algorithm, AnyPolicy, new_algorithm, new_policy
from unidle.buffers.rollout import Rollout
from unidle.config import Config, Engine, Recipe
from unidle.config.machine import available_cores
from unidle.config.settings import round_up_timesteps
from unidle.distributed.ranks import Ranks
from unidle.distributed.share import not_pinned, share_of
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import HostCollector
from unidle.engine.cuda_graphs import Capture
from unidle.engine.env_notes import env_notes, require_episode_records, require_images
from unidle.engine.learn.device_loop import DeviceLoop, can_capture_iteration
from unidle.engine.memory_check import require_memory_for_networks, require_memory_for_rollouts
from unidle.engine.other_trainers import CoreShare, OtherTrainers
from unidle.engine.placement import (
    choose_device,
    choose_slices,
    choose_vector_envs,
    choose_workers,
    fewer_workers,
    set_numerics,
)
from unidle.engine.sharing import Sharing
from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.device.host_view import TensorEnvs
from unidle.envs.import_name import callable_name, import_module
from unidle.envs.make import EnvMaker
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.pool.shared import SharedPools
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import EnvSpec
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.envs.vector.pool import VectorPool
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.rng import RANK, DrawingFrom, seed_globally
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.spaces.serialise import space_from_plain, space_to_plain
from unidle.timeline import Timeline


@dataclass(frozen=True)
class RunParts:
    """The collector, the algorithm, and how they run."""

    env_spec: EnvSpec
    algo: Algorithm
    collector: HostCollector | DeviceCollector
    loop: DeviceLoop | None  # None unless whole iterations run on the device
    workers: int  # worker processes; 0: environments are stepped in this process
    cores: int | None  # for this run, if other trainers use the machine too; None: all
    precision: str
    capture: Capture
    ranks: Ranks | None


def build_parts(
    config: Config,
    maker: EnvMaker,
    network: NetworkFactory | None,
    timeline: Timeline,
    say: Callable[[str], None],
    on_fault: Callable[..., None],
    others: OtherTrainers | None = None,
    sharing: Sharing | None = None,
    ranks: Ranks | None = None,
) -> RunParts:
    """Probe the environment, then build the parts of a run.

    The run shares the machine's cores with `others`, and this process with the runs of `sharing`. With `ranks`, the
    parts are this rank's share of those that `config` describes.
    """
    recipe, run, engine = config.recipe, config.run, config.engine
    device = choose_device(engine.device) if ranks is None else ranks.choose_device(engine.device)
    in_job = recipe.total_batch
    if ranks is not None:
        recipe, engine = share_of(recipe, ranks.size), not_pinned(engine)
    precision = set_numerics(device, recipe)
    env_spec = probe(maker, recipe.discretize, run.seed)
    torch.set_num_threads(engine.threads)  # after the probe: an environment may have changed the number
    if ranks is not None and (env_spec.on_device or env_spec.vectorised):
        raise UsageError(
            f"{run.env} steps many environments together, which does not run on several ranks; leave out --gpus, "
            "--ranks and torchrun, or use an environment that creates one gymnasium.Env."
        )
    if env_spec.on_device and recipe.overlap == "strict":
        raise UsageError(f"{run.env} runs on the device: there is nothing to overlap with learning; use --overlap off.")
    if run.log_info or run.monitor_csv:
        env_spec = replace(env_spec, log_info=run.log_info)
        require_episode_records(run, env_spec)
    require_images(recipe, env_spec.obs_layout)
    for note in env_notes(recipe, env_spec):
        say(note)
    require_memory_for_networks(recipe, env_spec.obs_layout, device)
    # After the probe, which may draw from these generators, for a number of steps that depends on time.
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)  # noqa: NPY002  # for environments and callbacks that draw from it
    torch.manual_seed(run.seed)
    # Weights are not drawn from the global generator, because runs in other threads use it too.
    weights = torch.Generator().manual_seed(run.seed)
    with DrawingFrom(weights):
        policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe, network).to(device)
    torch.set_rng_state(weights.get_state())  # for environments and networks that draw from it
    if ranks is not None:
        seed_globally(run.seed, RANK, ranks.rank)  # each rank draws other numbers
    sizes = env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size
    n_rollouts = 2 if recipe.overlap == "strict" else 1
    require_memory_for_rollouts(recipe, sizes, device, n_rollouts, policy.distribution)
    capture = Capture(device, say, graphs=engine.graphs)
    env = maker.device_env(recipe.n_envs, run.seed, device) if env_spec.on_device else None
    # If whole iterations are captured, their parts must not be captured separately.
    in_one_graph = env is not None and can_capture_iteration(env, recipe)
    capture_parts: Capturer = no_capture if in_one_graph else capture
    with DrawingFrom(weights):
        reduce = None if ranks is None else capture.split_at(ranks.mean_)
        algo = new_algorithm(policy, recipe, capture_parts, capture.fall_back, reduce, ranks)
    if env is None and ranks is None:
        torch.set_rng_state(weights.get_state())
    rollouts = [Rollout(recipe.n_steps, recipe.n_envs, *sizes, device) for _ in range(n_rollouts)]
    share = others.share() if others is not None else None
    cores = share.cores if share is not None else None
    if ranks is not None:
        cores = max(1, (cores or available_cores()) // ranks.place.local_size)
    first_env = 0 if ranks is None else ranks.rank * recipe.n_envs
    loop: DeviceLoop | None = None
    collector: HostCollector | DeviceCollector
    if env is not None:
        workers = 0
        is_busy = True
        collector = DeviceCollector(env, env_spec, policy, rollouts[0], run.seed, timeline, capture_parts, say)
        if engine.compile:
            collector.compile_steps()
        if in_one_graph:
            loop = DeviceLoop(collector, algo, run.seed, timeline, capture, None if sharing is None else sharing.bursts)
    else:
        # This process launches GPU work, or learns while the environments step.
        is_busy = device.type == "cuda" or recipe.overlap == "strict"
        workers, slices = _workers_and_slices(
            maker,
            env_spec,
            recipe,
            engine,
            device=device,
            is_busy=is_busy,
            cores=cores,
            share=share,
            sharing=sharing,
            say=say,
        )
        envs = make_envs(
            maker, env_spec, recipe.n_envs, run.seed, workers, engine, first_env, slices=slices, sharing=sharing
        )
        workers = envs.workers
        try:
            collector = HostCollector(envs, policy, rollouts, run.seed, timeline, capture, on_fault, sharing)
        except BaseException:
            envs.close()
            raise
        if ranks is not None:
            collector.take_part(ranks.rank, ranks.size)
        collector.schedule.n_rollouts = round_up_timesteps(run.timesteps, in_job) // in_job
    if others is not None:
        at_once = sharing.members if sharing else ranks.place.local_size if ranks else 1
        others.announce(max(1, workers * at_once + is_busy))
    return RunParts(env_spec, algo, collector, loop, workers, cores, precision, capture, ranks)


def _workers_and_slices(
    maker: EnvMaker,
    env_spec: EnvSpec,
    recipe: Recipe,
    engine: Engine,
    *,
    device: torch.device,
    is_busy: bool,
    cores: int | None,
    share: CoreShare | None,
    sharing: Sharing | None,
    say: Callable[[str], None],
) -> tuple[int, int]:
    """Worker processes, and slices of each; of vector environments, all slices."""
    job = engine, recipe.n_envs, env_spec.step_seconds
    if sharing is not None and engine.slices is None:
        engine = replace(engine, slices=1)  # while a worker waits for actions, those of other runs have its core
    if env_spec.vectorised:
        with_overlap = recipe.overlap == "strict"
        slices, workers = choose_vector_envs(
            maker, engine, recipe.n_envs, env_spec.step_seconds, device, overlap=with_overlap
        )
        if workers and (reason := _stays_here(maker, engine)):
            say(reason)
            return 0, slices
        return workers, slices
    workers = choose_workers(*job, is_busy=is_busy, cores=cores)
    if workers and (reason := _stays_here(maker, engine)):
        workers = 0
        say(reason)
    elif share is not None and workers < (alone := choose_workers(*job, is_busy=is_busy)):
        say(fewer_workers(share, workers, alone))
    if sharing is not None and engine.workers is None:
        workers = min(recipe.n_envs, sharing.workers_of(workers))
    return workers, choose_slices(engine, recipe.n_envs, workers, env_spec.step_seconds, device)


def _stays_here(maker: EnvMaker, engine: Engine) -> str | None:
    """A message if workers, which the user did not ask for, cannot get the environment; None if they can."""
    error = None if engine.subproc or engine.workers else maker.pickle_error()
    return error and (
        f"Environments are stepped in this process, because the factory cannot be sent to worker processes ({error}); "
        "for worker processes, use an environment id or a module-level function."
    )


def make_envs(
    maker: EnvMaker,
    env_spec: EnvSpec,
    n_envs: int,
    seed: int,
    workers: int,
    engine: Engine,
    first_index: int = 0,
    slices: int = 1,
    sharing: Sharing | None = None,
) -> HostEnvs:
    """Environments in this process, or in `workers` worker processes with `slices` slices each.

    Vector environments are stepped by their own library: in this process `slices` of them, or one in each worker
    process. Asynchronous ones share an event loop in this process, or one per worker process if the user sets workers;
    each is its own slice, unless the user sets the number of slices.
    """
    maker = maker.for_n_envs(n_envs)
    if workers and _stays_here(maker, engine):
        workers = 0
    if env_spec.on_device:
        return TensorEnvs(maker.device_env(n_envs, seed, first_index=first_index), env_spec)
    restarts, timeout = engine.max_env_restarts, engine.env_timeout
    if env_spec.vectorised:
        if not workers:
            return make_vector_envs(maker, env_spec, n_envs, seed, first_index, slices)
        pools = None if sharing is None else sharing.pools
        limits: dict[str, Any] = {"env_timeout": timeout, "max_env_restarts": restarts}
        return VectorPool(maker, env_spec, n_envs, seed, workers, first_index, **limits, shared=pools)
    if maker.kind == "async":
        maker = replace(maker, step_timeout=timeout)
        # One event loop is usually enough, and rate limits per site hold only within one process.
        if workers == 0 or not (engine.workers or engine.subproc):
            return AsyncEnvs(maker, env_spec, n_envs, seed, first_index, engine.slices, max_env_restarts=restarts)
        slices = engine.slices or n_envs
        timeout = timeout and 3 * timeout  # each step has its own timeout, and handling one takes time too
    if workers == 0:
        return SerialEnvs(maker, env_spec, n_envs, seed, first_index, max_env_restarts=restarts)
    # If the limit is a CPU quota, not a set of cores, other processes use these cores too.
    uses_all_cores = workers >= len(os.sched_getaffinity(0)) - 1
    return ProcessPool(
        maker,
        env_spec,
        n_envs,
        seed,
        workers,
        first_index,
        slices,
        env_timeout=timeout,
        max_env_restarts=restarts,
        pin_cores=uses_all_cores if engine.pin_cores is None else engine.pin_cores,
        shared=None if sharing is None else _shared_pools(sharing.pools, engine),
    )


def _shared_pools(pools: SharedPools, engine: Engine) -> SharedPools:
    """Without cores for a run whose user chooses the number of workers, or does not want them pinned."""
    return pools if engine.workers is None and engine.pin_cores is not False else replace(pools, cores=None)


def resolve_network(network: str | NetworkFactory | None) -> tuple[NetworkFactory | None, str | None]:
    """The factory of a user's network, and its name in the config."""
    if network is None:
        return None, None
    if callable(network):
        return network, callable_name(network)
    module, _, attribute = network.partition(":")
    if network.startswith("<") or not attribute:
        raise UsageError(f"The network {network} is not a module:callable; pass the factory again, as network=…")
    factory = getattr(import_module(module), attribute, None)
    if not callable(factory):
        raise UsageError(f"Module `{module}` has no callable `{attribute}`; check the name after the colon.")
    return factory, network


def spaces_to_plain(env_spec: EnvSpec) -> dict[str, Any]:
    """The spaces of a policy as plain data, for its checkpoint."""
    obs_layout, actions = env_spec.obs_layout, env_spec.action_layout
    return {
        "observation": space_to_plain(obs_layout.space),
        "action": space_to_plain(actions.space),
        "mask_width": obs_layout.mask_width,
    }


def policy_from(
    plain: dict[str, Any], config: Config, network: NetworkFactory | None
) -> tuple[AnyPolicy, ObservationLayout, ActionLayout]:
    """An untrained policy for the spaces in a checkpoint; needs no environment."""
    actions = ActionLayout.of(space_from_plain(plain["action"]), config.recipe.discretize)
    obs_layout = ObservationLayout.of(space_from_plain(plain["observation"]), plain["mask_width"])
    return new_policy(obs_layout, actions, config.recipe, network), obs_layout, actions
