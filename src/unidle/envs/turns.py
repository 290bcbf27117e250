"""Requests to one host take turns: so many at a time, and so much time between two, whoever sends them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

# When a host may next be asked, by `time.monotonic`: of the whole process, as its event loops are not one crawler each.
_NEXT: dict[str, float] = {}
_NEXT_LOCK = threading.Lock()


class Turns:
    """The turns of one host in one event loop; first come, first served.

    One that is cancelled while it waits leaves nothing behind: only the first in the queue takes a time, and it takes
    it when it goes.
    """

    def __init__(self, host: str, rate: float | None, connections: int) -> None:
        """At most `rate` requests a second (None: any number), and `connections` at a time."""
        self.host = host
        self.interval = 0.0 if rate is None else 1.0 / rate
        self._places = asyncio.Semaphore(connections)
        self._queue = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it while in this block."""
        async with self._places:
            if self.interval or self.host in _NEXT:
                async with self._queue:
                    while (wait := self._take()) > 0:
                        await asyncio.sleep(wait)
            yield

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
