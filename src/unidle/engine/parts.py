"""The parts that a run is made of, put together as its settings say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from unidle.algos.capturing import Capturer, as_it_is
from unidle.algos.registry import Algorithm, new_algorithm, new_policy
from unidle.buffers.rollout import Rollout
from unidle.config import Config
from unidle.config.settings import whole_steps
from unidle.engine.build import choose_device, choose_slices, choose_workers, make_envs, set_numerics
from unidle.engine.collect.device import DeviceCollector
from unidle.engine.collect.host import Collector
from unidle.engine.cuda_graphs import Capture
from unidle.engine.learn.device_loop import DeviceLoop, fits
from unidle.envs.make import EnvMaker
from unidle.envs.spec import EnvSpec, probe
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.timeline import Timeline


@dataclass(frozen=True)
class Parts:
    """What collects and what learns."""

    env_spec: EnvSpec
    algo: Algorithm
    collector: Collector | DeviceCollector
    loop: DeviceLoop | None  # where whole iterations are done on the device
    workers: int  # processes that step environments; 0: this one does
    precision: str
    capture: Capture


def build_parts(
    config: Config,
    maker: EnvMaker,
    network: NetworkFactory | None,
    timeline: Timeline,
    say: Callable[[str], None],
    on_fault: Callable[..., None],
) -> Parts:
    """Try the environment out, make as many as there are to be, and everything that works on them."""
    recipe, run, engine = config.recipe, config.run, config.engine
    device = choose_device(engine.device)
    precision = set_numerics(device, recipe)
    env_spec = probe(maker, recipe.discretize, run.seed)
    torch.set_num_threads(engine.threads)  # after the probe: an environment may have set it for itself
    if env_spec.on_device and recipe.overlap == "strict":
        raise UsageError(f"{run.env} lives on the device and has nothing to overlap with learning; use --overlap off.")
    # After the probe, which takes as many steps as there is time for and may draw from these.
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)  # noqa: NPY002  # for environments and callbacks that draw from it
    torch.manual_seed(run.seed)
    policy = new_policy(env_spec.obs_layout, env_spec.action_layout, recipe, network).to(device)
    capture = Capture(device, say, graphs=engine.graphs)
    env = maker.device_env(recipe.n_envs, run.seed, device) if env_spec.on_device else None
    # Iterations that are captured whole have no captured parts.
    is_whole = env is not None and fits(env, recipe)
    capture_parts: Capturer = as_it_is if is_whole else capture
    algo = new_algorithm(policy, recipe, capture_parts, capture.fall_back)
    sizes = env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, policy.state_size
    rollouts = [
        Rollout(recipe.n_steps, recipe.n_envs, *sizes, device) for _ in range(2 if recipe.overlap == "strict" else 1)
    ]
    loop: DeviceLoop | None = None
    collector: Collector | DeviceCollector
    if env is not None:
        workers = 0
        collector = DeviceCollector(env, env_spec, policy, rollouts[0], run.seed, timeline, capture_parts, say)
        if engine.compile:
            collector.compile_steps()
        if is_whole:
            loop = DeviceLoop(collector, algo, run.seed, timeline, capture)
    else:
        # It serves a GPU, or learns while the environments go on.
        is_busy = device.type == "cuda" or recipe.overlap == "strict"
        workers = choose_workers(engine, recipe.n_envs, env_spec.step_seconds, is_busy=is_busy)
        slices = choose_slices(engine, recipe.n_envs, workers, env_spec.step_seconds, device)
        envs = make_envs(maker, env_spec, recipe.n_envs, run.seed, workers, engine, slices=slices)
        workers = envs.workers
        try:
            collector = Collector(envs, policy, rollouts, run.seed, timeline, capture, on_fault)
        except BaseException:
            envs.close()
            raise
    collector.until = whole_steps(run.timesteps, recipe.total_batch) // recipe.total_batch
    return Parts(env_spec, algo, collector, loop, workers, precision, capture)
