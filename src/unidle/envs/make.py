"""Resolves the user's `env` (an id, `module:callable` or a factory) to an `EnvMaker`, using registered backends."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import gymnasium

from unidle.envs.adapter_registry import adapter_for, is_on_device
from unidle.envs.aio.async_env import AsyncEnv, GymnasiumAsyncEnv
from unidle.envs.env_object import MULTI_AGENT, is_multi_agent, settings_of
from unidle.envs.import_name import callable_name, import_module, is_reproducible
from unidle.envs.plugins import package_of
from unidle.envs.wrap import Wrapper, wrap, wrapper_of
from unidle.errors import UsageError

# Returns a gymnasium.Env, a vector environment of Gymnasium or Stable-Baselines3, or an Isaac-style simulator; or it is
# the class of an AsyncEnv.
EnvFactory = Callable[..., Any]


class PerEnv:
    """A factory with one function for each environment of a run; more environments begin with the first again."""

    def __init__(self, factories: Sequence[EnvFactory]) -> None:
        self.factories = tuple(factories)

    def __call__(self, **kwargs: Any) -> Any:
        """Create environment 0."""
        return self.factories[0](**kwargs)


# What an EnvMaker's factory returns: one gymnasium.Env; a native vector environment (EnvPool, ALE) of as many
# environments as asked for; a DeviceEnv; an AsyncEnv; or, from a user's function, a gymnasium.Env or a vector
# environment, known only after calling it.
EnvKind = Literal["gymnasium", "native", "device", "async", "unknown"]


@dataclass(frozen=True)
class EnvMaker:
    """Creates environments in this process or, sent by cloudpickle, in a worker process."""

    name: str  # as in config.yaml; in angle brackets if it cannot be created again from its name
    factory: EnvFactory
    kwargs: dict[str, Any] = field(default_factory=dict)
    kind: EnvKind = "unknown"
    single_env: EnvFactory | None = None  # the equivalent single gymnasium.Env of a DeviceEnv or AsyncEnv
    native: Callable[[EnvMaker, int], Any] | None = None  # (maker, number of environments) → VectorAdapter; if native
    evaluation_kwargs: dict[str, Any] = field(default_factory=dict)  # those that differ in evaluations
    obs_groups: tuple[str, ...] | None = None  # observation groups of a simulator, (): all; None: only the policy's
    action_masks: bool = True  # False: masks that the environment gives are ignored
    wrappers: tuple[Wrapper, ...] = ()  # around each single gymnasium.Env
    step_timeout: float | None = None  # seconds that a step or reset of an AsyncEnv may take
    # Created by `probed` and not stepped yet: simulators start slowly, and a process may be able to run only one.
    spare: list[Any] = field(default_factory=list, repr=False, compare=False)

    def on_host(self) -> EnvMaker:
        """The maker of the equivalent single gymnasium.Env if this one makes a DeviceEnv, else itself."""
        if self.kind != "device":
            return self
        if self.single_env is None:
            raise UsageError(
                f"{self.name} is a batched device environment without an equivalent single gymnasium.Env; "
                "--workers, --subproc, --wrapper, --frame-stack, --video and check-env need one, so leave them out."
            )
        return self._single(self.single_env)

    def _single(self, factory: EnvFactory) -> EnvMaker:
        return EnvMaker(
            self.name, factory, self.kwargs, "gymnasium", action_masks=self.action_masks, wrappers=self.wrappers
        )

    def wrapped(self, wrappers: Sequence[Any]) -> EnvMaker:
        """The maker with the wrappers of the setting `wrappers`; environments on the device become single ones."""
        if not wrappers:
            return self
        if self.kind in ("async", "native"):
            raise UsageError(
                f"--wrapper and --frame-stack wrap a single gymnasium.Env, which {self.name} is not; leave them out."
            )
        return replace(self.on_host(), wrappers=tuple(map(wrapper_of, wrappers)))

    def for_evaluation(self) -> EnvMaker:
        """The maker of environments in which a policy is evaluated."""
        return replace(self, kwargs={**self.kwargs, **self.evaluation_kwargs})

    def of_env(self, index: int) -> EnvMaker:
        """The maker of environment `index`."""
        if not isinstance(self.factory, PerEnv):
            return self
        return replace(self, factory=self.factory.factories[index % len(self.factory.factories)])

    def pickle_error(self) -> str | None:
        """Why the maker cannot be sent to worker processes; None if it can."""
        try:
            cloudpickle.dumps(self)
        except Exception as error:
            return _one_line(error)
        return None

    def for_n_envs(self, n_envs: int) -> EnvMaker:
        """Pass `n_envs` to environments whose tasks depend on it (multi-task benchmarks)."""
        factory = self.factory.func if isinstance(self.factory, partial) else self.factory
        if not getattr(factory, "is_multi_task", False):
            return self
        return replace(self, kwargs={**self.kwargs, "n_envs": n_envs})

    def __call__(self, **extra: Any) -> gymnasium.Env:
        """Create one gymnasium.Env; `extra` (render_mode) goes to the factory too."""
        if self.kind == "device":
            return self.on_host()(**extra)
        if self.kind == "async":
            return self._single(self.single_env or partial(GymnasiumAsyncEnv, self.factory))(**extra)
        if self.kind != "native":
            env = self.single_or_vector(**extra)
            if adapter_for(env) is None:
                assert isinstance(env, gymnasium.Env)
                return env
            env.close()
        raise UsageError(f"{self.name} is a batched environment; this command needs a factory of one gymnasium.Env.")

    def single_or_vector(self, **extra: Any) -> Any:
        """Call the factory: a gymnasium.Env or a vector environment; for an AsyncEnv, a gymnasium.Env."""
        if self.kind == "async":
            return self(**extra)
        env = self._call(extra)
        _require_all_async(self.name, env)
        if inspect.iscoroutinefunction(getattr(env, "step", None)):
            raise UsageError(
                f"{self.name} returned a {type(env).__name__}, whose step is a coroutine; pass the class itself, or "
                "functools.partial of it, so that its episodes share an event loop."
            )
        is_single = adapter_for(env) is None
        if is_multi_agent(env):
            raise UsageError(MULTI_AGENT.format(self.name))
        if is_single and not isinstance(env, gymnasium.Env):
            raise UsageError(
                f"{self.name} returned {type(env).__name__}, not a gymnasium.Env; "
                "derive from gymnasium.Env, or wrap an old Gym environment with shimmy."
            )
        if not is_single and self.wrappers:
            raise UsageError(
                f"{self.name} creates a vector environment; wrap it there instead of with --wrapper or --frame-stack."
            )
        return wrap(env, self.wrappers) if is_single else env

    @contextlib.contextmanager
    def probed(self) -> Iterator[Any]:
        """Create an environment to inspect; closed afterwards, or kept for `device_env` if it is on the device."""
        env = self.spare.pop() if self.spare else self.single_or_vector()
        try:
            yield env
        finally:
            if is_on_device(env):
                self.spare.append(env)
            else:
                env.close()

    def async_env(self) -> AsyncEnv:
        """Create one AsyncEnv."""
        env: AsyncEnv = self._call({})
        return env

    def create(self, **extra: Any) -> Any:
        """Call the factory of a native vector environment."""
        return self._call(extra)

    def device_env(self, n_envs: int, seed: int, device: Any = "cpu", first_index: int = 0) -> Any:
        """Create a DeviceEnv with environments `first_index`, …; a user's simulator decides how many."""
        if self.kind == "unknown":
            env = self.spare.pop() if self.spare else self.single_or_vector()
            adapter = adapter_for(env)
            assert adapter is not None
            return adapter.load()(env, self.name, seed, device, first_index, self.obs_groups)
        return self._call({"n_envs": n_envs, "seed": seed, "device": device, "first_index": first_index})

    def _call(self, extra: dict[str, Any]) -> Any:
        try:
            return self.factory(**self.kwargs, **extra)
        except TypeError as error:
            if self.kwargs and ("unexpected keyword" in str(error) or "multiple values" in str(error)):
                raise UsageError(f"{self.name} does not accept these env_kwargs: {_one_line(error)}.") from None
            if self.name.startswith("unidle/") and "required positional" in str(error):
                raise UsageError(f"{self.name} needs more env_kwargs: {_one_line(error)}.") from None
            raise


