"""Runs a training command in a job: passes signals on, and requeues the job if one stopped it early.

SLURM sends SIGUSR1 to this process before the time limit, and SIGTERM to all processes of the job when it is preempted,
cancelled or over its limit. The command saves a checkpoint on the first of them, and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from unidle.config.files import PBT_FILE
from unidle.config.machine import available_cores
from unidle.slurm.attempts import Attempts, SlurmJob, step_of
from unidle.slurm.controller import RequeueError, requeue

_STOPPED = tuple(128 + number for number in (signal.SIGUSR1, signal.SIGTERM))
_FAILED = 1


class Supervisor:
    """One attempt of a job."""

    def __init__(self, folder: Path, cores: int, command: Sequence[str], job: SlurmJob) -> None:
        self._folder, self._cores, self._command, self._job = folder, cores, list(command), job
        self._attempts = Attempts(folder, job)
        self._received: int | None = None  # the first signal
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train until the command ends, and requeue the job if it has to go on; returns the exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._handle)
        self._check_cores()
        if self._attempts.are_stuck:  # SLURM itself has requeued it
            return self._give_up()
        self._attempts.begin()
        code = self._train()
        if self._received is None or code not in _STOPPED:
            return code
        return self._give_up() if self._attempts.are_stuck else self._requeue(code)

    def _train(self) -> int:
        self._child = subprocess.Popen([sys.executable, "-m", "unidle", *resuming(self._command, self._folder)])
        if self._received is not None:  # before there was a process to pass it on to
            self._child.send_signal(signal.SIGUSR1)
        code = self._child.wait()
        return 128 - code if code < 0 else code

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._received == signal.SIGUSR1 and number == signal.SIGTERM:
            _say("SIGTERM came before the checkpoint was saved; give --signal more seconds.")
        if self._received is not None:
            return
        self._received = number
        reason = "The time limit is near" if number == signal.SIGUSR1 else "The job has to stop (SIGTERM)"
        _say(f"{reason}: saving a checkpoint.")
        if self._child is not None:
            # Never a second SIGTERM, which would end it at once.
            self._child.send_signal(signal.SIGUSR1)

    def _check_cores(self) -> None:
        cores = available_cores()
        if cores < self._cores:
            _say(f"This job asked for {self._cores} cores and may use {cores}: it trains, but more slowly.")

    def _give_up(self) -> int:
        _say(
            f"The job was stopped twice without completing an iteration (step {step_of(self._folder):,}), so it is not "
            "requeued; ask for more --time, and if an iteration takes long, for more seconds of --signal."
        )
        return _FAILED

    def _requeue(self, code: int) -> int:
        step = step_of(self._folder)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            # scontrol inherits this: the requeue that it asks for ends all processes of the job, also scontrol.
            signal.signal(number, signal.SIG_IGN)
        try:
            if not requeue(self._job):
                _say(f"The job was cancelled at step {step:,}; submit it again to continue.")
                return code
        except RequeueError as error:
            _say(f"SLURM refused to requeue the job ({error}); resubmit it to continue from step {step:,}.")
            return code
        _say(f"Requeued at step {step:,}, restart {self._job.restarts + 1}.")
        return 0


def resuming(command: Sequence[str], folder: Path) -> list[str]:
    """The command that starts or continues the run; all but a population do both with the same one."""
    if "--pbt" in command and (folder / PBT_FILE).is_file():
        return ["train", "--resume", str(folder)]
    return list(command)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m unidle.slurm --folder FOLDER --cores N -- COMMAND`, as the script of a job calls it."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case ["--folder", folder, "--cores", cores, "--", *command]:
            pass
        case _:
            _say("unidle.slurm is called by the scripts of `unidle slurm`; use that.")
            return 2
    job = SlurmJob.of(os.environ)
    if job is None:
        _say("There is no SLURM job here; submit the script with sbatch.")
        return 2
    return Supervisor(Path(folder), int(cores), command, job).run()


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"unidle: {sentence}\n".encode())  # print must not be called in a signal handler
