"""Starts the ranks of a data-parallel job on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from torch._C._distributed_c10d import TCPStore

from unidle.distributed.place import Place
from unidle.signals import STOPPING, handle, restore

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 15.0  # for the other ranks to notice that one has ended; then they are killed
_STOP_SECONDS = 2.0  # for ranks to end that are to stop immediately; then they are killed
_PR_SET_PDEATHSIG = 1  # Linux: have a signal sent when the parent dies
_LIBC = ctypes.CDLL(None)  # here: between fork and exec, loading a library may wait for a lock for ever


class _Stop:
    """What to send to the ranks when the launcher gets a signal that stops a run.

    A scheduler may signal all processes of a job, so that the ranks have got the same signal directly. A second SIGTERM
    or SIGINT would end them before they have saved. So the first signal is passed on as SIGUSR1, on which a rank saves
    and ends however often it comes, and the signal itself only if it comes again.
    """

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.first: int | None = None  # signal received
        self.deadline = float("inf")  # by which the ranks must have ended
        self._received: set[int] = set()
        is_ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # then it is in the ranks too
        self._graceful = None if is_ignored else signal.SIGUSR1

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = number
            self._send(self._graceful or number)
        elif number in self._received:
            self._send(number)
            if number in (signal.SIGINT, signal.SIGTERM):
                self.deadline = min(self.deadline, time.monotonic() + _STOP_SECONDS)
        self._received.add(number)

    def _send(self, number: int) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(number)

    def explains(self, number: int) -> bool:
        """Whether a rank that this signal has killed was stopped on purpose."""
        return self.first is not None and (number in STOPPING or self.deadline < float("inf"))

    def code(self, code: int) -> int:
        """The exit code of a job with this exit code of a rank: if it was stopped, the signal that the launcher got."""
        return code if self.first is None or code <= 128 else 128 + self.first


def launch(command: Sequence[str], size: int, say: Callable[[str], None], grace: float = _GRACE_SECONDS) -> int:
    """Run `command` as `size` ranks and wait for all of them; returns the exit code of the first rank that failed.

    Standard output is that of rank 0. A signal that stops a run stops the ranks, by agreement.
    """
    store = _store()
    stop = _Stop()
    # What is ignored, as SIGHUP under nohup, stays ignored in the ranks.
    before = handle([number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN], stop.handle)
    try:
        for rank in range(size):
            stop.ranks.append(_start(command, Place(rank, size, rank, size), store.port))
        return stop.code(_wait(stop, say, grace))
    finally:
        for process in stop.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        restore(before)


def _store() -> TCPStore:
    """The store through which the ranks meet; it has no password, so only this machine may reach it."""
    # The store's own socket would listen on all addresses, whatever host it is given.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _start(command: Sequence[str], place: Place, port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=_environment(place, port, os.environ),
        stdin=None if place.rank == 0 else subprocess.DEVNULL,
        stdout=None if place.rank == 0 else subprocess.DEVNULL,
        # A session of its own: Ctrl-C in the terminal reaches the ranks once, from here.
        start_new_session=True,
        preexec_fn=_end_with_launcher,
    )


def _end_with_launcher() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(place: Place, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank: what `torchrun` sets, with the store of this process."""
    return {
        **environment,
        **place.variables(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(stop: _Stop, say: Callable[[str], None], grace: float) -> int:
    ranks = stop.ranks
    first: tuple[int, int] | None = None  # the rank that failed first, and its exit status
    deadline = float("inf")
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
        if first is None:
            first = next(((rank, p.returncode) for rank, p in enumerate(ranks) if p.poll()), None)
            if first is not None:
                deadline = time.monotonic() + grace
        if time.monotonic() > min(deadline, stop.deadline):
            break
    codes = [process.poll() for process in ranks]
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and not stop.explains(-code):
            say(f"Rank {rank} was killed by {signal.Signals(-code).name}; stopping the other ranks.")
    failed = [code for code in codes if code]
    if first is None and not failed:
        return 0 if all(code == 0 for code in codes) else 128 + signal.SIGKILL
    # Rank 0 knows why the job ended: its code says whether that was a usage error, a failure or a signal.
    code = codes[0] or (failed[0] if first is None else first[1])
    return code if code > 0 else 128 - code
