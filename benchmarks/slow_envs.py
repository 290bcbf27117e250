"""Environments with one planted reason to be slow, `slow_envs:Name`.

Worker processes import this file, so it must not import torch or other slow modules.
"""

from __future__ import annotations

import http.client
import http.server
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

LATENCY_S = 0.02


class Cheap(gym.Env[Any, Any]):
    """An environment with a nearly free step."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        assert self.observation_space.shape is not None
        self._obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.work()
        return self._obs, 1.0, False, False, {}

    def work(self) -> None:
        """Do the work of a step; free by default."""


class Wide(Cheap):
    """Observations of four megabytes."""

    observation_space = gym.spaces.Box(0, 255, (4 * 2**20,), np.uint8)


class Pictures(Cheap):
    """Small images, like Atari: little to copy per step, but a large replay buffer."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)


class Sleeping(Cheap):
    def work(self) -> None:
        time.sleep(0.01)


def burn() -> None:
    """Use 4 ms of CPU time."""
    end = time.thread_time() + 0.004
    while time.thread_time() < end:
        sum(range(500))


class Burning(Cheap):
    def work(self) -> None:
        burn()


class Threaded(Cheap):
    """Multiplies matrices on 16 threads, on any machine."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(16)
        self._a = torch.randn(512, 512)

    def work(self) -> None:
        self._a = (self._a @ self._a).tanh()


class Asking(Cheap):
    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def work(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()


class _Handler(http.server.BaseHTTPRequestHandler):
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


def serving(before: Callable[[int], Any] = lambda _: None) -> int:
    """Start a slow HTTP server in a thread and return its port; `before` is called with the port before the start."""
    server = _Server(("127.0.0.1", 0), _Handler)
    before(server.server_address[1])  # processes are forked before threads are started
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]
