"""Starts the ranks of a data-parallel job on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from torch._C._distributed_c10d import TCPStore

from unidle.distributed.place import Place
from unidle.signals import STOPPING, handle, restore

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 15.0  # for the other ranks to notice that one has ended; then they are killed
_PR_SET_PDEATHSIG = 1  # Linux: have a signal sent when the parent dies


def launch(command: Sequence[str], size: int, say: Callable[[str], None], grace: float = _GRACE_SECONDS) -> int:
    """Run `command` as `size` ranks and wait for all of them; returns the exit code of the first rank that failed.

    Standard output is that of rank 0. The ranks get every signal that stops a run, and stop by agreement.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    # What is ignored, as SIGHUP under nohup, stays ignored in the ranks.
    before = handle([number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN], forward)
    try:
        ranks.extend(_start(command, Place(rank, size, rank, size), store.port) for rank in range(size))
        return _wait(ranks, say, grace)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        restore(before)


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def _wait(ranks: Sequence[subprocess.Popen[bytes]], say: Callable[[str], None], grace: float) -> int:
    first: tuple[int, int] | None = None  # the rank that failed first, and its exit status
    deadline = float("inf")
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
        if first is None:
            first = next(((rank, p.returncode) for rank, p in enumerate(ranks) if p.poll()), None)
            if first is not None:
                deadline = time.monotonic() + grace
        if time.monotonic() > deadline:
            break
    codes = [process.poll() for process in ranks]
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            say(f"Rank {rank} was ended by {signal.Signals(-code).name}; the other ranks end too.")
    failed = [code for code in codes if code]
    if first is None and not failed:
        return 0
    # Rank 0 knows why the job ended: its code says whether that was a usage error, a failure or a signal.
    code = codes[0] or (failed[0] if first is None else first[1])
    return code if code > 0 else 128 - code
