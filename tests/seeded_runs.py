"""Training runs that take no time, for the benchmarks that compare seeds. A run's process imports this module."""

from __future__ import annotations

import os
import time

Result = tuple[float, list[float | None]]

# Tasks of which no run succeeds.
RAISES, DIES = "raises", "dies"


def train(task: str, seed: int, device: str) -> Result:
    """A return made of the seed, and in place of the returns of training the core that the run is on."""
    if task == RAISES:
        raise ValueError("This run fails.")
    if task == DIES:
        os._exit(3)
    [core] = os.sched_getaffinity(0)
    return 100.0 + seed, [float(core)]


def train_sb3(task: str, seed: int, device: str) -> Result:
    """The same with a higher return for later seeds."""
    score, training = train(task, seed, device)
    return score + seed / 100, training


def slow(task: str, seed: int, device: str) -> Result:
    """A run that leaves no time for another one."""
    time.sleep(0.5)
    return train(task, seed, device)
