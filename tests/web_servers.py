"""Servers for tests, on loopback: well-behaved ones that count, and ones that speak whatever bytes they are told to."""

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
    """To its end, and not for long."""

    async def limited() -> _Result:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


class Seen:
    """What a server saw."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.port = int(url.rsplit(":", 1)[1].strip("/"))
        self.requests: list[web.BaseRequest] = []
        self.times: list[float] = []
        self.now = self.most = 0

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


@contextlib.asynccontextmanager
async def answering(answer: Answer, robots: str | None = None, host: str = "127.0.0.1") -> AsyncIterator[Seen]:
    """Answers all but robots.txt, which is a 404 unless given."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        seen.requests.append(request)
        if request.path == "/robots.txt":
            return web.Response(text=robots) if robots is not None else web.Response(status=404)
        seen.times.append(asyncio.get_running_loop().time())
        seen.now += 1
        seen.most = max(seen.most, seen.now)
        try:
            return await answer(request)
        finally:
            seen.now -= 1

    runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    seen = Seen(f"http://{host}:{runner.addresses[0][1]}/")
    try:
        yield seen
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[Seen]:
    """Reads a request and then says what it likes; `now` counts connections that are open."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.now += 1
        seen.most += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            seen.now -= 1
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    seen = Seen(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    try:
        yield seen
    finally:
        server.close()


async def hello(request: web.BaseRequest) -> web.Response:
    return web.Response(text="<title>Hello</title>", content_type="text/html")