# -- backends ----------------------------------------------------------------------------------------------------------

# Takes the full name and env_kwargs; raises UsageError if there is no such environment.
Backend = Callable[[str, dict[str, Any]], EnvMaker | EnvFactory]

# Prefix of a name → its backend; those given as "module:function" are imported on first use.
_BACKENDS: dict[str, Backend | str] = {
    "unidle/": "unidle.tasks.backend:own_task",
    "metaworld:": "unidle.tasks.backend:metaworld",
    "gymnax:": "unidle.envs.device.gymnax_env:backend",
    "brax:": "unidle.envs.device.brax_env:backend",
    "ale:": "unidle.envs.vector.ale:backend",
    "envpool:": "unidle.envs.vector.envpool:backend",
}


def register_backend(prefix: str, backend: Backend | str) -> None:
    """Register `backend` for all environment names that start with `prefix`, such as `mysim:`.

    `backend(name, env_kwargs)` returns a factory, which is called with env_kwargs, or an `EnvMaker`. A backend given as
    "module:function" is imported on first use.
    """
    if not prefix or (isinstance(backend, str) and not all(backend.partition(":")[::2])):
        raise UsageError(f"Backend `{backend}` for `{prefix}`: give a prefix, and a function or its `module:function`.")
    _BACKENDS[prefix] = backend


def _load_backend(prefix: str) -> Backend:
    backend = _BACKENDS[prefix]
    if not isinstance(backend, str):
        return backend
    module, _, function = backend.partition(":")
    try:
        loaded: Backend = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports is missing
        raise UsageError(
            f"The backend of `{prefix}` is {backend}, but module `{error.name}` is not installed; install it."
        ) from None
    except AttributeError:
        raise UsageError(
            f"The backend of `{prefix}` is {backend}, but the module has no `{function}`; fix its registration."
        ) from None
    return loaded


