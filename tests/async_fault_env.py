"""An asynchronous environment. It imports no torch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
from action_faults import ActionFaultEnv, Do


class AsyncFaultEnv:
    """`ActionFaultEnv` with coroutines for reset and step. With a file "reset slow", each reset takes 0.4 seconds."""

    open = 0  # instances that were not closed
    closed_on: ClassVar[set[str]] = set()  # thread names
    observation_space, action_space = ActionFaultEnv.observation_space, ActionFaultEnv.action_space

    def __init__(self, folder: str | None = None) -> None:
        self._env = ActionFaultEnv(folder)
        self._rng = np.random.default_rng()
        self._is_open = True
        AsyncFaultEnv.open += 1

    async def reset(self, seed: int) -> Any:
        if self._env.has_file("reset hangs"):
            await asyncio.sleep(600)
        await asyncio.sleep(0.4 if self._env.has_file("reset slow") else self._rng.uniform(0, 0.002))
        return self._env.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        match Do(int(action)):
            case Do.HANG:
                await asyncio.sleep(600)
            case Do.SLOW:
                await asyncio.sleep(0.4)
                return self._env.step(Do.STEP)
            case Do.EXIT:
                raise SystemExit(3)
        await asyncio.sleep(self._rng.uniform(0, 0.002))
        return self._env.step(action)

    async def close(self) -> None:
        AsyncFaultEnv.closed_on.add(threading.current_thread().name)
        AsyncFaultEnv.open -= self._is_open
        self._is_open = False
