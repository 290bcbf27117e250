"""Setup of the trainer's child processes: where they find unidle, and how they exit with the trainer.

Imports nothing slow: a worker calls `end_with_trainer` before it imports anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal

from unidle.signals import ignore_stopping

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # belongs on a worker's PYTHONPATH
_PR_SET_PDEATHSIG = 1  # Linux: have a signal sent when the parent dies


def end_with_trainer() -> None:
    """Ignore the signals that stop a run, and exit when the trainer exits."""
    ignore_stopping()
    # If the trainer is killed, this process is killed too, even in the middle of a slow step.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
