"""Statistics of finished episodes, as metrics report them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_WINDOW = 100  # episodes


class EpisodeStats:
    """Returns, lengths and successes of the latest episodes, and counts over the whole run."""

    def __init__(self) -> None:
        self.recent_returns: deque[float] = deque(maxlen=_WINDOW)
        self.recent_lengths: deque[int] = deque(maxlen=_WINDOW)
        self.recent_successes: deque[bool] = deque(maxlen=_WINDOW)  # of environments that report it
        self.episodes = 0
        self.faults: Counter[str] = Counter()  # by kind, in finished rollouts

    def add(self, returns: Sequence[float], lengths: Sequence[int], successes: Sequence[bool]) -> None:
        """Add the episodes of a finished rollout."""
        self.episodes += len(returns)
        self.recent_returns.extend(returns)
        self.recent_lengths.extend(lengths)
        self.recent_successes.extend(successes)

    def metrics(self) -> dict[str, float]:
        """Metrics for an iteration's record."""
        return episode_metrics(self.recent_returns, self.recent_lengths, self.episodes, self.recent_successes) | {
            f"faults/{kind}": count for kind, count in self.faults.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """All statistics, for a checkpoint."""
        return {
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "recent_successes": list(self.recent_successes),
            "episodes": self.episodes,
            "faults": dict(self.faults),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self.recent_successes.extend(state["recent_successes"])
        self.episodes = state["episodes"]
        self.faults.update(state["faults"])


def episode_metrics(
    returns: Sequence[float], lengths: Sequence[float], episodes: int, successes: Sequence[bool] = ()
) -> dict[str, float]:
    """The `rollout/…` metrics of the latest episodes; `episodes` is their number in the whole run."""
    metrics: dict[str, float] = {}
    if returns:
        metrics["rollout/return_mean"] = float(np.mean(returns))
        metrics["rollout/length_mean"] = float(np.mean(lengths))
    if successes:
        metrics["rollout/success"] = float(np.mean(successes))
    metrics["rollout/episodes"] = episodes
    return metrics
