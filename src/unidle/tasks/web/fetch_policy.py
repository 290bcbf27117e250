"""The politeness settings of the crawler, and the result of a request."""

from __future__ import annotations

from dataclasses import dataclass

from unidle.envs.request_outcomes import Failure
from unidle.errors import UsageError
from unidle.tasks.web.addresses import AllowList


@dataclass(frozen=True)
class FetchPolicy:
    """Limits and politeness of a Fetcher."""

    hosts: tuple[str, ...] = ()
    """Allowed hosts (see `unidle.tasks.web.addresses`); empty: this machine only."""
    rate: float | None = None
    """Requests per second to each host, over all episodes of a run; by default 2, on loopback unlimited."""
    connections: int | None = None
    """Concurrent connections to each host, over all episodes of a run; by default 4, on loopback 512."""
    obey_robots: bool = True
    """Respect robots.txt."""
    max_bytes: int = 2_000_000
    """Largest response, as sent and decompressed."""
    seconds: float = 10.0
    """Timeout of a response with its redirects; waiting for the rate limit does not count."""
    retries: int = 2
    """Retries after a transient failure."""
    backoff: float = 0.25
    """Seconds before the first retry, doubled for each further one, with ±50 % jitter."""
    max_redirects: int = 5
    user_agent: str = "unidle/0.1 (reinforcement-learning crawler; obeys robots.txt)"
    """Identify yourself and how to reach you."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", (self.hosts,) if isinstance(self.hosts, str) else tuple(self.hosts))
        AllowList.of(self.hosts)
        for name in ("rate", "connections", "max_bytes", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be positive, not {value}.")
        if min(self.retries, self.max_redirects, self.backoff) < 0:
            raise UsageError("retries, max_redirects and backoff must not be negative.")
        if not self.user_agent.strip() or not self.user_agent.isprintable():
            raise UsageError("user_agent must be one non-empty line that identifies you.")


@dataclass(frozen=True, slots=True)
class Page:
    """The result of a request."""

    url: str  # after redirects
    status: int = 0  # 0: no response
    failure: Failure | None = None
    why: str = ""  # the reason of the failure, as text
    body: bytes = b""  # decompressed; empty after a failure
    content_type: str = ""  # text/html
    charset: str = ""  # from the header
    redirects: int = 0
    attempts: int = 1
    seconds: float = 0.0  # including waiting


class FetchError(Exception):
    """A failed request; if `transient`, it may be retried after `pause` seconds."""

    def __init__(self, kind: Failure, why: str, status: int = 0, transient: bool = False, pause: float = 0.0) -> None:
        super().__init__(why)
        self.kind, self.why, self.status, self.transient, self.pause = kind, why, status, transient, pause
