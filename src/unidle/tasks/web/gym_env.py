"""`unidle/SiteExplore-v0` for Gymnasium: one episode at a time, on its own event loop."""

from __future__ import annotations

from typing import Any

from unidle.envs.aio.async_env import GymnasiumAsyncEnv
from unidle.tasks.web.site_explore import SiteExplore


class SiteExploreEnv(GymnasiumAsyncEnv):
    """`SiteExplore` as a gymnasium.Env."""

    def __init__(self, render_mode: str | None = None, **task: Any) -> None:
        """`task` has the arguments of SiteExplore: site, topic, …"""
        super().__init__(SiteExplore, render_mode, **task)
