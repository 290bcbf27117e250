"""What an environment looks like whose steps wait for somebody else: a website, a service, a person."""

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
    and the next call is `reset` or `close`. What is waited for may fail: that is something to be observed, and not an
    exception. An environment that gives `info["action_mask"]` gives it from both `reset` and `step`.
    """

    @property
    def observation_space(self) -> gymnasium.Space:
        """What is seen."""

    @property
    def action_space(self) -> gymnasium.Space:
        """What can be done."""

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begin the episode that this seed stands for: observation, info."""

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""

    async def close(self) -> None:
        """Let go of connections; a second time does nothing."""


class Awaited(gymnasium.Env):
    """Any AsyncEnv for Gymnasium: one episode at a time, in an event loop of its own."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, factory: Callable[..., AsyncEnv], render_mode: str | None = None, **task: Any) -> None:
        """`task` is what the factory takes."""
        self.render_mode = render_mode
        self.awaited = factory(**task)
        self.observation_space, self.action_space = self.awaited.observation_space, self.awaited.action_space
        self._loop = asyncio.new_event_loop()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._wait(self.awaited.reset(int(self.np_random.integers(2**31)) if seed is None else seed))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait for a step."""
        return self._wait(self.awaited.step(action))

    def close(self) -> None:
        """Close it and its event loop."""
        if not self._loop.is_closed():
            self._wait(self.awaited.close())
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        if asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(coroutine)
        with ThreadPoolExecutor(1) as thread:  # as in a notebook, whose own loop is running here
            return thread.submit(self._loop.run_until_complete, coroutine).result()


class Threaded:
    """A Gymnasium environment that waits without being a coroutine, in a thread of its own: an AsyncEnv.

    `functools.partial(Threaded, make_env)` is what to train on. A call that is cancelled cannot be ended: its thread
    goes on until the call returns, and ends then.
    """

    repeats = True  # the same seed and actions give the same episode, as Gymnasium asks of an environment

    def __init__(self, make_env: Callable[..., gymnasium.Env], **kwargs: Any) -> None:
        """The environment is made, stepped and closed in its thread."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_busy = self._is_closed = False
        # A daemon: a program does not wait with its end for an environment that hangs.
        threading.Thread(target=self._work, name="environment", daemon=True).start()
        try:
            self._env: gymnasium.Env = self._ask(lambda: make_env(**kwargs)).result()
        except BaseException:
            self._calls.put(None)
            raise
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begin the episode that this seed stands for."""
        return await self._call(lambda: self._env.reset(seed=seed))

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = await self._call(lambda: self._env.step(action))
        return observation, float(reward), terminated, truncated, info

    async def close(self) -> None:
        """Close the environment and end its thread, later if a call of it hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        closing = self._ask(self._env.close)
        self._calls.put(None)
        if not self._is_busy:
            await asyncio.wrap_future(closing)

    async def _call(self, call: Callable[[], _Result]) -> _Result:
        self._is_busy = True  # and stays so if this is cancelled
        try:
            result = await asyncio.wrap_future(self._ask(call))
        except Exception:
            self._is_busy = False
            raise
        self._is_busy = False
        return result

    def _ask(self, call: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put((call, future))
        return future

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del asked, call, future  # what was returned is not to be kept until the next call
