"""`Monitor`: puts the return and length of each finished episode into info["episode"], and into a file if asked to."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any, TextIO

import gymnasium

from unidle.errors import UsageError
from unidle.sb3.theirs import name_of_theirs


class Monitor(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Adds info["episode"] = {"r": return, "l": length, "t": seconds} to the last step of an episode.

    `filename` is where the same goes as CSV, in the format that Stable-Baselines3's `load_results` reads;
    `allow_early_resets` has no effect.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        filename: str | None = None,
        allow_early_resets: bool = True,
        reset_keywords: tuple[str, ...] = (),
        info_keywords: tuple[str, ...] = (),
        override_existing: bool = True,
    ) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(
            self,
            filename=filename,
            reset_keywords=tuple(reset_keywords),
            info_keywords=tuple(info_keywords),
            override_existing=override_existing,
        )
        super().__init__(env)
        self._info_keywords, self._began = tuple(info_keywords), time.time()
        self._reset_keywords, self._of_reset = tuple(reset_keywords), dict[str, Any]()
        self._file: TextIO | None = None
        if filename is not None:
            columns = ("r", "l", "t", *reset_keywords, *info_keywords)
            self._file = self._opened(_path(filename), columns, override_existing)
            self._writer = csv.DictWriter(self._file, columns)
        self._return, self._length = 0.0, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._return, self._length = 0.0, 0
        for name in self._reset_keywords:
            if name not in kwargs:
                raise UsageError(f"Monitor has `{name}` in reset_keywords; pass it to reset.")
            self._of_reset[name] = kwargs[name]
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and sum up the reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if terminated or truncated:
            episode = {"r": round(self._return, 6), "l": self._length, "t": round(time.time() - self._began, 6)}
            episode |= {name: info[name] for name in self._info_keywords}
            if self._file is not None:
                self._writer.writerow(episode | self._of_reset)
                self._file.flush()
            info = {**info, "episode": episode}
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment and the file."""
        super().close()
        if self._file is not None:
            self._file.close()

    def _opened(self, path: Path, columns: tuple[str, ...], override: bool) -> TextIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = override or not path.exists()
        file = path.open("w" if is_new else "a", newline="")
        if is_new:
            name = self.env.spec.id if self.env.spec is not None else "None"
            header = json.dumps({"t_start": self._began, "env_id": name})
            file.write(f"#{header}\n{','.join(columns)}\n")
            file.flush()
        return file


def _path(filename: str) -> Path:
    """`filename`.monitor.csv, or monitor.csv in the folder `filename`: what `load_results` looks for."""
    if filename.endswith("monitor.csv"):
        return Path(filename)
    return Path(filename, "monitor.csv") if Path(filename).is_dir() else Path(f"{filename}.monitor.csv")


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
