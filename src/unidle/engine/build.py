"""From settings to the parts of a run: device, policy, environments."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from unidle.algos.registry import AnyPolicy, new_policy
from unidle.config import Config, Engine, Recipe
from unidle.config.machine import available_cores
from unidle.engine.collect.host import QUICK_SECONDS
from unidle.envs.aio.pool import AsyncEnvs
from unidle.envs.device.host_view import TensorEnvs
from unidle.envs.make import EnvMaker, callable_name, import_module
from unidle.envs.pool.process_pool import ProcessPool
from unidle.envs.pool.serial import SerialEnvs
from unidle.envs.protocol import HostEnvs
from unidle.envs.spec import EnvSpec
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.errors import UsageError
from unidle.nn.actor_critic import NetworkFactory
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout
from unidle.spaces.serialise import space_from_plain, space_to_plain

# A round trip to a worker costs about this much, so shorter work is quicker done here.
_POOL_OVERHEAD_SECONDS = 150e-6


def choose_device(name: str) -> torch.device:
    """The device the user asked for; `auto` is the GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UsageError("--device cuda was asked for, but torch sees no CUDA GPU here; use --device cpu or auto.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def set_numerics(device: torch.device, recipe: Recipe) -> str:
    """Set matrix precision and repeatable kernels for this process; returns the precision in words."""
    torch.backends.cudnn.benchmark = False  # a choice by timing would differ from run to run
    torch.backends.cudnn.deterministic = True
    if device.type == "cpu":
        return "fp32"
    torch.set_float32_matmul_precision("highest" if recipe.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = recipe.precision != "fp32"
    return recipe.precision


def choose_workers(engine: Engine, n_envs: int, step_seconds: float, *, is_busy: bool, cores: int | None = None) -> int:
    """Worker processes to use; 0 steps the environments in this process. It changes speed only, never a result.

    `is_busy` says that this process has something to do all the time: a worker on its core would slow both. `cores`:
    if not those that there are here.
    """
    cores = cores or available_cores()
    if engine.subproc is False:
        return 0
    workers = min(n_envs, engine.workers or max(1, cores - is_busy))
    if engine.workers is None and workers < n_envs < 2 * workers:
        # Some would have two environments and others one. Two each take no longer, and a worker can then step one while
        # the other is served.
        workers = -(-n_envs // 2)
    saved = n_envs * step_seconds * (1 - 1 / min(cores, workers + is_busy))
    return workers if engine.subproc or engine.workers or saved > _POOL_OVERHEAD_SECONDS else 0


def choose_slices(engine: Engine, n_envs: int, workers: int, step_seconds: float, device: torch.device) -> int:
    """Slices per worker: two, unless a CPU serves all of them together anyway, because they step so quickly."""
    quick = device.type == "cpu" and step_seconds * n_envs / max(1, 2 * workers) < QUICK_SECONDS
    return engine.slices or (1 if quick else 2)


def too_many_workers(engine: Engine) -> str | None:
    """What to say if there are more processes than cores."""
    cores = available_cores()
    if engine.workers is not None and engine.workers > cores:
        return f"{engine.workers} worker processes share {cores} cores and slow each other down; use --workers {cores}."
    return None


def make_envs(
    maker: EnvMaker,
    env_spec: EnvSpec,
    n_envs: int,
    seed: int,
    workers: int,
    engine: Engine,
    first_index: int = 0,
    slices: int = 1,
) -> HostEnvs:
    """Environments in this process, or in `workers` worker processes of `slices` slices each.

    Those that step together do as their library does, and of a vector environment there are as many as it has. Those
    that wait do so on an event loop here, or on one in each worker process if the user asks for these; each is a slice
    of its own, unless the user asks for so many.
    """
    maker = maker.for_n_envs(n_envs)
    if env_spec.on_device:
        return TensorEnvs(maker.device_env(n_envs, seed, first_index=first_index), env_spec)
    if env_spec.vectorised:
        return make_vector_envs(maker, env_spec, n_envs, seed, first_index, slices)
    restarts = engine.max_env_restarts
    timeout = engine.env_timeout
    if maker.kind == "async":
        maker = replace(maker, deadline=timeout)
        # One loop is enough for most, and it keeps to its manners: those of two processes know nothing of each other.
        if workers == 0 or not (engine.workers or engine.subproc):
            return AsyncEnvs(maker, env_spec, n_envs, seed, first_index, engine.slices, max_env_restarts=restarts)
        slices = engine.slices or n_envs
        timeout = timeout and 3 * timeout  # steps have their own deadline, and what follows from one takes time too
    if workers == 0:
        return SerialEnvs(maker, env_spec, n_envs, seed, first_index, max_env_restarts=restarts)
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
        # Where a quota, not the set of cores, is what limits us, others are on these cores too.
        pin_cores=workers >= len(os.sched_getaffinity(0)) - 1 if engine.pin_cores is None else engine.pin_cores,
    )


def resolve_network(network: str | NetworkFactory | None) -> tuple[NetworkFactory | None, str | None]:
    """A user's network as a factory, and its name for the config."""
    if network is None:
        return None, None
    if callable(network):
        return network, callable_name(network)
    module, _, attribute = network.partition(":")
    if network.startswith("<") or not attribute:
        raise UsageError(f"The network {network} is no module:callable; pass the factory again, as network=…")
    factory = getattr(import_module(module), attribute, None)
    if not callable(factory):
        raise UsageError(f"Module `{module}` has no callable `{attribute}`; check the name after the colon.")
    return factory, network


def spaces_to_plain(env_spec: EnvSpec) -> dict[str, Any]:
    """The spaces and layout of a policy, for its checkpoint."""
    obs_layout, actions = env_spec.obs_layout, env_spec.action_layout
    return {
        "observation": space_to_plain(obs_layout.space),
        "action": space_to_plain(actions.space),
        "mask_width": obs_layout.mask_width,
    }


def policy_from(
    plain: dict[str, Any], config: Config, network: NetworkFactory | None
) -> tuple[AnyPolicy, ObservationLayout, ActionLayout]:
    """An untrained policy for the spaces in a checkpoint, without making the environment."""
    actions = ActionLayout.of(space_from_plain(plain["action"]), config.recipe.discretize)
    obs_layout = ObservationLayout.of(space_from_plain(plain["observation"]), plain["mask_width"])
    return new_policy(obs_layout, actions, config.recipe, network), obs_layout, actions
