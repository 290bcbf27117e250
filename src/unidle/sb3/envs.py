"""What a model may train on: an id, an environment, or a vector environment, whose functions unidle's pool runs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from unidle.envs.adapter_registry import adapter_for
from unidle.envs.env_object import MULTI_AGENT, is_multi_agent
from unidle.envs.make import EnvMaker, PerEnv, env_maker
from unidle.envs.vector.vector_wrappers import layers, load_statistics, statistics
from unidle.errors import UsageError
from unidle.integrations.worker_vec_env import Indices
from unidle.sb3.common.env_util import MakeEnv
from unidle.sb3.common.vec_env import DummyVecEnv, ExistingEnv, VecEnv

_STEPS_HERE = {"subproc": False}  # the user's objects exist in this process only


@dataclass
class Envs:
    """The environments of a model."""

    maker: EnvMaker
    n_envs: int
    vec_env: Any  # what `get_env` returns
    settings: dict[str, Any] = field(default_factory=dict)
    are_shared: bool = False  # the user's objects, of which there are no others

    def begin(self) -> None:
        """A run begins."""
        if isinstance(self.maker.factory, _SharedVecEnvFactory):
            self.maker.factory.begin()


def resolve_envs(env: Any) -> Envs:
    """The environments for the argument `env` of a model."""
    if isinstance(env, str):
        return Envs(env_maker(env), 1, DummyVecEnv([MakeEnv(env)]))
    if is_multi_agent(env):
        raise UsageError(MULTI_AGENT.format(type(env).__name__))
    if isinstance(env, VecEnv) or adapter_for(env) is not None:
        return _of_vec_env(env)
    if isinstance(env, gymnasium.Env):
        made = env_maker(partial(_SharedEnv, env))
        return Envs(_named(made, _name(env)), 1, DummyVecEnv([ExistingEnv(env)]), _STEPS_HERE, are_shared=True)
    raise UsageError(
        f"`env` is {env!r}; pass an id such as 'CartPole-v1', a gymnasium.Env, or a vector environment such as "
        "make_vec_env('CartPole-v1', n_envs=8)."
    )


def normaliser_of(vec_env: Any) -> Any:
    """The `VecNormalize` around a vector environment; None if there is none."""
    found = (layer for layer in layers(vec_env) if type(layer).__name__ == "VecNormalize")
    return next(found, None)


def _of_vec_env(env: Any) -> Envs:
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise UsageError(
            f"A {type(env).__name__} of Gymnasium is not a VecEnv; use unidle.train(lambda: …), which trains on it, or "
            "make_vec_env."
        )
    inner = env
    while type(inner).__name__ == "VecMonitor" and inner.results_writer is None:  # unidle counts episodes itself
        inner = inner.venv
    functions = inner.env_fns if isinstance(inner, VecEnv) else _functions_of_sb3(inner)
    if functions is None:
        maker = env_maker(_SharedVecEnvFactory(env))
        return Envs(_named(maker, type(env).__name__), int(env.num_envs), env, are_shared=True)
    first, settings = functions[0], {}
    name = _name_of_function(first)
    are_shared = any(isinstance(function, ExistingEnv) for function in functions)
    if are_shared:
        functions, settings = [partial(_shared, function) for function in functions], _STEPS_HERE
        first = functions[0]
    factory = first if all(function is first for function in functions) else PerEnv(functions)
    return Envs(_named(env_maker(factory), name), len(functions), env, settings, are_shared)


def _shared(function: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    return _SharedEnv(function())


def _functions_of_sb3(vec_env: Any) -> list[Callable[[], gymnasium.Env]] | None:
    """Functions that create the environments of Stable-Baselines3's DummyVecEnv or SubprocVecEnv again, from their ids.

    None if there are other wrappers, or environments that gymnasium.make did not create.
    """
    if type(vec_env).__name__ not in ("DummyVecEnv", "SubprocVecEnv"):
        return None
    functions: list[Callable[[], gymnasium.Env]] = []
    for spec in vec_env.get_attr("spec"):
        if spec is None:
            return None
        copied = deepcopy(spec)
        copied.additional_wrappers = tuple(
            wrapper for wrapper in spec.additional_wrappers if not wrapper.entry_point.endswith(":Monitor")
        )
        copied.kwargs.pop("render_mode", None)
        if any(wrapper.kwargs is None for wrapper in copied.additional_wrappers):
            return None
        functions.append(partial(gymnasium.make, copied))
    return functions


def _named(maker: EnvMaker, name: str) -> EnvMaker:
    """The maker with a name for the run; in angle brackets, because it names a Python object."""
    return replace(maker, name=f"<{name}>")


def _name(env: gymnasium.Env) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _name_of_function(function: Any) -> str:
    if isinstance(function, ExistingEnv):
        return _name(function.env)
    made = function.env if isinstance(function, MakeEnv) else function
    if isinstance(made, partial):  # of gymnasium.make
        made = getattr(made.args[0], "id", made) if made.args else made
    return made if isinstance(made, str) else getattr(made, "__name__", type(made).__name__)


class _SharedEnv(gymnasium.Wrapper):
    """The user's environment, which stays open when training is over."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset it; its method may have no `options`."""
        return self.env.reset(seed=seed, **({} if options is None else {"options": options}))

    def close(self) -> None:
        """Do nothing."""


class _SharedVecEnvFactory:
    """A factory that returns the user's vector environment, with the statistics that it had when `begin` was called.

    The test steps before a run must not count towards the running means of a `VecNormalize`.
    """

    def __init__(self, venv: Any) -> None:
        self._venv = venv
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._statistics = statistics(self._venv)

    def __call__(self) -> VecEnv:
        """Return it."""
        load_statistics(self._venv, self._statistics, freeze=False)
        return _SharedVecEnv(self._venv)


class _SharedVecEnv(VecEnv):
    """The user's vector environment, which stays open when training is over."""

    def __init__(self, venv: Any) -> None:
        self.venv, self.num_envs = venv, int(venv.num_envs)

    @property
    def _spaces(self) -> tuple[spaces.Space, spaces.Space]:
        return self.venv.observation_space, self.venv.action_space

    @property
    def unwrapped(self) -> Any:
        """The innermost vector environment."""
        return self.venv.unwrapped

    def seed(self, seed: int | None = None) -> Any:
        """Set the seeds of the next reset."""
        return self.venv.seed(seed)

    def reset(self) -> Any:
        """Reset all environments."""
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        """Start a step."""
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        """Finish the step."""
        return self.venv.step_wait()

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each environment."""
        found: list[Any] = self.venv.get_attr(attr_name, indices)
        return found

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        found: list[Any] = self.venv.env_method(method_name, *args, indices=indices, **kwargs)
        return found

    def close(self) -> None:
        """Do nothing."""
