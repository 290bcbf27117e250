"""`Monitor`: puts the return and length of each finished episode into info["episode"]."""

from __future__ import annotations

import time
from typing import Any

import gymnasium

from unidle.errors import UsageError
from unidle.sb3.theirs import name_of_theirs


class Monitor(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Adds info["episode"] = {"r": return, "l": length, "t": seconds} to the last step of an episode."""

    def __init__(
        self,
        env: gymnasium.Env,
        filename: str | None = None,
        allow_early_resets: bool = True,
        reset_keywords: tuple[str, ...] = (),
        info_keywords: tuple[str, ...] = (),
        override_existing: bool = True,
    ) -> None:
        if filename is not None or reset_keywords:
            raise UsageError(
                "unidle's Monitor writes no file of its own; leave out `filename` and `reset_keywords`, and pass "
                'settings={"monitor_csv": True} to the model, which writes monitor.csv to its run folder.'
            )
        gymnasium.utils.RecordConstructorArgs.__init__(self, info_keywords=tuple(info_keywords))
        super().__init__(env)
        self._info_keywords, self._began = tuple(info_keywords), time.time()
        self._return, self._length = 0.0, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._return, self._length = 0.0, 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and sum up the reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            episode = {"r": round(self._return, 6), "l": self._length, "t": round(time.time() - self._began, 6)}
            info = {**info, "episode": episode | {name: info[name] for name in self._info_keywords}}
        return observation, reward, terminated, truncated, info


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
