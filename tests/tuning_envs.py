"""Environments that make a training job slow, or that spoil a trial of it. No torch here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from cli_envs import Choice

DAWDLE_S = 1.0


class Sleepy(Choice):
    """Each step waits 10 ms, as for a server: more worker processes are faster, however few and busy the cores are."""

    def __init__(self) -> None:
        super().__init__(pause=0.01)


class Spoiling(Choice):
    """Sound in the trainer's process; in a worker it spoils a trial: `how` is crash, memory, hang or raise.

    Or, in any process, it starts another that it leaves behind as it crashes, or it dawdles when it is made.
    """

    def __init__(self, how: str, note: str = "") -> None:
        super().__init__()
        self._how, self._note = how, note
        if how == "dawdle":
            time.sleep(DAWDLE_S)

    def step(self, action: Any) -> Any:
        if self._how == "leave" and _in_trial():
            with open(self._note, "w", encoding="utf-8") as note:
                note.write(str(subprocess.Popen(["sleep", "60"]).pid))
            os.abort()
        if _in_worker():
            if self._how == "hang":
                time.sleep(1000)
            if self._how == "raise":
                raise MemoryError("the simulator wants more")
            os.kill(os.getppid(), {"crash": signal.SIGABRT, "memory": signal.SIGKILL}[self._how])
        return super().step(action)


def unreachable(*_: object) -> None:
    """A network that is fetched from where nobody answers."""
    raise ConnectionResetError("nobody answers")


def _in_worker() -> bool:
    return _program() == "unidle.envs.pool.worker"


def _in_trial() -> bool:
    return _program() == "unidle.tuning.search.trial_main"


def _program() -> str | None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return None if spec is None else spec.name
