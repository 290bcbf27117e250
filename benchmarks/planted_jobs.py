"""Small training jobs, each with one planted reason to be slow: python benchmarks/planted_jobs.py sleeping --seconds 6

They are ordinary PPO runs of Stable-Baselines3 that know nothing of unidle. `planted_causes.py` runs them under
`unidle watch`.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import socketserver
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

LATENCY_S = 0.02


class Cheap(gym.Env[Any, Any]):
    """A step that costs next to nothing."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._seen = np.zeros(8, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.work()
        return self._seen, 1.0, False, False, {}

    def work(self) -> None:
        """What the step costs."""


class Sleeping(Cheap):
    def work(self) -> None:
        time.sleep(0.01)


class Burning(Cheap):
    def work(self) -> None:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            sum(range(500))


class Asking(Cheap):
    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def work(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()


class Threaded(Cheap):
    """Multiplies matrices on 16 threads, whatever the machine has."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(16)
        self._a = torch.randn(384, 384)

    def work(self) -> None:
        self._a = torch.tanh(self._a @ self._a)


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


class Until(BaseCallback):
    """Ends training after so many seconds, and does something of its own at each step before."""

    def __init__(self, seconds: float, work: Callable[[PPO], None] = lambda _: None) -> None:
        super().__init__()
        self._end, self._work = time.monotonic() + seconds, work

    def _on_step(self) -> bool:
        self._work(self.model)  # type: ignore[arg-type]
        return time.monotonic() < self._end


def train(
    envs: Any, seconds: float, *, net: int = 64, n_steps: int = 64, batch_size: int = 256, work: Any = None, **more: Any
) -> None:
    batch_size = min(batch_size, n_steps * envs.num_envs)
    model = PPO(
        "MlpPolicy", envs, n_steps=n_steps, batch_size=batch_size, policy_kwargs={"net_arch": [net, net]},
        device="cpu", **more,
    )  # fmt: skip
    model.learn(10**9, callback=Until(seconds, *([work] if work else [])))
    envs.close()


def workers(make: Callable[[], Any], n: int, start: str = "fork") -> SubprocVecEnv:
    return SubprocVecEnv([make] * n, start_method=start)


def burn_python(_: PPO) -> None:
    Burning.work(None)  # type: ignore[arg-type]


def serving(before: Callable[[int], Any] = lambda _: None) -> int:
    """Start a server that answers slowly, in a thread, after `before` got its port; returns that."""
    server = _Server(("127.0.0.1", 0), _Answer)
    before(server.server_address[1])  # processes are forked before threads are started
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def asking(seconds: float) -> None:
    envs: list[SubprocVecEnv] = []
    serving(lambda port: envs.append(workers(partial(Asking, port), 4)))
    train(envs[0], seconds)


def saving(seconds: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "policy.pt"
        train(DummyVecEnv([Cheap]), seconds, net=256, work=lambda model: torch.save(model.policy.state_dict(), path))


# Job → (what is planted, as `unidle watch` calls it; the job).
JOBS: dict[str, tuple[str, Callable[[float], None]]] = {
    "sleeping": ("environment waits", lambda s: train(DummyVecEnv([Sleeping] * 2), s)),
    "sleeping workers": ("environment waits", lambda s: train(workers(Sleeping, 4), s)),
    "asking a server": ("environment waits", asking),
    "burning": ("environment computes", lambda s: train(DummyVecEnv([Burning] * 2), s)),
    "burning workers": ("environment computes", lambda s: train(workers(Burning, 4), s)),
    "idle workers": ("messages to workers", lambda s: train(workers(Cheap, 8), s, n_steps=256, n_epochs=1)),
    "threads": ("too many threads", lambda s: train(workers(Threaded, 4, "spawn"), s)),
    "tiny minibatches": ("small pieces", lambda s: train(DummyVecEnv([Cheap] * 4), s, batch_size=4)),
    "healthy": ("compute-bound", lambda s: train(DummyVecEnv([Cheap] * 8), s, net=512, batch_size=512, n_epochs=20)),
    "saving": ("logging", saving),
    "own callback": ("own code", lambda s: train(DummyVecEnv([Cheap]), s, work=burn_python)),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # or several threads on a small machine would be a second cause in every job
    JOBS[given.job][1](given.seconds)
