"""Processes that work for the trainer: where they find unidle, and how they end with it.

Imports nothing that takes time: a worker calls `end_with_trainer` before it imports anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # belongs on a worker's PYTHONPATH
_PR_SET_PDEATHSIG = 1  # Linux: have a signal sent when the parent dies


def end_with_trainer() -> None:
    """Live as long as the trainer does, and no longer, whatever signals come."""
    # These may reach the whole group, and the trainer decides what they mean. A handler that does nothing, not SIG_IGN:
    # that one would be inherited by whatever processes an environment starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Should the trainer be killed while a step takes its time here, do not wait for the step to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
