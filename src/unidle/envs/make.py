"""From what the user named (an id, `module:callable`, a factory) to a function that makes one environment."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import gymnasium

from unidle.envs.aio.async_env import AsyncEnv, Awaited
from unidle.errors import UsageError

# Returns a gymnasium.Env, a vector environment of Gymnasium or Stable-Baselines3, or one of Isaac Lab's kind; or it is
# the class of an AsyncEnv.
EnvFactory = Callable[..., Any]


@dataclass(frozen=True)
class EnvMaker:
    """Makes environments, here or (it travels by cloudpickle) in a worker process."""

    name: str  # what config.yaml says; empty brackets around it if it cannot be made again from there
    factory: EnvFactory
    kwargs: dict[str, Any] = field(default_factory=dict)
    # One gymnasium.Env; EnvPool's: as many as it is told, from a seed each; a DeviceEnv; one AsyncEnv; or whatever the
    # user's factory returns.
    makes: Literal["one", "many", "device", "async", "either"] = "either"
    twin: EnvFactory | None = None  # of a DeviceEnv or AsyncEnv: one gymnasium.Env with the same rules
    deadline: float | None = None  # seconds that a step or reset of an AsyncEnv may take
    # Made to be looked at and not yet stepped: a simulator starts slowly, and may be the only one of its process.
    spare: list[Any] = field(default_factory=list, repr=False, compare=False)

    def on_host(self) -> EnvMaker:
        """Makes the same environment as one gymnasium.Env, where it is a DeviceEnv."""
        if self.makes != "device":
            return self
        if self.twin is None:
            raise UsageError(
                f"{self.name} steps many at once on the device and there is no single one; do without --workers, "
                "--subproc, --video and check-env."
            )
        return self._gymnasium(self.twin)

    def _gymnasium(self, twin: EnvFactory) -> EnvMaker:
        return EnvMaker(self.name, twin, self.kwargs, makes="one")

    def with_slots(self, n_envs: int) -> EnvMaker:
        """Makes the same environment as one of `n_envs`, where that decides which task it plays when."""
        kind = self.factory.func if isinstance(self.factory, partial) else self.factory
        if not getattr(kind, "takes_turns", False):
            return self
        return replace(self, kwargs={**self.kwargs, "n_slots": n_envs})

    def __call__(self, **extra: Any) -> gymnasium.Env:
        """Make one environment; `extra` (render_mode) goes to the factory too."""
        if self.makes == "device":
            return self.on_host()(**extra)
        if self.makes == "async":
            return self._gymnasium(self.twin or partial(Awaited, self.factory))(**extra)
        if self.makes != "many":
            env = self.any(**extra)
            if vector_kind(env) is None:
                assert isinstance(env, gymnasium.Env)
                return env
            env.close()
        raise UsageError(f"{self.name} makes many environments at once; give a factory of one gymnasium.Env for this.")

    def any(self, **extra: Any) -> Any:
        """Make what the factory makes: one environment, or a vector environment; of an AsyncEnv, its twin."""
        if self.makes == "async":
            return self(**extra)
        env = self._call(extra)
        if inspect.iscoroutinefunction(getattr(env, "step", None)):
            raise UsageError(
                f"{self.name} returned a {type(env).__name__}, whose step is a coroutine; name the class itself, or "
                "functools.partial of it, so that its episodes share an event loop."
            )
        if not isinstance(env, gymnasium.Env) and vector_kind(env) is None:
            raise UsageError(
                f"{self.name} returned {type(env).__name__}, not a gymnasium.Env; "
                "derive from gymnasium.Env, or wrap an old Gym environment with shimmy."
            )
        return env

    @contextlib.contextmanager
    def tried(self) -> Iterator[Any]:
        """`any`, to be looked at: closed afterwards, or kept for `on_device` if it lives there."""
        env = self.spare.pop() if self.spare else self.any()
        try:
            yield env
        finally:
            if on_device_kind(env):
                self.spare.append(env)
            else:
                env.close()

    def awaitable(self) -> AsyncEnv:
        """Make one AsyncEnv."""
        env: AsyncEnv = self._call({})
        return env

    def pool(self, seeds: Sequence[int]) -> Any:
        """Make an EnvPool of as many environments as there are seeds."""
        return self._call({"num_envs": len(seeds), "seed": list(seeds)})

    def on_device(self, n_envs: int, seed: int, device: Any = "cpu", first_index: int = 0) -> Any:
        """Make a DeviceEnv of environments `first_index`, …; of a user's simulator, as many as it has."""
        if self.makes == "either":
            from unidle.envs.device.simulators import as_device_env  # loads torch, which worker processes do without

            env = self.spare.pop() if self.spare else self.any()
            return as_device_env(env, self.name, seed, device, first_index)
        return self._call({"n_envs": n_envs, "seed": seed, "device": device, "first_index": first_index})

    def _call(self, extra: dict[str, Any]) -> Any:
        try:
            return self.factory(**self.kwargs, **extra)
        except TypeError as error:
            if self.kwargs and ("unexpected keyword" in str(error) or "multiple values" in str(error)):
                raise UsageError(f"{self.name} does not take these env_kwargs: {_one_line(error)}.") from None
            if self.name.startswith("unidle/") and "required positional" in str(error):
                raise UsageError(f"{self.name} needs more env_kwargs: {_one_line(error)}.") from None
            raise


Backend = Callable[[str, dict[str, Any]], EnvMaker]  # a name and env_kwargs → what makes it, or a UsageError

