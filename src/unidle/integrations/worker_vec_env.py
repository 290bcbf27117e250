"""The part of a Stable-Baselines3 `VecEnv` that steps environments in worker processes; needs no Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from unidle.envs.vector.infos import infos_by_env
from unidle.envs.vector.worker_group import WorkerGroup
from unidle.errors import UsageError
from unidle.spaces.tree import rebuild

Indices = int | Iterable[int] | None


def start_workers(env_fns: Sequence[Callable[[], gymnasium.Env]], workers: int | None) -> WorkerGroup:
    """Worker processes with one environment per function, all with the same spaces."""
    group = WorkerGroup(env_fns, workers, AutoresetMode.SAME_STEP)
    try:
        for number, pair in enumerate(group.spaces):
            if pair != group.spaces[0]:
                raise UsageError(
                    f"Environment {number} and environment 0 have different spaces; make them all the same."
                )
        group.map_memory()
    except BaseException:
        group.close()
        raise
    return group


class WorkerVecEnv:
    """Methods of a `VecEnv` on a `WorkerGroup`; a subclass gives it, and inherits from a `VecEnv` too."""

    _group: WorkerGroup
    num_envs: int
    render_mode: str | None
    reset_infos: list[dict[str, Any]]
    _seeds: list[int | None]
    _options: list[dict[str, Any]]
    _reset_seeds: Callable[[], None]
    _reset_options: Callable[[], None]
    _get_indices: Callable[[Indices], Iterable[int]]

    # -- stepping ------------------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all environments with the seeds and options that were set, once."""
        if self._group.pending is not None:
            self._group.wait()  # for a step whose result was never requested
        everywhere = np.ones(self.num_envs, np.bool_)
        self._group.request_reset(self._seeds, [options or None for options in self._options], everywhere)
        infos = infos_by_env(self._group.wait(), self._group.spans)
        self.reset_infos = [info[-1] if info else {} for info in infos]
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        """Start a step."""
        self._group.request_step(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """The result of the step; an environment whose episode ended is reset."""
        self._group.expect("step")
        replies, arrays = self._group.wait(), self._group.arrays
        truncated, dones = arrays.truncated & ~arrays.terminated, arrays.truncated | arrays.terminated
        infos = []
        for env_id, given in enumerate(infos_by_env(replies, self._group.spans)):
            info, after_reset = given[-1] if given else {}, {}
            if dones[env_id]:
                final, after_reset = given[0], given[1] if len(given) > 1 else {}
                info = {**final["final_info"], "terminal_observation": final["final_obs"]}
                self.reset_infos[env_id] = after_reset
            infos.append({**info, "TimeLimit.truncated": bool(truncated[env_id])})
        return self._observations(), arrays.rewards.copy(), dones, infos

    def _observations(self) -> Any:
        leaves = {path: view.copy() for path, view in self._group.arrays.observations.items()}
        return rebuild(self._group.spaces[0][0], leaves)

    def close(self) -> None:
        """End the worker processes; may be repeated."""
        self._group.close()

    # -- attributes and methods of the environments --------------------------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute."""
        return all(self._group.call("has_attr", attr_name))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each environment; AttributeError if one does not have it."""
        return self._group.call("get_attr", attr_name, chosen=self._env_ids(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute where an environment or a wrapper has it, else on the outermost wrapper."""
        env_ids = self._env_ids(indices)
        self._group.call("set_attr", attr_name, dict.fromkeys(env_ids, value), chosen=env_ids)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        return self._group.call("call", method_name, args, kwargs, chosen=self._env_ids(indices))

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: Indices = None) -> list[bool]:
        """Whether each environment has a wrapper of this class."""
        return self._group.call("is_wrapped", wrapper_class, chosen=self._env_ids(indices))

    def get_images(self) -> Sequence[np.ndarray | None]:
        """The frame of each environment, if they render rgb_array."""
        return self.env_method("render") if self.render_mode == "rgb_array" else [None] * self.num_envs

    def _env_ids(self, indices: Indices) -> list[int]:
        return [range(self.num_envs)[index] for index in self._get_indices(indices)]
