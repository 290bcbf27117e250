"""`ProcessVectorEnv`: a `gymnasium.vector.VectorEnv` on worker processes, for use outside of unidle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from unidle.envs.vector.infos import merge_infos
from unidle.envs.vector.worker_group import WorkerGroup
from unidle.errors import UsageError
from unidle.spaces.tree import rebuild, walk

ObservationMode = str | tuple[spaces.Space, spaces.Space]


class DifferentSpacesError(UsageError, RuntimeError):
    """The environments of one vector environment have different spaces."""


class ProcessVectorEnv(VectorEnv):
    """Environments in a few worker processes, with exactly the results of Gymnasium's SyncVectorEnv.

    Observations, rewards and actions go through shared memory, non-empty infos through a pipe.
    """

    _group: WorkerGroup | None = None  # also if the constructor was called with wrong arguments

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        workers: int | None = None,
        *,
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """Start `workers` processes, or one per core; with copy=False the next step overwrites the observations.

        `observation_mode`: the environments' observation spaces are the "same", or "different" in their bounds; or the
        batched and the single space, if you know them.
        """
        self.num_envs, self._copy = len(env_fns), copy
        _check_mode(observation_mode)
        self.observation_mode, self.autoreset_mode = observation_mode, AutoresetMode(autoreset_mode)
        self._group = group = WorkerGroup(env_fns, workers, self.autoreset_mode)
        try:
            self._set_spaces(group.spaces)
            group.map_memory()
        except BaseException:
            self.close()
            raise
        self.metadata = {**group.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = group.render_mode
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._resetting = np.ones(self.num_envs, np.bool_)  # the mask of a pending reset

    def _set_spaces(self, pairs: list[tuple[spaces.Space, spaces.Space]]) -> None:
        """Check that all environments have the same spaces, or similar ones, and store them."""
        (observation, action), mode = pairs[0], self.observation_mode
        for number, (other, other_action) in enumerate(pairs):
            alike = other == observation if mode == "same" else _layout(other) == _layout(observation)
            if not alike or other_action != action:
                raise DifferentSpacesError(_difference(number, mode, alike=alike))
        self.single_action_space, self.action_space = action, batch_space(action, self.num_envs)
        self.single_observation_space = observation
        if mode == "same":
            self.observation_space = batch_space(observation, self.num_envs)
        elif mode == "different":
            self.observation_space = batch_differing_spaces([space for space, _ in pairs])
        elif isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode

    # -- the VectorEnv interface ---------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those in `options["reset_mask"]`; an int seeds environment i with seed + i."""
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Start a `reset`; `reset_wait` returns its result."""
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed has {len(seed)} entries for {self.num_envs} environments")
        reset_mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            reset_mask = _checked_mask(options["reset_mask"], self.num_envs)
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        self._running().request_reset(seed, [options] * self.num_envs, reset_mask)
        self._resetting = reset_mask

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """The result of the `reset_async` before; TimeoutError after `timeout` seconds, and it may be called again."""
        group = self._running()
        group.expect("reset")
        replies = group.wait(timeout)
        self._ended[self._resetting] = False
        return self._observations(), merge_infos(replies, group.spans, self._add_info)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take an action in each environment."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a `step`; `step_wait` returns its result."""
        group = self._running()
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            ended_ids = np.flatnonzero(self._ended).tolist()
            raise gymnasium.error.ResetNeeded(f"The episodes of environments {ended_ids} have ended; reset them first.")
        group.request_step(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """The result of the `step_async` before; TimeoutError after `timeout` seconds, and it may be called again."""
        group = self._running()
        group.expect("step")
        replies, arrays = group.wait(timeout), group.arrays
        rewards, terminated, truncated = arrays.rewards.copy(), arrays.terminated.copy(), arrays.truncated.copy()
        self._ended = terminated | truncated
        return self._observations(), rewards, terminated, truncated, merge_infos(replies, group.spans, self._add_info)

    def _observations(self) -> Any:
        group = self._running()
        views = group.arrays.observations
        leaves = {path: view.copy() for path, view in views.items()} if self._copy else views
        return rebuild(group.spaces[0][0], leaves)

    def render(self) -> tuple[Any, ...]:
        """The frame of each environment."""
        return self.call("render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or read an attribute."""
        return tuple(self._running().call("call", name, args, kwargs))

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Start a `call`; `call_wait` returns its result."""
        self._running().request_call("call", name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The result of the `call_async` before; TimeoutError after `timeout` seconds, and it may be called again."""
        group = self._running()
        group.expect("call")
        return tuple(group.call_results(timeout).values())

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of each environment; AttributeError if one does not have it."""
        return self.call(name)

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """A copy of each environment's random generator."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seed of each environment."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute to one value everywhere, or to the entries of a list or tuple."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"values has {len(values)} entries for {self.num_envs} environments")
        self._running().call("set_attr", name, dict(enumerate(values)))

    def _running(self) -> WorkerGroup:
        if self._group is None or self.closed:
            raise gymnasium.error.ClosedEnvironmentError("This vector environment is closed; create a new one.")
        return self._group

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the workers; those that do not exit within `timeout` seconds, or at once with `terminate`, are killed."""
        if self._group is None:
            return
        if self._group.pending is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._group.pending}` to complete.")
        if terminate or timeout is not None:
            self._group.close(0.0 if terminate or timeout is None else timeout)
        else:
            self._group.close()

    def __del__(self) -> None:
        if not self.closed:
            self.close()


def _check_mode(mode: ObservationMode) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, spaces.Space) for space in mode):
            raise TypeError(f"observation_mode must hold the batched and the single space, not {mode}")
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


def _layout(space: spaces.Space) -> list[Any]:
    return [(path, type(leaf), leaf.shape, leaf.dtype) for path, leaf in walk(space)]


def _difference(number: int, mode: ObservationMode, *, alike: bool) -> str:
    """The message about an environment with other spaces, worded as in Gymnasium, for programs that match it."""
    who = f"Environment {number} and environment 0 have different spaces"
    if alike:
        return f"{who}: the action spaces differ; make them all the same."
    if mode == "same":
        return (
            f"{who}: the sub-environments observation spaces are not equivalent. Make them all the same. If this is "
            "intentional, use `observation_mode='different'` instead."
        )
    return f"{who}: their observations need the same shape and dtype."


def _checked_mask(mask: Any, n_envs: int) -> np.ndarray:
    message = f"options['reset_mask'] must be a bool array of shape ({n_envs},) with some True, not {mask!r}"
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(message)
    if mask.shape != (n_envs,) or not mask.any():
        raise ValueError(message)
    return mask
