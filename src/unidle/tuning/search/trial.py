"""A trial: a training job in a process of its own, which goes on for a short stretch whenever it is told to.

Two trials that take turns are compared under the same conditions, and each is started and warmed up only once. Whatever
becomes of it (a crash, a hang, no memory) is a finding about its settings, not the end of whoever asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from unidle.config import Config
from unidle.subprocesses import PACKAGE_PARENT
from unidle.tuning.job import endless

# late: nobody could wait for it; unlike: it would not be the job's settings alone that differ.
Failure = Literal["memory", "crash", "hang", "late", "unlike"]

_GOODBYE_SECONDS = 10.0  # that a trial has to end in by itself
_DYING_SECONDS = 5.0  # between the end of its pipe and its own


class TrialError(Exception):
    """It did not come to its end; `kind` says how, the text why."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(text)
        self.kind: Failure = kind


@dataclass(frozen=True)
class Situation:
    """What a trial found when it was set up."""

    cores: int
    gpu: str | None  # which GPU is there, whether it is used or not
    on_gpu: bool
    on_device: bool  # the environments live where the networks do
    vectorised: bool  # they step as their own library does
    workers: int  # processes that step them
    slices: int  # of each
    memory_apart: bool  # what is remembered lies on the host, the networks on a GPU


@dataclass(frozen=True)
class Stretch:
    """What a trial did when it was told to go on, in whole iterations."""

    steps: int
    seconds: float
    trained: float  # seconds of training so far
    mean_return: float | None  # of the latest episodes
    first_return: float | None  # of the first ones that came to their end

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


class Trial:
    """One job; `start`, `go` as often as wanted, `close`."""

    def __init__(self, config: Config) -> None:
        """`config` must be validated."""
        self._folder = tempfile.TemporaryDirectory(prefix="unidle-trial-", ignore_cleanup_errors=True)
        self.config = _for_trial(config, Path(self._folder.name))
        self._log = Path(self._folder.name) / "said.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._pipe: Connection | None = None

    def start(self, patience: float) -> Situation:
        """Set it up and warm it up, in at most so many seconds."""
        self._launch("train")
        return Situation(**self._answer(patience))

    def go(self, seconds: float, patience: float) -> Stretch:
        """Train for about so many seconds, and wait no longer for them than `patience`."""
        self._send(seconds)
        return Stretch(**self._answer(patience))

    def profile(self, seconds: float, patience: float) -> Any:
        """Probe the job's ceilings instead: a `Profile`."""
        self._launch("profile")
        self._send(seconds)
        return self._answer(patience)

    @property
    def is_alive(self) -> bool:
        """Whether it can still go on."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End it and all its processes."""
        process, pipe = self._process, self._pipe
        if process is not None and pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GOODBYE_SECONDS)
            self._kill()
        self._folder.cleanup()

    def _launch(self, what: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            self._pipe = Connection(ours.detach())
            self._is_killed = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unidle.tuning.search.trial_main", what, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,  # Ctrl-C is for us alone, and what is killed is killed with its workers
            )
        self._send((os.getpid(), sys.path, self.config))

    def _send(self, message: Any) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # if it is gone, its answer tells
            self._pipe.send(message)

    def _answer(self, patience: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(patience):
            self._kill()
            raise TrialError("hang", f"it did not answer for {patience:.0f} seconds")
        try:
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "answer":
            return content
        raise TrialError(kind, content)

    def _died(self) -> TrialError:
        assert self._process is not None
        try:
            status = self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return TrialError("crash", "it hung up without a word, and went on")
        self._kill()
        if status == -signal.SIGKILL:
            return TrialError("memory", "it was killed, as the system does when memory runs out")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return TrialError("crash", f"it ended with {how}" + (f" ({lines[-1][:200]})" if lines else ""))

    def _kill(self) -> None:
        """And what it started, which may go on without it; once, for later its number may be another's."""
        assert self._process is not None
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _python_path() -> str:
    """With this package first, and without empty entries, which would stand for the folder that one is in."""
    return os.pathsep.join(part for part in (PACKAGE_PARENT, os.environ.get("PYTHONPATH")) if part)


def _for_trial(config: Config, folder: Path) -> Config:
    """The same job without end, which leaves nothing behind."""
    config = endless(config)
    run = replace(
        config.run,
        allow_recipe_change=True,  # to learn from the first steps on
        checkpoint_every=config.run.timesteps,
        eval_every=0,
        run_name=None,
        runs_dir=str(folder),
        save_replay_buffer=False,
        target_return=None,
        tensorboard=False,
        wandb=False,
    )
    return replace(config, run=run)
