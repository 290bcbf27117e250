"""One worker's process, seen from the trainer: started, talked to, watched, ended, and started again."""

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

from unidle.envs.faults import Fault, FaultKind
from unidle.errors import TrainingError, UsageError
from unidle.subprocesses import PACKAGE_PARENT

LOOK_AROUND_SECONDS = 0.5  # how often a waiting trainer looks whether all workers are still there
_ENDING_SECONDS = 30.0  # that a process has to be gone after a SIGKILL: it may have much memory to give back


class WorkerError(TrainingError):
    """A worker died, or hangs, or could not begin."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class AnyJob(Protocol):
    """What a worker is told at its start, as far as its process is concerned."""

    memory: int  # descriptor of the shared memory
    first_index: int

    @property
    def lines(self) -> range:
        """Its environments, counted from `first_index`."""


JobKind = TypeVar("JobKind", bound=AnyJob)


class WorkerProcess(Generic[JobKind]):
    """The process that does a job. It is the caller who decides when it is to be ended and started again."""

    def __init__(self, job: JobKind, beats: np.ndarray, module: str = "unidle.envs.pool.worker") -> None:
        """`beats` are those lines of the block's field that are this worker's; `module` is what it runs."""
        self.job, self._beats, self._module = job, beats, module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._last_beats: int | None = None
        self._silence = 0.0
        lines = job.lines
        names = [str(job.first_index + line) for line in (lines[0], lines[-1])]
        self.name = f"The worker of environments {' to '.join(names)}"
        paths = [PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        # As it is now, so that one that is started again finds what the first one found.
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(self) -> None:
        """Start the process; its first answer says that it is ready."""
        self._last_beats = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._pipe = Connection(ours.detach())
            try:
                self._process = subprocess.Popen(
                    # -P: the current folder is not searched, so that a queue.py there does not stand in for Python's.
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), self.job.memory),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is for results; what an environment prints goes to standard error
                    env=self._environment,
                )
            except OSError as error:
                raise WorkerError("exception", f"{self.name} could not be started: {error}") from None
        with contextlib.suppress(OSError):  # a worker that is gone already is found when its answer is due
            self._pipe.send_bytes(cloudpickle.dumps(self.job))

    def move_to(self, core: int) -> None:
        """Have the process run on that core from now on."""
        assert self._process is not None
        with contextlib.suppress(OSError):  # it may have ended, or the core be taken from us
            os.sched_setaffinity(self._process.pid, {core})

    # -- talking -------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a command."""
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise self._ended() from None

    def answer(self, patience: float) -> tuple[Any, list[Fault]]:
        """What the worker says next, and the faults it tells of; an error it tells of is raised.

        WorkerError if it ends without a word, or shows no sign of life for `patience` seconds.
        """
        assert self._pipe is not None
        self._last_beats = None
        while not self._pipe.poll(LOOK_AROUND_SECONDS):
            if self._has_ended() and not self._pipe.poll():  # in this order: what it said last is there by then
                raise self._ended()
            self._check_silence(True, patience)
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError):  # OSError: it died in the middle of a message
            raise self._ended() from None
        return _value_of(message)

    def has_answered(self) -> bool:
        """Whether `answer` would not have to wait."""
        assert self._pipe is not None
        return self._pipe.poll()

    def last_words(self) -> list[Fault]:
        """The faults told by messages that were not read yet, of a process that has ended."""
        assert self._pipe is not None
        faults: list[Fault] = []
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                faults += _value_of(self._pipe.recv_bytes())[1]
        return faults

    # -- watching ------------------------------------------------------------------------------------------------------

    def check(self, is_busy: bool, patience: float) -> None:
        """WorkerError if it has ended, or was busy with one thing for longer than `patience`.

        To be called every LOOK_AROUND_SECONDS or less often.
        """
        if self._has_ended():
            raise self._ended()
        self._check_silence(is_busy, patience)

    def _check_silence(self, is_busy: bool, patience: float) -> None:
        # Looks are counted, not hours: when the whole run is stopped for a while (Ctrl-Z), nobody hangs.
        beats = int(self._beats.sum()) if is_busy else None
        if beats is None or beats != self._last_beats:
            self._silence = 0.0
        else:
            self._silence += LOOK_AROUND_SECONDS
        self._last_beats = beats
        if self._silence >= patience:
            raise WorkerError("hung", f"{self.name} showed no sign of life for {patience:g} seconds and was killed.")

    def _has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def _ended(self) -> WorkerError:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return WorkerError(
            "killed",
            f"{self.name} ended unexpectedly (exit status {self._process.returncode}): "
            "it was killed, ran out of memory, or the environment crashed the interpreter.",
        )

    # -- ending --------------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close the pipe, which tells the worker to end."""
        if self._pipe is not None:
            self._pipe.close()

    def end(self, seconds: float = 0.0) -> None:
        """See to it that the process is gone: by itself within so many seconds, or killed."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(timeout=_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                raise TrainingError(f"{self.name} was killed, but is still there: the system holds it.") from None


def _value_of(message: bytes) -> tuple[Any, list[Fault]]:
    kind, value, faults = cloudpickle.loads(message)
    if kind == "usage":
        raise UsageError(value)
    if kind == "failure":
        raise WorkerError("exception", value)
    return value, faults
