"""`unidle/SiteExplore-v0` for Gymnasium: one episode at a time, in an event loop of its own."""

from __future__ import annotations

from typing import Any

from unidle.envs.aio.async_env import GymnasiumAsyncEnv
from unidle.tasks.web.site_explore import SiteExplore


class SiteExploreEnv(GymnasiumAsyncEnv):
    """One `SiteExplore`, waited for."""

    def __init__(self, render_mode: str | None = None, **task: Any) -> None:
        """`task` is what SiteExplore takes: site, topic, …"""
        super().__init__(SiteExplore, render_mode, **task)
