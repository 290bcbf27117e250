"""An environment to be awaited. It imports no torch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import numpy as np
from troubled import Do, Troubled


class Waiting:
    """`Troubled`, waited for: a coroutine where that one blocks. A file "drowsy" has each reset take 0.4 seconds."""

    open = 0  # how many there are that were not closed
    closed_on: ClassVar[set[str]] = set()  # names of threads
    observation_space, action_space = Troubled.observation_space, Troubled.action_space

    def __init__(self, folder: str | None = None) -> None:
        self._env = Troubled(folder)
        self._rng = np.random.default_rng()
        self._is_open = True
        Waiting.open += 1

    async def reset(self, seed: int) -> Any:
        if self._env._says("sleepy"):
            await asyncio.sleep(600)
        await asyncio.sleep(0.4 if self._env._says("drowsy") else self._rng.uniform(0, 0.002))
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
        Waiting.closed_on.add(threading.current_thread().name)
        Waiting.open -= self._is_open
        self._is_open = False
