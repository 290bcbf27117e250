"""CartPole with habits of real simulators: it forks, starts programs, leaves children behind, installs handlers.

None of this changes what the policy sees, so a run on any of them has the weights of a run on CartPole-v1.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from typing import Any

import gymnasium

LEFT_BEHIND = "left-behind"  # what forked children call themselves
PROGRAM = "sleep"  # and what else may outlive a trainer that is killed
_EVERY = 8  # episodes between two children
_LIFETIME_S = 60.0  # of a child that nobody ends


class _Habit(gymnasium.Wrapper):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._episodes = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        if self._episodes % _EVERY == 1:
            self._indulge()
        self._episodes += 1
        return super().reset(**options)

    def _indulge(self) -> None:
        raise NotImplementedError


def _wait() -> None:
    """In a child: take a name by which it can be told from unidle's processes, and live for a while."""
    with open("/proc/self/comm", "w") as name:
        name.write(LEFT_BEHIND)
    time.sleep(_LIFETIME_S)


class Forks(_Habit):
    """Forks a process, terminates it and waits for its end."""

    def _indulge(self) -> None:
        child = multiprocessing.get_context("fork").Process(target=_wait)
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM


class StartsPrograms(_Habit):
    """Starts a program, terminates it and waits for its end."""

    def _indulge(self) -> None:
        with subprocess.Popen([PROGRAM, str(_LIFETIME_S)]) as program:
            program.terminate()
            assert program.wait() == -signal.SIGTERM


class LeavesChildren(_Habit):
    """Forks one process that outlives the run."""

    _has_left = False

    def _indulge(self) -> None:
        if LeavesChildren._has_left:
            return
        LeavesChildren._has_left = True
        if os.fork() == 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)  # a signal to the whole group does not end it
            _wait()
            os._exit(0)


class InstallsHandlers(_Habit):
    """Takes over the signals of its process, as simulators with a window do."""

    def _indulge(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
