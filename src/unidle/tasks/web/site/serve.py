"""Serves generated sites over HTTP, on loopback only, with configurable latency and errors.

Site n of a server is at `/n/`; its seed is that of the server plus n.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from unidle.errors import UsageError
from unidle.tasks.web.site.generate import Layout, Site

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
_CACHED_SITES, _CACHED_PAGES = 64, 2048
_ROBOTS = "User-agent: *\nDisallow: /*/private/\n"


@dataclass(frozen=True)
class SiteServerConfig:
    """The sites to serve, and the latency and errors to simulate."""

    port: int = 0
    """0: any free port."""
    seed: int = 0
    """Site n is generated from seed + n."""
    sites: int = 1
    """Number of sites, at /0/, /1/, …"""
    pages: int = 1000
    """Pages per site."""
    links: int = 50
    """Links per page, approximately."""
    page_bytes: int = 30_000
    """Size of a page, approximately."""
    latency: float = 0.0
    """Seconds before each response."""
    jitter: float = 0.0
    """Up to that many more seconds, at random for each response."""
    error_rate: float = 0.0
    """Fraction of requests answered with 503."""
    slow_rate: float = 0.0
    """Fraction of pages that are slow, always the same ones."""
    slow_seconds: float = 2.0
    """Extra seconds for a slow page."""

    def __post_init__(self) -> None:
        for name in ("latency", "jitter", "slow_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} must be a number of seconds, not {getattr(self, name)}.")
        for name in ("error_rate", "slow_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} must be between 0 and 1, not {getattr(self, name)}.")
        if self.sites < 1 or not 0 <= self.port <= 65535:
            raise UsageError("Serve at least one site, on a port from 0 (any) to 65535.")
        Layout(self.pages, self.links, self.page_bytes)


class SiteServer:
    """A server of generated sites."""

    def __init__(self, config: SiteServerConfig) -> None:
        _aiohttp_web()  # report a missing package early
        self.config = config
        self.url = ""  # set by `start`
        self.responses: Counter[int] = Counter()  # by status
        self.site = lru_cache(_CACHED_SITES)(self._site)
        self._html = lru_cache(_CACHED_PAGES)(self._render)
        self._runner: Any = None

    @property
    def urls(self) -> list[str]:
        """The start page of each site."""
        return [f"{self.url}{number}/" for number in range(self.config.sites)]

    async def start(self) -> None:
        """Serve in this event loop until `stop`."""
        web = _aiohttp_web()
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, self.config.port, backlog=4096).start()
        except OSError as error:
            await self.stop()
            raise UsageError(f"Cannot listen on port {self.config.port} ({error.strerror}); choose another.") from None
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/"

    async def stop(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        config, path = self.config, request.path
        seconds = config.latency + config.jitter * random.random()
        # By path, so that a slow page is always slow.
        if config.slow_rate and zlib.crc32(path.encode()) / 2**32 < config.slow_rate:
            seconds += config.slow_seconds
        if seconds:
            await asyncio.sleep(seconds)
        response = self._response(request.method, path)
        self.responses[response.status] += 1
        return response

    def _response(self, method: str, path: str) -> web.Response:
        web = _aiohttp_web()
        respond = web.Response
        if method not in ("GET", "HEAD"):
            return respond(status=405, headers={"Allow": "GET, HEAD"})
        if path == "/robots.txt":
            return respond(text=_ROBOTS)
        if self.config.error_rate and random.random() < self.config.error_rate:
            return respond(status=503, text="Service unavailable.")
        number, slash, rest = path[1:].partition("/")
        if not number:
            links = "".join(f'<p><a href="{n}/">site {n}</a></p>' for n in range(self.config.sites))
            return respond(body=f"<title>Sites</title>{links}".encode(), content_type="text/html", charset="utf-8")
        if not (slash and number.isdecimal() and len(number) < 10 and int(number) < self.config.sites):
            return respond(status=404, text="There is no such site.")
        if rest.startswith("go/") and rest[3:].isdecimal() and len(rest) < 12:
            site = self.site(int(number))
            target = site.paths[int(rest[3:]) % len(site.paths)]
            return respond(status=302, headers={"Location": f"/{number}/{target}"})
        if rest.startswith("files/"):
            return respond(body=b"%PDF-1.4 \x00\xff" * 100, content_type="application/pdf")
        body = self._html(int(number), rest)
        if body is None:
            return respond(status=404, text="There is no such page.")
        return respond(body=body, content_type="text/html", charset="utf-8")

    def _site(self, number: int) -> Site:
        config = self.config
        return Site.of(config.seed + number, Layout(config.pages, config.links, config.page_bytes))

    def _render(self, number: int, path: str) -> bytes | None:
        return self.site(number).html(path, f"/{number}/")


@contextlib.asynccontextmanager
async def run_server(config: SiteServerConfig) -> AsyncIterator[SiteServer]:
    """Run a server in this event loop within the block."""
    server = SiteServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def in_background(config: SiteServerConfig) -> Iterator[SiteServer]:
    """Run a server in its own thread within the block."""
    server, loop = SiteServer(config), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="sites", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(_shut_down(server), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _shut_down(server: SiteServer) -> None:
    """Stop the server and cancel pending responses."""
    await server.stop()
    unanswered = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unanswered:
        task.cancel()
    await asyncio.gather(*unanswered, return_exceptions=True)


async def serve_forever(config: SiteServerConfig) -> None:
    """Print the URL and serve until cancelled."""
    async with run_server(config) as server:
        print(
            f"Serving {config.sites} generated {'site' if config.sites == 1 else 'sites'} at {server.urls[0]}",
            flush=True,
        )
        await asyncio.Event().wait()


def _aiohttp_web() -> Any:
    try:
        from aiohttp import web
    except ImportError:
        raise UsageError("Serving a site needs extra packages; run: pip install 'unidle[web]'.") from None
    return web
