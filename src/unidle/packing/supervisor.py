"""Supervises one command: ends all of its processes when it ends or when the packer does, even by SIGKILL.

A script that imports only the standard library: it starts in milliseconds, and needs no unidle on the job's PYTHONPATH.

    python -I -S supervisor.py SOCKET CORES GRACE COMMAND…

GRACE is how many seconds after the end of the packer it ends the command.

It sends JSON lines: {"pid": …} or {"error": …}, then {"status": …}. Each byte that it receives is a signal for the
command's process group; SIGKILL goes to every process of the command. Processes that the command leaves behind are
adopted (PR_SET_CHILD_SUBREAPER), so that none is missed, also not a daemon.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_HANGUP = signal.getsignal(signal.SIGHUP)  # ignored under nohup

_LINGER_S = 1.0  # for processes to end by themselves after the command, as those of multiprocessing do
_TERMINATE_S = 5.0  # from SIGTERM to SIGKILL
_KILL_EVERY_S = 0.1  # a process may start another one just before it is killed
_GIVE_UP_S = 20.0  # after the first SIGKILL: a process that waits for a broken disk or driver cannot be killed


class Supervisor:
    """The command, its processes, and the signals that are still to be sent."""

    def __init__(self, pipe: socket.socket, grace: float, command: list[str]) -> None:
        self._pipe, self._grace = pipe, grace
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._status: int | None = None
        self._schedule: list[tuple[float, int]] = []  # (when, signal for every process), earliest first
        self._give_up = float("inf")
        # Not SIG_IGN for SIGCHLD: exit statuses would be lost.
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._job = subprocess.Popen(command, start_new_session=True, preexec_fn=self._in_job)

    def run(self) -> None:
        """Wait for the command and everything it started."""
        self._report({"pid": self._job.pid})
        sources: list[socket.socket | int] = [self._pipe, self._wake]
        while self._reap() and time.monotonic() < self._give_up:
            ready = select.select(sources, [], [], self._until_next_signal())[0]
            if self._wake in ready:
                os.read(self._wake, 4096)
            if self._pipe in ready:
                received = self._receive()
                if not received:  # the packer is gone
                    sources.remove(self._pipe)
                    self._end(self._grace)
                for number in received:
                    self._send(number)
            self._send_due()
        self._report({"status": self._status})

    def _in_job(self) -> None:
        # A script starts background commands with SIGINT ignored, but this one is to be stopped by it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, _HANGUP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the supervisor itself is killed

    def _reap(self) -> bool:
        """Collect exit statuses; returns whether there are processes left."""
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._job.pid:
                self._job.returncode = self._status = os.waitstatus_to_exitcode(how)
                if not self._schedule:
                    self._end(_LINGER_S)

    def _end(self, grace: float) -> None:
        """End every process: SIGTERM after `grace` seconds, SIGKILL later."""
        at = time.monotonic() + grace
        self._schedule = [(at, signal.SIGTERM), (at + _TERMINATE_S, signal.SIGKILL)]

    def _send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._schedule = [(time.monotonic(), signal.SIGKILL)]
        elif self._status is None:  # else its group may be gone, and the number reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.pid, number)

    def _send_due(self) -> None:
        while self._schedule and self._schedule[0][0] <= time.monotonic():
            _, number = self._schedule.pop(0)
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if number == signal.SIGKILL:
                self._give_up = min(self._give_up, time.monotonic() + _GIVE_UP_S)
                self._schedule = [(time.monotonic() + _KILL_EVERY_S, signal.SIGKILL)]

    def _until_next_signal(self) -> float | None:
        return max(0.0, self._schedule[0][0] - time.monotonic()) if self._schedule else None

    def _receive(self) -> bytes:
        try:
            return self._pipe.recv(64)
        except OSError:
            return b""

    def _report(self, message: dict[str, object]) -> None:
        send(self._pipe, message)


def descendants(root: int) -> list[int]:
    """The processes that `root` started, directly or not."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has just ended
    found: list[int] = []
    generation = {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found += generation
    return found


def send(pipe: socket.socket, message: dict[str, object]) -> None:
    """Send a JSON line; the packer may be gone."""
    with contextlib.suppress(OSError):
        pipe.sendall(json.dumps(message).encode() + b"\n")


def main(descriptor: str, cores: str, grace: str, *command: str) -> None:
    """Supervise one command."""
    pipe = socket.socket(fileno=int(descriptor))
    pipe.set_inheritable(False)
    for number in _STOPPING:  # what stops the packer may also reach this process
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)  # held back until now
    try:
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        supervisor = Supervisor(pipe, float(grace), list(command))
    except OSError as error:
        send(pipe, {"error": error.strerror})
        return
    supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
