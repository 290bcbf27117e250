"""unidle's worker processes as a `VecEnv` of Stable-Baselines3.

    from unidle.integrations.sb3_vec_env import SubprocVecEnv
    model = PPO("MlpPolicy", SubprocVecEnv([make] * 32))

Several environments share a process, and observations go through shared memory. Needs no `__main__` guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gymnasium

from unidle.errors import UsageError
from unidle.integrations.worker_vec_env import WorkerVecEnv, start_workers

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError:
    raise UsageError("SubprocVecEnv needs Stable-Baselines3; run: pip install stable-baselines3.") from None


class SubprocVecEnv(WorkerVecEnv, VecEnv):
    """Steps like Stable-Baselines3's SubprocVecEnv, with `workers` processes (by default one per core)."""

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env]], workers: int | None = None) -> None:
        self._group = group = start_workers(env_fns, workers)
        try:
            super().__init__(len(env_fns), *group.spaces[0])
        except BaseException:
            group.close()
            raise

    def __del__(self) -> None:
        group = getattr(self, "_group", None)
        if group is not None:
            group.close()
