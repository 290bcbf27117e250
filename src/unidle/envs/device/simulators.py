"""Simulators that step many environments on the device and hold their state themselves.

    Isaac Lab, mjlab            (observation groups, reward, terminated, time_outs, extras); a new episode begins within
                                the step, and extras["final_obs"] has the last observation only where it was asked for
    Isaac Gym                   (observation groups, reward, done, extras), extras["time_outs"] if it tells them apart
    gymnasium.vector.VectorEnv  with tensors for arrays, AutoresetMode.SAME_STEP or DISABLED

What they return they may write over in their next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from unidle.envs.device.device_env import State, Step, Traits
from unidle.envs.make import on_device_kind
from unidle.envs.pool.slot import episode_seed
from unidle.envs.vector.adapters import resets_itself
from unidle.errors import UsageError

_GROUPS = ("policy", "actor", "obs")  # what the policy sees, as Isaac Lab, mjlab and Isaac Gym call it
_FINAL = ("final_obs", "final_observation")  # the second is Gymnasium's name before 1.0


class _Simulator:
    """What all of them have in common: no state to return, and tensors that go to the policy's device."""

    episode_limit = 1  # an episode may be cut off at any step

    def __init__(self, env: Any, seed: int, device: torch.device | str, first_index: int) -> None:
        self._env, self._inner = env, getattr(env, "unwrapped", env)
        self.n_envs = int(self._inner.num_envs)
        self._seed, self._device = episode_seed(seed, first_index, 0), torch.device(device)
        self._home = torch.device(_device_of(env) or "cpu")  # of its actions; need not be the policy's

    def _tensor(self, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(value).to(self._device, dtype)

    def close(self) -> None:
        """End the simulation."""
        if hasattr(self._env, "close"):  # Isaac Gym's have none
            self._env.close()


class IsaacEnv(_Simulator):
    """An environment of Isaac Lab, of mjlab or of Isaac Gym."""

    observation_space: spaces.Box
    action_space: spaces.Box | spaces.Discrete

    def __init__(
        self, env: Any, name: str, seed: int, device: torch.device | str = "cpu", first_index: int = 0
    ) -> None:
        super().__init__(env, seed, device, first_index)
        inner = self._inner
        # Isaac Gym's spaces are those of a single environment under the plain names.
        seen = getattr(inner, "single_observation_space", None) or inner.observation_space
        self._group = _group_of(seen, name)
        seen = seen.spaces[self._group] if self._group else seen
        if not getattr(seen, "shape", None):
            raise UsageError(f"{name} shows its terms one by one; let it concatenate the group `{self._group}`.")
        self.observation_space = spaces.Box(-np.inf, np.inf, tuple(seen.shape), np.float32)
        self.action_space = plain_space(getattr(inner, "single_action_space", None) or inner.action_space)
        self._shows_final = False

    @property
    def traits(self) -> Traits:
        """It shows an episode's last observation if it ever did so; it can, only in steps in which one ends."""
        return Traits(capture_safe=False, resumable=False, exact_final_observation=self._shows_final)

    def begin(self) -> tuple[State, Tensor]:
        """Reset all environments."""
        with _ordinary_tensors():
            takes_seed = "seed" in inspect.signature(self._env.reset).parameters
            outcome = self._env.reset(seed=self._seed) if takes_seed else self._env.reset()
            self._seen = self._observation(outcome[0] if isinstance(outcome, tuple) else outcome)
        return {}, self._seen

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """One step on flat actions [N, width]."""
        with _ordinary_tensors():
            if isinstance(self.action_space, spaces.Discrete):
                action = action.long()
            outcome = self._env.step(action.to(self._home).reshape(self.n_envs, *(self.action_space.shape or (1,))))
            if len(outcome) == 5:
                groups, reward, terminated, time_outs, extras = outcome
                terminated, time_outs = self._tensor(terminated, torch.bool), self._tensor(time_outs, torch.bool)
            else:
                groups, reward, done, extras = outcome
                done = self._tensor(done, torch.bool)
                time_outs = done & self._tensor(extras.get("time_outs", False), torch.bool)
                terminated = done & ~time_outs
            observation = self._observation(groups)
            final = next((self._observation(extras[key]) for key in _FINAL if key in extras), None)
            self._shows_final = self._shows_final or final is not None
            before, self._seen = self._seen, observation
            final = before if final is None else final
            return {}, Step(
                observation, final, self._tensor(reward, torch.float32), terminated, time_outs & ~terminated
            )

    def _observation(self, groups: Any) -> Tensor:
        shown = groups if isinstance(groups, Tensor) else groups[self._group or "obs"]
        return self._tensor(shown, torch.float32).clone()  # for `before`


class TensorVectorEnv(_Simulator):
    """A `gymnasium.vector.VectorEnv` that takes and returns tensors."""

    traits = Traits(capture_safe=False, resumable=False)

    def __init__(
        self, env: Any, name: str, seed: int, device: torch.device | str = "cpu", first_index: int = 0
    ) -> None:
        super().__init__(env, seed, device, first_index)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        for space in (self.observation_space, self.action_space):
            if not isinstance(space, (spaces.Box, spaces.Discrete)):
                raise UsageError(f"{name} has a {type(space).__name__} space; on the device only Box and Discrete go.")
        self._resets_itself = resets_itself(env, name)

    def begin(self) -> tuple[State, Tensor]:
        """Reset all environments."""
        with _ordinary_tensors():
            return {}, self._tensor(self._env.reset(seed=self._seed)[0]).clone()

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """One step on flat actions [N, width]."""
        with _ordinary_tensors():
            if isinstance(self.action_space, spaces.Discrete):
                action = action.long() + int(self.action_space.start)
            observation, reward, terminated, truncated, infos = self._env.step(
                action.to(self._home).reshape(self.n_envs, *self.action_space.shape)
            )
            terminated, truncated = self._tensor(terminated, torch.bool), self._tensor(truncated, torch.bool)
            observation, final = self._followed(self._tensor(observation).clone(), terminated, truncated, infos)
            return {}, Step(
                observation, final, self._tensor(reward, torch.float32), terminated, truncated & ~terminated
            )

    def _followed(self, seen: Tensor, terminated: Tensor, truncated: Tensor, infos: Any) -> tuple[Tensor, Tensor]:
        """What the next step begins from, and what the last one ended with."""
        if not self._resets_itself:
            ended = terminated | truncated
            if not ended.any():
                return seen, seen
            shown = self._tensor(self._env.reset(options={"reset_mask": ended.to(self._home)})[0])
            return torch.where(ended.view(-1, *[1] * (seen.dim() - 1)), shown, seen), seen
        given = next((infos[key] for key in _FINAL if key in infos), None)
        if given is None:
            if truncated.any():
                raise UsageError(
                    "The vector environment cut off an episode and began the next one, but infos['final_obs'] does not "
                    "hold its last observation; add it, as AutoresetMode.SAME_STEP asks."
                )
            return seen, seen
        return seen, self._tensor(given, seen.dtype)


def as_device_env(
    env: Any, name: str, seed: int, device: torch.device | str = "cpu", first_index: int = 0
) -> IsaacEnv | TensorVectorEnv:
    """What a user's factory made, as a DeviceEnv."""
    kinds: dict[Any, Callable[..., IsaacEnv | TensorVectorEnv]] = {"isaac": IsaacEnv, "tensors": TensorVectorEnv}
    return kinds[on_device_kind(env)](env, name, seed, device, first_index)


class _ordinary_tensors(torch.no_grad):  # noqa: N801  # used as the context manager that it is
    """No gradients, but no inference mode either: what a simulator makes in it could not be changed outside of it."""

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


def _group_of(space: Any, name: str) -> str | None:
    groups = getattr(space, "spaces", None)
    if groups is None:
        return None
    for group in _GROUPS:
        if group in groups:
            return group
    raise UsageError(f"{name} shows the groups {', '.join(groups)}; call what the policy sees `{_GROUPS[0]}`.")


def plain_space(given: Any) -> spaces.Box | spaces.Discrete:
    """Gymnasium's space, from one of Gymnasium, of the older Gym, of mjlab or of gymnax."""
    if hasattr(given, "n"):
        return spaces.Discrete(int(given.n))
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), given.shape) for bound in (given.low, given.high))
    return spaces.Box(low, high, dtype=np.float32)
