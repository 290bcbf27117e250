"""Runs the jobs of a pack: starts each when cores are free, watches them, and ends them in order."""

from __future__ import annotations

import contextlib
import json
import math
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from unidle.config.files import display_path
from unidle.config.machine import limit_threads
from unidle.errors import UsageError
from unidle.locks import release, try_lock
from unidle.packing.cores import CoreDivision, usable_cores
from unidle.packing.folder import SUMMARY, new_folder
from unidle.packing.gpu import SharedGpu
from unidle.packing.jobs import Job
from unidle.packing.mps import Mps
from unidle.packing.packed_job import PackedJob
from unidle.packing.supervised import StartError, SupervisedProcess
from unidle.signals import STOPPING, handle, restore
from unidle.writing import open_to_append, write_atomically

_POLL_EVERY_S = 1.0  # of processes, output and GPU
_SIGNAL_EVERY_S = 0.25  # a signal waits at most so long for an answer
_KILL_AFTER_S = 5.0  # after the second signal, which asks the jobs to end at once
_LOCK_TRIES = 10
_NOT_STARTED = 126  # exit code, as in a shell
_IMPATIENT = (signal.SIGINT, signal.SIGTERM)  # a second hangup, or SIGTERM after SIGUSR1 under SLURM, is no hurry


class PackDisplay(Protocol):
    """Where a pack shows what happens."""

    def on_message(self, text: str) -> None:
        """Show a line."""

    def on_change(self, packed: PackedJob) -> None:
        """A job has started or ended."""

    def on_poll(self, pack: Pack) -> None:
        """There are new readings."""


