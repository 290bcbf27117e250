"""Fetches pages politely and within limits; a failure is returned as a `Page`, not raised.

Connections go only to addresses that were checked: aiohttp calls `_resolve` when it connects, and uses one of the
returned addresses. There is no second DNS lookup that could return something else, and `_create_socket` refuses
unchecked addresses. Redirects are followed here, and each is checked like a new request.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from unidle.envs.aio.rate_limit import RateLimiter
from unidle.errors import UsageError
from unidle.tasks.web import robots
from unidle.tasks.web.addresses import AllowList, RefusedError, parse_ip, unmap_ipv4
from unidle.tasks.web.body import read_body
from unidle.tasks.web.fetch_policy import FetchError, FetchPolicy, Page
from unidle.tasks.web.robots import Robots

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

Lookup = Callable[[str, int], Awaitable[list[str]]]  # (name, port) → addresses

_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT = (429, 502, 503, 504)
_MAX_PAUSE = 10.0  # seconds; a longer Crawl-delay is capped, and after a longer Retry-After there is no retry
_ROBOTS_SECONDS = 3600.0  # lifetime of a cached robots.txt
_NO_ROBOTS_SECONDS = 30.0  # until a robots.txt that could not be fetched is requested again
_PUBLIC_RATE, _PUBLIC_CONNECTIONS = 2.0, 4
_LOOPBACK_CONNECTIONS = 512
_MAX_ORIGINS = 1024  # cached origins; *.example.org may match any number


@dataclass
class _Request:
    """One attempt at a request, with its redirects."""

    method: str
    url: URL
    left: float  # seconds
    limit: int  # bytes
    attempt: int  # from 1
    began: float  # time.monotonic() of the first attempt
    for_robots: bool  # for robots.txt itself: no robots check, and a body that is too large is truncated
    seen: set[URL] = field(default_factory=set)

    def page(self, **fields: Any) -> Page:
        """The result of the attempt."""
        redirects, seconds = max(0, len(self.seen) - 1), time.monotonic() - self.began
        return Page(str(self.url), redirects=redirects, attempts=self.attempt, seconds=seconds, **fields)


class Fetcher:
    """Fetches pages for all episodes of one event loop, which share limits and connections."""

    def __init__(self, policy: FetchPolicy | None = None, lookup: Lookup | None = None) -> None:
        """`lookup` replaces DNS."""
        _aiohttp()  # report a missing package early
        self.policy = policy or FetchPolicy()
        self.allowed = AllowList.of(self.policy.hosts)
        self.outcomes: Counter[str] = Counter()  # failures by kind, and "ok", "retry", "bytes"
        self.rules_version: object = object()  # replaced whenever the results of `may_follow` may change
        self._lookup = lookup or _by_dns
        self._allowed_origins: set[str] = set()  # origins on the allow-list; their addresses are checked separately
        self._checked_addresses: set[str] = set()  # addresses that may be connected to
        self._session: aiohttp.ClientSession | None = None
        self._limiters: dict[str, RateLimiter] = {}
        self._robots: dict[str, tuple[float, asyncio.Task[Robots | Page]]] = {}  # by origin: (expiry, result)
        self._agent = self.policy.user_agent.split("/")[0].split()[0]
        self._users = 0
        self._is_closed = False

    @staticmethod
    def shared(policy: FetchPolicy) -> Fetcher:
        """The Fetcher of the running event loop with this policy; call `release` when done."""
        fetchers = _shared.setdefault(asyncio.get_running_loop(), {})
        if policy not in fetchers:
            fetchers[policy] = Fetcher(policy)
        fetchers[policy]._users += 1
        return fetchers[policy]

    async def release(self) -> None:
        """Release a shared Fetcher; the last user closes it."""
        self._users -= 1
        if self._users == 0:
            _shared.get(asyncio.get_running_loop(), {}).pop(self.policy, None)
            await self.close()

    async def close(self) -> None:
        """Close all connections; a second call does nothing."""
        self._is_closed = True
        pending = [task for _, task in self._robots.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._robots.clear()
        if self._session is not None:
            await self._session.close()

    async def fetch(self, url: str, method: str = "GET") -> Page:
        """Fetch a page, with retries after transient failures."""
        if method not in ("GET", "HEAD"):
            raise UsageError(f"Only GET and HEAD are supported, not {method}.")
        if self._is_closed:
            raise RuntimeError("This Fetcher is closed.")
        page = await self._fetch_with_retries(method, url, self.policy.max_bytes)
        self.outcomes[page.failure or "ok"] += 1
        self.outcomes["bytes"] += len(page.body)
        return page

    def may_follow(self, urls: Iterable[str]) -> list[bool]:
        """Which canonical URLs may be fetched according to the allow-list and the robots.txt files known so far."""
        rules: dict[str, Robots | None] = {}  # by origin; None: not listed
        may = []
        for url in urls:
            origin = url[: url.find("/", 8)]
            if origin not in rules:
                rules[origin] = self._known_rules(origin) if self._is_listed(url) else None
            own = rules[origin]
            may.append(own is not None and own.allows(url[len(origin) :]))
        return may

    def _known_rules(self, origin: str) -> Robots:
        _, task = self._robots.get(origin, (0.0, None))
        found = task.result() if task is not None and task.done() and not task.cancelled() else None
        return found if isinstance(found, Robots) else robots.ALLOW_ALL

    def _is_listed(self, url: str) -> bool:
        try:
            self._check(_parsed(url))
        except FetchError:
            return False
        return True

    # -- requests, retries and redirects -------------------------------------------------------------------------------

    async def _fetch_with_retries(self, method: str, url: str, limit: int, for_robots: bool = False) -> Page:
        """Fetch with up to `retries` retries after transient failures."""
        policy, began, attempt = self.policy, time.monotonic(), 0
        while True:
            attempt += 1
            request = None
            try:
                request = _Request(method, _parsed(url), policy.seconds, limit, attempt, began, for_robots)
                return await self._follow(request)
            except FetchError as error:
                if not error.transient or attempt > policy.retries or error.pause > _MAX_PAUSE:
                    if request is None:
                        return Page(url, error.status, error.kind, error.why)
                    return request.page(status=error.status, failure=error.kind, why=error.why)
                self.outcomes["retry"] += 1
                backoff = policy.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff, error.pause))

    async def _follow(self, request: _Request) -> Page:
        """Send the request and follow redirects."""
        while True:
            self._check(request.url)
            if self.policy.obey_robots and not request.for_robots:
                await self._check_robots(request.url)
            request.seen.add(request.url)
            response, body = await self._exchange(request)
            headers = response.headers
            if response.status in _REDIRECTS and "Location" in headers:
                self._redirect(request, headers["Location"])
                continue
            if not 200 <= response.status < 300:
                transient = response.status in _TRANSIENT
                pause = _retry_after(headers.get("Retry-After", "")) if transient else 0.0
                if pause:
                    self._limiter_for(request.url).pause(min(pause, _MAX_PAUSE))
                raise FetchError("status", f"{response.status} {response.reason}", response.status, transient, pause)
            kind, _, parameters = headers.get("Content-Type", "").lower().partition(";")
            return request.page(
                status=response.status, body=body, content_type=kind.strip(), charset=_charset(parameters)
            )

    def _redirect(self, request: _Request, location: str) -> None:
        from yarl import URL

        try:
            request.url = request.url.join(URL(location)).with_fragment(None)
        except ValueError:
            raise FetchError("redirects", f"redirected to {location[:100]!r}, which is not a URL") from None
        if request.url in request.seen:
            raise FetchError("redirects", "redirect loop")
        if len(request.seen) > self.policy.max_redirects:
            raise FetchError("redirects", f"more than {self.policy.max_redirects} redirects")

    async def _exchange(self, request: _Request) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send one request and read the body of the response."""
        aiohttp = _aiohttp()
        async with self._limiter_for(request.url):
            began = time.monotonic()
            try:
                async with (
                    asyncio.timeout(request.left),
                    self._open().request(request.method, request.url, allow_redirects=False) as response,
                ):
                    if request.method == "HEAD" or not 200 <= response.status < 300:
                        return response, b""
                    return response, await read_body(response, request.limit, request.for_robots)
            except TimeoutError:
                raise FetchError("timeout", f"not finished after {self.policy.seconds:g} s") from None
            except aiohttp.ClientConnectorCertificateError as error:
                raise FetchError("connect", str(error)) from None
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, RefusedError):
                    raise FetchError("refused", str(error.os_error)) from None
                if isinstance(error, aiohttp.ClientConnectorDNSError):
                    raise FetchError("dns", f"unknown host {request.url.host}", transient=True) from None
                raise FetchError("connect", str(error), transient=True) from None
            except (aiohttp.ServerConnectionError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
                raise FetchError("broken", str(error) or type(error).__name__, transient=True) from None
            except (aiohttp.ClientError, zlib.error, ValueError) as error:
                raise FetchError("broken", str(error) or type(error).__name__) from None
            finally:
                request.left -= time.monotonic() - began

    # -- access checks -----------------------------------------------------------------------------------------------

    def _check(self, target: URL) -> None:
        """Refuse URLs that are not http(s) or not on the allow-list."""
        host = target.raw_host
        if target.scheme not in ("http", "https") or not host or target.user or target.password:
            raise FetchError("refused", f"{str(target)[:100]!r} is not a plain http:// or https:// URL")
        if _origin(target) in self._allowed_origins:
            return
        try:
            self.allowed.check_host(host, target.port or 0)
        except RefusedError as refused:
            raise FetchError("refused", str(refused)) from None
        if parse_ip(host) is not None:
            self._checked_addresses.add(host)
        if len(self._allowed_origins) < _MAX_ORIGINS:
            self._allowed_origins.add(_origin(target))

    async def _resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        """Resolve a name for aiohttp; if one address is refused, refuse the name altogether."""
        self.allowed.check_host(host, port)
        found = await self._lookup(host, port)
        if not found:
            raise OSError(f"{host} has no address")
        for address in found:
            self.allowed.check_resolved(host, port, address)
        self._checked_addresses.update(found)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        return [
            {"hostname": host, "host": address, "port": port, "family": own, "proto": 0, "flags": flags}
            for address, own in zip(found, families)
        ]

    def _create_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Create a socket, but only for a checked address."""
        family, kind, protocol, _, address = info
        if address[0] not in self._checked_addresses:
            raise RefusedError(f"{address[0]} was not checked")
        return socket.socket(family, kind, protocol)

    async def _check_robots(self, target: URL) -> None:
        origin, now = _origin(target), time.monotonic()
        until, task = self._robots.get(origin, (0.0, None))
        if task is None or now >= until:
            # A separate task, shared by all requests: cancelling one request does not cancel it.
            task = asyncio.create_task(self._fetch_robots(target, origin))
            self._robots[origin] = now + _ROBOTS_SECONDS, task
        found = task.result() if task.done() else await asyncio.shield(task)
        if isinstance(found, Page):
            assert found.failure is not None
            raise FetchError(found.failure, f"robots.txt cannot be used: {found.why}", found.status)
        if not found.allows(target.raw_path_qs):
            raise FetchError("robots", f"robots.txt disallows {target.raw_path_qs[:100]}")

    async def _fetch_robots(self, target: URL, origin: str) -> Robots | Page:
        """Fetch robots.txt; if it is unreachable or too complex, nothing may be fetched: return the failed Page."""
        limit = min(robots.MAX_BYTES, self.policy.max_bytes)
        page = await self._fetch_with_retries("GET", f"{origin}/robots.txt", limit, for_robots=True)
        self.rules_version = object()
        if page.failure is None:
            try:
                found = Robots.parse(page.body.decode("utf-8", "replace"), self._agent)
            except robots.TooComplexError as error:  # rules that cannot be obeyed: nothing may be fetched
                return replace(page, failure="robots", why=str(error))
            self._limiter_for(target).set_min_interval(min(found.delay, _MAX_PAUSE))
            return found
        if page.failure == "status" and 400 <= page.status < 500 and page.status != 429:
            return robots.ALLOW_ALL
        _, task = self._robots[origin]
        self._robots[origin] = time.monotonic() + _NO_ROBOTS_SECONDS, task
        return page

    def _limiter_for(self, target: URL) -> RateLimiter:
        host = target.raw_host or ""
        if host not in self._limiters:
            address = parse_ip(host)
            is_local = host == "localhost" or (address is not None and unmap_ipv4(address).is_loopback)
            rate = self.policy.rate or (None if is_local else _PUBLIC_RATE)
            connections = self.policy.connections or (_LOOPBACK_CONNECTIONS if is_local else _PUBLIC_CONNECTIONS)
            self._limiters[host] = RateLimiter(host, rate, connections)
        return self._limiters[host]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            aiohttp = _aiohttp()
            connector = aiohttp.TCPConnector(
                resolver=SimpleNamespace(resolve=self._resolve, close=_no_op),
                socket_factory=self._create_socket,
                use_dns_cache=False,  # resolve and check again for every connection
                limit=0,  # `RateLimiter` limits them
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # `_exchange` has its own timeout
                headers={
                    "User-Agent": self.policy.user_agent,
                    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.5,*/*;q=0.1",
                    "Accept-Encoding": "gzip, deflate",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # `read_body` decompresses within the limit
                trust_env=False,  # a proxy would resolve names itself
            )
        assert self._session is not None
        return self._session


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[FetchPolicy, Fetcher]] = weakref.WeakKeyDictionary()


async def _by_dns(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def _no_op() -> None:
    pass


@lru_cache(4096)
def _parsed(url: str) -> URL:
    from yarl import URL

    try:
        target = URL(url).with_fragment(None)
        if not target.raw_host:
            raise ValueError
    except (ValueError, TypeError):
        raise FetchError("refused", f"{url[:100]!r} is not a URL") from None
    return target


def _origin(target: URL) -> str:
    return str(target.origin())


def _charset(parameters: str) -> str:
    _, found, value = parameters.partition("charset=")
    return value.partition(";")[0].strip(" \"'") if found else ""


def _retry_after(text: str) -> float:
    """Seconds of a Retry-After header; 0 if it cannot be parsed."""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise UsageError("Web environments need extra packages; run: pip install 'unidle[web]'.") from None
    return aiohttp
