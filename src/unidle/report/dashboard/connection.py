"""A server's connection with a deadline and a limit, so that half-sent requests cannot shut other browsers out."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # to send a request
MAX_WAITING = 100  # connections without a complete request; well below the usual limit of 1024 open files


class Connection(H11Protocol):
    """HTTP/1.1. If too many connections wait for a request, the oldest of the peer with the most of them is closed."""

    _waiting_since = 0.0
    _deadline: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it is open, and no complete request was received since the last response."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not is_answering and not self.transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._update_deadline()
        waiting = [other for other in self.connections if isinstance(other, Connection) and other.is_waiting]
        if len(waiting) > MAX_WAITING:
            (busiest_peer, _), *_ = Counter(other._peer for other in waiting).most_common(1)
            its_own = (other for other in waiting if other._peer == busiest_peer)
            min(its_own, key=lambda other: other._waiting_since).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    @property
    def _peer(self) -> str | None:
        return self.client[0] if self.client else None

    def _update_deadline(self) -> None:
        """Start it when the wait begins; a few more bytes of the same request do not extend it."""
        if self._deadline is not None and not self.is_waiting:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and self.is_waiting:
            self._waiting_since = self.loop.time()
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