class Pack:
    """All jobs of a pack."""

    def __init__(
        self,
        jobs: Sequence[Job],
        display: PackDisplay,
        *,
        at_once: int | None = None,
        out: Path | None = None,
        use_mps: bool = True,
    ) -> None:
        """UsageError, before anything is started or written, if the jobs cannot run in this way."""
        if at_once is not None and at_once < 1:
            raise UsageError(f"--at-once {at_once} is too few; run at least 1 job at once.")
        self.at_once = min(at_once or len(jobs), len(jobs))
        for job in jobs:
            job.require_program()
        self._cores = CoreDivision(usable_cores(), jobs, self.at_once)
        self._display, self._mps = display, Mps()
        self.gpu = SharedGpu()
        try:
            self._note = self.gpu.require_memory(jobs, self.at_once)
            self.folder = new_folder(out)
        except UsageError:
            self.gpu.close()
            raise
        self._lock = open_to_append(self.folder / ".lock")  # the dashboard sees by it that this process is alive …
        for _ in range(_LOCK_TRIES):  # … and takes it for microseconds
            if try_lock(self._lock):
                break
            time.sleep(0.01)
        self._use_mps = use_mps and self.gpu.is_there
        if not self._use_mps:
            self._mps.text = "off: no GPU" if use_mps else "off: --no-mps"
        self.jobs = [PackedJob(job, self.folder / f"{job.name}.log") for job in jobs]
        self._started = datetime.now(UTC)
        self._signals: list[int] = []
        self._answered = 0  # of these signals
        self._kill_at = math.inf
        self._first_failure = 0

    @property
    def exit_code(self) -> int:
        """0 if all jobs succeeded, 128 + n if signal n stopped them, else the exit code of the first that failed."""
        if self._answered or any(packed.state == "not started" for packed in self.jobs):
            return 128 + self._signals[0]
        return self._first_failure

    def run(self) -> None:
        """Run all jobs; returns when the last process has ended."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._handling_signals())
            stack.callback(release, self._lock)
            stack.callback(self._save)
            stack.callback(self.gpu.close)
            if self._use_mps:
                stack.enter_context(self._mps)
            stack.callback(self._release)
            if self._note:
                self._display.on_message(self._note)
            self._display.on_message(self._opening())
            self._start_waiting()
            next_poll = 0.0
            while running := self._running():
                self._wait(running)
                self._answer_signals(running)
                ended = [each for each, process in running if process.poll() is not None]
                if ended or time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + _POLL_EVERY_S
                    self._poll()
                for each in ended:
                    self._end(each)
                if ended:
                    self._start_waiting()

    def plain(self) -> dict[str, Any]:
        """The summary as JSON."""
        is_over = not any(packed.state in ("waiting", "running") for packed in self.jobs)
        return {
            "started": self._started.isoformat(timespec="seconds"),
            "folder": display_path(self.folder.absolute()),
            "mps": self._mps.text,
            "at_once": self.at_once,
            "exit_code": self.exit_code if is_over else None,
            "jobs": [packed.plain() for packed in self.jobs],
        }

    def _opening(self) -> str:
        at_once = f", {self.at_once} at once" if self.at_once < len(self.jobs) else ""
        on = f"{_counted(len(self.jobs), 'job')}{at_once} on {_counted(self._cores.total, 'core')}"
        return f"{on}. NVIDIA MPS {self._mps.text}. Output: {display_path(self.folder.absolute())}"

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _running(self) -> list[tuple[PackedJob, SupervisedProcess]]:
        return [(each, each.process) for each in self.jobs if each.state == "running" and each.process is not None]

    def _start_waiting(self) -> None:
        """Start jobs, in their order, while there are cores for the next one."""
        for packed in self.jobs:
            if packed.state != "waiting":
                continue
            if self._signals:
                packed.state = "not started"
            elif len(self._running()) == self.at_once or not self._start(packed):
                break
        self._save()

    def _start(self, packed: PackedJob) -> bool:
        """Start a job; False if it has to wait for cores."""
        job, cores = packed.job, self._cores.take(packed.job)
        if cores is None:
            return False
        # Without PYTHONUNBUFFERED, what a Python program prints reaches its file in blocks of some kilobytes.
        env = {"PYTHONUNBUFFERED": "1", **job.environment(), **self._mps.environment}
        limit_threads(env)
        packed.cores, packed.started = cores, time.monotonic()
        try:
            packed.process = SupervisedProcess(job.command, cwd=job.cwd, env=env, output=packed.output, cores=cores)
        except (StartError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            packed.note = f"cannot be started: {reason}"
            self._close(packed, _NOT_STARTED)
            return True
        packed.state = "running"
        self._display.on_change(packed)
        return True

    def _wait(self, running: Iterable[tuple[PackedJob, SupervisedProcess]]) -> None:
        select.select([process for _, process in running], [], [], _SIGNAL_EVERY_S)

    def _poll(self) -> None:
        self.gpu.poll()
        for packed, _ in self._running():
            packed.poll(self.gpu)
        self._display.on_poll(self)

    def _end(self, packed: PackedJob) -> None:
        assert packed.process is not None
        status = packed.process.status
        assert status is not None
        packed.process.close()
        self._close(packed, status if status >= 0 else 128 - status)

    def _close(self, packed: PackedJob, code: int) -> None:
        packed.end("finished" if code == 0 else "stopped" if self._answered else "failed", code)
        self._first_failure = self._first_failure or code
        self._cores.give_back(packed.job, packed.cores)
        self._display.on_change(packed)

    def _release(self) -> None:
        """End what still runs, if this process cannot go on."""
        processes = [process for _, process in self._running()]
        for process in processes:
            process.release()
        for process in processes:
            process.close()

    def _save(self) -> None:
        try:
            write_atomically(self.folder / SUMMARY, json.dumps(self.plain(), indent=2) + "\n")
        except OSError as error:  # a full disk must not end the jobs
            self._display.on_message(f"{SUMMARY} could not be written ({error.strerror}).")

    # -- signals -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [n for n in STOPPING if n in _IMPATIENT or signal.getsignal(n) is not signal.SIG_IGN]
        before = handle(numbers, lambda number, _: self._signals.append(number))
        try:
            yield
        finally:
            restore(before)

    def _answer_signals(self, running: Sequence[tuple[PackedJob, SupervisedProcess]]) -> None:
        """Pass the first signal on; end the jobs at once after another, and kill them after a third, or in a while."""
        number = 0
        while self._answered < len(self._signals):
            arrived = self._signals[self._answered]
            self._answered += 1
            if self._answered == 1:
                number = arrived
                jobs = _counted(len(running), "job")
                self._display.on_message(f"Stopping {jobs} (Ctrl-C again: end them immediately).")
                self._start_waiting()  # from now on, none is started
            elif arrived in _IMPATIENT:
                number = signal.SIGTERM if self._kill_at == math.inf else signal.SIGKILL
                self._kill_at = time.monotonic() + _KILL_AFTER_S
        if time.monotonic() >= self._kill_at:
            number = signal.SIGKILL
            self._kill_at = math.inf
        if number:
            for _, process in running:
                process.send(number)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
