"""Wake-ups between processes through shared memory, in microseconds and without named resources to clean up.

`Semaphore` is a POSIX unnamed semaphore (`sem_init` with pshared) in the memory that trainer and workers map.
`Doorbell` avoids the system call while the waiter is awake.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from unidle.envs.shared_block import map_memory, shared_memory

SEMAPHORE_BYTES = 64  # sem_t is 32; one cache line each avoids false sharing
_ASLEEP = 32  # offset in the cache line of the flag that the waiter sleeps

_library = ctypes.util.find_library("c")
# PyDLL keeps the GIL, for calls that return at once; CDLL releases it, for calls that block.
_nonblocking, _blocking = ctypes.PyDLL(_library, use_errno=True), ctypes.CDLL(_library, use_errno=True)


class WakeUp(NamedTuple):
    """Addresses of what a process writes to wake another, for code in C (engine/collect/step_loop.c)."""

    asleep: int
    semaphore: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A semaphore at `offset` of mapped memory."""

    def __init__(self, memory: Any, offset: int, *, initialise: bool) -> None:
        """`initialise` in the one process that creates it, before any other maps it."""
        self._storage = (ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._storage))
        if initialise and _nonblocking.sem_init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init failed")

    @property
    def address(self) -> int:
        """Where it is in this process."""
        return ctypes.addressof(self._storage)

    def post(self) -> None:
        """Wake one waiter, now or later."""
        _nonblocking.sem_post(self._address)

    def take(self) -> bool:
        """Take one post without blocking; False if there is none."""
        return _nonblocking.sem_trywait(self._address) == 0

    def wait(self, seconds: float) -> bool:
        """Take one post, waiting for at most that many seconds; False if none arrived."""
        if self.take():
            return True
        end = time.time() + seconds
        deadline = _Timespec(int(end), int(end % 1 * 1e9))
        while _blocking.sem_timedwait(self._address, ctypes.byref(deadline)):
            reason = ctypes.get_errno()
            if reason == errno.ETIMEDOUT:
                return False
            if reason != errno.EINTR:
                raise OSError(reason, "sem_timedwait failed")
        return True


class Doorbell:
    """Wakes one waiter after a change in shared memory; while the waiter is awake, ringing costs one read.

    The waiter sets its sleep flag, checks for the change once more, then sleeps. The other side makes its change, reads
    the sleep flag, then posts. Both have a memory fence between their write and their read, so at least one of them
    sees the other's write: the waiter does not sleep, or it is woken. An extra post only causes an extra check; extra
    posts are drained before the next sleep.
    """

    def __init__(self, memory: Any, offset: int, *, initialise: bool) -> None:
        """At `offset` of `memory`, for one waiter; `initialise` as for `Semaphore`."""
        self._memory, self._asleep = memory, offset + _ASLEEP
        self._semaphore = Semaphore(memory, offset, initialise=initialise)
        if initialise:
            memory[self._asleep] = 0

    @property
    def wake_up(self) -> WakeUp:
        """For ringing or waiting in C."""
        address = self._semaphore.address
        return WakeUp(address + _ASLEEP, address)

    def ring(self) -> None:
        """Announce a change: wake the waiter if it sleeps."""
        fence()
        if self._memory[self._asleep]:
            self._semaphore.post()

    def wait(
        self, has_changed: Callable[[], bool], seconds: float, spin: float = 0.0, *, yields_core: bool = True
    ) -> None:
        """Wait until something changed or may have changed, for at most that many seconds.

        The first `spin` seconds are busy waiting, which saves the wake-up latency. With `yields_core` each iteration
        yields the core, which is right where processes share cores. On a dedicated core it is wrong: any other process
        that gets the core keeps it until the next scheduler tick, some milliseconds. Without it, other threads of this
        process are blocked by the GIL while it spins.
        """
        began = time.perf_counter()
        until, end = began + min(spin, seconds), began + seconds
        while time.perf_counter() < until:
            if has_changed():
                return
            if yields_core:
                os.sched_yield()
        while self._semaphore.take():
            pass
        self._memory[self._asleep] = 1
        fence()
        if not has_changed():
            self._semaphore.wait(max(0.0, end - time.perf_counter()))
        self._memory[self._asleep] = 0


class SharedDoorbell(Doorbell):
    """A doorbell in memory of its own, which several pools ring, so that one process can wait for all of them."""

    def __init__(self) -> None:
        self.descriptor = shared_memory(SEMAPHORE_BYTES)  # for the processes that ring
        super().__init__(map_memory(self.descriptor), 0, initialise=True)

    def close(self) -> None:
        """Close the descriptor; processes that have mapped the memory keep it."""
        os.close(self.descriptor)


_LOCK = threading.Lock()


def fence() -> None:
    """Order all writes before it with respect to all reads after it (a StoreLoad barrier).

    x86-64 guarantees all other orders. Acquiring a lock is an atomic exchange, which is a full fence there.
    """
    with _LOCK:
        pass