def has_backend(name: str) -> bool:
    """Whether a backend creates the environment, so that its name does not name a module."""
    return any(name.startswith(prefix) and name != prefix for prefix in _BACKENDS)


def env_maker(
    env: str | EnvFactory | gymnasium.Env, kwargs: dict[str, Any] | None = None, wrappers: Sequence[Any] = ()
) -> EnvMaker:
    """Resolve the user's `env`; UsageError if there is no such environment."""
    named: Any = env
    if not is_name_or_factory(env):
        given = settings_of(env)
        named, kwargs, wrappers = given["env"], kwargs or given.get("env_kwargs"), wrappers or given.get("wrappers", ())
    return _unwrapped_maker(named, kwargs or {}).wrapped(wrappers)


def is_name_or_factory(env: Any) -> bool:
    """Whether `env` is a name or a factory; otherwise it may be an environment object."""
    return bool(env) and (isinstance(env, str) or (callable(env) and not isinstance(env, gymnasium.Env)))


def _unwrapped_maker(env: str | EnvFactory, kwargs: dict[str, Any]) -> EnvMaker:
    if callable(env):
        return _from_callable(callable_name(env), env, kwargs)
    if not is_reproducible(env):
        raise UsageError(f"This run's environment was the Python object {env}; pass it again as env=…")
    for prefix in _BACKENDS:
        if env.startswith(prefix) and env != prefix:
            made = _load_backend(prefix)(env, kwargs)
            return made if isinstance(made, EnvMaker) else _from_callable(env, made, kwargs)
    module, _, attribute = env.partition(":")
    if attribute:
        found = getattr(import_module(module), attribute, None)
        if callable(found):
            return _from_callable(env, found, kwargs)
        if "-v" not in attribute:  # not an id that the module registers, such as module:Name-v0
            near = difflib.get_close_matches(attribute, dir(sys.modules[module]), n=1)
            hint = f"did you mean `{near[0]}`?" if near else "check the name after the colon."
            raise UsageError(f"Module `{module}` has no callable `{attribute}`; {hint}")
    return EnvMaker(env, gymnasium_factory(env), kwargs, kind="gymnasium")


def _from_callable(name: str, factory: EnvFactory, kwargs: dict[str, Any]) -> EnvMaker:
    inner = factory
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, type):
        _require_all_async(name, inner)
        if inspect.iscoroutinefunction(getattr(inner, "step", None)):
            return EnvMaker(name, factory, kwargs, kind="async")
    # Isaac Lab's batched environments derive from gymnasium.Env too.
    is_batched = getattr(factory, "is_vector_env", False)
    is_single = isinstance(factory, type) and issubclass(factory, gymnasium.Env) and not is_batched
    return EnvMaker(name, factory, kwargs, kind="gymnasium" if is_single else "unknown")


def _require_all_async(name: str, env: Any) -> None:
    """UsageError if `env`, a class or an object, has both coroutines and plain methods."""
    methods = ("reset", "step", "close")
    coroutines = [method for method in methods if inspect.iscoroutinefunction(getattr(env, method, None))]
    if len(coroutines) in (0, len(methods)):
        return
    plain = " and ".join(f"{method}()" for method in methods if method not in coroutines)
    others = " and ".join(f"{method}()" for method in coroutines)
    raise UsageError(
        f"{name} is half asynchronous: write {plain} as `async def`, like {others}; or write all three as plain "
        "methods of a gymnasium.Env."
    )


def gymnasium_factory(env_id: str) -> EnvFactory:
    """The factory of the environment registered as `env_id`; UsageError if there is none."""
    try:
        spec = gymnasium.spec(env_id.partition(":")[2] or env_id)  # a module before the id is imported by now
    except gymnasium.error.Error as error:
        path = env_id.removesuffix(".py")
        if Path(f"{path}.py").is_file():
            name = path.replace("/", ".") + ":ClassName"
            raise UsageError(f"`{env_id}` is a Python file; name its environment class too: {name}.") from None
        package = None if ":" in env_id else package_of(env_id)
        if package is not None:
            raise UsageError(
                f"There is no environment `{env_id}` yet; write `{package}:{env_id}`, so that the package {package} is "
                "imported, which may register it."
            ) from None
        raise UsageError(f"There is no environment `{env_id}`: {_one_line(error)}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"`{env_id}` names module `{error.name}`, which cannot be imported; check the name.") from None

    # The spec is sent to workers, so that they know ids registered by the user's script.
    def make(**kwargs: Any) -> gymnasium.Env:
        try:
            return gymnasium.make(spec, **kwargs)
        except gymnasium.error.DependencyNotInstalled as error:
            raise UsageError(f"`{env_id}` needs a package that is not installed: {_one_line(error)}") from None
        except TypeError as error:
            if "unexpected keyword" in str(error):
                raise UsageError(f"`{env_id}` does not accept these env_kwargs: {_one_line(error)}") from None
            raise

    return make


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
