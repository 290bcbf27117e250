"""The backends of `unidle/` and `metaworld:` names."""

from __future__ import annotations

import difflib
import importlib
import inspect
from functools import partial
from typing import Any

from unidle.envs.make import EnvMaker, gymnasium_factory
from unidle.errors import UsageError

# Name → (module, class) of the device or async version, and of the equivalent single gymnasium.Env.
_OWN: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "unidle/Mission-v0": (("mission.device_env", "Mission"), ("mission.gym_env", "MissionEnv")),
    "unidle/SiteExplore-v0": (("web.site_explore", "SiteExplore"), ("web.gym_env", "SiteExploreEnv")),
    "unidle/Trading-v0": (("trading.device_env", "Trading"), ("trading.gym_env", "TradingEnv")),
}
_SETTINGS = {"n_envs", "seed", "device"}  # set by flags, not in env_kwargs


def own_task(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """`unidle/CartPole-v1`, `unidle/Mission-v0`, …"""
    from unidle.tasks.classic_control import TASKS, Classic  # loads torch

    for setting in kwargs.keys() & _SETTINGS:
        raise UsageError(
            f"`{setting}` is set by --{setting.replace('_', '-')}; leave it out of the env_kwargs of {name}."
        )
    if name in TASKS:
        single_env = gymnasium_factory(name.removeprefix("unidle/"))
        return EnvMaker(name, partial(Classic, TASKS[name]), kwargs, kind="device", single_env=single_env)
    if name not in _OWN:
        known = [*TASKS, *_OWN]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(known)}."
        raise UsageError(f"unidle has no environment `{name}`; {hint}")
    own, single_env = (getattr(importlib.import_module(f"unidle.tasks.{module}"), kind) for module, kind in _OWN[name])
    is_async = inspect.iscoroutinefunction(own.step)
    return EnvMaker(name, own, kwargs, kind="async" if is_async else "device", single_env=single_env)


def metaworld(name: str, kwargs: dict[str, Any]) -> EnvMaker:
    """`metaworld:MT10`, `metaworld:reach-v3`, …"""
    from unidle.tasks.metaworld.env import MultiTaskEnv, task_names

    benchmark = name.partition(":")[2]
    task_names(benchmark)  # UsageError if the benchmark or the package is missing
    return EnvMaker(name, partial(MultiTaskEnv, benchmark), kwargs, kind="gymnasium")
