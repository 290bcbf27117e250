"""Exploration noise of TD3."""

from __future__ import annotations

import numpy as np


class NormalActionNoise:
    """Gaussian noise on actions; unidle's TD3 adds the same to every dimension, around 0."""

    def __init__(self, mean: np.ndarray, sigma: np.ndarray) -> None:
        self._mu, self._sigma = mean, sigma
