"""Environments whose steps wait for I/O, such as a website or a service: the protocol and two adapters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import gymnasium

_Result = TypeVar("_Result")


class AsyncEnv(Protocol):
    """A Gymnasium environment whose `reset` and `step` are coroutines, so that one thread keeps hundreds in flight.

    All calls come from one event loop, one at a time. A call may be cancelled at any `await`; the episode is then lost
    and the next call is `reset` or `close`. A failed request should become an observation, not an exception. An
    environment that sets `info["action_mask"]` sets it in both `reset` and `step`.
    """

    @property
    def observation_space(self) -> gymnasium.Space:
        """As in Gymnasium."""

    @property
    def action_space(self) -> gymnasium.Space:
        """As in Gymnasium."""

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Start the episode of this seed; return observation, info. Gymnasium's signature is fine too."""

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return observation, reward, terminated, truncated, info."""

    async def close(self) -> None:
        """Close connections; a second call does nothing."""


class GymnasiumAsyncEnv(gymnasium.Env):
    """An AsyncEnv as a gymnasium.Env: one episode at a time, on its own event loop."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, factory: Callable[..., AsyncEnv], render_mode: str | None = None, **kwargs: Any) -> None:
        """`kwargs` go to the factory."""
        self.render_mode = render_mode
        self.async_env = factory(**kwargs)
        self.observation_space, self.action_space = self.async_env.observation_space, self.async_env.action_space
        self._loop = asyncio.new_event_loop()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        return self._wait(self.async_env.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Run a step to completion."""
        return self._wait(self.async_env.step(action))

    def close(self) -> None:
        """Close the environment and its event loop."""
        if not self._loop.is_closed():
            self._wait(self.async_env.close())
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        if asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(coroutine)
        with ThreadPoolExecutor(1) as thread:  # a notebook has a running loop in this thread
            return thread.submit(self._loop.run_until_complete, coroutine).result()


class Threaded:
    """A blocking Gymnasium environment in its own thread, as an AsyncEnv.

    Train on `functools.partial(Threaded, make_env)`. A cancelled call cannot be interrupted: its thread runs until the
    call returns.
    """

    deterministic = True  # the same seed and actions give the same episode, as Gymnasium requires

    def __init__(self, make_env: Callable[..., gymnasium.Env], **kwargs: Any) -> None:
        """Create the environment in its thread; all calls run there."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_busy = self._is_closed = False
        # A daemon: the program can exit although an environment hangs.
        threading.Thread(target=self._run, name="environment", daemon=True).start()
        try:
            self._env: gymnasium.Env = self._submit(lambda: make_env(**kwargs)).result()
        except BaseException:
            self._calls.put(None)
            raise
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Start the episode of this seed."""
        return await self._call(lambda: self._env.reset(seed=seed))

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = await self._call(lambda: self._env.step(action))
        return observation, float(reward), terminated, truncated, info

    async def close(self) -> None:
        """Close the environment and end its thread; do not wait if a call is still running."""
        if self._is_closed:
            return
        self._is_closed = True
        closing = self._submit(self._env.close)
        self._calls.put(None)
        if not self._is_busy:
            await asyncio.wrap_future(closing)

    async def _call(self, call: Callable[[], _Result]) -> _Result:
        self._is_busy = True  # stays set if this is cancelled
        try:
            result = await asyncio.wrap_future(self._submit(call))
        except Exception:
            self._is_busy = False
            raise
        self._is_busy = False
        return result

    def _submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, call, future  # release the result before the next call
