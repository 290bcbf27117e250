"""`make_vec_env`: several copies of an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium

from unidle.sb3.common.monitor import Monitor
from unidle.sb3.common.vec_env import DummyVecEnv, VecEnv
from unidle.sb3.theirs import name_of_theirs


@dataclass(frozen=True)
class MakeEnv:
    """Creates one environment with its wrappers."""

    env: str | Callable[..., gymnasium.Env]
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrapper: Callable[..., gymnasium.Env] | None = None
    wrapper_kwargs: dict[str, Any] = field(default_factory=dict)
    monitor_kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> gymnasium.Env:
        """Create it."""
        made = gymnasium.make(self.env, **self.kwargs) if isinstance(self.env, str) else self.env(**self.kwargs)
        env = Monitor(made, **self.monitor_kwargs)
        return env if self.wrapper is None else self.wrapper(env, **self.wrapper_kwargs)


def make_vec_env(
    env_id: str | Callable[..., gymnasium.Env],
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | None = None,
    wrapper_class: Callable[..., gymnasium.Env] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_cls: Callable[..., VecEnv] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
) -> VecEnv:
    """`n_envs` copies of an environment, each in a `Monitor`, which writes to `monitor_dir` if that is given.

    A model steps them in its own pool, so that `vec_env_cls` matters only where your script steps them.
    """
    if isinstance(env_id, str):
        gymnasium.spec(env_id)  # raises Gymnasium's own error for an unknown name
    make = MakeEnv(env_id, env_kwargs or {}, wrapper_class, wrapper_kwargs or {}, monitor_kwargs or {})
    functions = [make] * n_envs
    if monitor_dir is not None:
        functions = [_logged(make, Path(monitor_dir) / f"{start_index + index}.monitor.csv") for index in range(n_envs)]
    vec_env = (vec_env_cls or DummyVecEnv)(functions, **(vec_env_kwargs or {}))
    vec_env.seed(seed)
    return vec_env


def _logged(make: MakeEnv, path: Path) -> MakeEnv:
    """The function with a file for its Monitor, which is kept when a later `learn` creates the environment again."""
    if make.monitor_kwargs.get("override_existing", True):
        path.unlink(missing_ok=True)
    return replace(make, monitor_kwargs={**make.monitor_kwargs, "filename": str(path), "override_existing": False})


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
