"""Exploration noise of TD3."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidle.sb3.theirs import name_of_theirs


class NormalActionNoise:
    """Gaussian noise on actions; unidle's TD3 adds the same to every dimension, around 0."""

    def __init__(self, mean: np.ndarray, sigma: np.ndarray) -> None:
        self._mu, self._sigma = mean, sigma


def __getattr__(name: str) -> Any:
    return name_of_theirs(__name__, name)
