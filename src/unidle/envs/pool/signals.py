"""Waking each other through shared memory: it costs microseconds, waiting nothing, and no name can be left behind.

POSIX unnamed semaphores (`sem_init` with pshared) that live in the block which trainer and workers map; and bells, for
those who mostly are awake.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

SEMAPHORE_BYTES = 64  # sem_t is 32; a cache line each keeps two of them from slowing each other down
_ASLEEP = 32  # where in that line a bell says whether somebody sleeps beside it

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

    def wait(self, seconds: float) -> bool:
        """Take one post, waiting for it at most so long; False if none came."""
        if self.take():
            return True
        end = time.time() + seconds
        deadline = _Timespec(int(end), int(end % 1 * 1e9))
        while _waiting.sem_timedwait(self._address, ctypes.byref(deadline)):
            reason = ctypes.get_errno()
            if reason == errno.ETIMEDOUT:
                return False
            if reason != errno.EINTR:
                raise OSError(reason, "sem_timedwait failed")
        return True


class Bell:
    """Wakes the one who waits here for a change in shared memory; while he is awake, to ring it costs a look.

    The waiter says that he sleeps, then looks for the change once more, then sleeps. Who makes a change makes it, then
    looks whether somebody sleeps, then posts. Each has a fence between what he writes and what he reads, so that at
    least one of them sees what the other wrote: the waiter does not sleep, or he is woken. A post too many only causes
    a look; they are taken away before he sleeps again.
    """

    def __init__(self, memory: Any, offset: int, *, initialise: bool) -> None:
        """At `offset` of `memory`, for one waiter; `initialise` as for a semaphore."""
        self._memory, self._asleep = memory, offset + _ASLEEP
        self._semaphore = Semaphore(memory, offset, initialise=initialise)
        if initialise:
            memory[self._asleep] = 0

    def ring(self) -> None:
        """Something has changed: wake the waiter if he sleeps."""
        fence()
        if self._memory[self._asleep]:
            self._semaphore.post()

    def wait(
        self, has_changed: Callable[[], bool], seconds: float, spin: float = 0.0, *, gives_way: bool = True
    ) -> None:
        """Wait until something has changed, or may have, but no longer than `spin` and so many seconds.

        For the first `spin` of them the core is kept, which spares the time to be woken. With `gives_way` anybody
        else who wants it has it first: right where processes share cores. On a core of one's own it is wrong: whoever
        gets it, however unimportant, keeps it until the scheduler's next tick, some milliseconds. Without it, other
        threads of this process wait too, for as long as it spins.
        """
        until = time.perf_counter() + min(spin, seconds)
        while time.perf_counter() < until:
            if has_changed():
                return
            if gives_way:
                os.sched_yield()
        while self._semaphore.take():
            pass
        self._memory[self._asleep] = 1
        fence()
        if not has_changed():
            self._semaphore.wait(seconds)
        self._memory[self._asleep] = 0


_LOCK = threading.Lock()


def fence() -> None:
    """Have all that was written before seen by others before anything is read that follows.

    x86-64 orders memory but for this. To take a lock is an atomic exchange, which is a fence there.
    """
    with _LOCK:
        pass
