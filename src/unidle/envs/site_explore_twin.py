"""`unidle/SiteExplore-v0` for Gymnasium: one episode at a time, in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gymnasium

from unidle.envs.site_explore import Observation, SiteExplore

_Result = TypeVar("_Result")


class SiteExploreEnv(gymnasium.Env):
    """One `SiteExplore`, waited for."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **task: Any) -> None:
        """`task` is what SiteExplore takes: site, topic, …"""
        self.render_mode = render_mode
        self.explorer = SiteExplore(**task)
        self.observation_space, self.action_space = self.explorer.observation_space, self.explorer.action_space
        self._loop = asyncio.new_event_loop()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._wait(self.explorer.reset(int(self.np_random.integers(2**31)) if seed is None else seed))

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Follow a link, or stop."""
        return self._wait(self.explorer.step(action))

    def close(self) -> None:
        """Let go of connections and event loop."""
        if not self._loop.is_closed():
            self._wait(self.explorer.close())
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        if asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(coroutine)
        with ThreadPoolExecutor(1) as thread:  # as in a notebook, whose own loop is running here
            return thread.submit(self._loop.run_until_complete, coroutine).result()
