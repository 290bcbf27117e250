"""Wrappers around the user's environments, in the config as `module:callable` or {`module:callable`: arguments}."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import gymnasium

from unidle.envs.import_name import callable_name, import_module, is_reproducible
from unidle.errors import UsageError


@dataclass(frozen=True)
class Wrapper:
    """A wrapper and its keyword arguments."""

    name: str
    wrap: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self, env: gymnasium.Env) -> gymnasium.Env:
        """Wrap `env`."""
        try:
            wrapped = self.wrap(env, **self.kwargs)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise UsageError(f"Wrapper {self.name} does not accept these arguments: {error}.") from None
        if not isinstance(wrapped, gymnasium.Env):
            raise UsageError(f"Wrapper {self.name} returned {type(wrapped).__name__}; it must return a gymnasium.Env.")
        return wrapped


def wrap(env: gymnasium.Env, wrappers: Sequence[Wrapper]) -> gymnasium.Env:
    """Apply `wrappers`, the first one innermost."""
    return reduce(lambda inner, wrapper: wrapper(inner), wrappers, env)


def wrapper_of(entry: str | Mapping[str, Any]) -> Wrapper:
    """The wrapper of one entry of the setting `wrappers`; UsageError if there is none."""
    if isinstance(entry, Mapping):
        if len(entry) != 1:
            raise UsageError(f"`wrappers` contains {dict(entry)}; write one entry per wrapper, as module:callable.")
        ((name, kwargs),) = entry.items()
    else:
        name, kwargs = entry, {}
    if not isinstance(name, str) or not isinstance(kwargs, Mapping | None):
        raise UsageError(f"`wrappers` contains {entry!r}; write module:callable, or {{module:callable: {{…}}}}.")
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"Wrapper `{name}` is not of the form module:callable, such as gymnasium.wrappers:ClipReward.")
    found = getattr(import_module(module), attribute, None)
    if not callable(found):
        raise UsageError(f"Module `{module}` has no callable `{attribute}`; check the name of the wrapper.")
    return Wrapper(name, found, kwargs or {})


def wrapper_entries(wrappers: Sequence[Any] | str) -> list[Any]:
    """The setting `wrappers` for what a Python user passes: names, {name: arguments}, or callables."""
    given = [wrappers] if isinstance(wrappers, str) or callable(wrappers) else wrappers
    return [_entry(wrapper) if callable(wrapper) else wrapper for wrapper in given]


def _entry(wrapper: Callable[..., Any]) -> str:
    name = callable_name(wrapper)
    if not is_reproducible(name):
        raise UsageError(
            f"The wrapper {name} cannot be imported by name; define it at the top of a module, or wrap the environment "
            "in the function that you pass as env."
        )
    return name
