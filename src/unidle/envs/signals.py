"""Semaphores in shared memory: a wake-up costs microseconds, waiting nothing, and no name can be left behind.

POSIX unnamed semaphores (`sem_init` with pshared) that live in the block which trainer and workers map.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import time
from typing import Any

SEMAPHORE_BYTES = 64  # sem_t is 32; a cache line each keeps two of them from slowing each other down

_library = ctypes.util.find_library("c")
# PyDLL keeps the GIL: right for calls that return at once. CDLL lets it go: right for those that wait.
_at_once, _waiting = ctypes.PyDLL(_library, use_errno=True), ctypes.CDLL(_library, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """One semaphore at `offset` of a mapped memory."""

    def __init__(self, memory: Any, offset: int, *, initialise: bool) -> None:
        """`initialise` is for the one process that makes it, before any other maps it."""
        self._storage = (ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._storage))
        if initialise and _at_once.sem_init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Let one waiter, now or later, go on."""
        _at_once.sem_post(self._address)

    def take(self) -> bool:
        """Take one post if there is one, without waiting."""
        return _at_once.sem_trywait(self._address) == 0

    def wait(self, seconds: float, spin: float = 0.0, *, gives_way: bool = True) -> bool:
        """Take one post, waiting for it at most so long; False if none came.

        For the first `spin` seconds of it the core is kept, which spares the time to be woken. With `gives_way` anybody
        else who wants it has it first: right where processes share cores. On a core of one's own it is wrong: whoever
        gets it, however unimportant, keeps it until the scheduler's next tick, some milliseconds. Without it, other
        threads of this process wait too, for as long as it spins.
        """
        if self.take():
            return True
        until = time.perf_counter() + min(spin, seconds)
        while time.perf_counter() < until:
            if self.take():
                return True
            if gives_way:
                os.sched_yield()
        end = time.time() + seconds
        deadline = _Timespec(int(end), int(end % 1 * 1e9))
        while _waiting.sem_timedwait(self._address, ctypes.byref(deadline)):
            reason = ctypes.get_errno()
            if reason == errno.ETIMEDOUT:
                return False
            if reason != errno.EINTR:
                raise OSError(reason, "sem_timedwait failed")
        return True
