"""NVIDIA MPS: kernels of several processes run on the GPU at the same time, instead of in turns.

Its daemon runs in a private folder under a supervisor, so that it serves nobody else and ends with the pack. One that
runs already is used and left as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from unidle.packing.supervised import StartError, SupervisedProcess

_CONTROL = "nvidia-cuda-mps-control"
_ANSWER_S = 10.0  # for the daemon to answer a command
_START_S = 15.0
_QUIT_S = 15.0  # for its servers to end; their clients have ended before
_OUTLIVES_S = 6.0  # if the packer is killed: its jobs may save until they are killed too
_LONGEST_PARENT = 60  # bytes: the daemon listens at a socket there, whose path may have 107
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


class Mps:
    """The daemon for the jobs of a pack; a context manager that starts and ends it."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        """Variables with which a job finds the daemon."""
        self.text = "off"
        """Whether there is one, and why not."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Mps:
        """Start the daemon, or find the one that runs already; without it, jobs take turns on the GPU."""
        if shutil.which(_CONTROL) is None:
            self.text = f"off: {_CONTROL} is not installed"
        elif _answers(os.environ):
            self.text = "on: its daemon was running already"
        else:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        parent = tempfile.gettempdir()
        parent = parent if len(os.fsencode(parent)) <= _LONGEST_PARENT else "/tmp"
        temporary = tempfile.TemporaryDirectory(prefix="unidle-mps-", dir=parent, ignore_cleanup_errors=True)
        folder = Path(self._stack.enter_context(temporary))
        variables = {_PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs")}
        for path in variables.values():
            Path(path).mkdir(mode=0o700)
        # With CUDA_VISIBLE_DEVICES the daemon would renumber the GPUs, and the variable that its clients inherit
        # would name others.
        env = {name: value for name, value in {**os.environ, **variables}.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            output = folder / "output.txt"
            command = [_CONTROL, "-f"]  # in the foreground
            daemon = SupervisedProcess(command, cwd=folder, env=env, output=output, grace=_OUTLIVES_S)
        except StartError as error:
            self.text = f"off: {_CONTROL} cannot run ({error})"
            return
        self._stack.callback(_stop, daemon, env)
        until = time.monotonic() + _START_S
        while not _answers(env):
            if daemon.wait(0.1) is not None or time.monotonic() > until:
                self.text = f"off: its daemon did not start ({_last_line(folder)})"
                return
        self.environment, self.text = variables, "on"


def _stop(daemon: SupervisedProcess, env: Mapping[str, str]) -> None:
    """Ask the daemon to quit, with its servers, and end what remains."""
    if daemon.poll() is None and _answers(env, "quit"):
        daemon.wait(_QUIT_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if daemon.status is None:
            daemon.send(number)
            daemon.wait(_QUIT_S)
    daemon.close()


def _answers(env: Mapping[str, str], command: str = "get_server_list") -> bool:
    """Whether the daemon of this environment obeys a command."""
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{command}\n",
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            start_new_session=True,  # Ctrl-C goes to this process only
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "Cannot find" not in done.stdout + done.stderr


def _last_line(folder: Path) -> str:
    """What the daemon printed or logged last."""
    found = []
    for path in (folder / "output.txt", folder / "logs" / "control.log"):
        with contextlib.suppress(OSError):
            found += [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return found[-1][:200] if found else "without a message"
