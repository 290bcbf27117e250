"""Adapters for batched simulators with internal state. Their steps return:

    Isaac Lab, mjlab            (observation groups, reward, terminated, time_outs, extras); they reset within the step,
                                and extras["final_obs"] has the final observation only if it was requested;
                                extras["log"] has values to log
    Isaac Gym                   (observation groups, reward, done, extras), with extras["time_outs"] in some tasks
    gymnasium.vector.VectorEnv  tensors instead of arrays, AutoresetMode.SAME_STEP or DISABLED

They may overwrite the returned tensors in their next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from unidle.envs.device.device_env import State, Step, Traits
from unidle.envs.pool.slot import episode_seed
from unidle.envs.vector.adapters import resets_within_step
from unidle.errors import UsageError

_GROUPS = ("policy", "actor", "obs")  # name of the policy's observation group in Isaac Lab, mjlab and Isaac Gym
_FINAL = ("final_obs", "final_observation")  # the second is Gymnasium's name before 1.0
_LOGS = ("log", "episode")  # the second is the name in legged_gym and older versions


class _Simulator:
    """Shared by the adapters: no state is returned, and tensors are moved to the policy's device."""

    episode_limit = 1  # an episode may be truncated at any step

    def __init__(self, env: Any, seed: int, device: torch.device | str, first_index: int) -> None:
        self._env, self._inner = env, getattr(env, "unwrapped", env)
        self.n_envs = int(self._inner.num_envs)
        self._seed, self._device = episode_seed(seed, first_index, 0), torch.device(device)
        self._sim_device = torch.device(_device_of(env) or "cpu")  # may differ from the policy's

    def _tensor(self, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(value).to(self._device, dtype)

    def close(self) -> None:
        """Close the simulation."""
        if hasattr(self._env, "close"):  # Isaac Gym tasks have no close()
            self._env.close()


class IsaacEnv(_Simulator):
    """An environment of Isaac Lab, of mjlab or of Isaac Gym.

    Its observation is the policy's observation group; with `obs_groups`, a Dict of those groups (all, if it is empty).
    Tensors then hold the groups concatenated, in the order of the Dict.
    """

    observation_space: spaces.Box | spaces.Dict
    action_space: spaces.Box | spaces.Discrete

    def __init__(
        self,
        env: Any,
        name: str,
        seed: int,
        device: torch.device | str = "cpu",
        first_index: int = 0,
        obs_groups: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(env, seed, device, first_index)
        inner = self._inner
        # In Isaac Gym the plain names are the spaces of a single environment.
        space = getattr(inner, "single_observation_space", None) or inner.observation_space
        self._group, self._groups = None, list[str]()
        known = getattr(space, "spaces", None)
        if obs_groups is None or not known:
            self._group = _group_of(space, name)
            self.observation_space = _group_space(known[self._group] if known else space, self._group, name)
        else:
            # If a name is unknown, keep all groups: the policy reports the error and lists them.
            names = obs_groups if obs_groups and known.keys() >= set(obs_groups) else list(known)
            self.observation_space = spaces.Dict({group: _group_space(known[group], group, name) for group in names})
            self._groups = list(self.observation_space.spaces)
        self.action_space = plain_space(getattr(inner, "single_action_space", None) or inner.action_space)
        # In Isaac Lab and mjlab: the time limit belongs to the task, so time-outs are terminations.
        self._is_finite_horizon = bool(getattr(getattr(inner, "cfg", None), "is_finite_horizon", False))
        self._has_final_obs = False
        self.logged: Mapping[str, Any] = {}

    @property
    def traits(self) -> Traits:
        """Final observations are exact once one was returned, which happens only in steps that end an episode."""
        return Traits(capture_safe=False, resumable=False, exact_final_observation=self._has_final_obs)

    def begin(self) -> tuple[State, Tensor]:
        """Reset all environments."""
        with _no_inference_mode():
            takes_seed = "seed" in inspect.signature(self._env.reset).parameters
            outcome = self._env.reset(seed=self._seed) if takes_seed else self._env.reset()
            self._last_obs = self._observation(outcome[0] if isinstance(outcome, tuple) else outcome)
        return {}, self._last_obs

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, width]."""
        with _no_inference_mode():
            if isinstance(self.action_space, spaces.Discrete):
                action = action.long()
            outcome = self._env.step(
                action.to(self._sim_device).reshape(self.n_envs, *(self.action_space.shape or (1,)))
            )
            if len(outcome) == 5:
                groups, reward, terminated, time_outs, extras = outcome
                terminated, time_outs = self._tensor(terminated, torch.bool), self._tensor(time_outs, torch.bool)
            else:
                groups, reward, done, extras = outcome
                done = self._tensor(done, torch.bool)
                time_outs = done & self._tensor(extras.get("time_outs", False), torch.bool)
                terminated = done & ~time_outs
            if self._is_finite_horizon:
                terminated = terminated | time_outs
            self.logged = next((extras[key] for key in _LOGS if extras.get(key)), {})
            observation = self._observation(groups)
            final = next((self._observation(extras[key]) for key in _FINAL if key in extras), None)
            self._has_final_obs = self._has_final_obs or final is not None
            before, self._last_obs = self._last_obs, observation
            final = before if final is None else final
            return {}, Step(
                observation, final, self._tensor(reward, torch.float32), terminated, time_outs & ~terminated
            )

    def _observation(self, groups: Any) -> Tensor:
        if self._groups:
            return torch.cat([self._tensor(groups[group], torch.float32).flatten(1) for group in self._groups], -1)
        obs = groups if isinstance(groups, Tensor) else groups[self._group or "obs"]
        return self._tensor(obs, torch.float32).clone()  # the simulator may overwrite it


class TensorVectorEnv(_Simulator):
    """A `gymnasium.vector.VectorEnv` on tensors."""

    traits = Traits(capture_safe=False, resumable=False)

    def __init__(
        self,
        env: Any,
        name: str,
        seed: int,
        device: torch.device | str = "cpu",
        first_index: int = 0,
        obs_groups: tuple[str, ...] | None = None,
    ) -> None:
        """`obs_groups` has no effect: there are no groups, and the policy rejects settings that name any."""
        super().__init__(env, seed, device, first_index)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        for space in (self.observation_space, self.action_space):
            if not isinstance(space, (spaces.Box, spaces.Discrete)):
                raise UsageError(
                    f"{name} has a {type(space).__name__} space; on the device only Box and Discrete are supported."
                )
        self._resets_within_step = resets_within_step(env, name)

    def begin(self) -> tuple[State, Tensor]:
        """Reset all environments."""
        with _no_inference_mode():
            return {}, self._tensor(self._env.reset(seed=self._seed)[0]).clone()

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, width]."""
        with _no_inference_mode():
            if isinstance(self.action_space, spaces.Discrete):
                action = action.long() + int(self.action_space.start)
            observation, reward, terminated, truncated, infos = self._env.step(
                action.to(self._sim_device).reshape(self.n_envs, *self.action_space.shape)
            )
            terminated, truncated = self._tensor(terminated, torch.bool), self._tensor(truncated, torch.bool)
            observation, final = self._reset_ended(self._tensor(observation).clone(), terminated, truncated, infos)
            return {}, Step(
                observation, final, self._tensor(reward, torch.float32), terminated, truncated & ~terminated
            )

    def _reset_ended(self, obs: Tensor, terminated: Tensor, truncated: Tensor, infos: Any) -> tuple[Tensor, Tensor]:
        """Reset ended environments if they do not reset themselves; return the next and the final observation."""
        if not self._resets_within_step:
            ended = terminated | truncated
            if not ended.any():
                return obs, obs
            reset_obs = self._tensor(self._env.reset(options={"reset_mask": ended.to(self._sim_device)})[0])
            return torch.where(ended.view(-1, *[1] * (obs.dim() - 1)), reset_obs, obs), obs
        final = next((infos[key] for key in _FINAL if key in infos), None)
        if final is None:
            if truncated.any():
                raise UsageError(
                    "The vector environment truncated an episode, but infos['final_obs'] does not have its final "
                    "observation; add it, as AutoresetMode.SAME_STEP requires."
                )
            return obs, obs
        return obs, self._tensor(final, obs.dtype)


class _no_inference_mode(torch.no_grad):  # noqa: N801
    """torch.no_grad without inference mode, whose tensors a simulator could not modify later."""

    def __enter__(self) -> None:
        super().__enter__()
        self._mode = torch.inference_mode(False)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        super().__exit__(*error)


def _device_of(env: Any) -> Any:
    layer = env if hasattr(env, "device") else getattr(env, "env", None) or env.unwrapped
    return layer.device if hasattr(layer, "device") else _device_of(layer)


def _group_space(space: Any, group: str | None, name: str) -> spaces.Box:
    if not getattr(space, "shape", None):
        raise UsageError(f"{name} does not concatenate the observation group `{group}`; set concatenate_terms for it.")
    return spaces.Box(-np.inf, np.inf, tuple(space.shape), np.float32)


def _group_of(space: Any, name: str) -> str | None:
    groups = getattr(space, "spaces", None)
    if groups is None:
        return None
    for group in _GROUPS:
        if group in groups:
            return group
    raise UsageError(f"{name} has the observation groups {', '.join(groups)}; name the policy's group `{_GROUPS[0]}`.")


def plain_space(given: Any) -> spaces.Box | spaces.Discrete:
    """Convert a space of Gym, mjlab or gymnax to Gymnasium's."""
    if hasattr(given, "n"):
        return spaces.Discrete(int(given.n))
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), given.shape) for bound in (given.low, given.high))
    return spaces.Box(low, high, dtype=np.float32)
