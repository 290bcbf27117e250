"""Loopback servers for tests: HTTP servers that count requests, and raw servers that send given bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_Result = TypeVar("_Result")


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine with a timeout of 20 seconds."""

    async def limited() -> _Result:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


class ServerLog:
    """Requests and connections that a server received."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.port = int(url.rsplit(":", 1)[1].strip("/"))
        self.requests: list[web.BaseRequest] = []
        self.times: list[float] = []
        self.concurrent = self.max_concurrent = 0

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


@contextlib.asynccontextmanager
async def http_server(answer: Answer, robots: str | None = None, host: str = "127.0.0.1") -> AsyncIterator[ServerLog]:
    """Answers every request with `answer`, except robots.txt, which is a 404 unless given."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        log.requests.append(request)
        if request.path == "/robots.txt":
            return web.Response(text=robots) if robots is not None else web.Response(status=404)
        log.times.append(asyncio.get_running_loop().time())
        log.concurrent += 1
        log.max_concurrent = max(log.max_concurrent, log.concurrent)
        try:
            return await answer(request)
        finally:
            log.concurrent -= 1

    runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    log = ServerLog(f"http://{host}:{runner.addresses[0][1]}/")
    try:
        yield log
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def raw_server(talk: Talk) -> AsyncIterator[ServerLog]:
    """Reads a request and then calls `talk`; `concurrent` counts open connections."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log.concurrent += 1
        log.max_concurrent += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            log.concurrent -= 1
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    log = ServerLog(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    try:
        yield log
    finally:
        server.close()


async def hello(request: web.BaseRequest) -> web.Response:
    return web.Response(text="<title>Hello</title>", content_type="text/html")