# Prefix of a name → its backend; as "module:function", so that one which is not used is never imported.
_BACKENDS: dict[str, Backend | str] = {
    "unidle/": "unidle.tasks.backend:own_task",
    "metaworld:": "unidle.tasks.backend:metaworld",
    "gymnax:": "unidle.envs.device.gymnax_env:backend",
    "brax:": "unidle.envs.device.brax_env:backend",
    "envpool:": "unidle.envs.vector.envpool:backend",
}


def register_backend(prefix: str, backend: Backend | str) -> None:
    """Let `backend` make every environment whose name starts with `prefix` (`mysim:`); it may be `module:function`."""
    _BACKENDS[prefix] = backend


def _loaded(backend: Backend | str) -> Backend:
    if not isinstance(backend, str):
        return backend
    module, _, function = backend.partition(":")
    loaded: Backend = getattr(importlib.import_module(module), function)
    return loaded


def on_device_kind(env: Any) -> Literal["isaac", "tensors"] | None:
    """Whether this steps many environments on a device: a vector environment of tensors, or one of Isaac Lab's kind.

    These have an attribute `device`, and no other kind has.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        layer: Any = env
        while layer is not None and not hasattr(layer, "device"):
            layer = getattr(layer, "env", None)
        return "tensors" if layer is not None else None
    inner = getattr(env, "unwrapped", env)
    return "isaac" if hasattr(inner, "device") and hasattr(inner, "num_envs") else None


def vector_kind(env: Any) -> Literal["gymnasium", "sb3", "isaac", "tensors"] | None:
    """Whose vector environment this is; None if it is none."""
    if hasattr(env, "async_reset") and hasattr(env, "recv"):
        raise UsageError(
            "An EnvPool is made by unidle itself; name it as --env envpool:CartPole-v1, with --env-kwargs."
        )
    on_device = on_device_kind(env)
    if on_device:
        return on_device
    if isinstance(env, gymnasium.vector.VectorEnv):
        return "gymnasium"
    # By name, so that Stable-Baselines3 need be neither installed nor imported.
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(env).__mro__}
    return "sb3" if ("stable_baselines3", "VecEnv") in kinds else None


def is_reproducible(name: str) -> bool:
    """Whether the name in a config.yaml is enough to make the environment again."""
    return not name.startswith("<")


def env_maker(env: str | EnvFactory, kwargs: dict[str, Any] | None = None) -> EnvMaker:
    """Resolve what the user gave; UsageError if there is no such environment."""
    kwargs = kwargs or {}
    if callable(env):
        return _from_callable(callable_name(env), env, kwargs)
    if not is_reproducible(env):
        raise UsageError(f"This run's environment was the Python object {env}; pass it again, as env=…")
    for prefix, backend in _BACKENDS.items():
        if env.startswith(prefix) and env != prefix:
            return _loaded(backend)(env, kwargs)
    module, _, attribute = env.partition(":")
    if attribute:
        found = getattr(import_module(module), attribute, None)
        if callable(found):
            return _from_callable(env, found, kwargs)
        if "-v" not in attribute:  # not an id that the module registers, as module:Name-v0
            near = difflib.get_close_matches(attribute, dir(sys.modules[module]), n=1)
            hint = f"did you mean `{near[0]}`?" if near else "check the name after the colon."
            raise UsageError(f"Module `{module}` has no callable `{attribute}`; {hint}")
    return EnvMaker(env, gymnasium_factory(env), kwargs, makes="one")


def _from_callable(name: str, factory: EnvFactory, kwargs: dict[str, Any]) -> EnvMaker:
    # Isaac Lab's environments derive from gymnasium.Env, each of them being many.
    is_many = getattr(factory, "is_vector_env", False)
    inner = factory
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type) and inspect.iscoroutinefunction(getattr(inner, "step", None)):
        return EnvMaker(name, factory, kwargs, makes="async")
    is_env = isinstance(factory, type) and issubclass(factory, gymnasium.Env) and not is_many
    return EnvMaker(name, factory, kwargs, makes="one" if is_env else "either")


def gymnasium_factory(env_id: str) -> EnvFactory:
    """What makes the environment registered under `env_id`; UsageError if there is none."""
    try:
        spec = gymnasium.spec(env_id.partition(":")[2] or env_id)  # a module before the id was imported by now
    except gymnasium.error.Error as error:
        raise UsageError(f"There is no environment `{env_id}`: {_one_line(error)}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"`{env_id}` names module `{error.name}`, which cannot be imported; check the name.") from None

    # The spec travels to workers, so an id that the user's own script registered is known there too.
    def make(**kwargs: Any) -> gymnasium.Env:
        try:
            return gymnasium.make(spec, **kwargs)
        except gymnasium.error.DependencyNotInstalled as error:
            raise UsageError(f"`{env_id}` needs a package that is not installed: {_one_line(error)}") from None
        except TypeError as error:
            if "unexpected keyword" in str(error):
                raise UsageError(f"`{env_id}` does not take these env_kwargs: {_one_line(error)}") from None
            raise

    return make


def import_module(name: str) -> Any:
    """A user's module, looked for in the current folder too, as `python -m` would."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise  # their module exists and lacks something itself: their traceback says it best
        raise UsageError(f"Module `{name}` cannot be found; run from the folder it is in, or check the name.") from None


def callable_name(function: Callable[..., Any]) -> str:
    """`module:name` if that leads back to the same object from a new process, else `<name>`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", repr(function))
    if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    return f"<{name.strip('<>')}>"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
