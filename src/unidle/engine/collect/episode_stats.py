"""Statistics of finished episodes, as metrics report them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_WINDOW = 100  # episodes

EpisodeRow = tuple[float, ...]  # return, length, info
# Returns, lengths, successes (where reported) and info [key, episode] of episodes that ended.
FinishedEpisodes = tuple[list[float], list[int], list[bool], list[list[float]]]


class EpisodeStats:
    """Returns, lengths, successes and info of the latest episodes, and counts over the whole run."""

    def __init__(self, log_info: Sequence[str] = ()) -> None:
        """`log_info` are the keys of the numbers in info."""
        self.recent_returns: deque[float] = deque(maxlen=_WINDOW)
        self.recent_lengths: deque[int] = deque(maxlen=_WINDOW)
        self.recent_successes: deque[bool] = deque(maxlen=_WINDOW)  # of environments that report it
        self.recent_info: dict[str, deque[float]] = {key: deque(maxlen=_WINDOW) for key in log_info}
        self.keeps_rows = False  # whether `take_rows` is called after each rollout
        self.episodes = 0
        self.rows_taken = 0  # in the whole run
        self._rows: list[EpisodeRow] = []
        self.faults: Counter[str] = Counter()  # by kind, in finished rollouts

    def add(
        self,
        returns: Sequence[float],
        lengths: Sequence[int],
        successes: Sequence[bool],
        info: Sequence[Sequence[float]] = (),
    ) -> None:
        """Add the episodes of a finished rollout; `info` [key, episode], NaN where it has no number."""
        self.episodes += len(returns)
        self.recent_returns.extend(returns)
        self.recent_lengths.extend(lengths)
        self.recent_successes.extend(successes)
        for recent, numbers in zip(self.recent_info.values(), info):
            recent.extend(number for number in numbers if not math.isnan(number))
        if self.keeps_rows:
            self._rows += zip(returns, lengths, *info)

    def take_rows(self) -> list[EpisodeRow]:
        """The episodes since the last call."""
        rows, self._rows = self._rows, []
        self.rows_taken += len(rows)
        return rows

    def metrics(self) -> dict[str, float]:
        """Metrics for an iteration's record."""
        return (
            episode_metrics(self.recent_returns, self.recent_lengths, self.episodes, self.recent_successes)
            | {f"faults/{kind}": count for kind, count in self.faults.items()}
            | self._info_metrics()
        )

    def _info_metrics(self) -> dict[str, float]:
        metrics = {}
        for key, numbers in self.recent_info.items():
            if numbers:
                metrics[f"info/{key}"] = numbers[-1]
                metrics[f"info/{key}_mean"] = float(np.mean(numbers))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All statistics, for a checkpoint."""
        return {
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "recent_successes": list(self.recent_successes),
            "recent_info": {key: list(numbers) for key, numbers in self.recent_info.items()},
            "episodes": self.episodes,
            "rows_taken": self.rows_taken,
            "faults": dict(self.faults),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self.recent_successes.extend(state["recent_successes"])
        for key, numbers in state.get("recent_info", {}).items():
            if key in self.recent_info:
                self.recent_info[key].extend(numbers)
        self.episodes, self.rows_taken = state["episodes"], state.get("rows_taken", 0)
        self.faults.update(state["faults"])


def episode_metrics(
    returns: Sequence[float], lengths: Sequence[float], episodes: int, successes: Sequence[bool] = ()
) -> dict[str, float]:
    """The `rollout/…` metrics of the latest episodes; `episodes` is their number in the whole run."""
    metrics: dict[str, float] = {}
    if returns:
        metrics["rollout/return_mean"] = _mean(returns)
        metrics["rollout/length_mean"] = _mean(lengths)
    if successes:
        metrics["rollout/success"] = _mean(successes)
    metrics["rollout/episodes"] = episodes
    return metrics


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)  # NumPy's mean of a deque takes several times as long
