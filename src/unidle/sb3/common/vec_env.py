"""`DummyVecEnv` and `SubprocVecEnv`: a model trains on their functions, in unidle's own pool of environments.

Environments are created here only when a script steps or inspects them itself. Wrappers (VecNormalize, VecFrameStack,
VecMonitor …) are those of Stable-Baselines3.
"""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from unidle.envs.vector.worker_group import WorkerGroup
from unidle.integrations.worker_vec_env import Indices, WorkerVecEnv, start_workers
from unidle.sb3.errors import ArgumentError
from unidle.sb3.theirs import name_of_theirs
from unidle.spaces.tree import follow, rebuild, walk

EnvFunction = Callable[[], gymnasium.Env]

__path__: list[str] = []  # a package in Stable-Baselines3: `vec_env.vec_normalize` is found by `theirs`


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)


@dataclass(frozen=True)
class ExistingEnv:
    """The function of an environment that exists already."""

    env: gymnasium.Env

    def __call__(self) -> gymnasium.Env:
        """Return it."""
        return self.env


def _bound(function: EnvFunction) -> EnvFunction:
    """A function that refers to an environment, as `lambda: env` does, with what it returns now.

    Its variable may have another value later: `env = DummyVecEnv([lambda: env])`.
    """
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a Python function, or one whose variable has no value yet
        return function
    is_there = any(isinstance(value, gymnasium.Env) for value in (*used.nonlocals.values(), *used.globals.values()))
    made = function() if is_there else None
    return ExistingEnv(made) if isinstance(made, gymnasium.Env) else function


