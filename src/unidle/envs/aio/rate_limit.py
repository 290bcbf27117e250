"""Limits on the rate of requests and the number of connections to one host.

Worker processes do not coordinate; each gets an equal share of the limit: with four of them, a rate of 2 per second is
0.5 for each, and 8 connections are 2.
"""

from __future__ import annotations

import asyncio
import threading
import time

from unidle.errors import UsageError

# Time of the next allowed request to each host (`time.monotonic`), shared by all event loops of the process.
_NEXT: dict[str, float] = {}
_NEXT_LOCK = threading.Lock()
_n_processes = 1  # that send requests to the same hosts


def share_limits(processes: int) -> None:
    """Divide all limits by the number of processes; call it before the first request."""
    global _n_processes
    _n_processes = processes


class RateLimiter:
    """Limits requests to one host in one event loop, first come, first served: `async with limiter: …`.

    Cancelling a waiting request is safe: only the first in the queue reserves a time, at the moment it proceeds.
    """

    def __init__(self, host: str, rate: float | None, connections: int) -> None:
        """At most `rate` requests per second (None: unlimited) and `connections` at a time, over all processes."""
        if connections < _n_processes:
            raise UsageError(
                f"{_n_processes} worker processes cannot share {connections} connections to {host}; "
                f"use --workers {connections} or fewer, or allow more connections in env_kwargs."
            )
        self.host = host
        self.interval = 0.0
        if rate is not None:
            self.set_min_interval(1.0 / rate)
        self._connections = asyncio.Semaphore(connections // _n_processes)
        self._queue = asyncio.Lock()

    async def __aenter__(self) -> None:
        """Wait until a request may be sent."""
        await self._connections.acquire()
        if not self.interval and self.host not in _NEXT:
            return
        try:
            async with self._queue:
                while (wait := self._reserve()) > 0:
                    await asyncio.sleep(wait)
        except BaseException:
            self._connections.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Free the connection."""
        self._connections.release()

    def set_min_interval(self, seconds: float) -> None:
        """Keep at least that many seconds between two requests, over all processes."""
        self.interval = max(self.interval, seconds * _n_processes)

    def pause(self, seconds: float) -> None:
        """Send no request for that many seconds, as the host asked (Retry-After)."""
        with _NEXT_LOCK:
            _NEXT[self.host] = max(_NEXT.get(self.host, 0.0), time.monotonic() + seconds)

    def _reserve(self) -> float:
        """Reserve the next request; return the seconds to wait before trying again, or 0 or less if it may be sent."""
        with _NEXT_LOCK:
            now = time.monotonic()
            wait = _NEXT.get(self.host, 0.0) - now
            if wait <= 0:
                if self.interval:
                    _NEXT[self.host] = now + self.interval
                else:
                    _NEXT.pop(self.host, None)
            return wait
