"""The packer's handle on a command that runs under a supervisor."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidle import signals

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class StartError(Exception):
    """A command could not be started; the text says why."""


class SupervisedProcess:
    """A command in its own session; neither it nor a process that it starts outlives this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: Path,
        cores: Sequence[int] = (),
        grace: float = 0.0,
    ) -> None:
        """Start `command` on `cores`, or on all; what it prints goes to the new file `output`.

        If this process is killed, the command is ended `grace` seconds later.
        """
        self._pipe, theirs = socket.socketpair()
        self._received = b""
        self.status: int | None = None
        """Exit status once it and all of its processes have ended; negative: the signal that ended it."""
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(theirs.fileno()), ",".join(map(str, cores))]
        with theirs, output.open("xb") as file, signals.blocked():  # until the supervisor can ignore them
            self._supervisor = subprocess.Popen(
                [*supervisor, str(grace), *command],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env=dict(env),
                start_new_session=True,
            )
        first = self._message()
        if "error" in first:
            self.close()
            raise StartError(first["error"])
        self.pid: int = first.get("pid", self._supervisor.pid)

    @property
    def supervisor_pid(self) -> int:
        """The process whose descendants are those of the command."""
        return self._supervisor.pid

    def fileno(self) -> int:
        """For `select`: readable when the command has ended."""
        return self._pipe.fileno()

    def poll(self) -> int | None:
        """Update `status` without waiting, and return it."""
        self._pipe.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._read_status()
        return self.status

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most so long; returns `status`."""
        self._pipe.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self._read_status()
        return self.status

    def send(self, number: int) -> None:
        """Send a signal to the command's process group; SIGKILL goes to all of its processes."""
        with contextlib.suppress(OSError):  # it has just ended
            self._pipe.sendall(bytes([number]))

    def release(self) -> None:
        """Let the supervisor end what still runs."""
        self._pipe.close()

    def close(self) -> None:
        """Wait until everything has ended."""
        self.release()
        self._supervisor.wait()

    def _read_status(self) -> None:
        if self.status is None:
            # Without a message, the supervisor was killed, and the command with it.
            self.status = self._message().get("status", -signal.SIGKILL)

    def _message(self) -> dict[str, Any]:
        """The next message; empty if the supervisor has ended."""
        while b"\n" not in self._received:
            try:
                part = self._pipe.recv(4096)
            except ConnectionResetError:
                part = b""
            if not part:
                return {}
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
