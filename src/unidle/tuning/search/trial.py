"""A trial: a training job in a separate process that trains one short segment per request.

Two alternating trials run under the same conditions, and each is started and warmed up only once. A crash, a hang or
running out of memory is a result of its settings and does not end the tuner.
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

# late: no time left to start it; incomparable: it would differ from the job in more than the settings.
Failure = Literal["memory", "crash", "hang", "late", "incomparable"]

_EXIT_SECONDS = 10.0  # for a trial to exit before it is killed
_DYING_SECONDS = 5.0  # between the end of its pipe and its exit


class TrialError(Exception):
    """A trial failed; `kind` says how, the text why."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(text)
        self.kind: Failure = kind


@dataclass(frozen=True)
class JobSetup:
    """The machine and layout that a trial reports after set-up."""

    cores: int
    gpu: str | None  # model, whether the job uses it or not
    on_gpu: bool
    on_device: bool  # environments run on the networks' device
    vectorised: bool  # environments are stepped by their own library
    workers: int  # processes that step environments
    slices: int  # per worker
    replay_off_device: bool  # replay buffer on the host, networks on a GPU


@dataclass(frozen=True)
class Segment:
    """One segment of training, in whole iterations."""

    steps: int
    seconds: float
    trained: float  # seconds of training so far
    mean_return: float | None  # of the latest episodes
    first_return: float | None  # of the first finished episodes

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Trial:
    """One job: call `start`, then `train_segment` any number of times, then `close`."""

    def __init__(self, config: Config) -> None:
        """`config` must be validated."""
        self._folder = tempfile.TemporaryDirectory(prefix="unidle-trial-", ignore_cleanup_errors=True)
        self.config = _for_trial(config, Path(self._folder.name))
        self._log = Path(self._folder.name) / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._pipe: Connection | None = None

    def start(self, patience: float) -> JobSetup:
        """Set up and warm up within `patience` seconds."""
        self._launch("train")
        return JobSetup(**self._receive(patience))

    def train_segment(self, seconds: float, patience: float) -> Segment:
        """Train for about `seconds`; fails after `patience` seconds."""
        self._send(seconds)
        return Segment(**self._receive(patience))

    def profile(self, seconds: float, patience: float) -> Any:
        """Probe the job instead of training; returns a `Profile`."""
        self._launch("profile")
        self._send(seconds)
        return self._receive(patience)

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Stop the trial and all its processes."""
        process, pipe = self._process, self._pipe
        if process is not None and pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
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
                start_new_session=True,  # Ctrl-C reaches only us, and workers are killed with the trial
            )
        self._send((os.getpid(), sys.path, self.config))

    def _send(self, message: Any) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # if it has exited, `_receive` reports it
            self._pipe.send(message)

    def _receive(self, patience: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(patience):
            self._kill()
            raise TrialError("hang", f"no response for {patience:.0f} seconds")
        try:
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            raise self._exit_error() from None
        if kind == "answer":
            return content
        raise TrialError(kind, content)

    def _exit_error(self) -> TrialError:
        assert self._process is not None
        try:
            status = self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return TrialError("crash", "the trial closed its connection without an error message")
        self._kill()
        if status == -signal.SIGKILL:
            return TrialError("memory", "the process was killed, probably because the system ran out of memory")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return TrialError("crash", f"the process ended with {how}" + (f" ({lines[-1][:200]})" if lines else ""))

    def _kill(self) -> None:
        """Kill the trial and its children, only once because the pid may be reused."""
        assert self._process is not None
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _python_path() -> str:
    """Return PYTHONPATH with this package first and without empty entries, which mean the current folder."""
    return os.pathsep.join(part for part in (PACKAGE_PARENT, os.environ.get("PYTHONPATH")) if part)


def _for_trial(config: Config, folder: Path) -> Config:
    """Return the endless job without checkpoints and logs."""
    config = endless(config)
    run = replace(
        config.run,
        allow_recipe_change=True,  # `endless` changes learning_starts
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
