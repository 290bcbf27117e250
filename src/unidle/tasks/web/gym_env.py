"""`unidle/SiteExplore-v0` for Gymnasium: one episode at a time, on its own event loop."""

from __future__ import annotations

from typing import Any

from unidle.envs.aio.async_env import GymnasiumAsyncEnv
from unidle.tasks.web.site_explore import SiteExplore


class SiteExploreEnv(GymnasiumAsyncEnv):
    """`SiteExplore` as a gymnasium.Env; renders as text."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    async_env: SiteExplore

    def __init__(self, render_mode: str | None = None, **task: Any) -> None:
        """`task` has the arguments of SiteExplore: site, topic, …"""
        super().__init__(SiteExplore, render_mode, **task)

    def render(self) -> str | None:
        """The page just fetched, the progress, and the links to choose from, by action; None in other render modes."""
        if self.render_mode != "ansi":
            return None
        task = self.async_env
        urls, visits = task.graph.urls, task.graph.visits
        return "\n".join(
            (
                f"{urls[visits[-1]] if visits else urls[0]}",
                f"{task.requests} of {task.budget} requests, {task.found} relevant pages found, {task.failed} failed",
                *(f"{action:4} {urls[page]}" for action, page in enumerate(task.candidates.tolist())),
                f"{task.links:4} (stop)",
            )
        )