class VecEnv(ABC):
    """The interface of Stable-Baselines3's `VecEnv`."""

    env_fns: Sequence[EnvFunction]
    num_envs: int
    _seeds: list[int | None]  # of the next reset
    _options: list[dict[str, Any]]

    def __init__(self, env_fns: Sequence[EnvFunction]) -> None:
        if not env_fns:
            raise ArgumentError("env_fns is empty; pass at least one function that creates an environment.")
        self.env_fns, self.num_envs = [_bound(function) for function in env_fns], len(env_fns)
        existing = {id(function.env) for function in self.env_fns if isinstance(function, ExistingEnv)}
        if len(existing) < sum(isinstance(function, ExistingEnv) for function in self.env_fns):
            raise ArgumentError(
                "Two of env_fns return the same environment; create one in each function, as in lambda: "
                "gymnasium.make('CartPole-v1')."
            )
        self.reset_infos: list[dict[str, Any]] = [{} for _ in env_fns]
        self._reset_seeds()
        self._reset_options()
        theirs = sys.modules.get("stable_baselines3.common.vec_env")
        if theirs is not None:  # its functions and callbacks check the type
            theirs.VecEnv.register(VecEnv)

    @property
    @abstractmethod
    def _spaces(self) -> tuple[spaces.Space, spaces.Space]:
        """Of observations and actions."""

    @property
    def observation_space(self) -> spaces.Space:
        """That of each environment."""
        return self._spaces[0]

    @property
    def action_space(self) -> spaces.Space:
        """That of each environment."""
        return self._spaces[1]

    @property
    def render_mode(self) -> str | None:
        """That of the first environment."""
        mode: str | None = self.get_attr("render_mode", 0)[0]
        return mode

    @property
    def metadata(self) -> dict[str, Any]:
        """The render modes."""
        return {"render_modes": [self.render_mode] if self.render_mode else []}

    @property
    def unwrapped(self) -> VecEnv:
        """The vector environment itself: it wraps no other."""
        return self

    @abstractmethod
    def reset(self) -> Any:
        """Reset all environments."""

    @abstractmethod
    def step_async(self, actions: np.ndarray) -> None:
        """Start a step."""

    @abstractmethod
    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Finish the step."""

    @abstractmethod
    def close(self) -> None:
        """Close all environments."""

    @abstractmethod
    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each environment."""

    @abstractmethod
    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all environments; one whose episode ended is reset."""
        self.step_async(actions)
        return self.step_wait()

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute."""
        try:
            self.get_attr(attr_name)
        except AttributeError:
            return False
        return True

    def get_images(self) -> Sequence[np.ndarray | None]:
        """The frame of each environment, if they render rgb_array."""
        return self.env_method("render") if self.render_mode == "rgb_array" else [None] * self.num_envs

    def render(self, mode: str | None = None) -> Any:
        """Render each environment; returns the frame of the first. `mode` is that of the environments."""
        if mode is not None and mode != self.render_mode:
            warnings.warn(
                f"`mode` is {mode!r}, but the environments were created with render_mode={self.render_mode!r}, which "
                "they keep; create them with the other mode.",
                stacklevel=2,
            )
        return self.env_method("render")[0]

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Set the seeds of the next reset: `seed`, `seed` + 1, …."""
        first = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        self._seeds = list(range(first, first + self.num_envs))
        return self._seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next reset."""
        given = options if isinstance(options, list) else [options or {}] * self.num_envs
        self._options = copy.deepcopy(given)

    def getattr_depth_check(self, name: str, already_found: bool) -> str | None:
        """For wrappers: attributes of environments are not attributes of this object."""
        return None

    def _reset_seeds(self) -> None:
        self._seeds = [None] * self.num_envs

    def _reset_options(self) -> None:
        self._options = [{} for _ in range(self.num_envs)]

    def _get_indices(self, indices: Indices) -> Iterable[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else indices


class DummyVecEnv(VecEnv):
    """Steps environments one after the other in this process."""

    _actions: Any = None

    @cached_property
    def envs(self) -> list[gymnasium.Env]:
        """The environments."""
        return [function() for function in self.env_fns]

    @property
    def _spaces(self) -> tuple[spaces.Space, spaces.Space]:
        return self.envs[0].observation_space, self.envs[0].action_space

    def reset(self) -> Any:
        """Reset all environments with the seeds and options that were set, once."""
        results = [
            env.reset(seed=seed, **({"options": options} if options else {}))
            for env, seed, options in zip(self.envs, self._seeds, self._options)
        ]
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [info for _, info in results]
        return self._stacked([observation for observation, _ in results])

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all environments; one whose episode ended is reset."""
        observations, rewards = [], np.zeros(self.num_envs, np.float32)
        dones, infos = np.zeros(self.num_envs, np.bool_), []
        for index, env in enumerate(self.envs):
            observation, reward, terminated, truncated, info = env.step(self._actions[index])
            rewards[index], dones[index] = float(reward), terminated or truncated
            info = {**info, "TimeLimit.truncated": bool(truncated and not terminated)}
            if dones[index]:
                info["terminal_observation"] = observation
                observation, self.reset_infos[index] = env.reset()
            observations.append(observation)
            infos.append(info)
        return self._stacked(observations), rewards, dones, infos

    def _stacked(self, observations: list[Any]) -> Any:
        space = self.observation_space
        leaves = {path: np.stack([np.asarray(follow(each, path)) for each in observations]) for path, _ in walk(space)}
        return rebuild(space, leaves)

    def close(self) -> None:
        """Close the environments that were created."""
        for env in vars(self).pop("envs", []):
            env.close()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each environment or of one of its wrappers."""
        return [self.envs[index].get_wrapper_attr(attr_name) for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each environment."""
        for index in self._get_indices(indices):
            self.envs[index].set_wrapper_attr(attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        return [method(*args, **kwargs) for method in self.get_attr(method_name, indices)]

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: Indices = None) -> list[bool]:
        """Whether each environment has a wrapper of this class."""
        return [_is_wrapped(self.envs[index], wrapper_class) for index in self._get_indices(indices)]


class SubprocVecEnv(WorkerVecEnv, VecEnv):
    """Steps environments in unidle's worker processes, `workers` of them (by default one per core).

    `start_method` is accepted and has no effect: no `__main__` guard is needed.
    """

    def __init__(
        self, env_fns: Sequence[EnvFunction], start_method: str | None = None, *, workers: int | None = None
    ) -> None:
        multiprocessing.get_context(start_method)  # raises a ValueError for an unknown one
        super().__init__(env_fns)
        self._workers = workers

    @cached_property
    def _group(self) -> WorkerGroup:  # type: ignore[override]
        return start_workers(self.env_fns, self._workers)

    @property
    def _spaces(self) -> tuple[spaces.Space, spaces.Space]:
        return self._group.spaces[0]

    def close(self) -> None:
        """End the worker processes that were started."""
        group = vars(self).pop("_group", None)
        if group is not None:
            group.close()

    def __del__(self) -> None:
        self.close()


def _is_wrapped(env: gymnasium.Env, wrapper_class: type[gymnasium.Wrapper]) -> bool:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, wrapper_class):
            return True
        env = env.env
    return False
