"""Requests to one host take turns: so many at a time, and so much time between two, whoever sends them.

Worker processes know nothing of each other. Each keeps to its part of what a host allows: a rate of 2 a second is 0.5
for each of four, and 8 connections are 2.
"""

from __future__ import annotations

import asyncio
import threading
import time

from unidle.errors import UsageError

# When a host may next be asked, by `time.monotonic`: of the whole process, as its event loops are not one crawler each.
_NEXT: dict[str, float] = {}
_NEXT_LOCK = threading.Lock()
_sharing = 1  # processes that ask the same hosts


def share_among(processes: int) -> None:
    """Say, before the first request, that so many processes ask the same hosts."""
    global _sharing
    _sharing = processes


class Turns:
    """The turns of one host in one event loop; first come, first served.

    One that is cancelled while it waits leaves nothing behind: only the first in the queue takes a time, and it takes
    it when it goes.
    """

    def __init__(self, host: str, rate: float | None, connections: int) -> None:
        """At most `rate` requests a second (None: any number), and `connections` at a time, from all processes."""
        if connections < _sharing:
            raise UsageError(
                f"{_sharing} worker processes cannot share {connections} connections to {host}; "
                f"use --workers {connections} or fewer, or allow more connections in env_kwargs."
            )
        self.host = host
        self.interval = 0.0
        if rate is not None:
            self.keep_apart(1.0 / rate)
        self._places = asyncio.Semaphore(connections // _sharing)
        self._queue = asyncio.Lock()

    async def __aenter__(self) -> None:
        """Wait for a turn, and have it until the block is left."""
        await self._places.acquire()
        if not self.interval and self.host not in _NEXT:
            return
        try:
            async with self._queue:
                while (wait := self._take()) > 0:
                    await asyncio.sleep(wait)
        except BaseException:
            self._places.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        """The next one may go."""
        self._places.release()

    def keep_apart(self, seconds: float) -> None:
        """No two requests within so many seconds, from all processes."""
        self.interval = max(self.interval, seconds * _sharing)

    def pause(self, seconds: float) -> None:
        """The host asks to be left alone for so long."""
        with _NEXT_LOCK:
            _NEXT[self.host] = max(_NEXT.get(self.host, 0.0), time.monotonic() + seconds)

    def _take(self) -> float:
        """Seconds to wait and ask again; 0 if the turn is taken."""
        with _NEXT_LOCK:
            now = time.monotonic()
            wait = _NEXT.get(self.host, 0.0) - now
            if wait <= 0:
                if self.interval:
                    _NEXT[self.host] = now + self.interval
                else:
                    _NEXT.pop(self.host, None)
            return wait
