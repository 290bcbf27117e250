"""Names of the environments that unidle ships, and of Meta-World's, turned into what makes them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from functools import partial
from typing import Any

from unidle.envs.make import EnvMaker, gymnasium_factory
from unidle.errors import UsageError

# Name → (module, class) of the version on the device or on an event loop, and of the one for Gymnasium.
_OWN: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "unidle/Mission-v0": (("mission.device_env", "Mission"), ("mission.gym_env", "MissionEnv")),
    "unidle/SiteExplore-v0": (("web.site_explore", "SiteExplore"), ("web.gym_env", "SiteExploreEnv")),
    "unidle/Trading-v0": (("trading.device_env", "Trading"), ("trading.gym_env", "TradingEnv")),
}
_SETTINGS = {"n_envs", "seed", "device"}  # not env_kwargs: unidle has flags for them


def own_task(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """`unidle/CartPole-v1`, `unidle/Mission-v0`, …"""
    from unidle.tasks.classic_control import TASKS, Classic  # loads torch, which worker processes do without

    for setting in kwargs.keys() & _SETTINGS:
        raise UsageError(f"`{setting}` of {name} is a setting of its own, --{setting.replace('_', '-')}; leave it out.")
    if name in TASKS:
        single_env = gymnasium_factory(name.removeprefix("unidle/"))
        return EnvMaker(name, partial(Classic, TASKS[name]), kwargs, kind="device", single_env=single_env)
    if name not in _OWN:
        known = [*TASKS, *_OWN]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}."
        raise UsageError(f"unidle has no environment `{name}`; {hint}")
    own, single_env = (getattr(importlib.import_module(f"unidle.tasks.{module}"), kind) for module, kind in _OWN[name])
    is_async = inspect.iscoroutinefunction(own.step)
    return EnvMaker(name, own, kwargs, kind="async" if is_async else "device", single_env=single_env)


def metaworld(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """`metaworld:MT10`, `metaworld:reach-v3`, …"""
    from unidle.tasks.metaworld.env import MultiTaskEnv, task_names

    benchmark = name.partition(":")[2]
    task_names(benchmark)  # raises a UsageError if there is no such benchmark, or no package
    return EnvMaker(name, partial(MultiTaskEnv, benchmark), kwargs, kind="gymnasium")
