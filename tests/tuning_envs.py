"""Environments that make a training job slow or make a trial of it fail. They import no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from cli_envs import Choice

SLOW_CREATION_S = 1.0


class SlowStep(Choice):
    """Each step sleeps 10 ms, as if waiting for a server: more worker processes are faster even on few busy cores."""

    def __init__(self) -> None:
        super().__init__(pause=0.01)


class FailingTrial(Choice):
    """Works in the trainer's process; in a worker it makes a trial fail: `how` is crash, memory, hang or raise.

    In any process, "orphan" starts a child process and crashes, and "slow creation" takes a second to create.
    """

    def __init__(self, how: str, pid_file: str = "") -> None:
        super().__init__()
        self._how, self._pid_file = how, pid_file
        if how == "slow creation":
            time.sleep(SLOW_CREATION_S)

    def step(self, action: Any) -> Any:
        if self._how == "orphan" and _in_trial():
            with open(self._pid_file, "w", encoding="utf-8") as pid_file:
                pid_file.write(str(subprocess.Popen(["sleep", "60"]).pid))
            os.abort()
        if _in_worker():
            if self._how == "hang":
                time.sleep(1000)
            if self._how == "raise":
                raise MemoryError("the simulator wants more")
            os.kill(os.getppid(), {"crash": signal.SIGABRT, "memory": signal.SIGKILL}[self._how])
        return super().step(action)


def unreachable_network(*_: object) -> None:
    """A network factory whose download fails."""
    raise ConnectionResetError("no response")


def _in_worker() -> bool:
    return _main_module() == "unidle.envs.pool.worker"


def _in_trial() -> bool:
    return _main_module() == "unidle.tuning.search.trial_main"


def _main_module() -> str | None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return None if spec is None else spec.name
