"""Less frequent garbage collection while hundreds of episodes are open.

By default Python searches for reference cycles after a few hundred allocations: here that is every step or two, takes a
tenth of the time, and finds almost none.
"""

from __future__ import annotations

import gc

_THRESHOLD = (20_000, 20, 100)
_default = gc.get_threshold()
_n_pools = 0  # currently open


def begin() -> None:
    """Raise the thresholds; call it when a pool of episodes opens."""
    global _default, _n_pools
    if _n_pools == 0:
        _default = gc.get_threshold()
        gc.set_threshold(*_THRESHOLD)
    _n_pools += 1


def end() -> None:
    """Call it when the pool closes; the last pool to close restores the thresholds."""
    global _n_pools
    _n_pools -= 1
    if _n_pools == 0:
        gc.set_threshold(*_default)
