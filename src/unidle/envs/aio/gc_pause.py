"""Fewer collections of garbage while hundreds of episodes are open.

Python looks for unreachable cycles each time that a few hundred objects were made, which is once in a step or two here,
and there are next to none: it took a tenth of a step.
"""

from __future__ import annotations

import gc

_THRESHOLD = (20_000, 20, 100)
_usual = gc.get_threshold()
_pools = 0  # that are open


def begin() -> None:
    """A pool of episodes is open."""
    global _usual, _pools
    if _pools == 0:
        _usual = gc.get_threshold()
        gc.set_threshold(*_THRESHOLD)
    _pools += 1


def end() -> None:
    """It is closed; the last one leaves everything as it was."""
    global _pools
    _pools -= 1
    if _pools == 0:
        gc.set_threshold(*_usual)
