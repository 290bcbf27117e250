"""Small training jobs, each with one planted reason to be slow: python benchmarks/planted_jobs.py sleeping --seconds 6

They are ordinary PPO runs of Stable-Baselines3 that do not use unidle. `planted_causes.py` runs them under
`unidle watch`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from slow_envs import Asking, Burning, Cheap, Sleeping, Threaded, burn, serving
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv


class StopAfter(BaseCallback):
    """Ends training after some seconds and calls a function at each step."""

    def __init__(self, seconds: float, work: Callable[[PPO], None] = lambda _: None) -> None:
        super().__init__()
        self._end, self._work = time.monotonic() + seconds, work

    def _on_step(self) -> bool:
        self._work(self.model)  # type: ignore[arg-type]
        return time.monotonic() < self._end


def train(
    envs: Any,
    seconds: float,
    *,
    net: int = 64,
    n_steps: int = 64,
    batch_size: int = 256,
    work: Any = None,
    **ppo_kwargs: Any,
) -> None:
    batch_size = min(batch_size, n_steps * envs.num_envs)
    model = PPO(
        "MlpPolicy", envs, n_steps=n_steps, batch_size=batch_size, policy_kwargs={"net_arch": [net, net]},
        device="cpu", **ppo_kwargs,
    )  # fmt: skip
    model.learn(10**9, callback=StopAfter(seconds, *([work] if work else [])))
    envs.close()


def workers(make: Callable[[], Any], n: int, start: str = "fork") -> SubprocVecEnv:
    return SubprocVecEnv([make] * n, start_method=start)


def asking(seconds: float) -> None:
    envs: list[SubprocVecEnv] = []
    serving(lambda port: envs.append(workers(partial(Asking, port), 4)))
    train(envs[0], seconds)


def saving(seconds: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "policy.pt"
        train(DummyVecEnv([Cheap]), seconds, net=256, work=lambda model: torch.save(model.policy.state_dict(), path))


# Job → (planted cause, as named by `unidle watch`; the job).
JOBS: dict[str, tuple[str, Callable[[float], None]]] = {
    "sleeping": ("environment waits", lambda s: train(DummyVecEnv([Sleeping] * 2), s)),
    "sleeping workers": ("environment waits", lambda s: train(workers(Sleeping, 4), s)),
    "asking a server": ("environment waits", asking),
    "burning": ("environment computes", lambda s: train(DummyVecEnv([Burning] * 2), s)),
    "burning workers": ("environment computes", lambda s: train(workers(Burning, 4), s)),
    "idle workers": ("messages to workers", lambda s: train(workers(Cheap, 8), s, n_steps=256, n_epochs=1)),
    "threads": ("too many threads", lambda s: train(workers(Threaded, 4, "spawn"), s)),
    "tiny minibatches": ("small batches", lambda s: train(DummyVecEnv([Cheap] * 4), s, batch_size=4)),
    "healthy": ("compute-bound", lambda s: train(DummyVecEnv([Cheap] * 8), s, net=512, batch_size=512, n_epochs=20)),
    "saving": ("logging", saving),
    "own callback": ("user code", lambda s: train(DummyVecEnv([Cheap]), s, work=lambda _: burn())),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # otherwise several threads on a small machine would be a second cause in every job
    JOBS[arguments.job][1](arguments.seconds)
