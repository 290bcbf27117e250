"""The trainer's handle on one worker process: start, commands, liveness checks, stop and restart."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import cloudpickle
import numpy as np

from unidle import signals
from unidle.envs.faults import Fault, FaultKind
from unidle.errors import TrainingError, UsageError
from unidle.subprocesses import PACKAGE_PARENT

POLL_SECONDS = 0.5  # how often a waiting trainer checks that all workers are alive
_KILL_SECONDS = 30.0  # after SIGKILL: a process may have much memory to release


class WorkerError(TrainingError):
    """A worker died, hangs or could not start."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class JobLike(Protocol):
    """What `WorkerProcess` needs of a job."""

    first_index: int

    @property
    def descriptors(self) -> list[int]:
        """What its process inherits."""

    @property
    def env_ids(self) -> range:
        """Its environments, relative to `first_index`."""


JobKind = TypeVar("JobKind", bound=JobLike)


class WorkerProcess(Generic[JobKind]):
    """The process for one job; the caller decides when to stop and restart it."""

    def __init__(self, job: JobKind, heartbeats: np.ndarray, module: str = "unidle.envs.pool.worker") -> None:
        """`heartbeats` are this worker's entries of the block; `module` is the Python module to run."""
        self.job, self._heartbeats, self._module = job, heartbeats, module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._last_beats: int | None = None
        self._silence = 0.0
        env_ids = job.env_ids
        names = [str(job.first_index + env_id) for env_id in (env_ids[0], env_ids[-1])]
        self.name = f"The worker of environments {' to '.join(names)}"
        self._label = f"environments={'-'.join(names)}"  # on its command line, for ps and `unidle watch`
        paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        # A snapshot, so that a restarted worker has the same environment variables.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(self) -> None:
        """Start the process; its first message says that it is ready."""
        self._last_beats = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._pipe = Connection(ours.detach())
            try:
                with signals.blocked():  # until the process can ignore them
                    self._process = subprocess.Popen(
                        # -P: do not search the current folder, where a user's queue.py would shadow Python's.
                        [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), self._label],
                        pass_fds=(theirs.fileno(), *self.job.descriptors),
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # stdout is for results; what environments print goes to stderr
                        env=self._environment,
                    )
            except OSError as error:
                raise WorkerError("exception", f"{self.name} could not be started: {error}") from None
        with contextlib.suppress(OSError):  # a worker that has already exited is detected when its reply is due
            self._pipe.send_bytes(cloudpickle.dumps(self.job))

    def move_to(self, core: int) -> None:
        """Pin the process to that core."""
        assert self._process is not None
        with contextlib.suppress(OSError):  # it may have exited, or the core may have been taken away
            os.sched_setaffinity(self._process.pid, {core})

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a command."""
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise self._ended() from None

    def receive(self, timeout: float) -> tuple[Any, list[Fault]]:
        """Wait for the next message: its value and faults; raise the error if the message is one.

        WorkerError if the process exits first, or if its heartbeat stops for `timeout` seconds.
        """
        assert self._pipe is not None
        self._last_beats = None
        while not self._pipe.poll(POLL_SECONDS):
            if self._has_ended() and not self._pipe.poll():  # in this order: its last message has arrived by then
                raise self._ended()
            self._check_silence(True, timeout)
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError):  # OSError: it died while sending
            raise self._ended() from None
        return _value_of(message)

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        assert self._pipe is not None
        return self._pipe.poll()

    def drain_faults(self) -> list[Fault]:
        """Return the faults in unread messages of a process that has exited."""
        assert self._pipe is not None
        faults: list[Fault] = []
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                faults += _value_of(self._pipe.recv_bytes())[1]
        return faults

    # -- liveness -----------------------------------------------------------------------------------------------------

    def check(self, is_busy: bool, timeout: float) -> None:
        """Raise WorkerError if the process has exited, or has worked on one thing for longer than `timeout`.

        Call it every POLL_SECONDS or less often.
        """
        if self._has_ended():
            raise self._ended()
        self._check_silence(is_busy, timeout)

    def _check_silence(self, is_busy: bool, timeout: float) -> None:
        # Counts checks instead of wall time: a run that is suspended (Ctrl-Z) does not count as a hang.
        heartbeats = int(self._heartbeats.sum()) if is_busy else None
        if heartbeats is None or heartbeats != self._last_beats:
            self._silence = 0.0
        else:
            self._silence += POLL_SECONDS
        self._last_beats = heartbeats
        if self._silence >= timeout:
            raise WorkerError("hung", f"{self.name} did not respond for {timeout:g} seconds and was killed.")

    def _has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def _ended(self) -> WorkerError:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return WorkerError(
            "killed",
            f"{self.name} exited unexpectedly (exit status {self._process.returncode}): "
            "it was killed, ran out of memory, or the environment crashed the interpreter.",
        )

    # -- stopping ------------------------------------------------------------------------------------------------------

    def close_pipe(self) -> None:
        """Close the pipe, on which the worker exits."""
        if self._pipe is not None:
            self._pipe.close()

    def stop(self, seconds: float = 0.0) -> None:
        """Wait that many seconds for the process to exit, then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(timeout=_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                raise TrainingError(
                    f"{self.name} was killed but has not exited; look for it with ps and dmesg."
                ) from None


def _value_of(message: bytes) -> tuple[Any, list[Fault]]:
    kind, value, faults = cloudpickle.loads(message)
    if kind == "usage":
        raise UsageError(value)
    if kind == "failure":
        raise WorkerError("exception", value)
    return value, faults
