"""One interface for the vector environments of Gymnasium, Stable-Baselines3 and EnvPool; that of ALE is in ale.py.

They differ in when they reset an environment whose episode ended, and where its final observation is:

    Gymnasium, SAME_STEP    reset within the step; infos["final_obs"]
    Gymnasium, DISABLED     reset on request, reset(options={"reset_mask": …}); the observation of the step
    Gymnasium, NEXT_STEP    reset by the next step, which belongs to no episode and does not fit into a rollout.
                            Sync-, Async- and ProcessVectorEnv are reset on request, like DISABLED; others are refused
    Stable-Baselines3       reset within the step; infos[i]["terminal_observation"]
    EnvPool                 reset on request, reset(env_id); the observation of the step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from unidle.envs.check import check_return_value
from unidle.envs.make import EnvMaker
from unidle.envs.vector.process_vector_env import ProcessVectorEnv
from unidle.envs.vector.vector_wrappers import (
    Statistics,
    allow_partial_resets,
    load_statistics,
    sb3_observation_space,
    statistics,
)
from unidle.errors import UsageError
from unidle.spaces.observations import MASK
from unidle.spaces.tree import follow, rebuild, walk


@dataclass
class ObsBatch:
    """Observations of k environments, and their action masks if there are any."""

    env_ids: np.ndarray  # [k] indices in the vector environment
    observations: Any  # structured like the space, each leaf [k, …]
    mask_of: Callable[[int], Any]  # the mask of environment k, if info has one


@dataclass
class VectorStep:
    """The result of one step of a vector environment."""

    obs: ObsBatch  # after the step, or after the reset if the environment resets within the step
    rewards: np.ndarray  # [N]
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    final_obs: Callable[[int], Any]  # index → final observation of the episode that ended
    reset_obs: ObsBatch | None  # first observations of the environments that were reset, unless `obs` has them
    scores: np.ndarray | None = None  # [N] what episode returns sum up, if that is not `rewards` (they are clipped)


class VectorAdapter(Protocol):
    """A vector environment; it may be stepping between `send` and `recv`."""

    size: int
    observation_space: Any  # of one environment
    action_space: Any

    def reset(self, seeds: Sequence[int]) -> ObsBatch:
        """Reset all environments, each with its own seed if the library allows it, else with the first."""

    def send(self, actions: Any) -> None:
        """Start a step with actions structured like the space, each leaf [N, …]."""

    def recv(self) -> VectorStep:
        """Finish the step; environments whose episode ended are reset."""

    def statistics(self) -> Statistics:
        """The running means in wrappers, for a checkpoint."""

    def load_statistics(self, state: Statistics, *, freeze: bool) -> None:
        """Continue from `statistics`; with `freeze`, for an evaluation, they do not change."""

    def close(self) -> None:
        """Close all environments."""


def select_one(space: spaces.Space, batch: Any, index: int) -> Any:
    """Select one value of a batch."""
    return rebuild(space, {path: follow(batch, path)[index] for path, _ in walk(space)})


def _select(space: spaces.Space, batch: Any, env_ids: np.ndarray) -> Any:
    """Copy some entries of a batch."""
    return rebuild(space, {path: np.asarray(follow(batch, path))[env_ids] for path, _ in walk(space)})


class _WrappedVector:
    """Shared by the adapters of environments that may have wrappers."""

    _env: Any

    def statistics(self) -> Statistics:
        """The running means in wrappers."""
        return statistics(self._env)

    def load_statistics(self, state: Statistics, *, freeze: bool) -> None:
        """Continue from `statistics`."""
        load_statistics(self._env, state, freeze=freeze)

    def close(self) -> None:
        """Close all environments."""
        self._env.close()


class GymnasiumVector(_WrappedVector):
    """A `gymnasium.vector.VectorEnv`."""

    def __init__(self, env: Any, name: str) -> None:
        self._env, self.size = env, int(env.num_envs)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self._resets_within_step = resets_within_step(env, name)
        self._env_ids = np.arange(self.size)
        if not self._resets_within_step:
            allow_partial_resets(env)
        self._is_async = isinstance(env, (AsyncVectorEnv, ProcessVectorEnv))
        self._verifies_mask = not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv, ProcessVectorEnv))

    def reset(self, seeds: Sequence[int]) -> ObsBatch:
        """Reset all environments."""
        observations, infos = check_return_value(self._env.reset(seed=seeds[0]), 2, "reset")
        return ObsBatch(self._env_ids, observations, lambda env_id: _mask_in(infos, env_id))

    def send(self, actions: Any) -> None:
        """Start a step, if the environment can step asynchronously."""
        self._actions = actions
        if self._is_async:
            self._env.step_async(actions)

    def recv(self) -> VectorStep:
        """Finish the step."""
        return self._step_from(self._env.step_wait() if self._is_async else self._env.step(self._actions))

    def _step_from(self, outcome: Any) -> VectorStep:
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise UsageError(
                "step() of the vector environment must return (observations, rewards, terminated, truncated, infos)."
            )
        observations, rewards, terminated, truncated, infos = outcome
        obs = ObsBatch(self._env_ids, observations, lambda env_id: _mask_in(infos, env_id))
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        if self._resets_within_step:
            return VectorStep(obs, rewards, terminated, truncated, lambda env_id: _final_in(infos, env_id), None)
        ended = terminated | truncated
        if not ended.any():
            return VectorStep(obs, rewards, terminated, truncated, lambda _: None, None)
        # Copied before the reset: a vector environment may return the same buffer each time.
        truncated_ids = np.flatnonzero(truncated).tolist()
        finals = {env_id: _copied(self.observation_space, observations, env_id) for env_id in truncated_ids}
        reset_obs = self._reset_some(ended, observations)
        return VectorStep(obs, rewards, terminated, truncated, finals.__getitem__, reset_obs)

    def _reset_some(self, ended: np.ndarray, observations: Any) -> ObsBatch:
        running = np.flatnonzero(~ended)
        before = _select(self.observation_space, observations, running) if self._verifies_mask else None
        after_reset, infos = check_return_value(self._env.reset(options={"reset_mask": ended.copy()}), 2, "reset")
        if self._verifies_mask:
            after = _select(self.observation_space, after_reset, running)
            leaves = [(follow(before, path), follow(after, path)) for path, _ in walk(self.observation_space)]
            if not all(np.array_equal(a, b) for a, b in leaves):
                raise UsageError(
                    "The vector environment's autoreset_mode is DISABLED, but reset(options={'reset_mask': …}) also "
                    "changed environments outside the mask; reset only those where the mask is True."
                )
            self._verifies_mask = len(running) == 0  # all were reset: nothing to compare
        env_ids = np.flatnonzero(ended)
        reset_obs = _select(self.observation_space, after_reset, env_ids)
        return ObsBatch(env_ids, reset_obs, lambda k: _mask_in(infos, int(env_ids[k])))


def resets_within_step(env: Any, name: str) -> bool:
    """Whether environments reset within the step; False if on request; UsageError if neither works."""
    mode = env.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)  # the enum came with Gymnasium 1.1
    if mode in ("SameStep", "Disabled"):
        return mode == "SameStep"
    if mode != "NextStep":
        raise UsageError(
            f"{name} does not declare its autoreset mode; set metadata['autoreset_mode'] to "
            "gymnasium.vector.AutoresetMode.SAME_STEP or DISABLED."
        )
    inner = env.unwrapped
    # Without shared memory, AsyncVectorEnv of Gymnasium 1.4 resets again in the next step.
    can_reset = isinstance(inner, AsyncVectorEnv) and inner.shared_memory and inner.worker is None
    if isinstance(inner, (SyncVectorEnv, ProcessVectorEnv)) or can_reset:
        return False
    raise UsageError(
        f"{name} resets by an extra step ({type(inner).__name__} with autoreset_mode NEXT_STEP), which "
        "does not fit into a rollout; use SAME_STEP, or gymnasium.make_vec(…, vectorization_mode='sync')."
    )


def _copied(space: spaces.Space, batch: Any, env_id: int) -> Any:
    return rebuild(space, {path: np.array(follow(batch, path)[env_id]) for path, _ in walk(space)})


def _final_in(infos: dict[str, Any], env_id: int) -> Any:
    final = infos["final_obs"][env_id] if "final_obs" in infos else None
    if final is None:
        raise UsageError(
            f"The vector environment truncated an episode of environment {env_id}, but infos['final_obs'] lacks its "
            "final observation; add it, as AutoresetMode.SAME_STEP requires."
        )
    return final


def _mask_in(infos: dict[str, Any], env_id: int) -> Any:
    """The mask of one environment in the infos of all; Gymnasium marks valid entries under `_key`."""
    given = infos.get(MASK)
    if given is None or not infos.get(f"_{MASK}", np.ones(env_id + 1))[env_id]:
        return None
    return _entry(given, env_id)


def _entry(given: Any, env_id: int) -> Any:
    if isinstance(given, dict):
        return {key: _entry(part, env_id) for key, part in given.items() if not key.startswith("_")}
    return given[env_id]


class Sb3Vector(_WrappedVector):
    """A `VecEnv` of Stable-Baselines3."""

    def __init__(self, env: Any, name: str) -> None:
        self._env, self.size = env, int(env.num_envs)
        self.observation_space, self.action_space = sb3_observation_space(env), env.action_space
        self._env_ids = np.arange(self.size)

    def reset(self, seeds: Sequence[int]) -> ObsBatch:
        """Reset all environments."""
        self._env.seed(seeds[0])
        observations = self._env.reset()
        infos = self._env.unwrapped.reset_infos
        return ObsBatch(self._env_ids, observations, lambda env_id: infos[env_id].get(MASK))

    def send(self, actions: Any) -> None:
        """Start a step, if the environment can step asynchronously."""
        if isinstance(self.action_space, (spaces.Dict, spaces.Tuple)):
            actions = [select_one(self.action_space, actions, env_id) for env_id in range(self.size)]
        self._env.step_async(actions)

    def recv(self) -> VectorStep:
        """Finish the step."""
        observations, rewards, dones, infos = self._env.step_wait()
        dones = np.asarray(dones, np.bool_)
        truncated = dones & np.array([bool(info.get("TimeLimit.truncated")) for info in infos])
        reset_infos = self._env.unwrapped.reset_infos
        obs = ObsBatch(
            self._env_ids, observations, lambda env_id: (reset_infos if dones[env_id] else infos)[env_id].get(MASK)
        )
        return VectorStep(
            obs, rewards, dones & ~truncated, truncated, lambda env_id: infos[env_id]["terminal_observation"], None
        )


class EnvPoolVector:
    """An EnvPool in synchronous mode.

    Each `reset` creates a new pool: EnvPool takes seeds only in its constructor.
    """

    def __init__(self, maker: EnvMaker, size: int) -> None:
        self._maker, self.size = maker, size
        self._pool = maker.create(num_envs=1, seed=[0])  # for its spaces
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self._env_ids = np.arange(size)
        if self._pool.config["max_num_players"] != 1:
            raise UsageError(f"{maker.name} has several players; only single-player environments can be trained.")

    def reset(self, seeds: Sequence[int]) -> ObsBatch:
        """Reset all environments, each with its own seed."""
        self._pool = self._maker.create(num_envs=len(seeds), seed=list(seeds))
        return self._reset(self._env_ids)

    def _reset(self, env_ids: np.ndarray) -> ObsBatch:
        observations, infos = self._pool.reset(env_ids.astype(np.int32))
        return ObsBatch(env_ids, observations, lambda k: _mask_in(infos, k))

    def send(self, actions: Any) -> None:
        """Start a step in EnvPool's threads."""
        self._pool.send(actions)

    def recv(self) -> VectorStep:
        """Finish the step."""
        observations, rewards, terminated, truncated, infos = self._pool.recv()
        obs = ObsBatch(self._env_ids, observations, lambda env_id: _mask_in(infos, env_id))
        ended = np.flatnonzero(terminated | truncated)
        reset_obs = self._reset(ended) if len(ended) else None
        space = self.observation_space
        return VectorStep(
            obs, rewards, terminated, truncated, lambda env_id: select_one(space, observations, env_id), reset_obs
        )

    def statistics(self) -> Statistics:
        """Nothing: there are no wrappers."""
        return {}

    def load_statistics(self, state: Statistics, *, freeze: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close all environments."""
        self._pool.close()
