"""How gently the web is asked, and what may come of it."""

from __future__ import annotations

from dataclasses import dataclass

from unidle.envs.request_outcomes import Failure
from unidle.errors import UsageError
from unidle.tasks.web.addresses import AllowList


@dataclass(frozen=True)
class FetchPolicy:
    """What a Fetcher may do, and how gently."""

    hosts: tuple[str, ...] = ()
    """Hosts it may talk to (see `unidle.tasks.web.addresses`); none: this machine only."""
    rate: float | None = None
    """Requests a second to each host, from all episodes of a run; by default 2, and on loopback any number."""
    connections: int | None = None
    """Connections at a time to each host, from all episodes of a run; by default 4, and on loopback 512."""
    obey_robots: bool = True
    """Do as robots.txt asks."""
    max_bytes: int = 2_000_000
    """Largest response, as sent and unpacked."""
    seconds: float = 10.0
    """Longest time for a response with its redirects; waiting for a turn does not count."""
    retries: int = 2
    """Further attempts after a failure that may pass."""
    backoff: float = 0.25
    """Seconds before the first of them, twice that before the second, and so on; half to one and a half times that."""
    max_redirects: int = 5
    user_agent: str = "unidle/0.1 (reinforcement-learning crawler; obeys robots.txt)"
    """Say who you are and how to reach you."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", (self.hosts,) if isinstance(self.hosts, str) else tuple(self.hosts))
        AllowList.of(self.hosts)
        for name in ("rate", "connections", "max_bytes", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be more than 0, not {value}.")
        if min(self.retries, self.max_redirects, self.backoff) < 0:
            raise UsageError("retries, max_redirects and backoff must not be negative.")
        if not self.user_agent.strip() or not self.user_agent.isprintable():
            raise UsageError("user_agent must be one line that says who is asking.")


@dataclass(frozen=True, slots=True)
class Page:
    """What came of a request."""

    url: str  # that answered: after redirects
    status: int = 0  # 0: there was no answer
    failure: Failure | None = None
    why: str = ""  # the failure in words
    body: bytes = b""  # unpacked; empty where there was a failure
    content_type: str = ""  # text/html
    charset: str = ""  # as the header has it
    redirects: int = 0
    attempts: int = 1
    seconds: float = 0.0  # with waiting


class FetchError(Exception):
    """What becomes a Page with a failure; `transient` if it may pass, after `pause` seconds at least."""

    def __init__(self, kind: Failure, why: str, status: int = 0, transient: bool = False, pause: float = 0.0) -> None:
        super().__init__(why)
        self.kind, self.why, self.status, self.transient, self.pause = kind, why, status, transient, pause
